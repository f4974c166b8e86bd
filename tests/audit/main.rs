//! `gapscope audit`: dumps written by hand, as other frameworks write them.

#[path = "../common/mod.rs"]
mod common;
mod dump;
mod faults;
mod figures;
mod golden;
mod native;
mod rescored;
mod round_trip;
mod routes;

use std::fs;
use std::path::Path;

use common::run::gapscope;
use serde_json::Value;

/// What the binary said: exit code, standard output and standard error.
fn outcome(args: &[&str]) -> (Option<i32>, String, String) {
    let output = gapscope().arg("audit").args(args).output().expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("the binary prints UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// An audit that succeeds: its text and its `audit.json`.
fn audited(folder: &Path, args: &[&str]) -> (String, Value) {
    let out = folder.join("audit");
    let args: Vec<&str> = args.iter().copied().chain(["--out", path(&out)]).collect();
    let (code, text, error) = outcome(&args);
    assert_eq!((code, error.as_str()), (Some(0), ""), "{args:?}");
    let json = fs::read_to_string(out.join("audit.json")).expect("an audit.json");
    (text, serde_json::from_str(&json).expect("JSON"))
}

fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// The value of a metric of the audit's only step; `None` where it is null.
fn value(audit: &Value, tag: &str) -> Option<f64> {
    let steps = audit["steps"].as_array().expect("steps");
    assert_eq!(steps.len(), 1);
    let metrics = steps[0]["metrics"].as_object().expect("metrics");
    metrics.get(tag).unwrap_or_else(|| panic!("no metric {tag}")).as_f64()
}

fn check(audit: &Value, tag: &str, expected: f64) {
    let found = value(audit, tag).unwrap_or_else(|| panic!("{tag} has no data"));
    assert!(
        (found - expected).abs() <= 1e-9 * expected.abs().max(1.0),
        "{tag}: {found} {expected}"
    );
}
