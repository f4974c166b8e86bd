//! The floor, measured: the same weights on the same tokens in other shapes.
//!
//! Sequences of the task's own prompts are sampled and scored again in cold private pools: as
//! decode rows, one token at a time, as prefills one by one, and as one packed prefill, which is
//! what the trainer's forward is too. All of it is the loaded engine's arithmetic, so that neither
//! weights nor tokens nor states of two sides can differ and be taken for healthy; what is left is
//! rounding. Learning changes weights and may move the floor: it is measured anew every
//! [`MEASURED_EVERY`] steps. What was measured goes into the checkpoint.

use anyhow::Result;

use super::Session;
use crate::base::{LogProb, Noise, Position, RequestId, Step, TokenId};
use crate::config::{Arithmetic, Config, Thresholds, Update};
use crate::engine::{Engine, Feed, Layout, Phase, Scratch};
use crate::gap::{Alarm, Floor};
use crate::ops::sampling::{sample_rows, Noises};
use crate::rollout::{Draw, Source};

/// Steps of a run that learns from one measurement to the next.
const MEASURED_EVERY: u64 = 10;
/// Sampled tokens of one measurement, where 8 to 64 sequences give as many.
const TOKENS: usize = 2048;
/// Errors do not grow with the length any more: states forget.
const LENGTH_MAX: usize = 512;
/// Sequences that it is measured on, at most.
const SEQUENCES_MAX: usize = 64;

impl Session {
    /// Measures the floor where the step is due for it; invariant arithmetic has none to measure.
    pub(super) fn refresh_floor(&mut self, step: Step) -> Result<()> {
        let learns = self.config.trainer.update != Update::None;
        let due = self.floor.is_none() || learns && step.get() % MEASURED_EVERY == 1;
        if self.config.check.floor.is_some() || !due {
            return Ok(());
        }
        match &self.source {
            Source::Embedded(engines) if self.num.arithmetic == Arithmetic::Fast => {
                self.floor = Some(self.measured_floor(engines.first())?);
            }
            Source::Embedded(_) => {}
            Source::Servers(_) => self.floor = Some(self.floor_of_servers(step)?),
        }
        Ok(())
    }

    /// The largest |d| that healthy arithmetic explains among so many tokens: 0 in invariant
    /// numerics, and before a step has been compared.
    #[must_use]
    pub fn floor(&self, n_tokens: u64) -> f64 {
        let stated = self.config.check.floor;
        stated.unwrap_or_else(|| self.floor.unwrap_or(Floor::EXACT).of(n_tokens))
    }

    fn measured_floor(&self, engine: &Engine) -> Result<Floor> {
        let len = (self.config.rollout.max_new_tokens as usize).min(LENGTH_MAX);
        let n = TOKENS.div_ceil(len).clamp(8, SEQUENCES_MAX);
        let problems = self.task.problems(Draw::Evaluation, Step::new(1), n as u32)?;
        let mut sequences: Vec<Vec<TokenId>> = problems.into_iter().map(|one| one.prompt).collect();
        let prompt_lens: Vec<usize> = sequences.iter().map(Vec::len).collect();
        let room = self.config.engine.max_model_len as usize;
        let longest = prompt_lens.iter().max().copied().unwrap_or(0);
        let decoded =
            self.sample_cold(engine, &mut sequences, len.min(room.saturating_sub(longest)));
        let whole: Vec<(&[TokenId], usize)> =
            sequences.iter().map(Vec::as_slice).zip(prompt_lens).collect();
        let alone = whole.iter().flat_map(|one| self.prefill_cold(engine, &[*one]));
        let packed = self.prefill_cold(engine, &whole);
        let legs = decoded.into_iter().flatten().zip(alone.flatten());
        let spread = |((a, b), c): ((LogProb, LogProb), LogProb)| {
            let nats = [a, b, c].map(|leg| f64::from(leg.get()));
            nats.iter().copied().fold(f64::NEG_INFINITY, f64::max)
                - nats.iter().copied().fold(f64::INFINITY, f64::min)
        };
        Ok(Floor::measured(&legs.zip(packed.into_iter().flatten()).map(spread).collect::<Vec<_>>()))
    }

    /// A pool of zeros with room for these sequences and no more.
    fn cold(engine: &Engine, sequences: usize, len: usize) -> Scratch {
        let max_model_len = u32::try_from(len).expect("a sequence fits in max_model_len");
        let layout = Layout { max_model_len, ..engine.layout().clone() };
        Scratch::new(engine.runner().device(), &layout, sequences)
    }

    /// Goes on from each prompt by `len` tokens, one decode row a token; returns what the engine
    /// says of each.
    fn sample_cold(
        &self,
        engine: &Engine,
        sequences: &mut [Vec<TokenId>],
        len: usize,
    ) -> Vec<Vec<LogProb>> {
        let runner = engine.runner();
        let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
        let mut scratch = Self::cold(engine, sequences.len(), longest + len);
        let noise = Noise::new(self.config.seed);
        let mut logps = vec![Vec::new(); sequences.len()];
        for at in 0..len {
            let rows = sequences.iter().enumerate();
            let feeds: Vec<Feed<'_>> = rows.map(|(i, tokens)| row(i, tokens, at > 0)).collect();
            let mut end = 0;
            let last = |feed: &Feed<'_>| {
                end += feed.tokens.len();
                end - 1
            };
            let last: Vec<usize> = feeds.iter().map(last).collect();
            let x_th = scratch.feed(runner, &feeds, None);
            let logits = runner.logits(&x_th.gather_rows(runner.hidden(), &last));
            // Of a step that no run has.
            let uniform = |(prompt, tokens): (usize, &Vec<TokenId>)| {
                noise.uniform(
                    RequestId::new(0, prompt as u32, 0),
                    Position::new(tokens.len() as u32),
                )
            };
            let noise = sequences.iter().enumerate().map(uniform).collect();
            let noise = Noises::new(&self.device, noise);
            let drawn = sample_rows(&logits, runner.vocab(), &noise, &self.contract).read();
            for ((tokens, logps), (token, logp)) in sequences.iter_mut().zip(&mut logps).zip(drawn)
            {
                tokens.push(token);
                logps.push(logp);
            }
        }
        logps
    }

    /// One batch of whole prefills: each sequence's tokens from its prompt's end on.
    fn prefill_cold(
        &self,
        engine: &Engine,
        sequences: &[(&[TokenId], usize)],
    ) -> Vec<Vec<LogProb>> {
        let runner = engine.runner();
        let longest = sequences.iter().map(|(tokens, _)| tokens.len()).max().unwrap_or(0);
        let rows = sequences.iter().enumerate();
        let feeds: Vec<Feed<'_>> = rows.map(|(i, (tokens, _))| row(i, tokens, false)).collect();
        let x_th = Self::cold(engine, sequences.len(), longest).feed(runner, &feeds, None);
        let mut end = 0;
        let score = |&(tokens, prompt_len): &(&[TokenId], usize)| {
            let first = end + prompt_len - 1;
            end += tokens.len();
            runner.log_probs(&self.contract, &x_th, first, &tokens[prompt_len..])
        };
        sequences.iter().map(score).collect()
    }
}

/// The alarm that the configuration names.
pub(super) fn alarm(config: &Config) -> Alarm {
    match config.check.thresholds {
        Thresholds::Floor => Alarm::OverFloor,
        Thresholds::NemoRl => Alarm::NEMO_RL,
        Thresholds::PrimeRl => Alarm::PRIME_RL,
        Thresholds::Slime => Alarm::SLIME,
        Thresholds::Miles => Alarm::MILES,
        Thresholds::Exact => Alarm::EXACT,
    }
}

/// A sequence's next row: the whole of it, or its last token where the rest is in the cache.
fn row(sequence: usize, tokens: &[TokenId], decodes: bool) -> Feed<'_> {
    match decodes {
        true => Feed { sequence, phase: Phase::Decode, tokens: &tokens[tokens.len() - 1..] },
        false => Feed { sequence, phase: Phase::Prefill, tokens },
    }
}
