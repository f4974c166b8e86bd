//! Made-up sweeps.

use serde_json::json;

use super::{Outcome, Prediction, SavedSummary, StepGapRow, SweepPoint};
use crate::base::Step;
use crate::gap::Tally;

pub(super) fn spikes(steps: &[u64]) -> Vec<Step> {
    steps.iter().copied().map(Step::new).collect()
}

pub(super) fn row(step: u64, gap_max: Option<f64>, spike: bool, nonfinite: u64) -> StepGapRow {
    StepGapRow { step: Step::new(step), gap_max, spike, nonfinite }
}

/// Set to `gpu.name = name`, predicted to be clean.
pub(super) fn point(name: &str, steps: u64, outcome: Outcome) -> SweepPoint {
    SweepPoint {
        name: name.to_owned(),
        set: vec![("gpu.name".to_owned(), json!(name))],
        steps,
        predicted: Prediction { num_blocks: 1441, exact: true, ..Prediction::default() },
        outcome,
    }
}

/// A point that ran; its summary follows from its gaps where it matters here.
pub(super) fn done(name: &str, steps: u64, gaps: &[StepGapRow]) -> SweepPoint {
    let spike_steps: Vec<Step> = gaps.iter().filter(|row| row.spike).map(|row| row.step).collect();
    let summary = SavedSummary {
        steps_done: gaps.len() as u64,
        first_spike_step: spike_steps.first().copied(),
        spike_windows: spike_steps.iter().map(|&step| (step, step)).collect(),
        spike_steps,
        ..summary()
    };
    point(name, steps, Outcome::Done { summary: Box::new(summary), gaps: gaps.to_vec() })
}

pub(super) fn summary() -> SavedSummary {
    SavedSummary {
        schema: 1,
        name: "x".to_owned(),
        error: None,
        steps_done: 48,
        n_tokens: 9216,
        nonfinite: 0,
        spike_steps: Vec::new(),
        first_spike_step: None,
        spike_windows: Vec::new(),
        spike_period: None,
        gap_max: Some(0.0),
        gap_mean: Some(0.0),
        frac_bitwise_equal: Some(1.0),
        floor: Some(0.0),
        num_blocks: Some(1441),
        state_stride: Some(3072),
        first_wrapped_block: None,
        blocks_per_step: Some(120.0),
        laps: Some(4.0),
        engine_steps: Some(480),
        tokens_per_engine_step: Some(64.5),
        preemptions: Some(0),
        engines: Vec::new(),
        tally: Tally::default(),
        findings: Vec::new(),
        reward_mean_first: Some(0.0),
        reward_mean_last: None,
    }
}
