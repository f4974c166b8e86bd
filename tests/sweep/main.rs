//! `gapscope sweep`: one run a point, predicted before it runs, resumable, and honest about the
//! points that cannot be.

#[path = "../common/mod.rs"]
mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::Duration;

use common::run::{gapscope, read_json};
use serde_json::{json, Value};
use tempfile::TempDir;

const SWEEP: &str = "tests/fixtures/sweep.toml";
const NAMES: [&str; 4] = [
    "rollouts_per_prompt=1,state_index_bits=17",
    "rollouts_per_prompt=4,state_index_bits=17",
    "rollouts_per_prompt=4,state_index_bits=64",
    "rollouts_per_prompt=4,num_gpu_blocks_override=2",
];

/// A sweep's folder, which goes with this value.
struct Sweep {
    _parent: TempDir,
    out: PathBuf,
}

impl Sweep {
    fn new() -> Self {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let out = parent.path().join("sweep");
        Self { _parent: parent, out }
    }

    /// Exit code, standard output and standard error.
    fn run(&self, args: &[&str]) -> (Option<i32>, String, String) {
        let output = gapscope().args(["sweep", SWEEP, "--out"]).arg(&self.out).args(args).output();
        let output = output.expect("the binary starts");
        let text = |bytes| String::from_utf8(bytes).expect("the binary prints UTF-8");
        (output.status.code(), text(output.stdout), text(output.stderr))
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.out.join(file)).expect(file)
    }

    fn points(&self) -> Vec<Value> {
        read_json(&self.out.join("sweep.json"))["points"].as_array().expect("points").clone()
    }

    /// The files of every point that hold no time.
    fn records(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = BTreeMap::new();
        collect(&self.out.join("points"), &mut files);
        files.retain(|path, _| {
            let name = path.file_name().expect("a file").to_string_lossy();
            !["timing.jsonl", "summary.json"].contains(&&*name)
        });
        let strip = |path: PathBuf| path.strip_prefix(&self.out).expect("inside").to_owned();
        files.into_iter().map(|(path, bytes)| (strip(path), bytes)).collect()
    }
}

fn collect(folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            collect(&path, files);
        } else {
            files.insert(path.clone(), fs::read(&path).expect("a file"));
        }
    }
}

#[test]
fn each_point_is_a_run_and_a_row_and_one_that_cannot_be_fails_the_sweep_at_its_end() {
    let sweep = Sweep::new();
    let (code, stdout, stderr) = sweep.run(&[]);
    assert_eq!((code, stdout.as_str()), (Some(1), ""), "{stderr}");
    let failed = format!("error: 1 of 4 points failed: {}; what came of each is in", NAMES[3]);
    assert!(stderr.contains(&failed), "{stderr}");

    let points = sweep.points();
    let spikes: Vec<_> =
        points.iter().map(|point| point["summary"]["spike_steps"].clone()).collect();
    // 2^17 / 3072: block 43 is the first of 64 to wrap. A step of one request takes 4 blocks, of
    // four 16; the second spike is the last one asked for.
    assert_eq!(spikes, [json!([]), json!([3, 4]), json!([]), json!(null)]);
    for point in &points[..3] {
        let ran = point["summary"]["steps_done"].as_u64().expect("a count");
        let foretold = point["predicted_spike_steps"].as_array().expect("steps").iter();
        let foretold: Vec<_> = foretold.filter(|step| step.as_u64() <= Some(ran)).collect();
        let spiked: Vec<_> = point["summary"]["spike_steps"].as_array().expect("").iter().collect();
        assert_eq!(foretold, spiked);
        assert_eq!(point["error"], Value::Null);
    }
    let error = points[3]["error"].as_str().expect("an error");
    assert!(error.contains("num_gpu_blocks_override"), "{error}");

    let csv = sweep.read("sweep.csv");
    assert_eq!(csv.lines().count(), 5, "{csv}");
    for (name, file) in NAMES[..3]
        .iter()
        .flat_map(|name| ["summary.json", "report.html", "config.json"].map(|file| (name, file)))
    {
        assert!(sweep.out.join("points").join(name).join(file).is_file(), "{name} {file}");
        let events = fs::read_dir(sweep.out.join("tb").join(name)).expect("a run of TensorBoard");
        assert_eq!(events.count(), 1, "{name}");
    }
    assert!(!sweep.out.join("points").join(NAMES[3]).exists(), "it left nothing");
    assert!(sweep.read("spike_map.svg").starts_with("<svg"), "a picture");
    assert!(sweep.read("report.html").contains("rollouts_per_prompt"), "a page");
}

#[test]
fn the_plan_is_told_before_anything_runs() {
    let output = gapscope().args(["sweep", SWEEP, "--dry-run"]).output().expect("starts");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    for (line, name) in lines.iter().zip(NAMES) {
        assert!(line.starts_with(&format!("{name}: ")), "{line}");
    }
    assert!(lines[1].contains("65 blocks, 16.0 taken a step"), "{}", lines[1]);
    assert!(lines[1].contains("spikes 3-4 (on paper the first at 2.69, then every 4.00)"));
    assert!(lines[3].contains("cannot run: "), "{}", lines[3]);
}

#[test]
fn another_sweeps_folder_is_left_alone() {
    let sweep = Sweep::new();
    let (code, _, stderr) = sweep.run(&["--resume"]);
    assert!(code == Some(1) && stderr.starts_with("error: no sweep to resume: cannot read"));
    sweep.run(&["--set", "steps=1"]);
    let before = sweep.read("sweep.csv");
    for (args, says) in [
        (&[][..], "is not empty: pass --resume to go on with a sweep, or another --out"),
        (&["--resume", "--set", "sweep.stop_after_spikes=9"], "holds another sweep"),
        (&["--resume", "--set", "name=other"], "holds another sweep"),
        (&["--resume", "--set", "seed=6"], "was run with another configuration"),
    ] {
        let (code, _, stderr) = sweep.run(&[&["--set", "steps=1"], args].concat());
        assert!(code == Some(1) && stderr.contains(says), "{args:?}: {stderr}");
    }
    assert_eq!(sweep.read("sweep.csv"), before);
}

fn start(sweep: &Sweep, args: &[&str]) -> Child {
    std::process::Command::new(env!("CARGO_BIN_EXE_gapscope"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["sweep", SWEEP, "--out"])
        .arg(&sweep.out)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("the binary starts")
}

/// Killed without warning again and again, at whatever it was doing, and then let through.
#[test]
fn a_sweep_that_was_killed_ends_with_the_same_bytes() {
    let (whole, killed) = (Sweep::new(), Sweep::new());
    whole.run(&[]);
    for delay_ms in [30, 60, 90, 120, 150, 250, 400] {
        let resume = killed.out.join("plan.json").is_file();
        if !resume {
            let _ = fs::remove_dir_all(&killed.out);
        }
        let mut child = start(&killed, if resume { &["--resume"] } else { &[] });
        thread::sleep(Duration::from_millis(delay_ms));
        child.kill().expect("a child of this process");
        child.wait().expect("a child of this process");
    }
    let resume: &[&str] = if killed.out.join("plan.json").is_file() { &["--resume"] } else { &[] };
    killed.run(resume);
    for file in ["sweep.csv", "spike_map.svg", "report.html"] {
        assert_eq!(killed.read(file), whole.read(file), "{file}");
    }
    let (killed, whole) = (killed.records(), whole.records());
    assert_eq!(killed.keys().collect::<Vec<_>>(), whole.keys().collect::<Vec<_>>());
    for (path, bytes) in &whole {
        assert!(killed[path] == *bytes, "{}", path.display());
    }
    assert!(whole.len() > 20, "{} files", whole.len());
}
