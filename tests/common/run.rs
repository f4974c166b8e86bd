//! Runs of the built binary, and what they leave.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use assert_cmd::Command;
use gapscope::base::Step;
use gapscope::report::parquet::{read_rollouts, read_tokens, RolloutRow, TokenRow};
use gapscope::report::RunFolder;
use serde_json::{json, Value};
use tempfile::TempDir;

/// The experiment that every test here changes a little.
pub const SMALL: &str = "tests/fixtures/small.toml";

/// The small experiment on sums, every prompt of five tokens.
pub const SUMS: &str = "tests/fixtures/sums.toml";

/// The binary, started in the repository's root.
pub fn gapscope() -> Command {
    let mut command = assert_cmd::cargo::cargo_bin_cmd!("gapscope");
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

/// Each assignment after a `--set` of its own.
pub fn set<'a>(assignments: &[&'a str]) -> Vec<&'a str> {
    assignments.iter().flat_map(|assignment| ["--set", *assignment]).collect()
}

/// The folder of a run, which goes with this value.
pub struct Run {
    parent: TempDir,
    pub folder: RunFolder,
    pub stdout: String,
}

impl Run {
    /// A run of the small experiment that has ended with exit code 0.
    pub fn small(assignments: &[&str]) -> Self {
        Self::of(SMALL, assignments)
    }

    /// As [`Self::small`], of another experiment.
    pub fn of(experiment: &str, assignments: &[&str]) -> Self {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let root = parent.path().join("run");
        let mut command = gapscope();
        command.args(["run", experiment, "--out"]).arg(&root).args(set(assignments));
        let stdout = command.assert().success().get_output().stdout.clone();
        let stdout = String::from_utf8(stdout).expect("the binary prints UTF-8");
        Self { folder: RunFolder::open(root).expect("a run folder"), parent, stdout }
    }

    pub fn root(&self) -> &Path {
        self.folder.root()
    }

    pub fn summary(&self) -> Value {
        read_json(&self.folder.summary())
    }

    pub fn config(&self) -> Value {
        read_json(&self.folder.config())
    }

    /// The rows of `steps.jsonl`.
    pub fn steps(&self) -> Vec<Value> {
        let text = fs::read_to_string(self.folder.steps()).expect("steps.jsonl");
        text.lines().map(|line| serde_json::from_str(line).expect("a row is JSON")).collect()
    }

    /// A metric's value at each step; NaN where it is absent.
    pub fn metric(&self, tag: &str) -> Vec<f64> {
        self.steps().iter().map(|row| row[tag].as_f64().unwrap_or(f64::NAN)).collect()
    }

    fn numbers(&self) -> impl Iterator<Item = Step> {
        let steps = self.summary()["steps_done"].as_u64().expect("a count");
        (1..=steps).map(Step::new)
    }

    /// The rows of each step's rollouts.
    pub fn rollouts(&self) -> Vec<Vec<RolloutRow>> {
        self.numbers().map(|n| read_rollouts(&self.folder.rollouts(n)).expect("rollouts")).collect()
    }

    /// The rows of every step's tokens.
    pub fn tokens(&self) -> Vec<TokenRow> {
        let rows = |n| read_tokens(&self.folder.tokens(n)).expect("tokens");
        self.numbers().flat_map(rows).collect()
    }

    /// Every file by its path below the root. The event file's name holds a time and a process id,
    /// so it is called `tb/events`.
    pub fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        collect(self.root(), self.root(), &mut files);
        files
    }

    /// Engine and trainer agree on every token of every step, and all tokens were compared.
    pub fn assert_clean(&self) {
        let (summary, config) = (self.summary(), self.config());
        let count = |value: &Value| value.as_u64().expect("a count");
        let rollout = &config["rollout"];
        assert_eq!(rollout["ignore_eos"], true, "lengths are known");
        let expected = count(&config["steps"])
            * count(&rollout["prompts_per_step"])
            * count(&rollout["rollouts_per_prompt"])
            * count(&rollout["max_new_tokens"]);
        assert_eq!(count(&summary["n_tokens"]), expected);
        let tokens = self.tokens();
        assert_eq!(tokens.len() as u64, expected);
        assert_eq!(summary["steps_done"], config["steps"]);
        assert_eq!(summary["nonfinite"], 0);
        assert_eq!(summary["gap_max"], 0.0, "{}", self.stdout);
        assert_eq!(summary["frac_bitwise_equal"], 1.0);
        assert_eq!(summary["spike_steps"], json!([]));
        assert_eq!(summary["findings"], json!([]));
        assert_eq!(read_json(&self.folder.findings()), json!([]));
        // Not by the report's word alone, and not because nothing was computed.
        assert!(tokens.iter().all(|row| row.logp_decode == row.logp_trainer));
        let different: BTreeSet<u32> =
            tokens.iter().map(|row| row.logp_decode.expect("decoded").get().to_bits()).collect();
        assert!(different.len() as u64 > expected / 8, "{} different logprobs", different.len());
    }
}

/// A JSON file.
pub fn read_json(path: &Path) -> Value {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn collect(root: &Path, folder: &Path, files: &mut BTreeMap<String, Vec<u8>>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path: PathBuf = entry.expect("an entry").path();
        if path.is_dir() {
            collect(root, &path, files);
            continue;
        }
        let name = path.strip_prefix(root).expect("below the root").to_str().expect("UTF-8");
        let name = if name.starts_with("tb/events.out.tfevents.") { "tb/events" } else { name };
        let earlier = files.insert(name.to_owned(), fs::read(&path).expect("a file"));
        assert!(earlier.is_none(), "two files are {name}");
    }
}
