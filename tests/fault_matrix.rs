//! Every planted fault is found and named by a judge that knows records alone, and no clean run is.

mod common;

use common::run::{gapscope, read_json};
use gapscope::config::{Planted, FAULTS};
use serde_json::Value;

/// Faults that a family here does not show: its positions are differences, or it has none.
const NEVER_SHOWN: [&str; 1] = ["position_offset"];

/// Faults of no kind that a verdict knows: the right request, and no culprit.
const OUTSIDE: [&str; 3] = ["state_bit_flip", "kv_page_zeroed", "layer_ulp"];

#[test]
fn every_fault_is_found_and_named_and_no_clean_twin_is_blamed() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let out = parent.path().join("faults");
    let output = gapscope().args(["faults", "run", "--out"]).arg(&out).output().expect("it starts");
    let told = String::from_utf8_lossy(&output.stderr);
    let table = read_json(&out.join("fault_matrix.json"));
    let rows = table["faults"].as_array().expect("rows");
    for row in rows {
        let outside = OUTSIDE.iter().any(|name| row["fault"] == *name);
        let right = (&row["named"], &row["rightly_unexplained"]);
        assert_eq!(right, (&(!outside).into(), &outside.into()), "{row:#}\n{told}");
        let found = (&row["detected"], &row["false_alarm_on_clean"]);
        assert_eq!(found, (&true.into(), &false.into()), "{row:#}\n{told}");
        let stopped = row["fault"] == "free_twice";
        let steps = if stopped { Value::Null } else { 1.into() };
        assert_eq!(row["steps_to_detect"], steps, "{row:#}");
    }
    assert!(output.status.success(), "{told}");
    for entry in FAULTS.iter().filter(|entry| matches!(entry.planted, Planted::Fault(_))) {
        let is_run = rows.iter().any(|row| row["fault"] == entry.name);
        assert_eq!(is_run, !NEVER_SHOWN.contains(&entry.name), "{}", entry.name);
    }
}

#[test]
fn random_settings_bring_no_false_verdict() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let out = parent.path().join("swarm");
    let swarm = ["faults", "swarm", "--seed", "1000", "--count", "24", "--out"];
    let output = gapscope().args(swarm).arg(&out).output().expect("it starts");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("24 runs: "));
}

#[test]
fn an_unknown_fault_is_refused_with_those_that_are_known() {
    let failed = gapscope().args(["faults", "run", "--only", "gremlins"]).assert().code(1);
    let told = String::from_utf8_lossy(&failed.get_output().stderr).into_owned();
    assert!(told.contains("no fault gremlins can be run; those that can are state_index_wraps"));
}
