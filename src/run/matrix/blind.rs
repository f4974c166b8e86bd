//! A verdict by a process that knows records alone.

use std::process::Command;

use anyhow::{ensure, Context, Result};

use crate::base::Step;
use crate::gap::Finding;
use crate::report::RunFolder;

/// The findings of a run's steps, by this program's own `judge` in a process of its own. The names
/// it is given say nothing but which step.
///
/// # Errors
/// A process that does not start, or does not say findings.
pub(super) fn judge(folder: &RunFolder, steps: &[Step]) -> Result<Vec<Finding>> {
    if steps.is_empty() {
        return Ok(Vec::new());
    }
    let program = std::env::current_exe().context("cannot find this program to start it again")?;
    let evidence = steps.iter().map(|&step| folder.evidence(step));
    let names = evidence.filter_map(|path| Some(path.strip_prefix(folder.root()).ok()?.to_owned()));
    let mut command = Command::new(&program);
    let output = command.arg("judge").args(names).current_dir(folder.root()).env_clear().output();
    let output = output.with_context(|| format!("cannot start {}", program.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the judge ended with {}: {}", output.status, said.trim());
    serde_json::from_slice(&output.stdout).context("what the judge said are no findings")
}
