//! Records that other frameworks dumped, with both sides' log-probabilities of each token.
//!
//! A file is read a few lines at a time and nothing of it is kept, so that a dump may be larger
//! than memory. What a dump holds in place of a log-probability is counted by kind and enters the
//! record as a non-finite value, which no mean takes in.

mod column;
mod contract;
mod error;
mod find;
mod line;
mod raw;
mod record;
mod values;

use std::collections::VecDeque;
use std::path::Path;
use std::str::FromStr;

use rayon::prelude::*;

pub use error::{ImportError, RecordProblem};
pub use find::{find, Found, Source};
pub use record::Imported;
pub use values::{Checks, SideChecks};

use self::line::Lines;
use self::raw::Raw;

/// Who wrote a dump of one JSON object a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `train_data_step{N}.jsonl`.
    NemoRl,
    /// `token_exports/step_{N}/rank_{R}.jsonl`.
    PrimeRl,
}

impl Format {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NemoRl => "nemo-rl",
            Self::PrimeRl => "prime-rl",
        }
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = [Self::NemoRl, Self::PrimeRl].into_iter().find(|format| format.name() == text);
        known.ok_or_else(|| format!("no format is called {text:?}; nemo-rl and prime-rl are"))
    }
}

/// Bytes of lines that are read before they are parsed, on every core.
const BATCH_BYTES: usize = 4 << 20;

/// The records of one file, in order.
#[derive(Debug)]
pub struct Records<'a> {
    source: &'a Source,
    lines: Lines,
    /// Refuses two sides of unlike temperature or mode.
    strict: bool,
    parsed: VecDeque<Result<Imported, ImportError>>,
}

impl<'a> Records<'a> {
    /// `strict` refuses records whose two sides are of unlike temperature or mode.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn open(source: &'a Source, strict: bool) -> Result<Self, ImportError> {
        let lines = Lines::open(&source.path)?;
        Ok(Self { source, lines, strict, parsed: VecDeque::new() })
    }

    fn parse_batch(&mut self) {
        let (mut batch, mut bytes, mut broken) = (Vec::new(), 0, None);
        while bytes < BATCH_BYTES {
            match self.lines.next_line() {
                Ok(Some((content, line))) => {
                    bytes += content.len();
                    batch.push((content, line));
                }
                Ok(None) => break,
                Err(error) => {
                    broken = Some(Err(error));
                    break;
                }
            }
        }
        let (source, strict) = (self.source, self.strict);
        let parsed: Vec<_> = batch
            .into_par_iter()
            .map(|(content, line)| {
                let record =
                    Raw::parse(content).and_then(|raw| record::import(raw, source, line, strict));
                record.map_err(|problem| at_line(&source.path, line, problem))
            })
            .collect();
        self.parsed = parsed.into_iter().chain(broken).collect();
    }
}

impl Iterator for Records<'_> {
    type Item = Result<Imported, ImportError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.parsed.is_empty() {
            self.parse_batch();
        }
        self.parsed.pop_front()
    }
}

fn at_line(path: &Path, line: u64, problem: RecordProblem) -> ImportError {
    ImportError::Record { path: path.to_owned(), line, problem: Box::new(problem) }
}
