//! Records that other frameworks dumped, with both sides' log-probabilities of each token.
//!
//! A file is read a line at a time and nothing of it is kept, so that a dump may be larger than
//! memory. What a dump holds in place of a log-probability is counted by kind and enters the record
//! as a non-finite value, which no mean takes in.

mod column;
mod error;
mod find;
mod line;
mod raw;
mod record;
mod values;

use std::path::Path;
use std::str::FromStr;

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

/// The records of one file, in order.
#[derive(Debug)]
pub struct Records<'a> {
    source: &'a Source,
    lines: Lines,
    /// Refuses two sides of unlike temperature or mode.
    strict: bool,
}

impl<'a> Records<'a> {
    /// `strict` refuses records whose two sides are of unlike temperature or mode.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn open(source: &'a Source, strict: bool) -> Result<Self, ImportError> {
        Ok(Self { source, lines: Lines::open(&source.path)?, strict })
    }

    fn read(&self, content: &[u8], line: u64) -> Result<Imported, RecordProblem> {
        let raw = Raw::parse(content)?;
        record::import(raw, self.source, line, self.strict)
    }
}

impl Iterator for Records<'_> {
    type Item = Result<Imported, ImportError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (content, line) = match self.lines.next_line() {
            Ok(Some(line)) => line,
            Ok(None) => return None,
            Err(error) => return Some(Err(error)),
        };
        // The buffer is lent back so that every line uses the same one.
        let result = self.read(&content, line);
        self.lines.give_back(content);
        Some(result.map_err(|problem| at_line(&self.source.path, line, problem)))
    }
}

fn at_line(path: &Path, line: u64, problem: RecordProblem) -> ImportError {
    ImportError::Record { path: path.to_owned(), line, problem: Box::new(problem) }
}
