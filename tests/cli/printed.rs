//! What commands print that succeed.

use std::fs;
use std::path::Path;

use crate::common::fixture;
use crate::common::run::{gapscope, set, SMALL};
use crate::{printed, refused};

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
        ("blocks a step", "48.0 (by replay of scheduler and pool)"),
        ("laps", "2.29 over 3 steps"),
        ("spike steps", "none"),
    ] {
        assert_eq!(shown(&text, label), value);
    }
    let small = printed(&[&args[..], &set(&["engine.state_index_bits=19"])].concat());
    assert_eq!(shown(&small, "first wrapped  "), "none (at 19 bits, in this pool)");
    let large = ["engine.state_index_bits=19", "engine.num_gpu_blocks_override=172", "steps=5"];
    let large = printed(&[&args[..], &set(&large)].concat());
    assert_eq!(shown(&large, "first wrapped  "), "171 (at 19 bits, in this pool)");
    let spikes = "4 (on paper the first at 3.56, then every 3.56)";
    assert_eq!(shown(&large, "spike steps"), spikes);
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

#[test]
fn presets() {
    let known = "the presets are tiny-jamba, tiny-jamba-moe, tiny-mamba, tiny-llama, \
        small-jamba, jamba-3b-shape";
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

/// `gapscope ... 2>&1 | head -1` neither fails nor ends a run early.
#[test]
#[cfg(unix)]
fn readers_may_leave() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let root = parent.path().join("run");
    let out = root.to_str().expect("UTF-8");
    for (args, code) in [
        (&["config", "--defaults"][..], 0),
        (&["run", SMALL, "--out", out], 0),
        (&["run", "no/such.toml"], 1),
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin!("gapscope"));
        command.args(args).current_dir(env!("CARGO_MANIFEST_DIR"));
        command.stdout(writer.try_clone().expect("a pipe")).stderr(writer);
        assert_eq!(command.status().expect("it starts").code(), Some(code), "{args:?}");
    }
    assert!(root.join("summary.json").is_file());
}
