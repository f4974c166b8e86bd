//! What can go wrong while a run is written down.

use std::io;
use std::path::{Path, PathBuf};

/// Every message names the path and the cause.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("cannot {action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: io::Error },

    #[error("cannot make the run folder {}: {source}; pass another --out", path.display())]
    MakeFolder { path: PathBuf, source: io::Error },

    #[error(
        "the run folder {} already holds a run ({file}): pass --resume to go on with it, or \
         another --out",
        folder.display()
    )]
    RunExists { folder: PathBuf, file: &'static str },

    #[error(
        "{} is in use: another process writes there; wait for it to end, or pass another --out",
        folder.display()
    )]
    InUse { folder: PathBuf },

    #[error(
        "{} holds {found} bytes, and the checkpoint was made at {due}: it was changed since; run \
         the experiment again with another --out",
        path.display()
    )]
    Shortened { path: PathBuf, found: u64, due: u64 },

    #[error("the checkpoint {} cannot be used: {found}", path.display())]
    BadCheckpoint { path: PathBuf, found: String },

    #[error("{} is not a run folder: it has no config.json", folder.display())]
    NotARun { folder: PathBuf },

    /// TensorBoard drops a tag's earlier points when a later event has a smaller step.
    #[error("TensorBoard tag {tag}: step {step} was given, but steps from {next} on are due")]
    StepGoesBack { tag: String, step: i64, next: i64 },

    #[error("step {step} is too large for TensorBoard; the largest is 2^63 - 2")]
    StepTooLarge { step: u64 },

    #[error("{}: cannot make Parquet: {source}", path.display())]
    MakeParquet { path: PathBuf, source: parquet::errors::ParquetError },

    #[error("{}: cannot read as Parquet: {source}", path.display())]
    ReadParquet { path: PathBuf, source: parquet::errors::ParquetError },

    #[error("{}: column {column}: {found}", path.display())]
    BadColumn { path: PathBuf, column: String, found: String },

    #[error("{}: cannot make JSON: {source}", path.display())]
    MakeJson { path: PathBuf, source: serde_json::Error },

    #[error("{}, line {line}: {found}; remove the run's folder and run it again", path.display())]
    BadRecord { path: PathBuf, line: u64, found: String },
}

impl ReportError {
    /// For `map_err`: the error of doing `action` to `path`.
    pub(super) fn io<'a>(
        action: &'static str,
        path: &'a Path,
    ) -> impl FnOnce(io::Error) -> Self + 'a {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}
