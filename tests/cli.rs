//! The command line as a person meets it: exit codes, and the exact words of every refusal.
//!
//! Exit codes: 0 done, 1 the input or environment is at fault, 2 usage.

mod common;

use std::fs;
use std::path::Path;

use common::fixture;
use common::run::{gapscope, set, SMALL};

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

/// A dry run of the small experiment with overrides is refused, as the run itself would be.
fn refused_override(assignments: &[&str], message: &str) {
    refused(&[&["run", SMALL, "--dry-run"][..], &set(assignments)].concat(), message);
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

#[test]
fn what_this_build_does_not_have_is_refused_by_name() {
    for (assignment, found, allowed) in [
        (
            "engine.enable_prefix_caching=true",
            "engine.enable_prefix_caching = true",
            "only false: this build has no prefix cache",
        ),
        ("engine.device=cuda", "engine.device = \"cuda\"", "only \"cpu\": this build has no CUDA"),
        (
            "engine.numerics=fast",
            "engine.numerics = \"fast\"",
            "only \"invariant\": this build has no fast numerics",
        ),
        (
            "engine.kind=vllm",
            "engine.kind = \"vllm\"",
            "only \"embedded\": this build drives no other engine",
        ),
        ("engine.replicas=2", "engine.replicas = 2", "only 1: this build runs one engine"),
        ("trainer.ranks=4", "trainer.ranks = 4", "only 1: this build trains on one rank"),
    ] {
        refused_override(
            &[assignment],
            &format!("--set 1: {found} is refused; it takes {allowed}"),
        );
    }
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
        tiny-jamba, jamba-3b-shape";

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
fn presets() {
    let known = "the presets are tiny-jamba, jamba-3b-shape";
    let parent = tempfile::tempdir().expect("a temporary folder");
    let folder = parent.path().join("made");
    let dir = folder.to_str().expect("UTF-8");
    refused(&["model", "init", "jamba", dir], &format!("unknown preset \"jamba\"; {known}"));
    assert!(!folder.exists());

    assert_eq!(printed(&["model", "init", "tiny-jamba", dir]), format!("{dir}\n"));
    let again = format!("{dir} already exists; name a folder that does not");
    refused(&["model", "init", "tiny-jamba", dir], &again);
    let tables = printed(&["model", "inspect", "tiny-jamba"]);
    assert_eq!(printed(&["model", "inspect", dir]), tables);
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

    let out = folder.path().join("out");
    let args = ["run", SMALL, "--out", out.to_str().expect("UTF-8")];
    refused(
        &[&args[..], &set(&["engine.num_gpu_blocks_override=4294967295"])].concat(),
        "the pool of 4294967295 blocks takes 52776558120960 bytes, which this machine does not \
         give: lower engine.num_gpu_blocks_override or engine.device_memory",
    );
    assert!(!out.exists());
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
    let held = "already holds a run (summary.json); pass another --out";
    refused(&args, &format!("the run folder {out} {held}"));
    assert_eq!(fs::read(root.join("summary.json")).expect("a summary"), before);
}

#[test]
fn without_out_a_run_goes_by_its_name() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let experiment = Path::new(env!("CARGO_MANIFEST_DIR")).join(SMALL);
    let mut command = gapscope();
    command.current_dir(folder.path()).arg("run").arg(experiment);
    command.args(set(&["name=other", "steps=1", "task.path=letters.jsonl"]));
    fs::copy(fixture("letters.jsonl"), folder.path().join("letters.jsonl")).expect("copied");
    let output = command.assert().success().get_output().stdout.clone();
    let stdout = String::from_utf8(output).expect("UTF-8");
    assert!(stdout.ends_with("report: runs/other/report.html\n"), "{stdout}");
    assert!(folder.path().join("runs/other/report.html").is_file());
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

#[test]
fn the_defaults_load_again() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let [all, bare] = ["all.toml", "bare.toml"].map(|name| folder.path().join(name));
    fs::write(&all, printed(&["config", "--defaults"])).expect("written");
    fs::write(&bare, "name = \"my-run\"\n[model]\npreset = \"tiny-jamba\"\n").expect("written");
    let [all, bare] =
        [&all, &bare].map(|file| printed(&["run", file.to_str().expect("UTF-8"), "--dry-run"]));
    assert_eq!(all, bare);
}

/// The value of a line `label            value`.
fn shown<'a>(text: &'a str, label: &str) -> &'a str {
    let rest = text.lines().find_map(|line| line.strip_prefix(label));
    rest.unwrap_or_else(|| panic!("no line {label} in\n{text}")).trim_start()
}

#[test]
fn a_dry_run_says_what_would_be_and_writes_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let out = folder.path().join("out");
    let out = out.to_str().expect("UTF-8");
    let args = ["run", SMALL, "--dry-run", "--out", out];
    let text = printed(&args);
    assert!(text.starts_with("{\n  \"name\": \"small\",\n  \"seed\": 3,\n"), "{text}");
    for (label, value) in [
        ("state stride", "3072 elements"),
        ("blocks   ", "64 (block 0 is the null block)"),
        ("first wrapped  ", "none (at 64 bits, in this pool)"),
        ("blocks a step", "48 (at full length, without preemption)"),
        ("laps", "2.29 over 3 steps"),
    ] {
        assert_eq!(shown(&text, label), value);
    }
    let small = printed(&[&args[..], &set(&["engine.state_index_bits=19"])].concat());
    assert_eq!(shown(&small, "first wrapped  "), "none (at 19 bits, in this pool)");
    let large = ["engine.state_index_bits=19", "engine.num_gpu_blocks_override=172"];
    let large = printed(&[&args[..], &set(&large)].concat());
    assert_eq!(shown(&large, "first wrapped  "), "171 (at 19 bits, in this pool)");
    assert_eq!(fs::read_dir(folder.path()).expect("the folder").count(), 0);
}

#[test]
fn model_tables() {
    for (model, assignments, page, stride, block, wrapped) in [
        ("tiny-jamba", &[][..], 12_288, 3_072, 48, [(22, 1_366), (32, 1_398_102)]),
        (
            "jamba-3b-shape",
            &[
                "model.dtype=bf16",
                "engine.mamba_ssm_cache_dtype=float32",
                "engine.max_model_len=4096",
            ],
            360_448,
            90_112,
            704,
            [(31, 23_832), (32, 47_663)],
        ),
        (
            "jamba-3b-shape",
            &["model.dtype=bf16"],
            196_608,
            98_304,
            384,
            [(31, 21_846), (32, 43_691)],
        ),
    ] {
        let text = printed(&[&["model", "inspect", model][..], &set(assignments)].concat());
        assert_eq!(shown(&text, "page"), format!("{page} bytes"), "{assignments:?}");
        assert_eq!(shown(&text, "state stride"), format!("{stride} elements"), "{assignments:?}");
        assert_eq!(shown(&text, "attention block"), format!("{block} tokens"), "{assignments:?}");
        for (bits, first) in wrapped {
            assert_eq!(shown(&text, &format!("  {bits} ")), first.to_string(), "{assignments:?}");
        }
    }
}

/// `gapscope config --defaults | head -1` is no failure.
#[test]
#[cfg(unix)]
fn a_reader_may_close_standard_output() {
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("gapscope"));
    let (reader, writer) = std::io::pipe().expect("a pipe");
    command.args(["config", "--defaults"]).stdout(writer).stderr(std::process::Stdio::piped());
    drop(reader);
    let output = command.output().expect("the binary starts");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}
