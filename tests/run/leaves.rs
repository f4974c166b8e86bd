//! What a run leaves and says, also when it is broken off.

use std::collections::BTreeSet;

use gapscope::report::parquet::RolloutRow;
use serde_json::{json, Value};

use crate::common::run::{gapscope, read_json, set, Run, SMALL};
use crate::{spikes, weights_by_step, ALL_LEGS};

#[test]
fn a_run_leaves_every_file() {
    let run = Run::small(&["checkpoint.save_final=true", "check.greedy_eval_prompts=2"]);
    let steps = ["step-00001", "step-00002", "step-00003"];
    let mut expected: BTreeSet<String> = [
        "checkpoints/final/config.json",
        "checkpoints/final/generation_config.json",
        "checkpoints/final/model.safetensors",
        "config.json",
        "evaluation.json",
        "findings.json",
        "report.html",
        "steps.jsonl",
        "summary.json",
        "tb/events",
        "timing.jsonl",
    ]
    .map(str::to_owned)
    .into();
    for folder in ["rollouts", "tokens"] {
        expected.extend(steps.map(|step| format!("{folder}/{step}.parquet")));
    }
    let files = run.files();
    assert_eq!(files.keys().cloned().collect::<BTreeSet<_>>(), expected);
    assert!(files.values().all(|bytes| !bytes.is_empty()));
    run.assert_clean();

    // What it leaves can be run again, and starts where the first run ended.
    let again = format!("model.path={}", run.root().join("checkpoints/final").display());
    let experiment = std::fs::read_to_string(SMALL).expect("the experiment");
    let parent = tempfile::tempdir().expect("a temporary folder");
    let file = parent.path().join("again.toml");
    std::fs::write(&file, experiment.replace("preset = \"tiny-jamba\"", "")).expect("written");
    let again = Run::of(file.to_str().expect("UTF-8"), &[&again]);
    again.assert_clean();
    assert!(!weights_by_step(&run).contains(&weights_by_step(&again)[0]));
}

#[test]
fn a_run_says_what_it_did() {
    let run = Run::small(&[]);
    run.assert_clean();
    let summary = run.summary();
    assert_eq!(summary["schema"], 1);
    assert_eq!(summary["name"], "small");
    assert_eq!(summary["num_blocks"], 64);
    assert_eq!(summary["state_stride"], 3072);
    assert_eq!(summary["first_wrapped_block"], Value::Null);
    assert_eq!(summary["floor"], 0.0);
    // Each of twelve requests holds a block a Mamba group, three, and one of attention.
    assert_eq!(summary["blocks_per_step"], 48.0);
    assert_eq!(summary["laps"], 3.0 * 48.0 / 63.0);
    assert_eq!(summary["preemptions"], 0);
    let rewards = run.metric("reward/mean");
    assert_eq!(summary["reward_mean_first"], rewards[0]);
    assert_eq!(summary["reward_mean_last"], rewards[2]);
    let of_records = |rollouts: &Vec<RolloutRow>| {
        rollouts.iter().map(|row| row.reward).sum::<f64>() / rollouts.len() as f64
    };
    assert_eq!(rewards, run.rollouts().iter().map(of_records).collect::<Vec<_>>());
    assert!(rewards.iter().any(|&mean| mean > 0.0 && mean < 1.0), "{rewards:?}");
    assert!(summary["wall_s"].as_f64().expect("seconds") > 0.0);

    let expected = format!(
        "small: 3 steps, 216 tokens compared, 0 nonfinite\n\
         gap_max 0  frac_bitwise_equal 1  spike steps: none\n\
         reward {} in the first tenth, {} in the last ({:.1} s)\n\
         0 finding(s)\n\
         report: {}\n",
        rewards[0],
        rewards[2],
        summary["wall_s"].as_f64().expect("seconds"),
        run.folder.report().display()
    );
    assert_eq!(run.stdout, expected);
}

/// Time is in `timing.jsonl`, TensorBoard and `wall_s`, and nowhere else.
#[test]
fn a_run_repeated_is_equal_byte_for_byte() {
    let assignments = [
        ALL_LEGS,
        "checkpoint.save_final=true",
        "check.greedy_eval_prompts=4",
        "trainer.warm_start.steps=2",
        "engine.faults=[\"engine_weight_ulp\"]",
    ];
    let [first, second] = [(); 2].map(|()| {
        let run = Run::small(&assignments);
        assert!(!spikes(&run).is_empty(), "findings and worst tokens are compared too");
        let mut summary = run.summary();
        summary["wall_s"].take();
        let mut files = run.files();
        files.retain(|name, _| name != "timing.jsonl" && name != "tb/events");
        files.insert("summary.json".to_owned(), summary.to_string().into_bytes());
        files
    });
    assert_eq!(first.keys().collect::<Vec<_>>(), second.keys().collect::<Vec<_>>());
    for (name, bytes) in &first {
        assert!(bytes == &second[name], "{name} differs");
    }
}

/// Other seeds are other runs: equality above is not for want of change.
#[test]
fn a_seed_changes_the_run() {
    let [first, second] = ["seed=3", "seed=4"].map(|seed| Run::small(&[seed]));
    assert_ne!(first.files()["steps.jsonl"], second.files()["steps.jsonl"]);
    assert_ne!(weights_by_step(&first)[0], weights_by_step(&second)[0]);
}

/// Steps before a failure are kept, and the failed run says how far it came.
#[test]
fn what_was_reported_before_an_error_stays() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let root = parent.path().join("run");
    // The second step's prompt is longer than the model allows.
    let problems = parent.path().join("problems.jsonl");
    let line = |prompt: &str| format!("{{\"prompt\":\"{prompt}\",\"answer\":\"x\"}}\n");
    std::fs::write(&problems, line("short") + &line(&"long".repeat(1000))).expect("a file");
    let path = format!("task.path={}", problems.display());
    let args = set(&[&path, "rollout.prompts_per_step=1", "trainer.update=none"]);
    let output = gapscope().args(["run", SMALL, "--out"]).arg(&root).args(args).output();
    let output = output.expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let last = stderr.lines().last().expect("an error");
    assert!(last.starts_with("error: request s2.p0.r0 has a prompt of 400"), "{last}");
    let summary = read_json(&root.join("summary.json"));
    assert_eq!(summary["steps_done"], json!(1));
    assert_eq!(summary["error"].as_str(), last.strip_prefix("error: "));
    assert!(root.join("tokens/step-00001.parquet").is_file());
    assert!(root.join("report.html").is_file());
}

/// Weights that overflow give no finite logprob: a spike, counted as such, then an error.
#[test]
fn weights_that_overflow_are_a_spike_of_nonfinite_tokens() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let root = parent.path().join("run");
    let mut command = gapscope();
    command.args(["run", SMALL, "--out"]).arg(&root).args(set(&["trainer.learning_rate=1e30"]));
    let output = command.output().expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let expected = "error: the new log-probability of token 0 in sequence 0 of its chunk is NaN: \
        the loss needs finite numbers; look for the step's non-finite tokens in its record";
    assert_eq!(stderr.lines().last(), Some(expected));
    let summary = read_json(&root.join("summary.json"));
    assert_eq!(summary["spike_steps"], json!([2]));
    assert_eq!((&summary["n_tokens"], &summary["nonfinite"]), (&json!(72), &json!(72)));
}
