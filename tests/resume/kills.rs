//! Killed without warning at random moments, and resumed, again and again.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use gapscope::base::Stream;
use rustix::process::{kill_process, Pid, Signal};

use crate::common::records::assert_same_records;
use crate::common::run::read_json;
use crate::{
    kill, wait_until, Case, ASLEEP, CACHED, FAST, STALE, SWEEP, TRAINING, TWO_ENGINES, WRAPPED,
};

/// Bytes of all that a process writes step by step.
fn written(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let size = |entry: fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => written(&entry.path()),
        _ if entry.file_name() == "steps.jsonl" => entry.metadata().map_or(0, |file| file.len()),
        _ => 0,
    };
    entries.flatten().map(size).sum()
}

/// `kills` kills, each once so many bytes are written and up to 30 ms later: within a step, a
/// checkpoint, the start or the end, wherever it happens to be.
fn check(case: &Case<'_>, kills: u64, seed: u64) {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let [whole, killed] = ["whole", "killed"].map(|name| parent.path().join(name));
    case.succeed(&whole, &[]);
    let total = written(&whole);
    let mut alive = 0;
    for number in 0..kills {
        let mut moment = Stream::new(seed, "kill", number);
        let bytes = moment.integer(0, total * (number + 1) / (kills + 1));
        let after = Duration::from_micros(moment.integer(0, 30_000));
        let begun = ["config.json", "plan.json"].iter().any(|file| killed.join(file).is_file());
        let mut child = case.start(&killed, if begun { &["--resume"] } else { &[] });
        wait_until(&mut child, || written(&killed) >= bytes);
        thread::sleep(after);
        alive += u64::from(child.try_wait().expect("a child").is_none());
        kill(child);
    }
    assert!(alive > kills / 2, "{alive} of {kills} kills found a process");
    case.succeed(&killed, &["--resume"]);
    assert_same_records(&killed, &whole);
}

#[test]
fn stale_reads_across_steps() {
    check(&STALE, 8, 1);
}

#[test]
fn training_after_a_warm_start_with_a_frozen_reference() {
    check(&TRAINING, 8, 2);
}

#[test]
fn training_over_two_ranks() {
    let case = Case { set: &[TRAINING.set, &["trainer.ranks=2"]].concat(), ..TRAINING };
    check(&case, 20, 7);
}

#[test]
fn an_index_that_wraps() {
    check(&WRAPPED, 7, 3);
}

#[test]
fn a_measured_floor() {
    check(&FAST, 3, 5);
}

#[test]
fn a_prefix_cache_that_outlives_its_weights() {
    check(&CACHED, 6, 5);
}

#[test]
fn a_pool_that_is_dropped_between_steps() {
    check(&ASLEEP, 5, 6);
}

#[test]
fn stale_reads_of_two_engines() {
    check(&TWO_ENGINES, 6, 7);
}

#[test]
fn a_sweep_and_its_points() {
    check(&SWEEP, 7, 4);
}

/// Ctrl-C leaves the checkpoint of the very step that it ended.
#[test]
fn an_interrupted_run_loses_nothing() {
    let case = Case { set: &[STALE.set, &["checkpoint.every=1000"]].concat(), ..STALE };
    let parent = tempfile::tempdir().expect("a temporary folder");
    let [whole, cut] = ["whole", "cut"].map(|name| parent.path().join(name));
    case.succeed(&whole, &[]);
    let mut child = case.start(&cut, &[]);
    wait_until(&mut child, || written(&cut) > written(&whole) / 3);
    kill_process(Pid::from_child(&child), Signal::INT).expect("the child is there");
    assert_eq!(child.wait().expect("a child").code(), Some(130));
    let done = &read_json(&cut.join("summary.json"))["steps_done"];
    let said = case.succeed(&cut, &["--resume"]);
    assert!(said.starts_with(&format!("sums: resuming after step {done}\n")), "{said}");
    assert_same_records(&cut, &whole);
}
