//! What a run that goes on finds of its past, and drops.

use std::fs;
use std::path::{Path, PathBuf};

use super::super::disk::remove;
use super::super::tensorboard;
use super::{step_name, ReportError, RunFolder, EVIDENCE, JSON, PARQUET, TRACE, TRACES};
use crate::base::Step;

const CHECKPOINT: &str = "safetensors";
/// Written at a run's end alone.
const LAST_FILES: [&str; 4] = ["summary.json", "findings.json", "evaluation.json", "report.html"];

impl RunFolder {
    #[must_use]
    pub fn checkpoint(&self, step: Step) -> PathBuf {
        self.checkpoints().join(step_name(step, CHECKPOINT))
    }

    /// Final weights as a model's folder.
    #[must_use]
    pub fn final_model(&self) -> PathBuf {
        self.checkpoints().join("final")
    }

    /// The steps of all checkpoints, the latest first.
    pub fn saved_steps(&self) -> Result<Vec<Step>, ReportError> {
        let mut steps: Vec<Step> = files_of_steps(&self.checkpoints(), CHECKPOINT)?
            .into_iter()
            .map(|(step, _)| step)
            .collect();
        steps.sort_by(|a, b| b.cmp(a));
        Ok(steps)
    }

    /// Leaves the latest checkpoints.
    pub fn keep_checkpoints(&self, latest: usize) -> Result<(), ReportError> {
        let old = self.saved_steps()?.into_iter().skip(latest);
        old.map(|step| self.checkpoint(step)).try_for_each(|path| remove(&path))
    }

    /// Removes all checkpoints, half-written ones too; final weights stay.
    pub fn drop_checkpoints(&self) -> Result<(), ReportError> {
        for (name, path) in entries(&self.checkpoints())? {
            if name.trim_start_matches('.').starts_with("step-") {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// Removes every file of its own that tells of a later step or of the run's end. Those that
    /// grow are cut by who goes on with them.
    pub fn drop_after(&self, step: Step) -> Result<(), ReportError> {
        for file in LAST_FILES {
            remove(&self.root.join(file))?;
        }
        remove(&self.final_model())?;
        let traces = TRACES.map(|extension| (TRACE, extension));
        let others = [
            ("rollouts", PARQUET),
            ("tokens", PARQUET),
            (EVIDENCE, JSON),
            ("checkpoints", CHECKPOINT),
        ];
        for (folder, extension) in others.into_iter().chain(traces) {
            let files = files_of_steps(&self.root.join(folder), extension)?;
            for (_, path) in files.into_iter().filter(|(found, _)| *found > step) {
                remove(&path)?;
            }
        }
        Ok(())
    }

    /// Removes all that a run has written but its configuration.
    pub fn clear(&self) -> Result<(), ReportError> {
        self.make_folders()?;
        self.drop_after(Step::new(0))?;
        self.drop_checkpoints()?;
        remove(&self.steps())?;
        remove(&self.timing())?;
        remove(&self.servers())?;
        tensorboard::rewind(&self.tensorboard, &[])
    }
}

/// The files called `step-NNNNN.EXTENSION`.
fn files_of_steps(folder: &Path, extension: &str) -> Result<Vec<(Step, PathBuf)>, ReportError> {
    let step = |name: &str| {
        let number = name.strip_prefix("step-")?.strip_suffix(extension)?.strip_suffix('.')?;
        number.parse().ok().map(Step::new)
    };
    let files = entries(folder)?.into_iter();
    Ok(files.filter_map(|(name, path)| Some((step(&name)?, path))).collect())
}

/// Name and path of everything in a folder; nothing of one that is gone.
fn entries(folder: &Path) -> Result<Vec<(String, PathBuf)>, ReportError> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let failed = |source| ReportError::io("list", folder)(source);
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
        all.extend(name.map(|name| (name, path)));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_later_goes_and_the_rest_stays() {
        let parent = tempfile::tempdir().unwrap();
        let folder = RunFolder::create(parent.path().join("run")).unwrap();
        let steps = [1, 2, 10, 100_000].map(Step::new);
        let mut paths = vec![folder.summary(), folder.root().join("notes.txt")];
        for step in steps {
            folder.write_evidence(step, &step).unwrap();
            paths.extend([folder.rollouts(step), folder.tokens(step), folder.checkpoint(step)]);
            paths.extend(folder.trace(step).unwrap());
            paths.push(folder.evidence(step));
        }
        for path in &paths {
            fs::write(path, "").unwrap();
        }
        fs::create_dir(folder.final_model()).unwrap();
        assert_eq!(folder.saved_steps().unwrap(), [100_000, 10, 2, 1].map(Step::new));
        folder.drop_after(Step::new(10)).unwrap();
        let left = |path: &&PathBuf| path.exists();
        assert_eq!(paths.iter().filter(left).count(), paths.len() - 7);
        assert!(!folder.summary().exists() && !folder.final_model().exists());
        folder.keep_checkpoints(2).unwrap();
        assert_eq!(folder.saved_steps().unwrap(), [10, 2].map(Step::new));
        folder.clear().unwrap();
        assert_eq!(paths.iter().filter(left).collect::<Vec<_>>(), [&paths[1]]);
    }
}
