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
    // The plan comes before the first point runs.
    let lines: Vec<&str> = stderr.lines().collect();
    for (line, name) in lines.iter().zip(NAMES) {
        assert!(line.starts_with(&format!("{name}: ")), "{stderr}");
    }
    assert!(lines[4].starts_with(&format!("1/4 {}: ", NAMES[0])), "{stderr}");
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
    assert!(code == Some(1) && stderr.starts_with("error: no sweep to resume in"));
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

/// Killed without warning when it has come as far as each of these files, and then let through.
#[test]
fn a_sweep_that_was_killed_ends_with_the_same_bytes() {
    let (whole, killed) = (Sweep::new(), Sweep::new());
    whole.run(&[]);
    let reached = [
        PathBuf::from("plan.json"),
        Path::new("points").join(NAMES[0]).join("config.json"),
        Path::new("points").join(NAMES[1]).join("steps.jsonl"),
        Path::new("points").join(NAMES[1]).join("report.html"),
    ];
    for file in reached {
        let resume = killed.out.join("plan.json").is_file();
        let mut child = start(&killed, if resume { &["--resume"] } else { &[] });
        let file = killed.out.join(file);
        while !file.exists() && child.try_wait().expect("a child of this process").is_none() {
            thread::sleep(Duration::from_millis(1));
        }
        child.kill().expect("a child of this process");
        child.wait().expect("a child of this process");
        assert!(file.exists(), "{}", file.display());
    }
    killed.run(&["--resume"]);
    assert_same(&killed, &whole);
}

/// What a kill or a careless hand may leave: each is cleared away or made anew.
#[test]
fn a_sweep_goes_on_from_whatever_is_there() {
    let whole = Sweep::new();
    whole.run(&[]);
    let check = |what: &str, spoil: &dyn Fn(&Path, &Path)| {
        let spoilt = Sweep::new();
        spoilt.run(&[]);
        let point = spoilt.out.join("points").join(NAMES[1]);
        spoil(&spoilt.out, &point);
        let (_, _, stderr) = spoilt.run(&["--resume"]);
        assert!(stderr.contains("1 of 4 points failed"), "{what}: {stderr}");
        assert_same(&spoilt, &whole);
    };
    let write = |path: PathBuf, text: &str| fs::write(path, text).expect("written");
    let remove = |path: PathBuf| fs::remove_file(path).expect("removed");
    check("nothing", &|_, _| {});
    check("an empty summary", &|_, point| write(point.join("summary.json"), ""));
    check("a torn summary", &|_, point| write(point.join("summary.json"), "{\"schema\": 1,"));
    check("no summary", &|_, point| remove(point.join("summary.json")));
    check("torn steps", &|_, point| write(point.join("steps.jsonl"), "{\"step\":1,\"gap/"));
    check("an empty config", &|_, point| {
        remove(point.join("summary.json"));
        write(point.join("config.json"), "");
    });
    check("a folder that is gone", &|_, point| fs::remove_dir_all(point).expect("removed"));
    check("a table that is gone", &|out, _| remove(out.join("sweep.csv")));
    check("a temporary file", &|out, _| write(out.join(".sweep.csv.tmp"), "half"));
}

/// All but the time and TensorBoard's files.
fn assert_same(found: &Sweep, expected: &Sweep) {
    for file in ["sweep.csv", "sweep.json", "spike_map.svg", "report.html"] {
        assert_eq!(found.read(file), expected.read(file), "{file}");
    }
    let (found, expected) = (found.records(), expected.records());
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (path, bytes) in &expected {
        assert!(found[path] == *bytes, "{}", path.display());
    }
    assert!(expected.len() > 20, "{} files", expected.len());
}

/// A point that fails in its third step shows what it measured before.
#[test]
fn a_point_that_fails_midway_keeps_its_steps() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let counter = parent.path().join("calls");
    let command = format!(
        "echo x >> {0}; n=$(wc -l < {0}); if [ $n -ge 3 ]; then exit 1; fi; sed 's/.*/0/'",
        counter.display()
    );
    let text = format!(
        "name = \"midway\"\nsteps = 4\n[model]\npreset = \"tiny-jamba\"\n[engine]\n\
         max_model_len = 64\n[rollout]\nprompts_per_step = 1\nrollouts_per_prompt = 2\n\
         max_new_tokens = 2\n[task]\nkind = \"jsonl\"\npath = \"tests/fixtures/letters.jsonl\"\n\
         reward = \"command\"\nreward_command = [\"sh\", \"-c\", {command:?}]\n\
         [trainer]\nupdate = \"none\"\n[sweep]\nseed = [1]\n"
    );
    let file = parent.path().join("midway.toml");
    fs::write(&file, text).expect("written");
    let out = parent.path().join("out");
    let output = gapscope().arg("sweep").arg(&file).arg("--out").arg(&out).output();
    let output = output.expect("the binary starts");
    let stderr = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("1/1 seed=1: failed after 2 steps: "), "{stderr}");
    let point = &read_json(&out.join("sweep.json"))["points"][0];
    assert_eq!(point["summary"]["steps_done"], 2);
    assert!(point["error"].as_str().expect("an error").contains("exit"), "{point}");
}

#[test]
fn a_swept_key_is_not_to_be_set() {
    let sweep = Sweep::new();
    let set = "rollout.rollouts_per_prompt=9";
    let (code, _, stderr) = sweep.run(&["--set", set]);
    let says = format!("error: --set {set}: the sweep sets this key at its points");
    assert!(code == Some(1) && stderr.starts_with(&says), "{stderr}");
    assert!(!sweep.out.exists());
}

/// The numbers that the experiments and the README speak of, as the replay gives them.
#[test]
fn the_experiments_spike_where_they_say() {
    let every = |n: u64| {
        let steps: Vec<String> = (1..=48 / n).map(|k| (k * n).to_string()).collect();
        steps.join(", ")
    };
    let two_of_three: Vec<String> =
        (0..16).map(|k| format!("{}-{}", 3 * k + 2, 3 * k + 3)).collect();
    let none = || "none".to_owned();
    for (experiment, spikes) in [
        (
            "index_wrap",
            vec![every(12), every(6), every(3), two_of_three.join(", "), "1-48".to_owned()],
        ),
        ("index_wrap_window", vec![none(), every(12), "12-17, 28-33, 45-50".to_owned()]),
        (
            "imposter_request",
            ["none", "2-4", "none", "none", "none", "2-4"].map(str::to_owned).to_vec(),
        ),
        (
            "memory_lever",
            [
                "none",
                "none",
                "none",
                "none",
                "12-14",
                "4-14",
                "9-14",
                "11-14",
                "13-14",
                "none, and from step 16 on if it went on",
                "16-42",
            ]
            .map(str::to_owned)
            .to_vec(),
        ),
        (
            "blocks_override",
            ["none", "none", "none", "2-6", "5-6", "none, and from step 9 on if it went on"]
                .map(str::to_owned)
                .to_vec(),
        ),
    ] {
        let file = format!("experiments/{experiment}.toml");
        let output = gapscope().args(["sweep", &file, "--dry-run"]).output().expect("starts");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        assert_eq!(text.lines().count(), spikes.len(), "{text}");
        for (line, spikes) in text.lines().zip(spikes) {
            let found = line.split("; spikes ").nth(1).expect("a prediction");
            let found = found.split(" (on paper").next().expect("the steps");
            assert_eq!(found, spikes, "{experiment}: {line}");
        }
    }
}
