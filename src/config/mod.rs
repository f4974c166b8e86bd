//! An experiment file as written, to a checked [`Config`] that the rest of the crate trusts.
//!
//! The path of a file: `source` flattens TOML text and `--set` overrides to (dotted key, value,
//! place) and refuses what [`KEYS`] does not know; `check` fills in the defaults, refuses what does
//! not go together and builds the plain data of `types`. No default is decided anywhere else.
//!
//! Paths in a file (`model.path`, `task.path`) are taken as written: relative ones are relative to
//! the current directory, not to the file.

mod args;
mod check;
mod defaults;
mod device;
mod error;
mod fault;
mod keys;
mod kind;
mod nearest;
mod servers;
mod sleep;
mod source;
mod sweep;
#[cfg(test)]
mod tests;
mod trace;
mod types;
mod words;

use std::path::Path;

pub use defaults::defaults_text;
pub use device::{Device, CPU_MEMORY};
pub use error::{ConfigError, Place};
pub use fault::{Fault, FaultEntry, Planted, Side, FAULTS};
pub use keys::{IfAbsent, Key, KEYS, PRESETS};
pub use kind::{Kind, Range};
pub use nearest::nearest;
pub use servers::{LaunchConfig, ServersConfig, FIRST_PAUSE};
pub use sleep::Sleep;
pub use sweep::{overrides, Sweep, SweepSettings, MAX_SWEEP_POINTS};
pub use trace::{TraceConfig, Traced};
pub use types::*;

/// Reads and checks an experiment file. Each override reads `KEY=VALUE`, as after `--set`; later
/// ones win over earlier ones and over the file.
///
/// # Errors
/// The first thing wrong with the file or an override, with its place, and what would be right.
pub fn load(path: &Path, overrides: &[String]) -> Result<Config, ConfigError> {
    let read = || {
        // A pipe may never end, and never begin.
        let kind = std::fs::metadata(path)?;
        if !kind.is_file() && !kind.is_dir() {
            return Err(std::io::Error::other("it is not a regular file"));
        }
        std::fs::read_to_string(path)
    };
    let text = read().map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    parse(&text, &path.display().to_string(), overrides)
}

/// As [`load`], from text; `file` is only what errors call it.
///
/// # Errors
/// As [`load`].
pub fn parse(text: &str, file: &str, overrides: &[String]) -> Result<Config, ConfigError> {
    check::check(&source::read(text, file, overrides)?)
}

impl Config {
    /// The resolved configuration as it is saved beside a run: every key, in one order, floats that
    /// read back to the same bits, infinity as the string "inf". Without the sweep, which is no
    /// part of a run.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a checked config is plain data") + "\n"
    }

    /// Reads what [`Self::to_json`] wrote; `file` is only what errors call it.
    ///
    /// # Errors
    /// Text that is not a saved configuration of this version, with the field at fault.
    pub fn from_json(text: &str, file: &str) -> Result<Self, ConfigError> {
        serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_str(text)).map_err(
            |error| ConfigError::Saved {
                file: file.to_owned(),
                key: error.path().to_string(),
                source: error.into_inner(),
            },
        )
    }
}
