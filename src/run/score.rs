//! `gapscope score`: token ids in, log-probabilities out, an object a line in the order of the
//! input.
//!
//! The file is read twice: first to check every line, so that nothing is computed for a file that
//! has a bad one, then to score. Both times a line at a time, and what is scored at once is bounded
//! in tokens, so that memory does not grow with the file. Ids may repeat: a line of output belongs
//! to a line of input by its place, and an id is a label that nothing is looked up by.

mod bound;
mod legs;
mod lines;
mod sink;

use std::path::{Path, PathBuf};

use anyhow::{ensure, Result};
use serde::{Serialize, Serializer};

use super::memory::available_bytes;
use super::parts;
use super::progress::{say, Meter};
use crate::base::{Contract, LogProb, LogprobsMode};
use crate::config::{Config, Leg};
use crate::trainer::Sequence;
pub(super) use bound::{floats_a_token, Bound, Largest};
use legs::Scorer;
pub(super) use lines::Limits;
use lines::{Id, Lines, Request};
use sink::{Reader, Sink};

/// Tokens that are scored at once, unless one sequence alone has more.
const BATCH_TOKENS: usize = 2048;
const BATCH_SEQUENCES: usize = 64;

/// What to score, and how.
#[derive(Clone, Debug)]
pub struct ScoreOptions {
    pub input: PathBuf,
    /// Standard output where absent.
    pub output: Option<PathBuf>,
    pub leg: Leg,
    /// Logits are divided by it.
    pub temperature: f32,
}

/// Scores a file with the model of a configuration. What it returns is for a terminal, and empty
/// where that is where the scores went.
///
/// # Errors
/// Whatever is wrong with the model, a line of the input or the output; a machine with less memory
/// than the longest sequence needs. The output file is then as it was.
pub fn score(config: &Config, options: &ScoreOptions) -> Result<String> {
    let contract = contract(options.temperature)?;
    let plan = parts::plan(config)?;
    let limits = Limits::of(&plan.config);
    let survey = Survey::of(&options.input, limits)?;
    let bound = Bound::of(&plan, config, options.leg, survey.largest)?;
    if survey.largest.longest > BATCH_TOKENS {
        say(&format!("a sequence of {} tokens: up to {bound}", survey.largest.longest));
    }
    bound.check(available_bytes())?;
    let mut sink = Sink::open(options.output.as_deref())?;
    let scorer = Scorer::open(config, options.leg, contract)?;
    let mut meter = Meter::new("tokens scored", survey.tokens);
    let mut batches = Batches { lines: Lines::open(&options.input, limits)?, waiting: None };
    while let Some((ids, sequences)) = batches.next()? {
        for (id, scores) in ids.iter().zip(scorer.score(&sequences)?) {
            let line = Line { id, logprobs: scores.into_iter().map(Number).collect() };
            if sink.line(&line)? == Reader::Gone {
                return Ok(String::new());
            }
        }
        meter.add(sequences.iter().map(|one| one.tokens.len() as u64).sum());
    }
    meter.finish();
    sink.finish()?;
    Ok(match &options.output {
        Some(path) => format!(
            "{} log-probabilities of {} sequence(s): {}\n",
            survey.targets,
            survey.sequences,
            path.display()
        ),
        None => String::new(),
    })
}

fn contract(temperature: f32) -> Result<Contract> {
    ensure!(
        temperature.is_finite() && temperature >= Contract::GREEDY_BELOW,
        "--temperature {temperature} is refused: log-probabilities are of logits / T with T at \
         least {}; those of greedy decoding are of T = 1, which is the default",
        Contract::GREEDY_BELOW
    );
    let logprobs_mode = LogprobsMode::ProcessedLogprobs;
    Ok(Contract { temperature, logprobs_mode, ..Contract::PLAIN })
}

/// What the first reading of the input finds.
struct Survey {
    sequences: u64,
    tokens: u64,
    targets: u64,
    largest: Largest,
}

impl Survey {
    fn of(path: &Path, limits: Limits) -> Result<Self> {
        let mut survey = Self {
            sequences: 0,
            tokens: 0,
            targets: 0,
            largest: Largest { tokens: 0, sequences: 0, longest: 0 },
        };
        for request in Lines::open(path, limits)? {
            let Sequence { tokens, prompt_len } = request?.sequence;
            survey.sequences += 1;
            survey.tokens += tokens.len() as u64;
            survey.targets += (tokens.len() - prompt_len) as u64;
            survey.largest.longest = survey.largest.longest.max(tokens.len());
        }
        ensure!(survey.sequences > 0, "{} holds no sequence", path.display());
        survey.largest = Largest::with(survey.largest.longest);
        Ok(survey)
    }
}

/// The input in pieces that are scored at once.
struct Batches {
    lines: Lines,
    /// Read already, and too much for the batch before.
    waiting: Option<Request>,
}

impl Batches {
    fn next(&mut self) -> Result<Option<(Vec<Id>, Vec<Sequence>)>> {
        let (mut ids, mut sequences, mut longest) = (Vec::new(), Vec::new(), 0);
        while let Some(request) = self.waiting.take().map(Ok).or_else(|| self.lines.next()) {
            let request = request?;
            longest = longest.max(request.sequence.tokens.len());
            if !sequences.is_empty() && !fit(sequences.len() + 1, longest) {
                self.waiting = Some(request);
                break;
            }
            ids.push(request.id);
            sequences.push(request.sequence);
        }
        Ok((!ids.is_empty()).then_some((ids, sequences)))
    }
}

/// Whether so many sequences are scored at once, the longest of so many tokens.
pub(super) fn fit(sequences: usize, longest: usize) -> bool {
    sequences <= BATCH_SEQUENCES && sequences * longest <= BATCH_TOKENS
}

/// One line of the output.
#[derive(Serialize)]
struct Line<'a> {
    id: &'a Id,
    logprobs: Vec<Number>,
}

/// The shortest decimal that reads back to the same f32. JSON has no word for what is not finite:
/// that is a string, "NaN", "inf" or "-inf".
struct Number(LogProb);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.get() {
            nats if nats.is_finite() => serializer.serialize_f32(nats),
            nats => serializer.collect_str(&nats),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Stream;

    #[test]
    fn every_f32_reads_back_to_its_bits() {
        let mut stream = Stream::new(0, "bits", 0);
        let random = (0..200_000).map(|_| stream.next_u64() as u32);
        let edges = [0, 1, 0x007f_ffff, 0x0080_0000, 0x7f7f_ffff, 0x8000_0000, 0xff80_0000];
        for value in edges.into_iter().chain(random).map(f32::from_bits) {
            let text = serde_json::to_string(&Number(LogProb::new(value))).expect("a number");
            if !value.is_finite() {
                let name = if value.is_nan() {
                    "NaN"
                } else if value > 0.0 {
                    "inf"
                } else {
                    "-inf"
                };
                assert_eq!(text, format!("\"{name}\""));
                continue;
            }
            let (direct, wide): (f32, f64) = (text.parse().unwrap(), text.parse().unwrap());
            assert_eq!(direct.to_bits(), value.to_bits(), "{text}");
            assert_eq!((wide as f32).to_bits(), value.to_bits(), "{text} by way of an f64");
        }
    }

    #[test]
    fn temperatures() {
        for (temperature, expected) in [
            (1.0, Ok(true)),
            (0.5, Ok(false)),
            (0.0, Err("--temperature 0 is refused: log-probabilities are of logits / T with T")),
            (-1.0, Err("--temperature -1 is refused")),
            (f32::NAN, Err("--temperature NaN is refused")),
            (f32::INFINITY, Err("--temperature inf is refused")),
        ] {
            match (contract(temperature), expected) {
                (Ok(contract), Ok(raw)) => assert_eq!(contract.scores_raw_logits(), raw),
                (Err(error), Err(start)) => {
                    assert!(error.to_string().starts_with(start), "{error}");
                }
                (found, expected) => panic!("{temperature}: {found:?}, expected {expected:?}"),
            }
        }
    }
}
