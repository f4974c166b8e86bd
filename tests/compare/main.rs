//! `gapscope compare` and `run --fail-on`, by the binary.

#[path = "../common/mod.rs"]
mod common;
mod fail_on;

use std::fs;
use std::path::Path;

use common::run::{gapscope, Run};
use gapscope::base::Step;

/// Exit code, standard output, standard error.
fn outcome(args: &[&str]) -> (Option<i32>, String, String) {
    let output = gapscope().args(args).output().expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("the binary prints UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Compares with and without `--fail-on-difference`; returns what is printed.
fn compared(left: &Run, right: &Run, differ: bool) -> String {
    let args = ["compare", path(left.root()), path(right.root())];
    let (code, text, errors) = outcome(&args);
    assert_eq!((code, errors.as_str()), (Some(0), ""), "{text}");
    let code = if differ { Some(1) } else { Some(0) };
    let strict = outcome(&[&args[..], &["--fail-on-difference"]].concat());
    assert_eq!(strict, (code, text.clone(), String::new()));
    text
}

#[test]
fn a_run_and_its_repetition_are_equal() {
    let [left, right] = [(); 2].map(|()| Run::small(&[]));
    let tags = left.steps()[0].as_object().expect("a row").len() - 1;
    let expected = format!(
        "config   equal\nsteps    3 in both\nmetrics  {tags} equal\ntokens   {} equal\n",
        3 * 3 * 4 * 6
    );
    assert_eq!(compared(&left, &right, false), expected);
}

/// No address of so small a pool is as wide as 40 bits.
#[test]
fn settings_alone_are_no_difference() {
    let change = ["engine.state_index_bits=40", "name=other"];
    let text = compared(&Run::small(&[]), &Run::small(&change), false);
    let expected = "config   2 setting(s) differ: left | right\n  \
        engine.state_index_bits  64 | 40\n  name  \"small\" | \"other\"\nsteps    3 in both\n";
    assert!(text.starts_with(expected), "{text}");
    assert!(text.contains(" equal\ntokens   216 equal\n"), "{text}");
}

#[test]
fn the_first_difference_is_named() {
    let [left, right] = [Run::small(&[]), Run::small(&["engine.faults=[\"engine_weight_ulp\"]"])];
    let text = compared(&left, &right, true);
    let pairs = left.tokens().into_iter().zip(right.tokens());
    // A spike's requests are looked at again: their other legs are in the right run alone.
    let legs = |row: &gapscope::report::parquet::TokenRow| {
        let all = [row.logp_decode, row.logp_prefill, row.logp_trainer, row.logp_reference];
        all.map(|logp| logp.map(|logp| logp.get()))
    };
    let key = |row: &_| legs(row).map(|logp| logp.map(f32::to_bits));
    let (first, other) = pairs
        .clone()
        .filter(|(a, b)| (a.request, a.position) == (b.request, b.position))
        .find(|(a, b)| key(a) != key(b))
        .expect("the fault shows");
    let place = format!("first at step 1, request {}, position {}", first.request, first.position);
    assert!(text.contains(&place), "{place}\n{text}");
    let shown = |logp: Option<f32>| logp.map_or("-".to_owned(), |logp| format!("{logp:?}"));
    let names = ["logp_decode", "logp_prefill", "logp_trainer", "logp_reference"];
    for (name, (a, b)) in names.into_iter().zip(legs(&first).into_iter().zip(legs(&other))) {
        let column = format!("  {name}  {} | {}\n", shown(a), shown(b));
        let differs = a.map(f32::to_bits) != b.map(f32::to_bits);
        assert_eq!(text.contains(&column), differs, "{column}\n{text}");
    }
    assert!(text.contains("  gap/spike  step 1: 0.0 | 1.0  (3 step(s))\n"), "{text}");
}

#[test]
fn steps_that_only_one_run_has() {
    let text = compared(&Run::small(&["steps=1"]), &Run::small(&[]), true);
    assert!(text.contains("steps    1 in both; only right: 2 from 2 to 3\n"), "{text}");
    assert!(text.contains(" equal\ntokens   72 equal\n"), "{text}");
}

#[test]
fn what_is_no_whole_run_is_refused() {
    let (left, right) = (Run::small(&["steps=1"]), Run::small(&["steps=1"]));
    let refused = |right: &Path, message: &str| {
        let (code, text, error) = outcome(&["compare", path(left.root()), path(right)]);
        assert_eq!((code, text.as_str()), (Some(1), ""), "{error}");
        assert!(error.starts_with(&format!("error: {message}")), "{error}");
    };
    let empty = tempfile::tempdir().expect("a temporary folder");
    let no_run = format!("{} is not a run folder: it has no config.json\n", empty.path().display());
    refused(empty.path(), &no_run);
    let tokens = right.folder.tokens(Step::new(1));
    let bytes = fs::read(&tokens).expect("tokens");
    fs::write(&tokens, &bytes[..bytes.len() / 2]).expect("written");
    refused(right.root(), &format!("{}: cannot read as Parquet: ", tokens.display()));
    fs::remove_file(&tokens).expect("removed");
    refused(right.root(), &format!("cannot read {}: No such file", tokens.display()));
    let steps = right.folder.steps();
    let text = fs::read_to_string(&steps).expect("steps");
    fs::write(&steps, text.trim_end()).expect("written");
    refused(right.root(), &format!("{}, line 1: the line is torn", steps.display()));
    fs::write(right.folder.config(), "{").expect("written");
    refused(right.root(), &format!("cannot read {}: EOF", right.folder.config().display()));
}
