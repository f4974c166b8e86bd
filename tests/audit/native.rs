//! A run's own folder gives the numbers that the run itself wrote down.

use std::fs;

use gapscope::base::{
    Contract, EngineIndex, EngineStep, LogProb, RequestId, Step, TokenId, WeightVersion,
};
use gapscope::engine::{Completion, FinishReason, Phase, SampledToken};
use gapscope::report::parquet::{write_rollouts, write_tokens};
use gapscope::report::RunFolder;
use gapscope::rollout::Rollout;

use super::common::run::Run;
use super::{audited, outcome, path};

/// Makes every step's gap larger than 0, and its cause known.
const FAULT: &str = "engine.faults=[\"engine_weight_ulp\"]";

#[test]
fn a_run_folder_measures_as_its_run_did() {
    let run = Run::small(&["trainer.update=none", FAULT]);
    let folder = tempfile::tempdir().expect("a folder");
    let (text, audit) = audited(folder.path(), &["--rollouts", path(run.root())]);
    let steps = fs::read_to_string(run.folder.steps()).expect("steps.jsonl");
    let mut compared = 0;
    for (line, row) in steps.lines().zip(audit["steps"].as_array().expect("steps")) {
        let written: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(written["step"], row["step"]);
        for (tag, value) in row["metrics"].as_object().expect("metrics") {
            assert_eq!(&written[tag], value, "{tag}");
            compared += 1;
        }
    }
    assert!(compared > 70, "{compared}");
    assert!(text.contains(" of native: "), "{text}");
    // An ulp of one weight need not show in every step.
    let shown = run.metric("gap/logp_abs_diff_max").iter().filter(|&&gap| gap > 0.0).count();
    let told = text.matches("finding   weights_not_synced: the engine sampled").count();
    assert!(shown > 0 && told == shown, "{shown} of 3 steps\n{text}");
}

#[test]
fn a_folder_that_is_no_run_is_refused_as_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let (code, _, error) = outcome(&["--rollouts", path(folder.path()), "--format", "native"]);
    let expected = format!(
        "error: {} is not a run folder: it has no config.json or no tokens\n",
        path(folder.path())
    );
    assert_eq!((code, error), (Some(1), expected));
}

/// Sixty-four sequences, ten of which an engine decoded unlike its own prefill
/// (NVIDIA-NeMo/RL#2100).
#[test]
fn k07_with_all_three_legs_exactly_the_outliers_are_blamed_on_the_engine() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = RunFolder::create(folder.path().join("run")).expect("a run folder");
    run.claim("{}").expect("written");
    let rollouts: Vec<Rollout> = (0..64).map(rollout).collect();
    write_rollouts(&run.rollouts(Step::new(5)), &rollouts, "other").expect("written");
    write_tokens(&run.tokens(Step::new(5)), &rollouts).expect("written");

    let args = ["--rollouts", path(run.root()), "--floor", "0.1"];
    let (text, audit) = audited(folder.path(), &args);
    let said = "three-way check of 10: rollout engine disagrees with itself";
    assert!(text.contains(said), "{text}");
    let found = audit["steps"][0]["findings"][0]["requests"].as_array().expect("requests");
    let expected: Vec<String> =
        (0..64).filter(|&at| outlier(at)).map(|at| format!("s5.p0.r{at}")).collect();
    assert_eq!(found, &expected);
    assert_eq!(expected.len(), 10);
}

fn outlier(index: u32) -> bool {
    index % 6 == 3 && index < 60
}

fn rollout(index: u32) -> Rollout {
    let decode = if outlier(index) { [-0.1, -0.2] } else { [-0.1, -6.0] };
    let sampled = |logp: f32| SampledToken {
        token: TokenId::new(9),
        logp: LogProb::new(logp),
        engine_step: EngineStep::new(1),
        phase: Phase::Decode,
        scheduled_tokens: 1,
        computed_tokens: 0,
        batch_row: 0,
        batch_rows: 1,
        padding_rows: 0,
    };
    let scored = Some([-0.1, -6.0].map(|logp| Some(LogProb::new(logp))).to_vec());
    let completion = Completion {
        id: RequestId::new(5, 0, index),
        engine: EngineIndex::default(),
        prompt: vec![TokenId::new(1)],
        tokens: decode.map(sampled).to_vec(),
        finish_reason: FinishReason::Length,
        contract: Contract::PLAIN,
        weight_version: WeightVersion::new(0),
        engine_fingerprint: Some(7),
        lives: Vec::new(),
        preemptions: 0,
        cached_tokens: 0,
    };
    Rollout {
        completion,
        prompt_text: String::new(),
        completion_text: String::new(),
        reward: 0.0,
        advantage: 0.0,
        loss_mask: vec![true; 2],
        prefill: scored.clone(),
        trainer: scored,
        reference: None,
        trainer_fingerprint: None,
    }
}
