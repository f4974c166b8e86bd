//! A run's own folder gives the numbers that the run itself wrote down.

use std::fs;

use super::common::run::Run;
use super::{audited, outcome, path};

/// Makes every step's gap larger than 0, and its cause known.
const FAULT: &str = "engine.faults=[\"engine_weight_ulp\"]";

#[test]
fn a_run_folder_measures_as_its_run_did() {
    let run = Run::small(&["trainer.update=none", FAULT]);
    let folder = tempfile::tempdir().expect("a folder");
    let (text, audit) = audited(folder.path(), &["--rollouts", path(run.root())]);
    let steps = fs::read_to_string(run.folder.steps()).expect("steps.jsonl");
    let mut compared = 0;
    for (line, row) in steps.lines().zip(audit["steps"].as_array().expect("steps")) {
        let written: serde_json::Value = serde_json::from_str(line).expect("JSON");
        assert_eq!(written["step"], row["step"]);
        for (tag, value) in row["metrics"].as_object().expect("metrics") {
            assert_eq!(&written[tag], value, "{tag}");
            compared += 1;
        }
    }
    assert!(compared > 70, "{compared}");
    assert!(text.contains(" of native: "), "{text}");
    assert_eq!(
        text.matches("finding   weights_not_synced: the engine sampled").count(),
        3,
        "{text}"
    );
    assert!(run.metric("gap/logp_abs_diff_max").iter().all(|&gap| gap > 0.0));
}

#[test]
fn a_folder_that_is_no_run_is_refused_as_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let (code, _, error) = outcome(&["--rollouts", path(folder.path()), "--format", "native"]);
    let expected = format!(
        "error: {} is not a run folder: it has no config.json or no tokens\n",
        path(folder.path())
    );
    assert_eq!((code, error), (Some(1), expected));
}
