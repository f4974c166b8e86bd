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

fn replays(table: &Value) -> usize {
    table["rows"].as_array().expect("rows").len() + 1
}

/// In any order the same is pointed to, after six replays at most: the usual one, and three drawn.
#[track_caller]
fn check_orders(run: &Run, expected: &str) {
    let (text, table) = bisect(run.root(), &[]);
    assert!(text.starts_with(expected), "{text}");
    assert!(text.contains(&format!("\n{} replays: ", replays(&table))), "{text}");
    assert!(replays(&table) <= 6, "{table:#}");
    for seed in ["1", "2", "3"] {
        let (text, shuffled) = bisect(run.root(), &["--shuffle", seed]);
        assert!(text.starts_with(expected), "order {seed}: {text}");
        assert_eq!(shuffled["points_to"], table["points_to"], "order {seed}");
        assert_eq!(shuffled["decided"], true, "order {seed}");
        assert!(replays(&shuffled) <= 6, "order {seed}: {shuffled:#}");
    }
}

#[test]
fn k01_a_wrapped_index_ends_with_its_width_in_any_order() {
    let run = Run::of("experiments/index_wrap.toml", &["steps=13"]);
    check_orders(&run, "step 12: points to a state address that overflows\n");
}

#[test]
fn k01_what_else_ends_a_wrapped_index_does_not_outweigh_it() {
    let run = Run::of("experiments/index_wrap.toml", &["steps=13"]);
    let (text, table) = bisect(run.root(), &["--all"]);
    assert!(text.starts_with("step 12: points to a state address that overflows\n"), "{text}");
    for (key, expected) in [
        ("state_index_bits", "gone"),
        ("rollouts_per_prompt", "gone"),
        ("free_list", "gone"),
        ("num_gpu_blocks_override", "gone"),
        ("force_prefill", "gone"),
        ("max_num_batched_tokens", "same"),
        ("max_tokens_per_chunk", "same"),
    ] {
        assert_eq!(effect(&table, key), expected, "{key}");
    }
}

#[test]
fn k02_a_stale_state_ends_with_the_split_rule_in_any_order() {
    let run = Run::of("experiments/imposter_request.toml", &["steps=2"]);
    check_orders(&run, "step 2: points to a short first chunk that is taken for a decode");
}

#[test]
fn k02_what_else_ends_a_stale_state_does_not_outweigh_it() {
    let run = Run::of("experiments/imposter_request.toml", &["steps=2"]);
    let (text, table) = bisect(run.root(), &["--all"]);
    let expected = "step 2: points to a short first chunk that is taken for a decode";
    assert!(text.starts_with(expected), "{text}");
    for key in ["batch_split", "max_num_batched_tokens", "force_prefill"] {
        assert_eq!(effect(&table, key), "gone", "{key}");
    }
}

const SCORES: [&str; 2] = ["steps=1", "trainer.update=none"];
const LEARNS: [&str; 2] = ["steps=2", "trainer.learning_rate=1e-2"];

/// The small experiment with a fault of the engine or of the trainer: the lever that hides it is
/// named, in the usual order and in one that is drawn.
#[track_caller]
fn check_fault(side: &str, fault: &str, sets: &[&str], lever: &str, points_to: &str) {
    let planted = format!("{side}.faults=[\"{fault}\"]");
    let run = Run::small(&[sets, &[planted.as_str()]].concat());
    let (text, table) = bisect(run.root(), &[]);
    let (shuffled_text, shuffled) = bisect(run.root(), &["--shuffle", "11"]);
    for (text, table) in [(&text, &table), (&shuffled_text, &shuffled)] {
        assert!(text.contains(&format!(": points to {points_to}\n")), "{fault}: {text}");
        assert_eq!(table["points_to"], serde_json::json!([points_to]), "{fault}");
        assert_eq!(effect(table, lever), "gone", "{fault}");
    }
}

const DECODES: &str = "the decode path, or the state that it reads back";
const PACKS: &str = "the trainer's batch: packing, padding or an order of sums that follows it";
const ARRIVES: &str = "weights that arrive late, too early or at one side only";
const MEANS: &str = "what the numbers mean: temperature or filters on one side only";

#[test]
fn k03_a_state_kept_through_a_preemption_ends_with_more_blocks() {
    let sets = [
        &SCORES[..],
        &["engine.num_gpu_blocks_override=19", "engine.max_model_len=96"],
        &["rollout.prompts_per_step=1", "rollout.max_new_tokens=60"],
    ];
    let points_to = "preemption: what a request keeps or loses when it gives up its blocks";
    let lever = "num_gpu_blocks_override 19 -> 38";
    check_fault("engine", "keep_state_on_preempt", &sets.concat(), lever, points_to);
}

#[test]
fn k05_padding_rows_end_with_eager() {
    let rows = ["rollout.prompts_per_step=1", "rollout.rollouts_per_prompt=3"];
    let sets = [&SCORES[..], &["engine.enforce_eager=false"], &rows].concat();
    let points_to = "rows that fill a batch of decodes up to a captured size";
    check_fault("engine", "padding_writes", &sets, "enforce_eager", points_to);
}

#[test]
fn k07_a_decode_path_that_differs_ends_with_forced_prefill() {
    check_fault("engine", "decode_update_differs", &SCORES, "force_prefill", DECODES);
}

#[test]
fn what_strikes_a_state_once_ends_with_forced_prefill() {
    for fault in ["state_bit_flip", "kv_page_zeroed", "layer_ulp"] {
        check_fault("engine", fault, &SCORES, "force_prefill", DECODES);
    }
}

#[test]
fn k11_k12_weights_that_do_not_arrive_end_without_updates() {
    check_fault("engine", "old_weights_on_wake", &LEARNS, "trainer.update", ARRIVES);
    let tied = [&LEARNS[..], &["model.preset=tiny-mamba"]].concat();
    check_fault("engine", "head_not_refreshed", &tied, "trainer.update", ARRIVES);
    check_fault("trainer", "score_after_update", &LEARNS, "trainer.update", ARRIVES);
}

#[test]
fn k13_k14_k24_a_trainers_batch_ends_with_one_sequence_a_pass() {
    for fault in ["pads_enter_state", "no_document_reset", "batch_dependent_reduction"] {
        check_fault("trainer", fault, &SCORES, "max_tokens_per_chunk", PACKS);
    }
}

#[test]
fn k15_moved_positions_end_with_one_sequence_a_pass() {
    let rotary = [&SCORES[..], &["model.preset=tiny-llama"]].concat();
    check_fault("trainer", "position_offset", &rotary, "max_tokens_per_chunk", PACKS);
}

#[test]
fn k19_k20_what_numbers_mean_ends_with_plain_sampling() {
    let warm = [&SCORES[..], &["rollout.temperature=0.5"]].concat();
    check_fault("engine", "unlabelled_temperature", &warm, "rollout.temperature", MEANS);
    let cut = [&SCORES[..], &["rollout.top_p=0.8"]].concat();
    check_fault("engine", "unlabelled_filters", &cut, "rollout.temperature", MEANS);
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

/// Neither the trainer's own noise nor a shift is any lever's.
#[test]
fn k16_k17_what_no_lever_ends_is_said_to_be_the_trainers() {
    for fault in ["dropout", "shifted_logprobs"] {
        let planted = format!("trainer.faults=[\"{fault}\"]");
        let run = Run::small(&[&SCORES[..], &[planted.as_str()]].concat());
        let (text, table) = bisect(run.root(), &["--shuffle", "5"]);
        assert!(text.starts_with("step 1: no lever ends it: look at the trainer"), "{text}");
        assert_eq!(table["points_to"], serde_json::json!([]), "{fault}");
    }
}

#[test]
fn what_no_lever_of_the_engine_ends_is_somewhere_else() {
    let run = Run::small(&["trainer.faults=[\"trainer_weight_ulp\"]", "trainer.update=none"]);
    let (text, table) = bisect(run.root(), &[]);
    assert!(text.starts_with("step 1: no lever ends it: look at the trainer"), "{text}");
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
