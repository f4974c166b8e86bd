//! The command line as a person meets it.
//!
//! Exit codes: 0 done, 1 the input or environment is at fault, 2 usage.

#[path = "../common/mod.rs"]
mod common;
mod doctor;
mod printed;
mod refusals;

use std::fs;
use std::path::Path;

use common::run::{gapscope, SMALL};

/// Runs the binary; returns exit code, standard output and standard error.
fn outcome(args: &[&str]) -> (Option<i32>, String, String) {
    let output = gapscope().args(args).output().expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("the binary prints UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// The command fails with exit code 1, says this and nothing else.
fn refused(args: &[&str], message: &str) {
    let expected = (Some(1), String::new(), format!("error: {message}\n"));
    assert_eq!(outcome(args), expected, "{args:?}");
}

/// What a command prints that succeeds and warns of nothing.
fn printed(args: &[&str]) -> String {
    let (code, stdout, stderr) = outcome(args);
    assert_eq!((code, stderr.as_str()), (Some(0), ""), "{args:?}");
    stdout
}

/// The small experiment with one line replaced.
fn changed(folder: &Path, from: &str, to: &str) -> String {
    let text = fs::read_to_string(SMALL).expect("the experiment");
    assert!(text.contains(from), "{from}");
    let file = folder.join("changed.toml");
    fs::write(&file, text.replace(from, to)).expect("written");
    file.to_str().expect("UTF-8").to_owned()
}

#[test]
fn usage_is_exit_code_2() {
    for (args, first) in [
        (&["rn", SMALL][..], "error: unrecognized subcommand 'rn'"),
        (&["run"], "error: the following required arguments were not provided:"),
        (&["run", SMALL, "more"], "error: unexpected argument 'more' found"),
        (&["run", SMALL, "--sett", "x=1"], "error: unexpected argument '--sett' found"),
        (
            &["run", SMALL, "--set"],
            "error: a value is required for '--set <K=V>' but none was supplied",
        ),
        (&["config"], "error: the following required arguments were not provided:"),
        (
            &["model", "init", "tiny-jamba"],
            "error: the following required arguments were not provided:",
        ),
        (
            &["model", "init", "tiny-jamba", "x", "--seed", "-"],
            "error: invalid value '-' for '--seed <SEED>': invalid digit found in string",
        ),
    ] {
        let (code, stdout, stderr) = outcome(args);
        assert_eq!((code, stdout.as_str()), (Some(2), ""), "{args:?}");
        assert_eq!(stderr.lines().next(), Some(first), "{args:?}");
    }
    let (code, _, help) = outcome(&[]);
    assert_eq!(code, Some(2));
    assert!(help.contains("Usage: gapscope <COMMAND>"), "{help}");
    for (args, starts) in [
        (["--help"], "An RL rollout harness"),
        (["--version"], concat!("gapscope ", env!("CARGO_PKG_VERSION"))),
    ] {
        assert!(printed(&args).starts_with(starts), "{args:?}");
    }
}
