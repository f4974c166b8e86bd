//! `gapscope explain`: a request's life, told to somebody who has not been there.

mod common;

use std::fs;
use std::path::Path;

use common::run::{gapscope, Run};

/// Standard output, its lines joined: where a paragraph is wrapped is no matter.
fn explain(run: &Path, more: &[&str]) -> String {
    let output = gapscope().arg("explain").arg(run).args(more).assert().success();
    let text = String::from_utf8(output.get_output().stdout.clone()).expect("UTF-8");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
}

fn refused(run: &Path, more: &[&str], message: &str) {
    let output = gapscope().arg("explain").arg(run).args(more).output().expect("the binary starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    let last = stderr.lines().last().unwrap_or_default();
    assert_eq!((output.status.code(), last), (Some(1), format!("error: {message}").as_str()));
}

#[test]
fn the_imposters_life_says_whose_state_it_read() {
    let run = Run::of("experiments/imposter_request.toml", &["steps=3"]);
    let before = run.files();
    let text = explain(run.root(), &[]);
    says(
        &text,
        &[
            "request s2.p0.r7: where it went wrong",
            "s2.p0.r7 was admitted in engine step 66 with the one token of budget that the 7 other \
             requests of the batch had left (420 of 421).",
            "sorted among the decodes by the split rule scheduled_tokens",
            "before the reorder is_decode is True for it, after 7 rows for which it is False",
            "it read block 355, where s1.p2.r6 had left its keys and values (engine steps",
            "block 356, where s1.p2.r7 had left its state of Mamba layer 0 (engine steps",
            "all other requests of the step are clean",
            "Its forward parts from the trainer's in layer 0 (mamba) at position 0.",
            "prefill against trainer nothing: equal after every layer",
            "Three-way check: rollout engine disagrees with itself",
            "stale_state: request s2.p0.r7: its first chunk",
            &format!("gapscope explain {} --request s2.p0.r7", run.root().display()),
            &format!("gapscope bisect {} --step 2", run.root().display()),
        ],
    );
    let told = fs::read_to_string(run.root().join("explain/s2.p0.r7.txt")).expect("the text");
    assert!(text.starts_with(&told.split_whitespace().collect::<Vec<_>>().join(" ")));
    let page = fs::read_to_string(run.root().join("explain/s2.p0.r7.html")).expect("the page");
    assert!(page.starts_with("<!DOCTYPE html>") && page.contains("block 355, where s1.p2.r6"));
    let mut after = run.files();
    after.retain(|name, _| !name.starts_with("explain/"));
    assert!(before == after, "explain changes no other file");

    // Another step by its number, and a request that nothing happened to.
    says(&explain(run.root(), &["--step", "3"]), &["request s3.p0.r7: where it went wrong"]);
    let clean = explain(run.root(), &["--request", "s1.p0.r7"]);
    says(
        &clean,
        &[
            "request s1.p0.r7: a clean request",
            "where nobody had left anything, so that it was still zero",
            "It is clean: engine and trainer have the same log-probability for each of its 20 \
             compared tokens, to the last bit.",
        ],
    );
    assert!(!clean.contains("First bad token") && !clean.contains("Finding"), "{clean}");
}

#[test]
fn a_wrapped_index_is_told_by_its_blocks() {
    let run = Run::of("experiments/index_wrap.toml", &["steps=12"]);
    let text = explain(run.root(), &[]);
    says(
        &text,
        &[
            "Its first chunk ran as a prefill row, which starts from zero whatever its blocks \
             hold.",
            "past the reach of a state index of 22 bits, which ends before block 1366",
            "its prefill stored the state of block 1411 inside block 45, and in block 1411 its \
             decodes found zeros, for nobody had held it",
            "Its forward parts from the trainer's in layer 0 (mamba) at position",
            "address_wrap: block 1366 is the first",
        ],
    );
    // The last lap's owners are still known on the next one.
    let run = Run::of("experiments/index_wrap.toml", &["steps=24"]);
    let text = explain(run.root(), &["--step", "24"]);
    says(&text, &["its decodes found what s12.p", "had left, its state of Mamba layer"]);
}

#[test]
fn what_is_wrong_behind_the_last_layer_is_the_head() {
    let run = Run::small(&["engine.faults=[\"engine_weight_ulp\"]", "trainer.update=none"]);
    let text = explain(run.root(), &[]);
    says(
        &text,
        &[
            "Its forward parts from the trainer's in the head at position",
            "decode against prefill nothing: equal after every layer",
            "weights_not_synced: ",
        ],
    );
}

/// Planted after the middle one of four layers, in the decode rows of a step's first request.
#[test]
fn one_ulp_in_one_layer_of_one_request_is_found_with_its_layer() {
    let run = Run::small(&["engine.faults=[\"layer_ulp\"]", "trainer.update=none"]);
    let text = explain(run.root(), &[]);
    says(
        &text,
        &[
            "request s1.p0.r0: where it went wrong",
            "Its forward parts from the trainer's in layer 2 (mlp) at position",
            "decode against forced decode layer 2 (mlp)",
            "prefill against trainer nothing: equal after every layer",
            "all other requests of the step are clean",
        ],
    );
}

#[test]
fn what_cannot_be_explained_is_refused() {
    let run = Run::of("experiments/imposter_request.toml", &["steps=2"]);
    let root = run.root().display();
    refused(
        run.root(),
        &["--request", "s2.p9.r7"],
        &format!("{root} has no request s2.p9.r7: the nearest is s2.p7.r7, and its steps are 1-2"),
    );
    refused(
        run.root(),
        &["--request", "p9"],
        "request id \"p9\" does not read s<step>.p<prompt>.r<rollout>, such as s12.p3.r7",
    );
    let other = "request s2.p0.r7 is of step 2, and --step asks for step 1";
    refused(run.root(), &["--request", "s2.p0.r7", "--step", "1"], other);
    let message = format!("step 1 of {root} has no spike: those that have are 2");
    refused(run.root(), &["--step", "1"], &message);

    let config = fs::read_to_string(run.folder.config()).expect("config.json");
    fs::write(run.folder.config(), config.replace("\"seed\": 7", "\"seed\": 8")).expect("written");
    let message = format!(
        "{root}: request s2.p0.r0 does not come out again as it was recorded, from its completion \
         index 0 on: config.json, the model or the task has changed since, or another version made \
         the run"
    );
    refused(run.root(), &[], &message);

    let empty = tempfile::tempdir().expect("a folder");
    let message = format!("{} is not a run folder: it has no config.json", empty.path().display());
    refused(empty.path(), &[], &message);
    let clean = Run::small(&["trainer.update=none"]);
    let message = format!(
        "no step of {} spiked: there is nothing to explain; name a request to see its life all the \
         same",
        clean.root().display()
    );
    refused(clean.root(), &[], &message);
}
