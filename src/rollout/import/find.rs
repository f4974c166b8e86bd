//! Which files a dump is made of, and which step each is of.

use std::path::{Path, PathBuf};

use super::line::Lines;
use super::raw::{self, Raw};
use super::{at_line, Format, ImportError};
use crate::base::Step;

/// One file of a dump.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub path: PathBuf,
    pub format: Format,
    pub step: Step,
}

/// What there is to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Sorted by step, files of one step in the order given.
    pub sources: Vec<Source>,
    /// Folders of steps that prime-rl has not marked as complete.
    pub unstable: Vec<PathBuf>,
}

/// The files of a dump: those named, and those in folders that are named. Without `format` the keys
/// of each file's first record tell it.
///
/// A step is read from the names that the frameworks give; a file of another name is of the step
/// its records say, or of its place in the list, counted from 1.
///
/// # Errors
/// A file that cannot be read, holds no record or is of no known format; a folder without a dump.
pub fn find(paths: &[PathBuf], format: Option<Format>) -> Result<Found, ImportError> {
    let mut found = Found::default();
    for (path, place) in paths.iter().zip(1..) {
        if path.is_dir() {
            for path in in_folder(path, &mut found.unstable)? {
                found.sources.push(source(path, format, place)?);
            }
        } else {
            found.sources.push(source(path.clone(), format, place)?);
        }
    }
    found.sources.sort_by_key(|source| source.step);
    Ok(found)
}

fn source(path: PathBuf, format: Option<Format>, place: u64) -> Result<Source, ImportError> {
    let mut lines = Lines::open(&path)?;
    let Some((content, line)) = lines.next_line()? else {
        return Err(ImportError::Empty { path });
    };
    let sniffed = raw::sniff(content.clone()).map_err(|problem| at_line(&path, line, problem))?;
    let format = match (format, sniffed) {
        (Some(format), _) | (None, Ok(format)) => format,
        (None, Err(keys)) => return Err(ImportError::UnknownFormat { path, line, keys }),
    };
    let step = match (format, named_step(&path, format)) {
        (_, Some(step)) => step,
        (Format::NemoRl | Format::Vllm | Format::Torchtitan, None) => place,
        (Format::PrimeRl, None) => {
            let raw = Raw::parse(content).map_err(|problem| at_line(&path, line, problem))?;
            raw.export_step.or(raw.step).unwrap_or(place)
        }
    };
    Ok(Source { path, format, step: Step::new(step) })
}

/// The step that the framework's naming gives a file.
fn named_step(path: &Path, format: Format) -> Option<u64> {
    match format {
        Format::NemoRl => between(path, "train_data_step", ".jsonl"),
        Format::PrimeRl => between(path.parent()?, "step_", ""),
        Format::Vllm | Format::Torchtitan => None,
    }
}

fn between(path: &Path, before: &str, after: &str) -> Option<u64> {
    let name = path.file_name()?.to_str()?;
    name.strip_prefix(before)?.strip_suffix(after)?.parse().ok()
}

/// The dump's files in a folder: of NeMo-RL's log folder, of prime-rl's output folder, its
/// `token_exports`, or one step of them.
fn in_folder(folder: &Path, unstable: &mut Vec<PathBuf>) -> Result<Vec<PathBuf>, ImportError> {
    let nemo = numbered(folder, "train_data_step", ".jsonl")?;
    let ranks = numbered(folder, "rank_", ".jsonl")?;
    if !nemo.is_empty() || !ranks.is_empty() {
        return Ok(if nemo.is_empty() { ranks } else { nemo });
    }
    let exports = folder.join("token_exports");
    let exports = if exports.is_dir() { &exports } else { folder };
    let steps = numbered(exports, "step_", "")?;
    if steps.is_empty() {
        return Err(ImportError::NoDump { path: folder.to_owned() });
    }
    let mut files = Vec::new();
    for step in steps {
        if step.join("STABLE").exists() {
            files.extend(numbered(&step, "rank_", ".jsonl")?);
        } else {
            unstable.push(step);
        }
    }
    if files.is_empty() {
        return Err(ImportError::NothingStable { path: folder.to_owned() });
    }
    Ok(files)
}

/// What is in the folder by names with a number in them, in the numbers' order.
fn numbered(folder: &Path, before: &str, after: &str) -> Result<Vec<PathBuf>, ImportError> {
    let error = |source| ImportError::Read { path: folder.to_owned(), source };
    let mut found = Vec::new();
    for entry in folder.read_dir().map_err(error)? {
        let path = entry.map_err(error)?.path();
        if let Some(number) = between(&path, before, after) {
            found.push((number, path));
        }
    }
    found.sort();
    Ok(found.into_iter().map(|(_, path)| path).collect())
}
