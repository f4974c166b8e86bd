//! The folder that a run leaves, and the names in it.

mod past;

use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::{write_json, Claim, ReportError};
use crate::base::{RequestId, Step};
use crate::config::Config;

/// Every file that a run writes at the top: any of them shows that one has been here, finished or
/// not, or would be written over.
const FILES: [&str; 8] = [
    "summary.json",
    "steps.jsonl",
    "config.json",
    "timing.jsonl",
    "findings.json",
    "evaluation.json",
    "report.html",
    "servers.json",
];
/// The folders of files that a run writes.
const FOLDERS: [&str; 3] = ["rollouts", "tokens", "checkpoints"];
/// What the engine saw, where somebody asked.
const TRACE: &str = "trace";
const TRACES: [&str; 2] = ["txt", "jsonl"];
const PARQUET: &str = "parquet";
/// Made by the first step that leaves something there.
const EVIDENCE: &str = "evidence";
const JSON: &str = "json";
/// TensorBoard's files, where they stay within the run.
const TENSORBOARD: &str = "tb";

/// One run's folder. It owns every path in it, so that writers and readers cannot disagree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunFolder {
    root: PathBuf,
    tensorboard: PathBuf,
}

impl RunFolder {
    /// Makes the folder and those in it. A folder that holds a run is refused; other files in it
    /// are left alone, and so is a start that came to nothing.
    pub fn create(root: impl Into<PathBuf>) -> Result<Self, ReportError> {
        Self::named(root.into()).make()
    }

    /// As [`Self::create`], with TensorBoard's files in a folder of their own: TensorBoard calls a
    /// run by the path of its folder.
    pub fn create_beside(root: &Path, tensorboard: &Path) -> Result<Self, ReportError> {
        let folder = Self { root: root.to_owned(), tensorboard: tensorboard.to_owned() };
        folder.make()
    }

    fn named(root: PathBuf) -> Self {
        let tensorboard = root.join(TENSORBOARD);
        Self { root, tensorboard }
    }

    fn make(self) -> Result<Self, ReportError> {
        self.check_free()?;
        self.make_folders()?;
        Ok(self)
    }

    /// # Errors
    /// Names the first thing that shows a run, or that would be written over.
    fn check_free(&self) -> Result<(), ReportError> {
        let is_start = self.is_start();
        let mut parts = FOLDERS.map(|part| (part, self.root.join(part))).to_vec();
        parts.push((EVIDENCE, self.root.join(EVIDENCE)));
        if !is_start {
            parts.push((TENSORBOARD, self.tensorboard.clone()));
        }
        let used = |(_, path): &&(&'static str, PathBuf)| {
            fs::read_dir(path).is_ok_and(|mut files| files.next().is_some())
        };
        let shows = |file: &&str| {
            let path = self.root.join(file);
            path.exists() && !(is_start && shows_no_step(file, &path))
        };
        let file = FILES.into_iter().find(shows);
        match file.or_else(|| parts.iter().find(used).map(|(part, _)| *part)) {
            Some(file) => Err(ReportError::RunExists { folder: self.root.clone(), file }),
            None => Ok(()),
        }
    }

    /// Whether the configuration that is there is a run's own. Models have a `config.json` too.
    fn is_start(&self) -> bool {
        let path = self.config();
        let text = fs::read_to_string(&path).ok();
        // A start that was cut off has said nothing.
        let is_own = |text: String| text.is_empty() || Config::from_json(&text, "").is_ok();
        text.is_some_and(is_own)
    }

    fn make_folders(&self) -> Result<(), ReportError> {
        let parts = FOLDERS.map(|part| self.root.join(part));
        let all = std::iter::once(self.root.clone()).chain(parts).chain([self.tensorboard()]);
        for path in all {
            fs::create_dir_all(&path).map_err(|source| ReportError::MakeFolder { path, source })?;
        }
        Ok(())
    }

    /// Writes the resolved configuration and holds it: of two runs that begin in one folder at
    /// once, one gets it. What a start that came to nothing has left goes.
    pub fn claim(&self, config: &str) -> Result<Claim, ReportError> {
        let mut claim = Claim::make(&self.config())?;
        // Once more: another may have had it until now.
        self.check_free()?;
        self.clear()?;
        claim.write(config).inspect_err(|_| {
            // Half a file would pass for a run.
            let _ = fs::remove_file(self.config());
        })?;
        Ok(claim)
    }

    /// Takes away what was made for a run that cannot begin. Folders that hold something stay.
    pub fn abandon(&self, claim: Claim) {
        // Under the lock, so that it is nobody else's file.
        let _ = fs::remove_file(self.config());
        drop(claim);
        let parts = FOLDERS.map(|part| self.root.join(part));
        for path in parts.into_iter().chain([self.tensorboard(), self.root.clone()]) {
            let _ = fs::remove_dir(path);
        }
    }

    /// A folder that a run has left, to read it or to go on with it.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, ReportError> {
        Self::named(root.into()).opened()
    }

    /// As [`Self::open`], of a run made by [`Self::create_beside`].
    pub fn open_beside(root: &Path, tensorboard: &Path) -> Result<Self, ReportError> {
        let folder = Self { root: root.to_owned(), tensorboard: tensorboard.to_owned() };
        folder.opened()
    }

    fn opened(self) -> Result<Self, ReportError> {
        if self.config().is_file() {
            Ok(self)
        } else {
            Err(ReportError::NotARun { folder: self.root })
        }
    }

    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The resolved configuration.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.root.join("config.json")
    }

    /// What the servers are that sampled, where they did.
    #[must_use]
    pub fn servers(&self) -> PathBuf {
        self.root.join("servers.json")
    }

    /// The run in one object.
    #[must_use]
    pub fn summary(&self) -> PathBuf {
        self.root.join("summary.json")
    }

    /// Every metric, one row a step.
    #[must_use]
    pub fn steps(&self) -> PathBuf {
        self.root.join("steps.jsonl")
    }

    /// Seconds, one row a step; with TensorBoard's `perf/*` and `wall_s` the only place that holds
    /// time.
    #[must_use]
    pub fn timing(&self) -> PathBuf {
        self.root.join("timing.jsonl")
    }

    #[must_use]
    pub fn findings(&self) -> PathBuf {
        self.root.join("findings.json")
    }

    #[must_use]
    pub fn report(&self) -> PathBuf {
        self.root.join("report.html")
    }

    /// The folder of TensorBoard's event files.
    #[must_use]
    pub fn tensorboard(&self) -> PathBuf {
        self.tensorboard.clone()
    }

    #[must_use]
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// What the step's findings were drawn from, where that was asked for.
    #[must_use]
    pub fn evidence(&self, step: Step) -> PathBuf {
        self.root.join(EVIDENCE).join(step_name(step, JSON))
    }

    pub fn write_evidence(&self, step: Step, case: &impl Serialize) -> Result<(), ReportError> {
        let path = self.root.join(EVIDENCE);
        fs::create_dir_all(&path).map_err(|source| ReportError::MakeFolder { path, source })?;
        write_json(&self.evidence(step), case)
    }

    /// One row a request.
    #[must_use]
    pub fn rollouts(&self, step: Step) -> PathBuf {
        self.root.join("rollouts").join(parquet_name(step))
    }

    /// The two files of a step's trace, for people and for tools; their folder is made.
    pub fn trace(&self, step: Step) -> Result<[PathBuf; 2], ReportError> {
        let path = self.root.join(TRACE);
        let files = TRACES.map(|extension| path.join(step_name(step, extension)));
        fs::create_dir_all(&path).map_err(|source| ReportError::MakeFolder { path, source })?;
        Ok(files)
    }

    /// A request's story as text and as a page; their folder is made.
    pub fn explanation(&self, request: RequestId) -> Result<[PathBuf; 2], ReportError> {
        let path = self.root.join("explain");
        let files = ["txt", "html"].map(|extension| path.join(format!("{request}.{extension}")));
        fs::create_dir_all(&path).map_err(|source| ReportError::MakeFolder { path, source })?;
        Ok(files)
    }

    /// One row a sampled token.
    #[must_use]
    pub fn tokens(&self, step: Step) -> PathBuf {
        self.root.join("tokens").join(parquet_name(step))
    }
}

/// Of a file that is there before the first step is.
fn shows_no_step(file: &str, path: &Path) -> bool {
    match file {
        "config.json" | "servers.json" => true,
        "steps.jsonl" | "timing.jsonl" => fs::metadata(path).is_ok_and(|found| found.len() == 0),
        _ => false,
    }
}

fn parquet_name(step: Step) -> String {
    step_name(step, PARQUET)
}

fn step_name(step: Step, extension: &str) -> String {
    format!("step-{:05}.{extension}", step.get())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_never_written_over_another() {
        for mark in FILES {
            let parent = tempfile::tempdir().unwrap();
            let root = parent.path().join("runs/clean");
            let folder = RunFolder::create(&root).unwrap();
            assert_eq!(folder.rollouts(Step::new(7)), root.join("rollouts/step-00007.parquet"));
            assert!(folder.rollouts(Step::new(7)).parent().unwrap().is_dir());
            assert!(folder.tokens(Step::new(100_000)).ends_with("step-100000.parquet"));
            assert!(folder.tensorboard().is_dir());

            RunFolder::create(&root).expect("an empty tree is no run");
            fs::write(root.join(mark), "{}").unwrap();
            assert_eq!(
                RunFolder::create(&root).unwrap_err().to_string(),
                format!(
                    "the run folder {} already holds a run ({mark}): pass --resume to go on with \
                     it, or another --out",
                    root.display()
                )
            );
        }
    }

    /// Killed while servers started, or ended by what the first files met.
    #[test]
    fn a_start_that_came_to_nothing_is_no_run() {
        let text = "name = \"x\"\nmodel.preset = \"tiny-jamba\"\n";
        let own = crate::config::parse(text, "test.toml", &[]).unwrap().to_json();
        let event = "tb/events.out.tfevents.1.host.1.0";
        let started = [("servers.json", "[]"), ("steps.jsonl", ""), (event, "version")];
        for (config, more, free) in [
            (&own[..], ("timing.jsonl", ""), true),
            ("", ("timing.jsonl", ""), true),
            (&own[..20], ("timing.jsonl", ""), false),
            ("{\"model_type\": \"jamba\"}", ("timing.jsonl", ""), false),
            (&own, ("steps.jsonl", "{}"), false),
            (&own, ("rollouts/step-00001.parquet", ""), false),
            (&own, ("checkpoints/step-00000.safetensors", ""), false),
            (&own, ("summary.json", "{}"), false),
        ] {
            let parent = tempfile::tempdir().unwrap();
            let folder = RunFolder::create(parent.path().join("run")).unwrap();
            let files = started.into_iter().chain([("config.json", config), more]);
            files.for_each(|(file, text)| fs::write(folder.root().join(file), text).unwrap());
            fs::write(folder.root().join("server-0.log"), "words").unwrap();
            assert_eq!(RunFolder::create(folder.root()).is_ok(), free, "{config} {more:?}");
            let claim = folder.claim("new");
            assert_eq!(claim.is_ok(), free, "{config} {more:?}");
            let left = |file: &str| folder.root().join(file).exists();
            for (file, _) in started {
                assert_eq!(left(file), !free, "{file}, {more:?}");
            }
            assert!(left("server-0.log"));
            assert_eq!(fs::read(folder.config()).unwrap() == b"new", free);
        }
    }

    #[test]
    fn a_run_that_cannot_begin_leaves_what_is_not_its_own() {
        let parent = tempfile::tempdir().unwrap();
        for (others, stays) in [(None, false), (Some("server-0.log"), true)] {
            let root = parent.path().join("run");
            let folder = RunFolder::create(&root).unwrap();
            let claim = folder.claim("{}").unwrap();
            others.iter().for_each(|other| fs::write(root.join(other), "words").unwrap());
            folder.abandon(claim);
            assert_eq!(root.exists(), stays);
            let left = fs::read_dir(&root).map_or(0, Iterator::count);
            assert_eq!(left, usize::from(stays));
            RunFolder::create(&root).expect("another may begin there");
        }
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named_with_its_cause() {
        let parent = tempfile::tempdir().unwrap();
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        let root = file.join("run");
        let error = RunFolder::create(&root).unwrap_err().to_string();
        let expect = format!("cannot make the run folder {}: Not a directory", root.display());
        assert!(error.starts_with(&expect), "{error}");
    }

    #[test]
    fn only_a_run_opens() {
        let parent = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(parent.path()).unwrap();
        let error = RunFolder::open(parent.path()).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("{} is not a run folder: it has no config.json", parent.path().display())
        );
        fs::write(folder.config(), "{}").unwrap();
        assert_eq!(RunFolder::open(parent.path()).unwrap(), folder);
    }
}
