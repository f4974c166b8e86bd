//! A disk that is full, at every size up to one that is large enough: whatever a command was
//! writing, it ends with exit code 1, names the file and says what to do, and what was whole before
//! is still readable.
//!
//! The disk is a tmpfs, which only root may mount. Where that fails these tests say so and check
//! nothing.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::run::{gapscope, read_json, set, Run, SMALL};
use gapscope::base::Step;
use gapscope::model::load_master;
use gapscope::report::parquet::{read_rollouts, read_tokens};
use gapscope::report::RunFolder;
use tempfile::TempDir;

const PAGE: u64 = 4096;

/// A file system of a given size, which goes with this value.
struct Disk {
    folder: TempDir,
}

impl Disk {
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", "size=4096", "tmpfs"]).arg(folder.path());
        if command.stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
            return Some(Self { folder });
        }
        // Not eprintln, which the harness keeps to itself.
        writeln!(std::io::stderr(), "no tmpfs can be mounted: no disk is full").expect("stderr");
        None
    }

    /// Empty, and this large.
    fn resize(&self, bytes: u64) {
        for entry in fs::read_dir(self.path()).expect("a folder") {
            let path = entry.expect("an entry").path();
            let removed = if path.is_dir() { fs::remove_dir_all } else { fs::remove_file };
            removed(&path).expect("removed");
        }
        self.grow(bytes);
    }

    fn grow(&self, bytes: u64) {
        let size = format!("remount,size={bytes}");
        let status = Command::new("mount").args(["-o", &size]).arg(self.path()).status();
        assert!(status.expect("mount starts").success(), "{size}");
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

/// Runs a command on disks of so many free pages until one is large enough. `readable` looks at
/// what each failure leaves. Returns the names of the files that did not fit.
fn check(
    pages: impl IntoIterator<Item = u64>,
    args: &[&str],
    out: &str,
    prepare: impl Fn(&Path),
    readable: impl Fn(&Path),
) -> BTreeSet<String> {
    let mut named = BTreeSet::new();
    let Some(disk) = Disk::mount() else { return named };
    let out = disk.path().join(out);
    for size in pages.into_iter().map(|pages| pages * PAGE) {
        disk.resize(size.max(PAGE));
        prepare(&out);
        if size == 0 {
            fs::write(disk.path().join("ballast"), [0; PAGE as usize]).expect("written");
        }
        let output = gapscope().args(args).arg(&out).output().expect("the binary starts");
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        if output.status.success() {
            assert!(!named.is_empty(), "every size was large enough");
            return named;
        }
        assert_eq!(output.status.code(), Some(1), "{size} bytes: {stderr}");
        let last = stderr.lines().last().expect("a message");
        let about = "No space left on device (os error 28)";
        let advice = "; make room there, or write to another disk";
        assert!(last.contains(about) && last.ends_with(advice), "{size} bytes: {stderr}");
        named.insert(named_file(last, disk.path()));
        readable(&out);
    }
    panic!("no size was large enough; {named:?} did not fit");
}

/// Of "error: cannot write PATH: ...", the path below the disk, without a step's number.
fn named_file(message: &str, disk: &Path) -> String {
    let path = message
        .strip_prefix("error: cannot ")
        .and_then(|rest| rest.split_once(' '))
        .and_then(|(_, path)| path.split_once(": "))
        .map(|(path, _)| PathBuf::from(path.trim_start_matches("the run folder ")));
    let below = path.as_deref().and_then(|path| path.strip_prefix(disk).ok());
    let below = below.unwrap_or_else(|| panic!("{message:?} names no file of the disk"));
    let name = below.to_str().expect("UTF-8");
    let name = if name.contains("events.out.tfevents") { "tb/events" } else { name };
    name.replace(|c: char| c.is_ascii_digit(), "")
}

/// Every row that is there is whole, and every file of a step is whole or not there.
fn run_is_readable(root: &Path) {
    let Ok(folder) = RunFolder::open(root) else { return };
    read_json(&folder.config());
    let steps = fs::read_to_string(folder.steps()).unwrap_or_default();
    let rows: Vec<serde_json::Value> =
        steps.lines().map(|line| serde_json::from_str(line).expect("a whole row")).collect();
    for (row, step) in rows.iter().zip((1..).map(Step::new)) {
        assert_eq!(row["step"], step.get());
        assert!(!read_rollouts(&folder.rollouts(step)).expect("rollouts").is_empty());
        assert!(!read_tokens(&folder.tokens(step)).expect("tokens").is_empty());
    }
    for path in [folder.summary(), folder.findings(), root.join("evaluation.json")] {
        if path.exists() {
            read_json(&path);
        }
    }
    let weights = folder.checkpoints().join("final");
    if weights.exists() {
        load_master(&weights).expect("a whole model");
    }
}

fn nothing(_: &Path) {}

/// The names are among those that did not fit, if any disk was full.
fn assert_named(found: &BTreeSet<String>, names: &[&str]) {
    let missing: Vec<_> = names.iter().filter(|name| !found.contains(**name)).collect();
    assert!(found.is_empty() || missing.is_empty(), "{missing:?} not among {found:?}");
}

#[test]
fn a_run() {
    let args = [&["run", SMALL][..], &set(&["steps=2"]), &["--out"]].concat();
    let found = check(0..100, &args, "run", nothing, run_is_readable);
    let names = [
        "run/config.json",
        "tb/events",
        "run/rollouts/step-.parquet",
        "run/tokens/step-.parquet",
        "run/steps.jsonl",
        "run/timing.jsonl",
        "run/findings.json",
        "run/report.html",
        "run/summary.json",
    ];
    assert_named(&found, &names);
}

#[test]
fn a_run_that_leaves_its_model() {
    let args = |setting| [&["run", SMALL][..], &set(&["steps=1", setting]), &["--out"]].concat();
    let sizes = (8..40).chain((40..500).step_by(20));
    let saving = args("checkpoint.save_final=true");
    let found = check(sizes, &saving, "run", nothing, run_is_readable);
    let model = ["config.json", "model.safetensors"].map(|n| format!("run/checkpoints/final/{n}"));
    assert_named(&found, &model.each_ref().map(String::as_str));
    let evaluating = args("check.greedy_eval_prompts=2");
    let found = check(8..100, &evaluating, "run", nothing, run_is_readable);
    assert_named(&found, &["run/evaluation.json"]);
}

/// The advice is good: with room made, `--resume` comes to the end that an undisturbed run has.
#[test]
fn a_run_goes_on_once_there_is_room() {
    check_resume(&["trainer.update=none", "checkpoint.every=1"], (4..60).step_by(3));
}

/// Each checkpoint is 3 MB of shards.
#[test]
fn a_sharded_run_goes_on_once_there_is_room() {
    check_resume(&["trainer.ranks=2", "checkpoint.every=1"], (300..2400).step_by(350));
}

fn check_resume(sets: &[&str], pages: impl IntoIterator<Item = u64>) {
    let Some(disk) = Disk::mount() else { return };
    let undisturbed = Run::small(sets);
    let mut stopped = BTreeSet::new();
    for size in pages.into_iter().map(|pages| pages * PAGE) {
        disk.resize(size);
        let out = disk.path().join("run");
        let args = [&["run", SMALL][..], &set(sets), &["--out"]].concat();
        let output = gapscope().args(&args).arg(&out).output().expect("the binary starts");
        if output.status.success() {
            continue;
        }
        assert_eq!(output.status.code(), Some(1));
        let stderr = String::from_utf8(output.stderr).expect("UTF-8");
        stopped.insert(named_file(stderr.lines().last().expect("a message"), disk.path()));
        disk.grow(64 << 20);
        gapscope().args(&args).arg(&out).arg("--resume").assert().success();
        let folder = RunFolder::open(&out).expect("a run");
        let same = |a: PathBuf, b: PathBuf| {
            assert!(
                fs::read(&a).expect("a file") == fs::read(&b).expect("a file"),
                "{a:?}, {size}"
            );
        };
        same(folder.steps(), undisturbed.folder.steps());
        for step in (1..=3).map(Step::new) {
            same(folder.tokens(step), undisturbed.folder.tokens(step));
            same(folder.rollouts(step), undisturbed.folder.rollouts(step));
        }
    }
    assert!(stopped.iter().any(|name| name.starts_with("run/checkpoints/step-")), "{stopped:?}");
}

#[test]
fn a_sweep() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let text = fs::read_to_string("tests/fixtures/sweep.toml").expect("the experiment");
    // Its last point cannot be.
    let (points, _) = text.rsplit_once("[[sweep.points]]").expect("points");
    let file = parent.path().join("sweep.toml");
    fs::write(&file, points).expect("written");
    let readable = |root: &Path| {
        let points = fs::read_dir(root.join("points")).into_iter().flatten();
        points.for_each(|point| run_is_readable(&point.expect("a point").path()));
        let table = fs::read_to_string(root.join("sweep.csv")).unwrap_or("\n".to_owned());
        assert!(table.ends_with('\n'), "{table}");
        if root.join("sweep.json").exists() {
            read_json(&root.join("sweep.json"));
        }
    };
    let args = ["sweep", file.to_str().expect("UTF-8"), "--out"];
    let found = check((0..12).chain((12..400).step_by(9)), &args, "sweep", nothing, readable);
    let names = ["plan.json", "sweep.csv", "sweep.json", "spike_map.svg", "report.html"];
    assert_named(&found, &names.map(|name| format!("sweep/{name}")).each_ref().map(|n| n.as_str()));
}

#[test]
fn a_model() {
    let gone = |folder: &Path| assert!(!folder.exists(), "half a model stays");
    let found =
        check((0..400).step_by(30), &["model", "init", "tiny-jamba"], "model", nothing, gone);
    assert_named(&found, &["model/config.json", "model/model.safetensors"]);
}

#[test]
fn scores() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let input = parent.path().join("tokens.jsonl");
    let line = |id: u32| format!("{{\"id\":{id},\"token_ids\":[3,4,5,6,7,8,9]}}\n");
    fs::write(&input, (0..300).map(line).collect::<String>()).expect("written");
    let input = input.to_str().expect("UTF-8");
    let model = "tests/fixtures/tiny-jamba";
    let args = ["score", "--model", model, "--input", input, "--output"];
    let older = |output: &Path| fs::write(output, "older").expect("written");
    let stays = |output: &Path| {
        assert_eq!(fs::read_to_string(output).expect("a file"), "older");
        let beside = fs::read_dir(output.parent().expect("a folder")).expect("a folder").count();
        assert_eq!(beside, 1, "half the scores stay");
    };
    let found = check(2..20, &args, "scores.jsonl", older, stays);
    assert_named(&found, &["scores.jsonl"]);
}

#[test]
fn an_audit() {
    let run = Run::small(&["steps=4"]);
    let readable = |root: &Path| {
        let steps = fs::read_to_string(root.join("steps.jsonl")).unwrap_or_default();
        steps.lines().for_each(|line| {
            serde_json::from_str::<serde_json::Value>(line).expect("a whole row");
        });
        assert!(!root.join("audit.json").exists(), "an audit that is whole");
    };
    let rollouts = run.root().to_str().expect("UTF-8");
    let found =
        check(0..30, &["audit", "--rollouts", rollouts, "--out"], "audit", nothing, readable);
    assert_named(&found, &["audit/steps.jsonl", "audit/audit.json"]);
}

/// What goes to standard output, where that is a full disk.
#[test]
#[cfg(target_os = "linux")]
fn standard_output() {
    let run = Run::small(&["steps=1"]);
    let root = run.root().to_str().expect("UTF-8");
    for args in [
        &["compare", root, root][..],
        &["audit", "--rollouts", root],
        &["run", SMALL, "--dry-run"],
        &["model", "inspect", "tiny-jamba"],
        &["config", "--defaults"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gapscope"));
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
        let output = command.args(args).stdout(full).output().expect("the binary starts");
        let message = "error: cannot write to standard output: No space left on device (os error \
            28); make room there, or write to another disk\n";
        assert_eq!(String::from_utf8_lossy(&output.stderr), message, "{args:?}");
        assert_eq!(output.status.code(), Some(1), "{args:?}");
    }
}
