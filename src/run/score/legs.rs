//! One leg's forward over whole sequences whose tokens are known.

use super::super::parts;
use crate::base::{Contract, LogProb, TokenId};
use crate::config::{Config, Leg};
use crate::engine::{self, Feed, Forced, Layout, Phase, Runner, Scratch};
use crate::model::Model;
use crate::ops::array::{Array, Device};
use crate::ops::weights::Weights;
use crate::trainer::reference::Reference;
use crate::trainer::{Sequence, Trainer};
use anyhow::Result;

/// The engine's addresses are right here: `score` has no faults.
const STATE_INDEX_BITS: u32 = 64;

/// A model that scores.
pub(super) struct Scorer {
    forward: Forward,
    contract: Contract,
}

enum Forward {
    Trainer(Box<Trainer>),
    Reference(Box<Reference>),
    Prefill(Box<EngineLeg>),
    Decode(Box<EngineLeg>),
}

impl Scorer {
    /// Loads the configuration's model.
    pub(super) fn open(config: &Config, leg: Leg, contract: Contract) -> Result<Self> {
        let (plan, master) = parts::weights(config)?;
        let num = plan.numerics_of(config);
        // A unit of the master goes as soon as it is rounded.
        let round = |master: Vec<Vec<f32>>| -> Vec<Weights> {
            let one = |flat| Weights::of_master(&Array::Cpu(flat), num.dtype);
            master.into_iter().map(one).collect()
        };
        let forward = match leg {
            Leg::Trainer => {
                let trainer =
                    Trainer::new(&Device::Cpu, plan, num, config.trainer.clone(), &master)?;
                Forward::Trainer(Box::new(trainer))
            }
            Leg::Reference => {
                Forward::Reference(Box::new(parts::reference(&plan, &round(master))?))
            }
            Leg::Prefill | Leg::Decode => {
                let layout = engine::layout(&plan, &num, &config.engine)?;
                let model = Model::load(&plan, &num, &round(master));
                let runner = Runner::new(num, &layout, model, STATE_INDEX_BITS);
                let engine = Box::new(EngineLeg { runner, layout, contract });
                match leg {
                    Leg::Prefill => Forward::Prefill(engine),
                    _ => Forward::Decode(engine),
                }
            }
        };
        Ok(Self { forward, contract })
    }

    /// Each sequence's tokens from `prompt_len` on.
    pub(super) fn score(&self, sequences: &[Sequence]) -> Result<Vec<Vec<LogProb>>> {
        Ok(match &self.forward {
            Forward::Trainer(trainer) => {
                let scores = trainer.score(sequences, &self.contract)?;
                scores.into_iter().map(|one| one.contract).collect()
            }
            Forward::Reference(reference) => {
                let one = |Sequence { tokens, prompt_len }: &Sequence| {
                    let all = reference.target_logprobs(tokens, self.contract.temperature)?;
                    Ok(all[prompt_len - 1..].iter().map(|&nats| LogProb::new(nats)).collect())
                };
                sequences.iter().map(one).collect::<Result<_>>()?
            }
            Forward::Prefill(engine) => engine.prefill(sequences),
            Forward::Decode(engine) => engine.decode(sequences),
        })
    }
}

/// The engine's runner over private pools.
struct EngineLeg {
    runner: Runner,
    layout: Layout,
    contract: Contract,
}

impl EngineLeg {
    /// Room for these sequences and no more.
    fn scratch(&self, sequences: &[Sequence]) -> Scratch {
        let longest = sequences.iter().map(|one| one.tokens.len()).max().unwrap_or(0);
        let max_model_len = u32::try_from(longest).expect("a line has fewer than 2^32 tokens");
        Scratch::new(
            self.runner.device(),
            &Layout { max_model_len, ..self.layout.clone() },
            sequences.len(),
        )
    }

    /// Every sequence as one prefill row.
    fn prefill<'a>(&self, sequences: &'a [Sequence]) -> Vec<Vec<LogProb>> {
        let feeds: Vec<Feed<'_>> =
            (0..sequences.len()).map(|i| prefill_row(i, &sequences[i].tokens)).collect();
        let x_th = self.scratch(sequences).feed(&self.runner, &feeds, None);
        let mut end = 0;
        let place = |Sequence { tokens, prompt_len }: &'a Sequence| {
            end += tokens.len();
            (end - tokens.len() + prompt_len - 1, &tokens[*prompt_len..])
        };
        let mut work: Vec<_> = sequences.iter().map(place).collect();
        self.runner.device().map(&mut work, |_, &mut (first, targets)| {
            self.runner.log_probs(&self.contract, &x_th, first, targets)
        })
    }

    /// The prompts as prefill rows, then every later token as a decode row of its own, forced.
    fn decode(&self, sequences: &[Sequence]) -> Vec<Vec<LogProb>> {
        let all: Vec<Forced<'_>> = sequences
            .iter()
            .map(|one| Forced { tokens: &one.tokens, prompt_len: one.prompt_len })
            .collect();
        self.runner.decode_forced(&self.contract, self.scratch(sequences), &all)
    }
}

fn prefill_row(sequence: usize, tokens: &[TokenId]) -> Feed<'_> {
    Feed { sequence, phase: Phase::Prefill, tokens }
}
