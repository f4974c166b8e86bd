//! What `doctor` says of this machine and this build.

use crate::common::run::gapscope;
use crate::{outcome, printed};

/// Labels, each with what was found.
fn sheet(text: &str) -> Vec<(&str, &str)> {
    text.lines().map(|line| (line[..12].trim_end(), &line[14..])).collect()
}

#[test]
fn the_exit_code_says_whether_the_device_asked_for_can_be_used() {
    let text = printed(&["doctor"]);
    let (label, found) = *sheet(&text).last().expect("lines");
    assert_eq!(label, "device cuda", "{text}");
    assert!(sheet(&text).contains(&("device cpu", "ready")), "{text}");
    assert_eq!(outcome(&["doctor", "--device", "cpu"]).0, Some(0));
    let (code, _, stderr) = outcome(&["doctor", "--device", "cuda"]);
    assert_eq!((code, stderr.as_str()), (Some(i32::from(found != "ready")), ""), "{text}");
}

/// Hidden devices stand for a machine without: one without a driver says that, in a build that
/// would ask it.
#[test]
fn what_is_missing_is_said_with_what_to_do() {
    let mut command = gapscope();
    command.env("CUDA_VISIBLE_DEVICES", "-1").args(["doctor", "--device", "cuda"]);
    let output = command.output().expect("the binary starts");
    let text = String::from_utf8(output.stdout).expect("the binary prints UTF-8");
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(1), &b""[..]), "{text}");

    let sheet = sheet(&text);
    let labels: Vec<&str> = sheet.iter().map(|(label, _)| *label).collect();
    let found = |label| sheet.iter().find(|line| line.0 == label).map(|line| line.1);
    let verdict = found("device cuda").expect("a last line");
    if !cfg!(feature = "cuda") {
        assert_eq!(labels, ["build", "CPU", "device cpu", "device cuda"], "{text}");
        assert!(verdict.contains("cargo build --release --features cuda"), "{text}");
        return;
    }
    let (head, tail) =
        (["build", "CPU", "kernels", "driver"], ["cuBLASLt", "NCCL", "device cpu", "device cuda"]);
    match found("GPU") {
        Some(gpus) => {
            assert_eq!(labels, [&head[..], &["GPU"], &tail].concat(), "{text}");
            assert_eq!(gpus, "the driver shows none");
            assert!(verdict.contains("look at CUDA_VISIBLE_DEVICES"), "{text}");
        }
        // No driver, or one that is too old: both lines say what to do.
        None => {
            assert_eq!(labels, [head, tail].concat(), "{text}");
            assert_eq!(found("driver"), Some(verdict), "{text}");
            assert!(verdict.contains("or set engine.device = \"cpu\""), "{text}");
        }
    }
}
