//! Whole runs over scripted servers.

use std::fs;

use serde_json::{json, Value};

use gapscope::base::LogprobsMode;
use gapscope::config::Dtype;
use gapscope::model::{save_preset, Preset};
use gapscope::report::parquet::read_rollouts;

use crate::common::run::{gapscope, read_json};
use crate::scripted::{Asked, Reply, Scripted, State, MODEL};

/// The run that every test here changes a little, without its model and addresses.
pub const RUN: &str = "name = \"served\"\nsteps = 2\n[engine]\nkind = \"vllm\"\nretry_for_s = 1\n\
    [rollout]\nprompts_per_step = 4\nrollouts_per_prompt = 3\nmax_new_tokens = 8\n\
    ignore_eos = true\n\
    [trainer]\nupdate = \"none\"\n";

/// Exit code, standard error, and the run's folder.
pub fn run(server: &Scripted, sets: &[&str]) -> (Option<i32>, String, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (code, stderr) = run_in(&folder, server, sets, &[]);
    (code, stderr, folder)
}

fn run_in(
    folder: &tempfile::TempDir,
    server: &Scripted,
    sets: &[&str],
    more: &[&str],
) -> (Option<i32>, String) {
    let file = folder.path().join("served.toml");
    let text = RUN.replacen('\n', &format!("\n{MODEL}"), 1);
    fs::write(&file, text).expect("a file");
    let url = format!("engine.url={}", server.url);
    let sets = [&[url.as_str()], sets].concat();
    let mut command = gapscope();
    command.arg("run").arg(&file).arg("--out").arg(folder.path().join("run"));
    command.args(sets.iter().flat_map(|set| ["--set", set])).args(more);
    let output = command.output().expect("the binary starts");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

pub fn summary(folder: &tempfile::TempDir) -> Value {
    read_json(&folder.path().join("run/summary.json"))
}

#[test]
fn a_server_that_computes_what_the_trainer_does_has_no_gap() {
    let server = Scripted::new(|_| Reply::Right);
    let (code, stderr, folder) = run(&server, &["check.legs=[\"prefill\"]"]);
    assert_eq!(code, Some(0), "{stderr}");
    let summary = summary(&folder);
    assert_eq!((&summary["n_tokens"], &summary["gap_max"]), (&json!(2 * 96), &json!(0.0)));
    assert_eq!((&summary["findings"], &summary["resume_exact"]), (&json!([]), &json!(false)));
    // What a server does not say is absent.
    for key in ["num_blocks", "engine_steps", "preemptions", "decoded_first_chunks", "laps"] {
        assert_eq!(summary[key], Value::Null, "{key}");
    }
    let facts = read_json(&folder.path().join("run/servers.json"));
    assert_eq!(facts[0]["version"], "0.0.test");
    assert_eq!(facts[0]["logprobs_mode"], "raw_logprobs");
    // The floor's own requests are no rollouts, and are asked one after the other.
    let asked = server.asked();
    assert_eq!(asked.keys().filter(|name| name.starts_with("s0.")).count(), 32);
    assert_eq!(asked.keys().filter(|name| name.ends_with(".prefill")).count(), 24 + 16);
}

#[test]
fn a_withheld_contract_is_found_out_from_the_records() {
    let server = Scripted::of(LogprobsMode::ProcessedLogprobs, |_| Reply::Right);
    let said = ["rollout.temperature=0.6", "steps=1"];
    let (code, stderr, folder) = run(&server, &said);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("set engine.logprobs_mode = \"processed_logprobs\""), "{stderr}");
    assert!(!folder.path().join("run").exists(), "a run that cannot start leaves nothing");

    let withheld = [&said[..], &["engine.check_contract=false"]].concat();
    let (code, stderr, folder) = run(&server, &withheld);
    assert_eq!(code, Some(0), "{stderr}");
    let findings = summary(&folder)["findings"].clone();
    assert_eq!(findings[0]["kind"], "logprob_mode", "{findings:#}");
    let message = findings[0]["message"].as_str().expect("a message");
    assert!(message.contains("after temperature 0.600 (found)"), "{message}");

    let told = [&said[..], &["engine.logprobs_mode=processed_logprobs"]].concat();
    let (code, stderr, folder) = run(&server, &told);
    assert_eq!(code, Some(0), "{stderr}");
    assert_eq!(summary(&folder)["gap_max"], 0.0);
}

/// One token of one request is wrong, and so is another one's missing value.
#[test]
fn a_wrong_value_is_a_finding_of_its_request_alone() {
    let server = Scripted::new(|asked: &Asked| match asked.name {
        "s1.p2.r1" => Reply::Edited(|answer| {
            let value = &mut answer["choices"][0]["logprobs"]["token_logprobs"][3];
            *value = json!(value.as_f64().expect("a number") - 0.5);
        }),
        "s2.p0.r0" => Reply::Edited(|answer| {
            answer["choices"][0]["logprobs"]["token_logprobs"][0] = json!(null);
        }),
        _ => Reply::Right,
    });
    let (code, stderr, folder) = run(&server, &[]);
    assert_eq!(code, Some(0), "{stderr}");
    let summary = summary(&folder);
    assert_eq!(summary["spike_steps"], json!([1, 2]));
    assert_eq!((&summary["nonfinite"], &summary["n_tokens"]), (&json!(1), &json!(2 * 96 - 1)));
    let requests: Vec<&Value> = summary["findings"]
        .as_array()
        .expect("findings")
        .iter()
        .map(|one| &one["requests"])
        .collect();
    assert_eq!(requests, [&json!(["s1.p2.r1"]), &json!(["s2.p0.r0"])]);
    let message = summary["findings"][0]["message"].as_str().expect("a message");
    assert!(message.contains("decode/prefill 5e-1, prefill/trainer 0e0"), "{message}");
}

/// The groups go round, and records and findings say which server sampled them.
#[test]
fn of_several_servers_the_one_that_is_wrong_is_named() {
    let right = Scripted::new(|_| Reply::Right);
    let wrong = Scripted::new(|asked: &Asked| match asked.name {
        "s1.p3.r1" => Reply::Edited(|answer| {
            let value = &mut answer["choices"][0]["logprobs"]["token_logprobs"][3];
            *value = json!(value.as_f64().expect("a number") - 0.5);
        }),
        _ => Reply::Right,
    });
    let both = format!("engine.url=[{:?}, {:?}]", right.url, wrong.url);
    let (code, stderr, folder) = run(&right, &[&both]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stderr.contains("  SPIKE of engine 1, 1 finding(s)"), "{stderr}");
    let findings = summary(&folder)["findings"].clone();
    assert_eq!(findings[0]["engine"], 1);
    let message = findings[0]["message"].as_str().expect("a message");
    assert!(message.starts_with("engine 1: 1 of 12 requests have a gap"), "{message}");
    let rollouts = folder.path().join("run/rollouts/step-00001.parquet");
    for row in read_rollouts(&rollouts).expect("rollouts") {
        assert_eq!(row.engine_index.get(), row.request.prompt_id.get() % 2);
    }
}

#[test]
fn a_request_that_fails_for_good_ends_the_run_and_keeps_what_was_done() {
    let server = Scripted::new(|asked| match asked.name {
        "s2.p1.r2" => Reply::Status(400, "{\"error\": {\"message\": \"bad token\"}}"),
        _ => Reply::Right,
    });
    let (code, stderr, folder) = run(&server, &[]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("request s2.p1.r2, tried 1 time(s): HTTP 400: bad token"), "{stderr}");
    let summary = summary(&folder);
    assert_eq!((&summary["steps_done"], &summary["n_tokens"]), (&json!(1), &json!(96)));
}

#[test]
fn a_run_goes_on_with_the_servers_that_it_had() {
    let server = Scripted::new(|asked| match (asked.name, asked.before) {
        ("s2.p1.r2", 0) => Reply::Status(400, "{\"error\": {\"message\": \"bad token\"}}"),
        _ => Reply::Right,
    });
    let sets = ["checkpoint.every=1"];
    let (code, stderr, folder) = run(&server, &sets);
    assert_eq!((code, &summary(&folder)["steps_done"]), (Some(1), &json!(1)), "{stderr}");
    server.is_now("0.1.test");
    let (code, stderr) = run_in(&folder, &server, &sets, &["--resume"]);
    let says = format!(
        "{}: its version was 0.0.test when the run began, and is 0.1.test: start it as it was",
        server.url
    );
    assert!(code == Some(1) && stderr.contains(&says), "{stderr}");
    server.is_now("0.0.test");
    let (code, stderr) = run_in(&folder, &server, &sets, &["--resume"]);
    assert_eq!((code, &summary(&folder)["steps_done"]), (Some(0), &json!(2)), "{stderr}");
}

/// The folder holds other weights than the trainer's when the server is started.
#[test]
fn a_server_that_learns_has_the_trainers_weights_from_the_first_step_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let served = folder.path().join("served");
    save_preset(&served, Preset::TinyLlama, 99, Dtype::F32).expect("a model folder");
    let mut state = State::new(LogprobsMode::RawLogprobs, Box::new(|_| Reply::Right));
    state.folder = Some(served.clone());
    state.reload().expect("it has a folder");
    let server = Scripted::with(state);
    let (code, stderr, left) = run(&server, &["steps=1", "check.floor=0"]);
    assert_eq!(code, Some(0), "{stderr}");
    assert_ne!(summary(&left)["gap_max"], 0.0, "these are other weights");

    let sync = format!("engine.sync_folder={}", served.display());
    // As a process that was killed in the middle leaves it; Linux has none beyond 2^22.
    let left_behind = served.join(".gapscope-next-4194305");
    fs::create_dir(&left_behind).expect("a folder");
    // No answer of random weights is right, so that it is decay that moves them.
    let learn = ["trainer.update=adamw", "trainer.weight_decay=1.0", "trainer.learning_rate=0.1"];
    let sets = [&[sync.as_str(), "steps=3", "check.floor=0"], &learn[..]].concat();
    let (code, stderr, left) = run(&server, &sets);
    assert_eq!(code, Some(0), "{stderr}");
    let summary = summary(&left);
    assert_eq!((&summary["n_tokens"], &summary["gap_max"]), (&json!(3 * 96), &json!(0.0)));
    assert!(!left_behind.exists());
    assert_eq!(summary["findings"], json!([]));
}

#[test]
fn a_server_that_cannot_be_given_weights_is_refused_before_the_first_step() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let served = folder.path().join("served");
    save_preset(&served, Preset::TinyLlama, 99, Dtype::F32).expect("a model folder");
    let server = Scripted::new(|_| Reply::Right);
    let sync = format!("engine.sync_folder={}", served.display());
    let (code, stderr, _left) = run(&server, &[&sync, "trainer.update=adamw"]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("it has no /collective_rpc: start the server with"), "{stderr}");
    assert!(server.asked().keys().all(|name| name == "probe"), "{:?}", server.asked());
}

/// Prompts from a file, without answers; the same folder as a run leaves.
#[test]
fn an_audit_of_a_server_is_a_run() {
    let server = Scripted::new(|_| Reply::Right);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (prompts, out) = (folder.path().join("prompts.jsonl"), folder.path().join("run"));
    fs::write(&prompts, "{\"prompt\": \"1+1=\"}\n\n{\"prompt\": \"2+2=\"}\n").expect("a file");
    let mut command = gapscope();
    command.args(["audit", "--server", &server.url, "--model", "tiny-llama", "--prompts"]);
    command.arg(&prompts).arg("--out").arg(&out).args(["--fail-on", "finding"]);
    command.args(["--set", "rollout.ignore_eos=true", "--set", "rollout.max_new_tokens=5"]);
    let output = command.output().expect("the binary starts");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let summary = read_json(&out.join("summary.json"));
    assert_eq!((&summary["n_tokens"], &summary["gap_max"]), (&json!(2 * 4 * 5), &json!(0.0)));
    assert!(out.join("report.html").exists());
}
