//! Exit code 3.

use std::collections::BTreeSet;

use gapscope::{config, run};

use crate::common::run::{set, Run, SMALL};
use crate::{outcome, path};

/// Runs the small experiment; returns exit code and standard error's lines about `--fail-on`. A
/// run that started has always left everything.
fn failing(assignments: &[&str], expressions: &[&str]) -> (Option<i32>, Vec<String>) {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let root = parent.path().join("run");
    let mut args = vec!["run", SMALL, "--out", path(&root)];
    args.extend(set(assignments));
    args.extend(expressions.iter().flat_map(|expression| ["--fail-on", *expression]));
    let (code, stdout, stderr) = outcome(&args);
    if code != Some(1) {
        assert!(stdout.contains("\nreport: "), "{stdout}");
        assert!(root.join("report.html").is_file() && root.join("summary.json").is_file());
    } else {
        assert!(!root.exists(), "nothing is left of a run that was refused");
    }
    let about = stderr.lines().filter(|line| line.contains("--fail-on"));
    (code, about.map(str::to_owned).collect())
}

#[test]
fn a_metric_that_holds_at_any_step_is_exit_code_3() {
    let clean = &[][..];
    let wrong = &["engine.faults=[\"engine_weight_ulp\"]"][..];
    for (assignments, expression, code, lines) in [
        (clean, "finding", 0, &[][..]),
        (clean, "gap/logp_abs_diff_max>0", 0, &[]),
        (
            clean,
            "gap/frac_bitwise_equal>=1",
            3,
            &["--fail-on 'gap/frac_bitwise_equal>=1.0' held at step 1: 1"],
        ),
        (clean, "pool/laps < 0", 0, &[]),
        (wrong, "gap/spike>=1", 3, &["--fail-on 'gap/spike>=1.0' held at step 1: 1"]),
        (wrong, "finding", 3, &["--fail-on 'finding' held at step 1: weights_not_synced"]),
        (clean, "gap_detail/prob_pearson<-2", 0, &[]),
    ] {
        let found = failing(assignments, &[expression]);
        let lines: Vec<String> = lines.iter().map(|line| (*line).to_owned()).collect();
        assert_eq!(found, (Some(code), lines), "{expression}");
    }
}

#[test]
fn several_expressions_are_held_apart() {
    let (code, lines) = failing(&[], &["finding", "rollout/requests>11", "rollout/requests>12"]);
    assert_eq!(code, Some(3));
    assert_eq!(lines, ["--fail-on 'rollout/requests>11.0' held at step 1: 12"]);
}

#[test]
fn a_metric_without_a_value_holds_nothing_and_is_said() {
    // No KL is asked for.
    let (code, lines) = failing(&[], &["loss/kl<=1e9"]);
    assert_eq!(code, Some(0));
    assert_eq!(lines, ["--fail-on 'loss/kl<=1000000000.0': no data at 3 of 3 place(s)"]);
}

#[test]
fn tags_and_expressions_are_refused_before_the_run() {
    for (assignments, expression, message) in [
        (
            &[][..],
            "gap/k3_maen>1",
            "error: --fail-on 'gap/k3_maen>1.0': there will be no metric gap/k3_maen; did you \
             mean gap/k3_mean?",
        ),
        (
            &["trainer.update=none"],
            "loss/grad_norm>1",
            "error: --fail-on 'loss/grad_norm>1.0': there will be no metric loss/grad_norm",
        ),
    ] {
        let (code, lines) = failing(assignments, &[expression]);
        assert_eq!((code, lines.as_slice()), (Some(1), &[message.to_owned()][..]));
    }
    let (code, _, stderr) = outcome(&["run", SMALL, "--fail-on", "gap/k3_mean=1"]);
    assert_eq!(code, Some(2), "{stderr}");
    let expected = "error: invalid value 'gap/k3_mean=1' for '--fail-on <EXPR>': expected \
        \"finding\", or a metric, one of > >= < <=, and a number, such as 'gap/k3_mean>1e-3'";
    assert_eq!(stderr.lines().next(), Some(expected));
}

/// The tags that a run is known to write are those that it writes.
#[test]
fn tags_are_known_before_the_run() {
    for assignments in [
        &[][..],
        &["trainer.update=none", "check.legs=[\"decode\",\"prefill\",\"trainer\",\"reference\"]"],
        &["trainer.importance_cap=2", "trainer.kl_coef=0.1"],
        &["engine.replicas=3"],
    ] {
        let owned: Vec<String> = assignments.iter().map(|&text| text.to_owned()).collect();
        let config = config::load(SMALL.as_ref(), &owned).expect("a config");
        let known: BTreeSet<String> = run::metric_tags(&config).into_iter().collect();
        for row in Run::small(assignments).steps() {
            let mut found: BTreeSet<String> =
                row.as_object().expect("a row").keys().cloned().collect();
            assert!(found.remove("step"));
            assert_eq!(found, known, "{assignments:?}");
        }
    }
}
