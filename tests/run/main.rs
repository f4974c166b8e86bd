//! Whole runs of the binary, each of a second.

mod accounts;
mod agree;
#[path = "../common/mod.rs"]
mod common;
mod disagree;
mod leaves;

use std::collections::BTreeSet;

use common::run::Run;
use gapscope::report::parquet::RolloutRow;
use serde_json::Value;

const ALL_LEGS: &str = "check.legs=[\"prefill\",\"reference\"]";
const SCORE_ONLY: &str = "trainer.update=none";

/// Both sides' fingerprint of a step's weights: equal, and the same for all its rollouts.
fn weights(rollouts: &[RolloutRow]) -> u64 {
    let both = rollouts.iter().flat_map(|row| [row.engine_fingerprint, row.trainer_fingerprint]);
    let found: BTreeSet<Option<u64>> = both.collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found.into_iter().flatten().next().expect("both sides have one")
}

fn weights_by_step(run: &Run) -> Vec<u64> {
    run.rollouts().iter().map(|rollouts| weights(rollouts)).collect()
}

fn spikes(run: &Run) -> Vec<u64> {
    let steps = run.summary()["spike_steps"].clone();
    serde_json::from_value(steps).expect("a list of steps")
}

/// The run's findings of one kind, and no others.
fn findings(run: &Run, kind: &str) -> Vec<Value> {
    let Value::Array(found) = run.summary()["findings"].clone() else { panic!("a list") };
    assert!(found.iter().all(|one| one["kind"] == kind), "{found:#?}");
    found
}
