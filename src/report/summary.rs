//! A run in one object, and the culprits that it found.

use serde::Serialize;

use crate::base::json_float::{serialize as float, serialize_option as option_float};
use crate::base::{BlockId, RequestId, Step};

/// `summary.json`. Absent is `null`, never 0: nothing compared has no gap.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Of this layout; 1.
    pub schema: u32,
    pub name: String,
    pub steps_done: u64,
    /// Sampled tokens that were compared.
    pub n_tokens: u64,
    /// Of them, those with a non-finite log-probability on either side.
    pub nonfinite: u64,
    pub spike_steps: Vec<Step>,
    pub first_spike_step: Option<Step>,
    /// Runs of consecutive spike steps, first and last of each.
    pub spike_windows: Vec<[Step; 2]>,
    /// Steps from one window to the next; absent under three windows.
    #[serde(serialize_with = "option_float")]
    pub spike_period: Option<f64>,
    /// Nats, as are the mean and the floor.
    #[serde(serialize_with = "option_float")]
    pub gap_max: Option<f64>,
    #[serde(serialize_with = "option_float")]
    pub gap_mean: Option<f64>,
    #[serde(serialize_with = "option_float")]
    pub frac_bitwise_equal: Option<f64>,
    #[serde(serialize_with = "option_float")]
    pub floor: Option<f64>,
    pub num_blocks: u64,
    /// Elements from one block's state to the next; absent without a recurrent layer.
    pub state_stride: Option<u64>,
    /// The first block whose state index leaves `state_index_bits`, if the pool is large enough to have one.
    pub first_wrapped_block: Option<u64>,
    #[serde(serialize_with = "option_float")]
    pub blocks_per_step: Option<f64>,
    /// How many times the pool has been gone through.
    #[serde(serialize_with = "option_float")]
    pub laps: Option<f64>,
    pub engine_steps: u64,
    pub preemptions: u64,
    pub findings: Vec<Finding>,
    /// Over the first tenth of the steps.
    #[serde(serialize_with = "option_float")]
    pub reward_mean_first: Option<f64>,
    /// Over the last tenth of the steps.
    #[serde(serialize_with = "option_float")]
    pub reward_mean_last: Option<f64>,
    /// Whether a run that is resumed from here ends byte-equal to one that was not interrupted.
    pub resume_exact: bool,
    /// Seconds; the only time in this file.
    #[serde(serialize_with = "float")]
    pub wall_s: f64,
}

impl Summary {
    /// The layout that [`Summary`] describes.
    pub const SCHEMA: u32 = 1;
}

/// A named culprit as it is shown to people; the evidence is the gap room's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// One of the closed set of kinds, such as `address_wrap`.
    pub kind: String,
    /// The leg that is to blame, where one is.
    pub leg: Option<String>,
    pub step: Step,
    pub requests: Vec<RequestId>,
    pub blocks: Vec<BlockId>,
    pub message: String,
}
