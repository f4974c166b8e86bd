//! Verdicts on evidence that runs have left, by a process that has nothing else to go by.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::gap::{CaseFile, Finding};

/// The findings of each file's step, in the order of the files, as JSON.
///
/// # Errors
/// A file that cannot be read or holds no evidence, or whose legs are not of the same tokens.
pub fn judge(files: &[PathBuf]) -> Result<String> {
    let mut findings: Vec<Finding> = Vec::new();
    for path in files {
        let shown = path.display();
        let text = fs::read(path).with_context(|| format!("cannot read {shown}"))?;
        let mut json = serde_json::Deserializer::from_slice(&text);
        let case: CaseFile = serde_path_to_error::deserialize(&mut json)
            .with_context(|| format!("{shown} holds no evidence of a run's step"))?;
        findings.extend(case.judge().with_context(|| shown.to_string())?);
    }
    Ok(serde_json::to_string_pretty(&findings)? + "\n")
}
