//! `gapscope bisect`: which levers end a run's spike, and what that is said to mean.

mod common;

use std::fs;
use std::path::Path;

use common::run::{gapscope, Run};
use serde_json::Value;

/// Standard output and the table of a bisection.
fn bisect(run: &Path, more: &[&str]) -> (String, Value) {
    let mut command = gapscope();
    let output = command.arg("bisect").arg(run).args(more).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).expect("UTF-8");
    let table = fs::read_to_string(run.join("bisect.json")).expect("the table");
    (text, serde_json::from_str(&table).expect("JSON"))
}

/// `gone` or `same` and so on, by the lever's key.
fn effect<'a>(table: &'a Value, key: &str) -> &'a str {
    let rows = table["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["change"].as_str().is_some_and(|text| text.contains(key)));
    let row = row.unwrap_or_else(|| panic!("no row of {key} in {table}"));
    let name = row.get("effect").and_then(Value::as_str);
    name.unwrap_or_else(|| panic!("no effect in {row}"))
}

fn refused(run: &Path, more: &[&str], message: &str) {
    let output = gapscope().arg("bisect").arg(run).args(more).output().expect("the binary starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!((output.status.code(), stderr), (Some(1), format!("error: {message}\n")));
    assert!(!run.join("bisect.json").exists());
}

#[test]
fn a_wrapped_index_ends_with_its_width() {
    let run = Run::of("experiments/index_wrap.toml", &["steps=13"]);
    let (text, table) = bisect(run.root(), &[]);
    assert!(text.starts_with("step 12: points to a state address that overflows\n"), "{text}");
    assert_eq!(table["rows"].as_array().expect("rows").len(), 1, "enough is enough");
    let (text, table) = bisect(run.root(), &["--all"]);
    assert!(text.starts_with("step 12: points to a state address that overflows\n"), "{text}");
    for (key, expected) in [
        ("state_index_bits", "gone"),
        ("rollouts_per_prompt", "gone"),
        ("free_list", "gone"),
        ("num_gpu_blocks_override", "gone"),
        ("force_prefill", "gone"),
        ("max_num_batched_tokens", "same"),
    ] {
        assert_eq!(effect(&table, key), expected, "{key}");
    }
}

#[test]
fn a_stale_state_ends_with_the_split_rule_and_with_the_budget() {
    let run = Run::of("experiments/imposter_request.toml", &["steps=2"]);
    let (text, table) = bisect(run.root(), &["--all"]);
    let expected = "step 2: points to a short first chunk that is taken for a decode";
    assert!(text.starts_with(expected), "{text}");
    for key in ["batch_split", "max_num_batched_tokens", "force_prefill"] {
        assert_eq!(effect(&table, key), "gone", "{key}");
    }
}

#[test]
fn k09_a_stale_prefix_cache_ends_with_the_cache() {
    let sets = [
        "trainer.update=adamw",
        "trainer.learning_rate=1e-2",
        "trainer.weight_decay=0.5",
        "engine.enable_prefix_caching=true",
        "engine.faults=[\"keep_cache_over_updates\"]",
        "engine.max_model_len=96",
        "task.prompt_tokens=64",
    ];
    let run = Run::of("tests/fixtures/sums.toml", &sets);
    assert_eq!(run.summary()["spike_steps"], serde_json::json!([2, 3]));
    let (text, table) = bisect(run.root(), &[]);
    let expected = "step 2: points to reused state: stale weights or a wrong boundary";
    assert!(text.starts_with(expected), "{text}");
    assert_eq!(effect(&table, "enable_prefix_caching"), "gone");
}

#[test]
fn what_no_lever_of_the_engine_ends_is_somewhere_else() {
    let run = Run::small(&["trainer.faults=[\"trainer_weight_ulp\"]", "trainer.update=none"]);
    let (text, table) = bisect(run.root(), &[]);
    assert!(
        text.starts_with("step 1: no lever of the engine ends it: look at the trainer"),
        "{text}"
    );
    assert_eq!(table["points_to"], serde_json::json!([]));
    assert_eq!(effect(&table, "force_prefill"), "same");
    assert_eq!(effect(&table, "max_num_seqs"), "same");
}

#[test]
fn what_cannot_be_bisected_is_refused() {
    let clean = Run::small(&["trainer.update=none"]);
    let root = clean.root().display();
    refused(clean.root(), &[], &format!("no step of {root} spiked: there is nothing to bisect"));
    let run = Run::of("experiments/index_wrap.toml", &["steps=12"]);
    let root = run.root().display();
    let message = format!("step 3 of {root} has no spike: those that have are 12");
    refused(run.root(), &["--step", "3"], &message);
}
