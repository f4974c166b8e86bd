//! Ctrl-C, and what it leaves.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use common::run::read_json;
use rustix::process::{kill_process, Pid, Signal};

fn start(args: &[&str], out: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_gapscope"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(args)
        .arg("--out")
        .arg(out)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary starts")
}

/// Once a file is there, the command is interrupted; returns its exit code.
fn interrupted(mut child: Child, once: &Path) -> Option<i32> {
    while !once.exists() {
        assert_eq!(child.try_wait().expect("a child"), None, "it ended before {}", once.display());
        thread::sleep(Duration::from_millis(1));
    }
    let pid = Pid::from_child(&child);
    kill_process(pid, Signal::INT).expect("the child is there");
    child.wait().expect("a child").code()
}

#[test]
fn a_run_ends_with_the_step_and_with_130() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let out = parent.path().join("run");
    let child = start(&["run", "tests/fixtures/small.toml", "--set", "steps=100000"], &out);
    assert_eq!(interrupted(child, &out.join("steps.jsonl")), Some(130));
    let summary = read_json(&out.join("summary.json"));
    let steps = summary["steps_done"].as_u64().expect("a count");
    let error = summary["error"].as_str().expect("an error").to_owned();
    assert_eq!(error, format!("interrupted after step {steps}"));
    let rows = fs::read_to_string(out.join("steps.jsonl")).expect("steps.jsonl");
    assert_eq!(rows.lines().count() as u64, steps);
    for folder in ["rollouts", "tokens"] {
        let files = fs::read_dir(out.join(folder)).expect("a folder").count();
        assert_eq!(files as u64, steps, "{folder}");
    }
    let page = fs::read_to_string(out.join("report.html")).expect("a page");
    assert!(page.contains(&error), "the page says so");
}

#[test]
fn a_sweep_ends_with_its_point_unfinished_and_goes_on_to_the_same_bytes() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let [out, whole] = ["cut", "whole"].map(|name| parent.path().join(name));
    let sweep = ["sweep", "tests/fixtures/sweep.toml", "--set", "steps=60"];
    start(&sweep, &whole).wait().expect("a child");
    let second = out.join("points/rollouts_per_prompt=4,state_index_bits=64/steps.jsonl");
    assert_eq!(interrupted(start(&sweep, &out), &second), Some(130));
    let csv = |folder: &Path| fs::read_to_string(folder.join("sweep.csv")).expect("a table");
    assert_ne!(csv(&out), csv(&whole));
    let resumed = [&sweep[..], &["--resume"]].concat();
    // One point cannot be.
    assert_eq!(start(&resumed, &out).wait().expect("a child").code(), Some(1));
    assert_eq!(csv(&out), csv(&whole));
}
