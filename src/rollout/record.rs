//! The record of one rollout: what the engine said, what it earned, what the other legs say.

use serde::{Deserialize, Serialize};

use crate::base::{float, LogProb};
use crate::engine::Completion;

/// One leg's log-probabilities, aligned with `completion.tokens`; `None` is "not computed".
pub type LegLogProbs = Vec<Option<LogProb>>;

/// One rollout. `completion` holds the `decode` leg; other legs are filled in when computed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    pub completion: Completion,
    pub prompt_text: String,
    pub completion_text: String,
    #[serde(with = "float")]
    pub reward: f64,
    /// Group-normalised reward.
    #[serde(with = "float")]
    pub advantage: f64,
    /// Whether each sampled token counts in loss and gap.
    pub loss_mask: Vec<bool>,
    pub prefill: Option<LegLogProbs>,
    pub trainer: Option<LegLogProbs>,
    pub reference: Option<LegLogProbs>,
    /// As `engine_fingerprint`, of the weights that the trainer scored with.
    pub trainer_fingerprint: Option<u64>,
}

impl Rollout {
    /// The `decode` leg in the same form as the others.
    #[must_use]
    pub fn decode(&self) -> LegLogProbs {
        self.completion.tokens.iter().map(|sampled| Some(sampled.logp)).collect()
    }
}
