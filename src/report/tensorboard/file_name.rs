//! Names of event files: TensorBoard reads those that contain `tfevents`, in the order of names.

use std::fmt;
use std::fs;
use std::path::Path;

use super::super::ReportError;

const PREFIX: &str = "events.out.tfevents.";

/// `events.out.tfevents.<seconds>.<host>.<pid>.<n>`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileName<'a> {
    /// Since 1970.
    pub seconds: u64,
    pub host: &'a str,
    pub pid: u32,
    /// Tells files of one process and second apart.
    pub n: u32,
}

impl FileName<'_> {
    /// The same name, its seconds moved past those of every event file in `folder`.
    pub(super) fn behind_all_in(self, folder: &Path) -> Result<Self, ReportError> {
        let theirs = all_in(folder)?.iter().filter_map(|name| seconds_of(name)).max();
        let seconds = theirs.map_or(0, |theirs| theirs.saturating_add(1)).max(self.seconds);
        Ok(Self { seconds, ..self })
    }
}

/// The names of all event files in a folder.
pub(super) fn all_in(folder: &Path) -> Result<Vec<String>, ReportError> {
    let error = |source| ReportError::io("list", folder)(source);
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(error)? {
        let name = entry.map_err(error)?.file_name().into_string().ok();
        names.extend(name.filter(|name| name.starts_with(PREFIX)));
    }
    Ok(names)
}

impl fmt::Display for FileName<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A host name is whatever the machine says; a slash in it would be a folder.
        let host: String = self
            .host
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "-_".contains(c) { c } else { '-' })
            .collect();
        write!(f, "{PREFIX}{:010}.{host}.{}.{}", self.seconds, self.pid, self.n)
    }
}

fn seconds_of(name: &str) -> Option<u64> {
    name.strip_prefix(PREFIX)?.split('.').next()?.parse().ok()
}
