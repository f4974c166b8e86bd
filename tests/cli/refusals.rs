//! The exact words of refusals.

use std::fs;
use std::path::Path;

use crate::common::fixture;
use crate::common::run::{set, SMALL};
use crate::{changed, outcome, printed, refused};

/// A dry run of the small experiment with overrides is refused, as the run itself would be.
fn refused_override(assignments: &[&str], message: &str) {
    refused(&[&["run", SMALL, "--dry-run"][..], &set(assignments)].concat(), message);
}

#[test]
fn experiment_files() {
    refused(
        &["run", "no/such.toml"],
        "cannot read the experiment file no/such.toml: No such file or directory (os error 2)",
    );
    refused(
        &["run", "tests"],
        "cannot read the experiment file tests: Is a directory (os error 21)",
    );
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (from, to, message) in [
        (
            "max_num_seqs",
            "max_num_seq",
            "12:1: unknown key engine.max_num_seq; did you mean engine.max_num_seqs?",
        ),
        (
            "max_num_batched_tokens = 64",
            "max_num_batched_tokens = 0",
            "11:26: engine.max_num_batched_tokens = 0 is refused; it takes an integer from 1 to \
             4294967295",
        ),
        (
            "\"tiny-jamba\"",
            "\"tiny-jambo\"",
            "7:10: model.preset = \"tiny-jambo\" is refused; it takes one of \"tiny-jamba\", \
             \"tiny-jamba-moe\", \"tiny-mamba\", \"tiny-llama\", \"small-jamba\", \
             \"jamba-3b-shape\"; did you mean \"tiny-jamba\"?",
        ),
    ] {
        let file = changed(folder.path(), from, to);
        refused(&["run", &file, "--dry-run"], &format!("{file}:{message}"));
    }
    let file = changed(folder.path(), "preset = \"tiny-jamba\"", "");
    let fix = "write path = \"FOLDER\" or preset = \"tiny-jamba\" under [model]";
    refused(&["run", &file], &format!("{file}: model.path or model.preset is missing; {fix}"));
}

#[test]
fn overrides() {
    for (assignments, message) in [
        (
            &["engine.max_num_seqs"][..],
            "--set 1: expected KEY=VALUE, such as engine.max_num_seqs=64, found \
             \"engine.max_num_seqs\"",
        ),
        (
            &["seed=1", "engine.max_num_seq=3"],
            "--set 2: unknown key engine.max_num_seq; did you mean engine.max_num_seqs?",
        ),
        (
            &["engine.max_num_seqs=many"],
            "--set 1: engine.max_num_seqs = \"many\" is refused; it takes an integer from 1 to \
             4294967295",
        ),
        (
            &["engine.max_num_batched_tokens=0"],
            "--set 1: engine.max_num_batched_tokens = 0 is refused; it takes an integer from 1 to \
             4294967295",
        ),
        (
            &["engine.free_list=filo"],
            "--set 1: engine.free_list = \"filo\" is refused; it takes one of \"fifo\", \"lifo\"; \
             did you mean \"fifo\"?",
        ),
        (
            &["engine.max_num_batched_tokens=8"],
            "engine.max_num_batched_tokens = 8 (--set 1) and engine.max_num_seqs = 16 \
             (tests/fixtures/small.toml:12:16) do not go together: the token budget must be at \
             least max_num_seqs: raise it or lower max_num_seqs",
        ),
        (
            &["rollout.rollouts_per_prompt=1"],
            "rollout.rollouts_per_prompt = 1 (--set 1) and trainer.update = \"adamw\" (the \
             default) do not go together: GRPO compares the rollouts of one prompt, and a group \
             of one has no advantage: sample 2 or more, or write update = \"none\"",
        ),
    ] {
        refused_override(assignments, message);
    }
    printed(&[
        "run",
        SMALL,
        "--dry-run",
        "--set",
        "rollout.rollouts_per_prompt=1",
        "--set",
        "trainer.update=none",
    ]);
}

/// A machine or a build without CUDA says so before anything is left behind. Where there is a GPU
/// this holds nothing: the tests of CUDA do.
#[test]
fn a_device_that_is_not_there_is_refused() {
    let message = match cfg!(feature = "cuda") {
        true => {
            "CUDA needs NVIDIA's driver library (libcuda.so.1), which this machine does not have: \
             install the driver, or set engine.device = \"cpu\""
        }
        false => {
            "engine.device = \"cuda\" needs a build with CUDA: cargo build --release --features \
             cuda, with nvcc at hand; or set engine.device = \"cpu\""
        }
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("run");
    let args = ["run", SMALL, "--set", "engine.device=cuda", "--out", out.to_str().expect("UTF-8")];
    let (code, stdout, stderr) = outcome(&args);
    if cfg!(feature = "cuda") && !stderr.contains("libcuda") {
        return;
    }
    assert_eq!((code, stdout.as_str(), stderr), (Some(1), "", format!("error: {message}\n")));
    assert!(!out.exists());
}

#[test]
fn model_folders() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let experiment = changed(folder.path(), "preset = \"tiny-jamba\"", "");
    let out = folder.path().join("out");
    let run = |model: &Path, message: &str| {
        let model = format!("model.path={}", model.display());
        let out = out.to_str().expect("UTF-8");
        refused(&["run", &experiment, "--out", out, "--set", &model], message);
        assert!(!Path::new(out).exists(), "a run that cannot start leaves nothing");
    };
    let hint = "name a folder that holds config.json and model.safetensors, or a preset: \
        tiny-jamba, tiny-jamba-moe, tiny-mamba, tiny-llama, small-jamba, jamba-3b-shape";

    let missing = folder.path().join("missing");
    let not_there =
        format!("{} is not a model folder: it does not exist; {hint}", missing.display());
    run(&missing, &not_there);
    refused(&["model", "inspect", missing.to_str().expect("UTF-8")], &not_there);
    let a_file = format!("{experiment} is not a model folder: it is a file; {hint}");
    run(Path::new(&experiment), &a_file);
    refused(&["model", "inspect", &experiment], &a_file);

    let empty = folder.path().join("empty");
    fs::create_dir(&empty).expect("a folder");
    let config = empty.join("config.json");
    let no_file = "No such file or directory (os error 2)";
    run(&empty, &format!("cannot read {}: {no_file}", config.display()));
    fs::copy(fixture("tiny-jamba/config.json"), &config).expect("copied");
    let weights = empty.join("model.safetensors");
    run(&empty, &format!("cannot read {}: {no_file}", weights.display()));

    let whole = fs::read(fixture("tiny-jamba/model.safetensors")).expect("the fixture");
    for (bytes, reason) in [
        (whole.len() - 4, "incomplete metadata, file not fully covered"),
        (1000, "invalid header length"),
        (5, "header too small"),
        (0, "header too small"),
    ] {
        fs::write(&weights, &whole[..bytes]).expect("written");
        let message = format!(
            "{} holds {bytes} bytes that are no whole safetensors file ({reason}): copy or \
             download it again",
            weights.display()
        );
        run(&empty, &message);
    }
}

#[test]
fn pools_that_cannot_be() {
    // Three Mamba groups, two attention blocks of 48 tokens, and the null block.
    refused_override(
        &["engine.num_gpu_blocks_override=5"],
        "engine.num_gpu_blocks_override is 5, but one request of engine.max_model_len = 64 tokens \
         needs 6 blocks, the null block included: raise the override to at least 6 or lower \
         max_model_len",
    );
    printed(&["run", SMALL, "--dry-run", "--set", "engine.num_gpu_blocks_override=6"]);

    let folder = tempfile::tempdir().expect("a temporary folder");
    let by_memory = changed(folder.path(), "num_gpu_blocks_override = 64", "");
    let with = |memory: &str| {
        let memory = format!("engine.device_memory={memory}");
        outcome(&["run", &by_memory, "--dry-run", "--set", &memory])
    };
    // 967,856 bytes of weights and 6 blocks of 12,288, at 0.9.
    let message = "error: engine.device_memory = 1157313 bytes at gpu_memory_utilization = 0.9 \
        leaves 5 blocks after 967856 bytes of weights, but one request of engine.max_model_len = \
        64 tokens needs 6, the null block included: raise device_memory to at least 1157316, \
        raise gpu_memory_utilization, or lower max_model_len\n";
    assert_eq!(with("1157313"), (Some(1), String::new(), message.to_owned()));
    let (code, stdout, _) = with("1157316");
    assert_eq!(code, Some(0));
    assert!(stdout.contains("blocks            6 (block 0 is the null block)\n"), "{stdout}");
}

/// Paths that not even root can make.
#[test]
fn folders_that_a_run_cannot_have() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let file = parent.path().join("file");
    fs::write(&file, "").expect("written");
    let below = file.join("run");
    let mut cases =
        vec![(below, "Not a directory (os error 20)"), (file, "File exists (os error 17)")];
    if cfg!(target_os = "linux") {
        cases.push(("/proc/gapscope-run".into(), "No such file or directory (os error 2)"));
    }
    for (path, reason) in cases {
        let path = path.to_str().expect("UTF-8");
        let message = format!("cannot make the run folder {path}: {reason}; pass another --out");
        refused(&["run", SMALL, "--out", path], &message);
    }
}

#[test]
fn a_run_is_never_written_over() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let root = parent.path().join("run");
    let out = root.to_str().expect("UTF-8");
    let args = ["run", SMALL, "--out", out, "--set", "steps=1"];
    assert_eq!(outcome(&args).0, Some(0));
    let before = fs::read(root.join("summary.json")).expect("a summary");
    let held =
        "already holds a run (summary.json): pass --resume to go on with it, or another --out";
    refused(&args, &format!("the run folder {out} {held}"));
    assert_eq!(fs::read(root.join("summary.json")).expect("a summary"), before);
}
