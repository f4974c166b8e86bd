//! A run in one object.

use std::fmt;

use serde::{Deserialize, Serialize, Serializer};

use super::steps::{of_engines, windows};
use crate::base::float::{optional::serialize as option_float, serialize as float};
use crate::base::{BlockId, EngineIndex, RequestId, Step};
use crate::gap::{Finding, FindingKind, Legs, Tally};

/// `summary.json`. Absent is `null`, never 0: nothing compared has no gap.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Of this layout; 1.
    pub schema: u32,
    pub name: String,
    /// What ended the run before its last step; absent where nothing did.
    pub error: Option<String>,
    pub steps_done: u64,
    /// Sampled tokens that were compared: both log-probabilities are finite.
    pub n_tokens: u64,
    /// The other tokens: a log-probability is non-finite on either side.
    pub nonfinite: u64,
    pub spike_steps: Vec<Step>,
    pub first_spike_step: Option<Step>,
    /// Runs of consecutive spike steps, first and last of each.
    pub spike_windows: Vec<(Step, Step)>,
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
    /// The largest that a step was held to.
    #[serde(serialize_with = "option_float")]
    pub floor: Option<f64>,
    /// Of each engine's pool. This and the engines' other counts are absent where they do not say.
    pub num_blocks: Option<u64>,
    /// Elements from one block's state to the next; absent without a recurrent layer.
    pub state_stride: Option<u64>,
    /// The first block whose state index leaves `state_index_bits`, if the pool is large enough to
    /// have one.
    pub first_wrapped_block: Option<u64>,
    /// Of several engines the one that took most, as are the laps.
    #[serde(serialize_with = "option_float")]
    pub blocks_per_step: Option<f64>,
    /// How many times the pool has been gone through.
    #[serde(serialize_with = "option_float")]
    pub laps: Option<f64>,
    /// Of all engines, as are the preemptions.
    pub engine_steps: Option<u64>,
    /// Scheduled tokens of an engine step, those computed again after a preemption included.
    #[serde(serialize_with = "option_float")]
    pub tokens_per_engine_step: Option<f64>,
    pub preemptions: Option<u64>,
    /// Each engine's own, where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub engines: Vec<EngineSummary>,
    #[serde(flatten)]
    pub tally: Tally,
    /// In short: `findings.json` has all of each.
    #[serde(serialize_with = "brief")]
    pub findings: Vec<Finding>,
    /// Over the first tenth of the steps.
    #[serde(serialize_with = "option_float")]
    pub reward_mean_first: Option<f64>,
    /// Over the last tenth of the steps.
    #[serde(serialize_with = "option_float")]
    pub reward_mean_last: Option<f64>,
    /// Whether a run of this configuration that goes on from one of its checkpoints ends byte-equal
    /// to one that was never interrupted, time aside: no policy of it may read bytes of the block
    /// pool that it has not written, or the checkpoints hold them. The same whether this run was
    /// resumed or not.
    pub resume_exact: bool,
    /// Seconds of the process that ended the run; the only time in this file.
    #[serde(serialize_with = "float")]
    pub wall_s: f64,
}

/// One of several engines, whose pool has a schedule of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineSummary {
    pub engine: EngineIndex,
    /// The spike steps in which a request of this engine was over the floor.
    pub spike_steps: Vec<Step>,
    #[serde(with = "crate::base::float::optional")]
    pub blocks_per_step: Option<f64>,
    /// How many times its pool has been gone through.
    #[serde(with = "crate::base::float")]
    pub laps: f64,
    pub engine_steps: u64,
    pub preemptions: u64,
}

impl Summary {
    /// The layout that [`Summary`] describes.
    pub const SCHEMA: u32 = 1;
}

/// A few lines for a terminal.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |value: Option<f64>| value.map_or("no data".to_owned(), |v| v.to_string());
        let Self { name, steps_done, n_tokens, nonfinite, .. } = self;
        writeln!(
            f,
            "{name}: {steps_done} steps, {n_tokens} tokens compared, {nonfinite} nonfinite"
        )?;
        let (gap, equal) = (number(self.gap_max), number(self.frac_bitwise_equal));
        let spikes = windows(self.spike_windows.iter().copied(), ", ");
        let spikes = if spikes.is_empty() { "none" } else { &spikes };
        let own = self.engines.iter().map(|one| (one.engine, &one.spike_steps[..]));
        let own = of_engines(own, ", ").filter(|_| !self.spike_steps.is_empty());
        let own = own.map_or(String::new(), |own| format!(" ({own})"));
        writeln!(f, "gap_max {gap}  frac_bitwise_equal {equal}  spike steps: {spikes}{own}")?;
        let (first, last) = (number(self.reward_mean_first), number(self.reward_mean_last));
        writeln!(
            f,
            "reward {first} in the first tenth, {last} in the last ({:.1} s)",
            self.wall_s
        )?;
        // One line a kind: forty steps of one fault are one thing to know.
        let mut kinds: Vec<FindingKind> = Vec::new();
        for finding in &self.findings {
            if !kinds.contains(&finding.kind) {
                kinds.push(finding.kind);
                let same = self.findings.iter().filter(|other| other.kind == finding.kind).count();
                let (name, step) = (finding.kind.name(), finding.step);
                writeln!(
                    f,
                    "{name}, {same} finding(s), the first in step {step}: {}",
                    finding.message
                )?;
            }
        }
        write!(f, "{} finding(s)", self.findings.len())
    }
}

/// What the summary says of a finding.
#[derive(Serialize)]
struct Brief<'a> {
    kind: FindingKind,
    leg: Legs,
    step: Step,
    #[serde(skip_serializing_if = "Option::is_none")]
    engine: Option<EngineIndex>,
    requests: &'a [RequestId],
    blocks: &'a [BlockId],
    message: &'a str,
}

fn brief<S: Serializer>(findings: &[Finding], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(findings.iter().map(|finding| Brief {
        kind: finding.kind,
        leg: finding.leg,
        step: finding.step,
        engine: finding.engine,
        requests: &finding.requests,
        blocks: &finding.blocks,
        message: &finding.message,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::CompletionIndex;

    #[test]
    fn absent_is_null_and_a_finding_has_six_fields() {
        let finding = Finding {
            kind: FindingKind::AddressWrap,
            leg: Legs::DecodeTrainer,
            step: Step::new(3),
            engine: None,
            requests: vec![RequestId::new(3, 0, 1)],
            requests_total: 1,
            blocks: vec![BlockId::new(1366)],
            first_bad_position: Some(CompletionIndex::new(0)),
            index_bits: None,
            message: "why".to_owned(),
        };
        let summary = Summary {
            schema: Summary::SCHEMA,
            name: "x".to_owned(),
            error: None,
            steps_done: 3,
            n_tokens: 9,
            nonfinite: 1,
            spike_steps: vec![Step::new(3)],
            first_spike_step: Some(Step::new(3)),
            spike_windows: vec![(Step::new(3), Step::new(3))],
            spike_period: None,
            gap_max: Some(f64::INFINITY),
            gap_mean: Some(0.0),
            frac_bitwise_equal: Some(1.0),
            floor: Some(0.0),
            num_blocks: Some(1441),
            state_stride: Some(3072),
            first_wrapped_block: None,
            blocks_per_step: Some(120.0),
            laps: Some(0.25),
            engine_steps: Some(7),
            tokens_per_engine_step: Some(64.5),
            preemptions: Some(0),
            engines: Vec::new(),
            tally: Tally { bad_requests: 1, ..Tally::default() },
            findings: vec![finding],
            reward_mean_first: None,
            reward_mean_last: Some(f64::NAN),
            resume_exact: true,
            wall_s: 1.5,
        };
        assert_eq!(
            serde_json::to_string(&summary).unwrap(),
            "{\"schema\":1,\"name\":\"x\",\"error\":null,\"steps_done\":3,\"n_tokens\":9,\
             \"nonfinite\":1,\
             \"spike_steps\":[3],\"first_spike_step\":3,\"spike_windows\":[[3,3]],\
             \"spike_period\":null,\"gap_max\":\"inf\",\"gap_mean\":0.0,\
             \"frac_bitwise_equal\":1.0,\"floor\":0.0,\"num_blocks\":1441,\"state_stride\":3072,\
             \"first_wrapped_block\":null,\"blocks_per_step\":120.0,\"laps\":0.25,\
             \"engine_steps\":7,\"tokens_per_engine_step\":64.5,\"preemptions\":0,\
             \"decoded_first_chunks\":null,\"stale_first_chunks\":null,\"wrapped_requests\":null,\
             \"bad_requests\":1,\"confident_wrong\":0,\"findings\":[{\"kind\":\"address_wrap\",\
             \"leg\":\"decode_trainer\",\"step\":3,\"requests\":[\"s3.p0.r1\"],\
             \"blocks\":[1366],\"message\":\"why\"}],\"reward_mean_first\":null,\
             \"reward_mean_last\":\"NaN\",\"resume_exact\":true,\"wall_s\":1.5}"
        );
    }
}
