//! Records that other frameworks dumped, with both sides' log-probabilities of each token, or with
//! the engine's alone.
//!
//! A file is read a few lines at a time and nothing of it is kept, so that a dump may be larger
//! than memory. What a dump holds in place of a log-probability is counted by kind and enters the
//! record as a non-finite value, which no mean takes in.

mod column;
mod contract;
mod engine_side;
mod error;
mod find;
mod line;
mod raw;
mod record;
mod values;

use std::path::Path;
use std::str::FromStr;
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, JoinHandle};

use rayon::prelude::*;

pub(in crate::rollout) use column::Column;
pub use error::{ImportError, RecordProblem};
pub use find::{find, Found, Source};
pub(in crate::rollout) use line::quote_non_finite;
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
    /// Responses of a vLLM server, one a line, alone or beside their requests.
    Vllm,
    /// `rollout_samples.jsonl`.
    Torchtitan,
}

impl Format {
    const ALL: [Self; 4] = [Self::NemoRl, Self::PrimeRl, Self::Vllm, Self::Torchtitan];

    /// Whether a record holds the engine's side alone.
    #[must_use]
    pub const fn is_of_engine(self) -> bool {
        matches!(self, Self::Vllm | Self::Torchtitan)
    }

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NemoRl => "nemo-rl",
            Self::PrimeRl => "prime-rl",
            Self::Vllm => "vllm",
            Self::Torchtitan => "torchtitan",
        }
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|format| format.name() == text);
        known.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("no format is called {text:?}; there are {names}")
        })
    }
}

/// Bytes of lines that are read before they are parsed, on every core.
const BATCH_BYTES: usize = 2 << 20;

type Batch = Vec<Result<Imported, ImportError>>;

/// The records of one file, in order. While a batch of them is used, a thread has the next one read
/// and parsed.
#[derive(Debug)]
pub struct Records {
    batch: std::vec::IntoIter<Result<Imported, ImportError>>,
    batches: Receiver<Batch>,
    reader: Option<JoinHandle<()>>,
}

impl Records {
    /// `strict` refuses records whose two sides are of unlike temperature or mode.
    ///
    /// # Errors
    /// A file that cannot be opened, or no thread to read it.
    pub fn open(source: &Source, strict: bool) -> Result<Self, ImportError> {
        let mut lines = Lines::open(&source.path)?;
        let (path, source) = (source.path.clone(), source.clone());
        // Without room in between, so that one batch is in use and one stands ready.
        let (ready, batches) = mpsc::sync_channel(0);
        let read = move || loop {
            let batch = parse_batch(&mut lines, &source, strict);
            let is_last = batch.last().is_none_or(Result::is_err);
            // Nobody takes it any more once the first error has been met.
            if ready.send(batch).is_err() || is_last {
                return;
            }
        };
        let reader = thread::Builder::new().name("import".into()).spawn(read);
        let reader = reader.map_err(|source| ImportError::Read { path, source })?;
        Ok(Self { batch: Vec::new().into_iter(), batches, reader: Some(reader) })
    }
}

impl Iterator for Records {
    type Item = Result<Imported, ImportError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.batch.as_slice().is_empty() {
            match self.batches.recv() {
                Ok(batch) => self.batch = batch.into_iter(),
                Err(_) => {
                    let ended = self.reader.take().map_or(Ok(()), JoinHandle::join);
                    ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                }
            }
        }
        self.batch.next()
    }
}

/// Empty at the end of the file; nothing follows an error that ends it.
fn parse_batch(lines: &mut Lines, source: &Source, strict: bool) -> Batch {
    let (mut batch, mut bytes, mut broken) = (Vec::new(), 0, None);
    while bytes < BATCH_BYTES {
        match lines.next_line() {
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
    let parsed = batch.into_par_iter().flat_map_iter(|(content, line)| {
        let records = match source.format.is_of_engine() {
            true => engine_side::import(&content, source, line),
            false => Raw::parse(content)
                .and_then(|raw| Ok(vec![record::import(raw, source, line, strict)?])),
        };
        match records {
            Ok(records) => records.into_iter().map(Ok).collect(),
            Err(problem) => vec![Err(at_line(&source.path, line, problem))],
        }
    });
    let mut parsed: Batch = parsed.collect();
    parsed.extend(broken);
    parsed
}

fn at_line(path: &Path, line: u64, problem: RecordProblem) -> ImportError {
    ImportError::Record { path: path.to_owned(), line, problem: Box::new(problem) }
}
