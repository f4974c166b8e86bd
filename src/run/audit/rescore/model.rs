//! The model at hand, and whether the records fit it.

use anyhow::{Context, Result};

use super::super::step::Record;
use super::super::{routes, Input};
use super::{tokens, ROWS};
use crate::base::TokenId;
use crate::config::{Config, Leg};
use crate::model::Plan;
use crate::ops::array::Device;
use crate::run::memory::available_bytes;
use crate::run::parts;
use crate::run::progress::Meter;
use crate::run::score::{Bound, Largest, Limits};
use crate::trainer::Trainer;

/// Bytes that it takes a logit: the row, sorted, and what its largest ones weigh together.
const ROW_BYTES: u64 = 4 + 4 + 8;

/// The model at hand.
pub(in crate::run::audit) struct Model {
    pub(super) trainer: Trainer,
    pub(super) meter: Meter,
}

impl Model {
    /// Reads the inputs once before anything is computed: every record's ids and length are held
    /// against the model, and the longest one against the machine's memory.
    pub(in crate::run::audit) fn open(
        config: &Config,
        inputs: &[Input],
        strict: bool,
    ) -> Result<Self> {
        let plan = parts::plan(config)?;
        let Survey { longest, tokens } = Survey::of(inputs, strict, &plan)?;
        let mut bound = Bound::of(&plan, config, Leg::Trainer, Largest::with(longest))?;
        bound.logits += (ROWS * plan.config.vocab_size) as u64 * ROW_BYTES;
        bound.check(available_bytes())?;
        let (plan, master) = parts::weights(config)?;
        let num = plan.numerics_of(config);
        let trainer = Trainer::new(&Device::Cpu, plan, num, config.trainer.clone(), &master)?;
        Ok(Self { trainer, meter: Meter::new("tokens rescored", tokens) })
    }

    pub(in crate::run::audit) fn finish(&self) {
        self.meter.finish();
    }
}

/// What the first reading of the inputs finds.
#[derive(Default)]
struct Survey {
    /// Tokens of the longest record, and of all.
    longest: usize,
    tokens: u64,
}

impl Survey {
    fn of(inputs: &[Input], strict: bool, plan: &Plan) -> Result<Self> {
        let mut survey = Self::default();
        let fits = |record: &Record, tokens: &[TokenId]| -> Result<()> {
            Limits::of(&plan.config).check(tokens)?;
            record.routes.iter().flatten().try_for_each(|side| routes::check(side, plan))
        };
        for input in inputs {
            for record in input.records(strict)? {
                let record = record?;
                let tokens = tokens(&record.rollout);
                survey.longest = survey.longest.max(tokens.len());
                survey.tokens += tokens.len() as u64;
                fits(&record, &tokens).with_context(|| {
                    let id = record.rollout.completion.id;
                    format!("{}, line {}: record {id}", input.path().display(), record.line)
                })?;
            }
        }
        Ok(survey)
    }
}
