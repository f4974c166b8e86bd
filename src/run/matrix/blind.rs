//! A verdict by a process that knows evidence alone.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{ensure, Context, Result};

use crate::base::Step;
use crate::gap::Finding;
use crate::report::RunFolder;

/// The findings of a run's steps, by this program's own `judge` in a process of its own. It works
/// in a folder that has copies of the evidence and nothing else, by names that say nothing but
/// which step.
///
/// # Errors
/// A disk that is full, a process that does not start, or does not say findings.
pub(super) fn judge(folder: &RunFolder, steps: &[Step]) -> Result<Vec<Finding>> {
    if steps.is_empty() {
        return Ok(Vec::new());
    }
    let away = std::env::temp_dir().join(format!("gapscope-judge-{}", std::process::id()));
    fs::create_dir_all(&away).with_context(|| format!("cannot make {}", away.display()))?;
    let judged = judge_in(&away, folder, steps);
    fs::remove_dir_all(&away).with_context(|| format!("cannot remove {}", away.display()))?;
    judged
}

fn judge_in(away: &Path, folder: &RunFolder, steps: &[Step]) -> Result<Vec<Finding>> {
    let mut names = Vec::new();
    for step in steps {
        let (from, name) = (folder.evidence(*step), format!("{step}.json"));
        fs::copy(&from, away.join(&name))
            .with_context(|| format!("cannot copy {} to {}", from.display(), away.display()))?;
        names.push(name);
    }
    let program = std::env::current_exe().context("cannot find this program to start it again")?;
    let output =
        Command::new(&program).arg("judge").args(names).current_dir(away).env_clear().output();
    let output = output.with_context(|| format!("cannot start {}", program.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the judge ended with {}: {}", output.status, said.trim());
    serde_json::from_slice(&output.stdout).context("what the judge said are no findings")
}
