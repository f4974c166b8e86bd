//! What is wrong with an experiment file, where, and what would be right.

use std::fmt;
use std::path::PathBuf;

/// Where a key or a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Line and column count from 1; columns are characters.
    File { file: String, line: usize, column: usize },
    /// The n-th `--set`, counted from 1.
    Override(usize),
}

/// `file:line:column`, which terminals and editors open, or `--set n`.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { file, line, column } => write!(f, "{file}:{line}:{column}"),
            Self::Override(n) => write!(f, "--set {n}"),
        }
    }
}

/// The first thing wrong with an experiment file or an override.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read the experiment file {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },

    #[error("{place}: not valid TOML: {message}")]
    Syntax { place: Place, message: String },

    #[error("--set {n}: expected KEY=VALUE, such as engine.max_num_seqs=64, found {found:?}")]
    Override { n: usize, found: String },

    /// `hint` is the nearest known key, or else what the table takes.
    #[error("{place}: unknown key {key}; {hint}")]
    UnknownKey { place: Place, key: String, hint: String },

    /// A wrong type, a value out of range, or one that this build does not have. `allowed` ends in
    /// the nearest name where the value is a misspelt one.
    #[error("{place}: {key} = {found} is refused; it takes {allowed}")]
    Value { place: Place, key: String, found: String, allowed: String },

    /// A key that must be written and is not.
    #[error("{file}: {key} is missing; {fix}")]
    Missing { file: String, key: String, fix: String },

    /// Values that are right each for itself. `values` says key, value and place of each.
    #[error("{} do not go together: {why}", values.join(" and "))]
    Conflict { values: Vec<String>, why: String },

    #[error("[sweep] {why}")]
    Sweep { why: String },

    /// A `config.json` that this version did not write.
    #[error("{file}: not a saved configuration: at {key}: {source}")]
    Saved { file: String, key: String, source: serde_json::Error },
}
