//! Planted faults of the trainer's side and of what numbers mean, each named by its verdict; and
//! named alike by another process that has the evidence and nothing else.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::run::{gapscope, read_json, Run, SUMS};
use serde_json::{json, Value};

/// One step of the small experiment, which only scores.
const ONE_STEP: [&str; 3] = ["steps=1", "trainer.update=none", "check.evidence=true"];

/// The small experiment's first step with these settings.
fn first_step(settings: &[&str]) -> Run {
    Run::small(&[&ONE_STEP, settings].concat())
}

fn evidence(run: &Run) -> PathBuf {
    run.root().join("evidence/step-00001.json")
}

fn kinds(findings: &Value) -> Vec<&str> {
    let all = findings.as_array().expect("a list").iter();
    all.map(|finding| finding["kind"].as_str().expect("a kind")).collect()
}

/// The run's findings are of these kinds, and so is what a judge says who sees the evidence alone,
/// under a name that tells nothing.
#[track_caller]
fn check(run: &Run, fault: &str, expected: &[&str]) -> Value {
    let findings = read_json(&run.folder.findings());
    assert_eq!(kinds(&findings), expected, "{fault}: {findings:#}");
    if expected.is_empty() {
        assert!(!evidence(run).exists(), "{fault}: nothing was found");
        return findings;
    }
    assert_eq!(judged(&evidence(run)), findings, "{fault}");
    let text = fs::read_to_string(evidence(run)).expect("evidence");
    for told in [fault, "fault", "batch_split", "state_index_bits\":"] {
        assert!(!text.contains(told), "the evidence tells of {told}");
    }
    findings
}

fn judged(path: &Path) -> Value {
    let away = tempfile::tempdir().expect("a temporary folder");
    let copy = away.path().join("case.json");
    fs::copy(path, &copy).expect("evidence");
    let out = gapscope().arg("judge").arg(&copy).current_dir(away.path()).assert().success();
    serde_json::from_slice(&out.get_output().stdout).expect("JSON")
}

fn message(findings: &Value) -> &str {
    findings[0]["message"].as_str().expect("a message")
}

#[test]
fn a_clean_step_leaves_no_evidence() {
    check(&first_step(&[]), "", &[]);
}

#[test]
fn k13_pads_that_enter_the_state_are_a_leak() {
    let run = first_step(&["trainer.faults=[\"pads_enter_state\"]"]);
    let findings = check(&run, "pads_enter_state", &["packing_leak"]);
    assert!(message(&findings).contains("that are the longest of theirs are good"), "{findings:#}");
    // One sequence a pass has no padding.
    let alone =
        first_step(&["trainer.faults=[\"pads_enter_state\"]", "trainer.max_tokens_per_chunk=1"]);
    check(&alone, "pads_enter_state", &[]);
    // Nor have sequences of one length.
    let faulty = [&ONE_STEP[..], &["trainer.faults=[\"pads_enter_state\"]"]].concat();
    check(&Run::of(SUMS, &faulty), "pads_enter_state", &[]);
}

#[test]
fn k14_a_document_that_is_not_reset_is_a_leak() {
    let run = first_step(&["trainer.faults=[\"no_document_reset\"]"]);
    let findings = check(&run, "no_document_reset", &["packing_leak"]);
    assert!(message(&findings).contains("that are the first of their pack are good, 11 of the 11"));
    let alone =
        first_step(&["trainer.faults=[\"no_document_reset\"]", "trainer.max_tokens_per_chunk=1"]);
    check(&alone, "no_document_reset", &[]);
}

#[test]
fn k15_moved_positions_are_nothing_to_models_without_and_rounding_to_rotary_ones() {
    check(&first_step(&["trainer.faults=[\"position_offset\"]"]), "position_offset", &[]);
    let rotary = first_step(&["trainer.faults=[\"position_offset\"]", "model.preset=tiny-llama"]);
    let most = rotary.metric("gap/logp_abs_diff_max")[0];
    assert!(0.0 < most && most < 1e-5, "{most}");
    check(&rotary, "position_offset", &["unexplained"]);
    // Sequences of one length have no padding.
    let equal = ["trainer.faults=[\"position_offset\"]", "model.preset=tiny-llama"];
    check(&Run::of(SUMS, &[&ONE_STEP[..], &equal].concat()), "position_offset", &[]);
}

#[test]
fn k16_dropout_makes_a_trainer_that_does_not_repeat_itself() {
    let run = first_step(&["trainer.faults=[\"dropout\"]"]);
    let findings = check(&run, "dropout", &["not_repeatable"]);
    assert_eq!(findings[0]["requests_total"], 12);
}

#[test]
fn k17_shifted_logprobs_are_off_by_one() {
    let run = first_step(&["trainer.faults=[\"shifted_logprobs\"]"]);
    let findings = check(&run, "shifted_logprobs", &["mask_or_shift"]);
    let told = message(&findings);
    assert!(
        told.starts_with("off by one: decode[i+1] against trainer[i] differs by 0e0"),
        "{told}"
    );
}

/// Random weights end on many ids, none of them of a prompt; the trainer's side knows the first.
#[test]
fn k18_an_end_id_on_one_side_only_is_told_without_a_gap() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let folder = parent.path().join("model");
    gapscope().args(["model", "init", "tiny-jamba"]).arg(&folder).assert().success();
    let path = folder.join("config.json");
    let mut config = read_json(&path);
    let ends: Vec<u32> = (128..240).collect();
    config["eos_token_id"] = json!(ends);
    fs::write(&path, config.to_string()).expect("a config");
    let model = format!("model.path={}", folder.display());
    let small = fs::read_to_string(common::run::SMALL).expect("the small experiment");
    let experiment = parent.path().join("exp.toml");
    fs::write(&experiment, small.replace("preset = \"tiny-jamba\"", "")).expect("an experiment");
    let experiment = experiment.to_str().expect("UTF-8");
    let base = [&ONE_STEP[..], &[&model, "rollout.ignore_eos=false"]].concat();
    check(&Run::of(experiment, &base), "one_end_token", &[]);
    let faulty = [&base[..], &["trainer.faults=[\"one_end_token\"]"]].concat();
    let run = Run::of(experiment, &faulty);
    let findings = check(&run, "one_end_token", &["end_token"]);
    assert!(message(&findings).contains("masks every one of them"), "{findings:#}");
    assert_eq!(run.summary()["spike_steps"], json!([]));
}

#[test]
fn k19_an_unlabelled_temperature_is_found_by_refit() {
    let settings = ["engine.faults=[\"unlabelled_temperature\"]", "rollout.temperature=0.5"];
    let findings = check(&first_step(&settings), "unlabelled_temperature", &["logprob_mode"]);
    assert!(message(&findings).contains("are after temperature 0.500 (found)"), "{findings:#}");
    assert_eq!(findings[0]["requests_total"], 12);
    let hidden = ["engine.faults=[\"unlabelled_temperature\"]", "rollout.temperature=1.0"];
    check(&first_step(&hidden), "unlabelled_temperature", &[]);
}

#[test]
fn k20_unlabelled_filters_are_found_by_their_kept_mass() {
    let settings = ["engine.faults=[\"unlabelled_filters\"]", "rollout.top_p=0.8"];
    let findings = check(&first_step(&settings), "unlabelled_filters", &["logprob_mode"]);
    let filter = "top-p 0.800 (found, kept mass 0.80";
    assert!(message(&findings).contains(filter), "{findings:#}");
    let hidden = ["engine.faults=[\"unlabelled_filters\"]", "rollout.top_p=1.0"];
    check(&first_step(&hidden), "unlabelled_filters", &[]);
}

#[test]
fn k24_a_reduction_that_follows_the_batch_is_named() {
    let run = first_step(&["trainer.faults=[\"batch_dependent_reduction\"]"]);
    let findings = check(&run, "batch_dependent_reduction\"]", &["batch_dependent_reduction"]);
    assert!(message(&findings).contains("outside [0.9, 1.1]"), "{findings:#}");
    let alone = first_step(&[
        "trainer.faults=[\"batch_dependent_reduction\"]",
        "trainer.max_tokens_per_chunk=1",
    ]);
    check(&alone, "batch_dependent_reduction", &[]);
}

/// Two faults at once that touch the same requests have no single culprit.
#[test]
fn two_faults_at_once_have_no_single_culprit() {
    let settings = ["trainer.faults=[\"trainer_weight_ulp\"]", "engine.state_index_bits=8"];
    let findings = read_json(&first_step(&settings).folder.findings());
    let found = kinds(&findings);
    assert!(found.contains(&"unexplained"), "{findings:#}");
    for finding in findings.as_array().expect("a list") {
        let named = finding["kind"] != "unexplained";
        assert!(!named || finding["requests_total"].as_u64() < Some(12), "{finding:#}");
    }
}

#[test]
fn a_judge_says_what_is_no_evidence() {
    let away = tempfile::tempdir().expect("a temporary folder");
    let path = away.path().join("case.json");
    fs::write(&path, "{\"step\": 1, \"fault\": 2}").expect("a file");
    let failed = gapscope().arg("judge").arg(&path).assert().code(1);
    let told = String::from_utf8_lossy(&failed.get_output().stderr).into_owned();
    assert!(told.contains("holds no evidence of a run's step"), "{told}");
}

/// A pool that runs out of blocks when the first requests cross into their second.
#[test]
fn k03_a_state_kept_through_a_preemption_is_named_with_its_request() {
    let settings = [
        "engine.faults=[\"keep_state_on_preempt\"]",
        "engine.num_gpu_blocks_override=19",
        "engine.max_model_len=96",
        "rollout.prompts_per_step=1",
        "rollout.rollouts_per_prompt=4",
        "rollout.max_new_tokens=60",
    ];
    let run = first_step(&settings);
    assert!(run.summary()["preemptions"].as_u64() > Some(0), "{:#}", run.summary());
    let findings = check(&run, "keep_state", &["state_kept_on_preempt"]);
    assert!(message(&findings).contains("resumed after a preemption"), "{findings:#}");
}

#[test]
fn k05_padding_that_writes_is_named_with_its_victim() {
    let settings = [
        "engine.faults=[\"padding_writes\"]",
        "engine.enforce_eager=false",
        "rollout.prompts_per_step=1",
        "rollout.rollouts_per_prompt=3",
    ];
    let findings = check(&first_step(&settings), "padding_writes", &["padding_write"]);
    assert_eq!(findings[0]["requests_total"], 1, "{findings:#}");
}

#[test]
fn k07_a_decode_path_of_its_own_is_named_with_whom_it_hits() {
    let run = first_step(&["engine.faults=[\"decode_update_differs\"]"]);
    let findings = check(&run, "decode_update_differs", &["decode_path"]);
    assert!((1..12).contains(&findings[0]["requests_total"].as_u64().expect("a number")));
    let told = message(&findings);
    assert!(told.contains("first in layer 0 (mamba) at position"), "{told}");
    let forced =
        first_step(&["engine.faults=[\"decode_update_differs\"]", "engine.force_prefill=true"]);
    check(&forced, "decode_update_differs", &[]);
}

#[test]
fn k25_gates_of_their_own_are_named_with_their_layer() {
    let small = fs::read_to_string(common::run::SMALL).expect("the small experiment");
    let model = "path = \"tests/fixtures/tiny-jamba-moe\"";
    let away = tempfile::tempdir().expect("a temporary folder");
    let experiment = away.path().join("exp.toml");
    fs::write(&experiment, small.replace("preset = \"tiny-jamba\"", model)).expect("one");
    let experiment = experiment.to_str().expect("UTF-8");
    let settings = [&ONE_STEP[..], &["engine.faults=[\"gate_renormalised\"]"]].concat();
    let findings = check(&Run::of(experiment, &settings), "gate_renormalised", &["gate_weights"]);
    assert_eq!(findings[0]["requests_total"], 12);
    assert!(message(&findings).contains("first in layer 1 (moe)"), "{findings:#}");
    check(&Run::of(experiment, &ONE_STEP), "", &[]);
}
