//! One rank of the trainer: its part of the weights, and what it does with its own sequences.
//!
//! Whatever a rank is asked, all ranks are asked, and each takes part in every collective, with or
//! without sequences.

mod seen;

use std::sync::Arc;

pub use seen::Prediction;

use super::collective::Collective;
use super::head::{self, Scored, Target};
use super::minibatch::GrpoChunk;
use super::pass::{self, Chunk, Gradient, Shape};
use super::units::{ShardedUnits, Supply};
use super::{adamw, grpo, planted, Experience, Sequence, SequenceScores, TrainerError};
use crate::base::{Contract, TokenId};
use crate::config::{Fault, TrainerConfig, Update};
use crate::model::{Numerics, Plan};
use crate::ops::array::{Array, Device};
use crate::ops::weights::Weights;

/// A rank's state between two calls.
pub(super) struct Worker {
    pub device: Device,
    pub plan: Arc<Plan>,
    pub num: Numerics,
    pub config: Arc<TrainerConfig>,
    pub units: ShardedUnits,
    /// Shards of the start weights, where a KL is asked for.
    pub frozen: Option<Vec<Weights>>,
}

/// One minibatch of GRPO, as one rank sees it.
pub(super) struct Minibatch<'a> {
    /// This rank's own.
    pub experiences: &'a [Experience],
    /// Beside them, by the frozen weights.
    pub reference: Option<&'a [SequenceScores]>,
    pub temperature: f32,
    /// Of all ranks.
    pub counts: grpo::Counts,
}

impl Worker {
    pub(super) fn new(
        collective: Box<dyn Collective>,
        device: &Device,
        model: (&Arc<Plan>, Numerics),
        config: &Arc<TrainerConfig>,
        master: &[Vec<f32>],
    ) -> Self {
        let (plan, num) = model;
        let trains = config.update == Update::Adamw;
        let units = ShardedUnits::new(collective, device, num.dtype, master, trains);
        let (plan, config) = (Arc::clone(plan), Arc::clone(config));
        Self { device: device.clone(), plan, num, config, units, frozen: None }
    }

    pub(super) fn index(&self) -> usize {
        self.units.rank().index()
    }

    /// Whether it is the one that keeps what all ranks have gathered.
    fn is_first(&self) -> bool {
        self.index() == 0
    }

    pub(super) fn shape(&self) -> Shape<'_> {
        Shape { plan: &self.plan, num: &self.num, device: &self.device }
    }

    /// The weights that scoring uses.
    pub(super) fn supply(&self) -> Supply<'_> {
        let supply = Supply::of(&self.units);
        match self.config.faults.contains(&Fault::TrainerWeightUlp) {
            true => supply.with_ulp(&self.plan),
            false => supply,
        }
    }

    /// Keeps today's weights as the KL's reference.
    pub(super) fn freeze(&mut self) {
        self.frozen = Some(self.units.weights());
    }

    /// Every unit in the compute dtype; empty but on the first rank.
    pub(super) fn hand_over(&self) -> Result<Vec<Weights>, TrainerError> {
        let supply = Supply::of(&self.units);
        self.all_units(|unit| supply.gather(unit, None))
    }

    /// Every unit's f32 master weights on the host; empty but on the first rank.
    pub(super) fn master(&self) -> Result<Vec<Vec<f32>>, TrainerError> {
        let units = self.all_units(|unit| self.units.gather_master(unit))?;
        Ok(units.into_iter().map(Array::into_host).collect())
    }

    /// Of every tensor that scoring uses; empty but on the first rank.
    pub(super) fn fingerprints(&self) -> Result<Vec<u64>, TrainerError> {
        let supply = self.supply();
        let mut all = Vec::new();
        for (unit, spec) in self.plan.units.iter().enumerate() {
            let weights = supply.gather(unit, None)?;
            if self.is_first() {
                all.extend(spec.fingerprints(&weights));
            }
        }
        Ok(all)
    }

    /// Every unit one after another, as a forward that computes nothing.
    pub(super) fn gather_all(&self) -> Result<(), TrainerError> {
        let (supply, count) = (Supply::of(&self.units), self.plan.units.len());
        for unit in 0..count {
            supply.gather(unit, (unit + 1 < count).then_some(unit + 1))?;
        }
        self.device.wait();
        Ok(())
    }

    fn all_units<T>(
        &self,
        gather: impl Fn(usize) -> Result<T, TrainerError>,
    ) -> Result<Vec<T>, TrainerError> {
        let mut units = Vec::new();
        for unit in 0..self.plan.units.len() {
            let whole = gather(unit)?;
            if self.is_first() {
                units.push(whole);
            }
        }
        Ok(units)
    }

    /// Every completion token's log-probability, with the weights as they are. `pass` counts the
    /// passes of all ranks, which a planted fault draws from.
    pub(super) fn score(
        &self,
        sequences: &[Sequence],
        contract: &Contract,
        pass: u64,
    ) -> Result<Vec<SequenceScores>, TrainerError> {
        // No two draw the same.
        let pass = pass * self.units.world_size() as u64 + self.index() as u64;
        self.score_with(&self.supply(), sequences, contract, (&self.config.faults, pass))
    }

    /// By the frozen weights.
    pub(super) fn score_frozen(
        &self,
        sequences: &[Sequence],
        contract: &Contract,
    ) -> Result<Vec<SequenceScores>, TrainerError> {
        let frozen = self.frozen.as_ref().expect("the reference was frozen before");
        let supply = Supply::of_frozen(&self.units, frozen);
        self.score_with(&supply, sequences, contract, (&[], 0))
    }

    fn score_with(
        &self,
        units: &Supply<'_>,
        sequences: &[Sequence],
        contract: &Contract,
        (faults, pass): (&[Fault], u64),
    ) -> Result<Vec<SequenceScores>, TrainerError> {
        let (mut chunks, mut prompt_lens) = self.pack(sequences);
        let pad = self.plan.config.pad_token_id.unwrap_or(TokenId::new(0));
        planted::plant(faults, pass, pad, &self.device, &mut chunks, &mut prompt_lens);
        let root = pass::forward(self.shape(), units, &mut chunks, false, None)?;
        let shape = self.shape();
        let scored: Vec<Vec<Scored>> = self.device.map(&mut chunks, |_, chunk| {
            let targets = head::targets(chunk, &prompt_lens);
            let mut scored = head::log_probs(shape, &root, chunk, &targets, contract);
            if faults.contains(&Fault::BatchDependentReduction) {
                planted::sum_by_batch(shape, &root, chunk, &targets, contract, &mut scored);
            }
            scored
        });
        let mut flat = scored.into_iter().flatten();
        let of_sequence = |sequence: &Sequence| {
            let mut scores = SequenceScores::default();
            for _ in sequence.prompt_len..sequence.tokens.len() {
                let one = flat.next().expect("one score a completion token");
                scores.contract.push(one.contract);
                scores.ratio.push(one.ratio);
            }
            if faults.contains(&Fault::ShiftedLogprobs) && !scores.contract.is_empty() {
                scores.contract.rotate_left(1);
            }
            scores
        };
        Ok(sequences.iter().map(of_sequence).collect())
    }

    pub(super) fn pack(&self, sequences: &[Sequence]) -> (Vec<Chunk>, Vec<usize>) {
        let tokens: Vec<&[TokenId]> = sequences.iter().map(|s| s.tokens.as_slice()).collect();
        let chunks = pass::pack(&self.device, &tokens, self.config.max_tokens_per_chunk as usize);
        (chunks, sequences.iter().map(|sequence| sequence.prompt_len).collect())
    }

    /// One update, counted from 1. Returns this rank's terms of the loss, and the gradient's norm.
    pub(super) fn learn(
        &mut self,
        batch: &Minibatch<'_>,
        (options, step): (&adamw::Options, u64),
    ) -> Result<(grpo::Loss, f64), TrainerError> {
        let Minibatch { experiences, reference, temperature, counts } = *batch;
        let sequences: Vec<Sequence> = experiences.iter().map(|e| e.sequence.clone()).collect();
        let mut loss = grpo::Loss::new(grpo::Options::from(&*self.config), counts)?;
        let gradient = self.gradient(&sequences, temperature, |chunk, new| {
            loss.add(&GrpoChunk::new(chunk, experiences, reference, new).borrow())
        })?;
        Ok((loss, self.units.update(&self.plan.units, options, step, &gradient)?))
    }

    /// One supervised update, counted from 1. Returns this rank's part of the loss before it.
    pub(super) fn warm_step(
        &mut self,
        sequences: &[Sequence],
        tokens: usize,
        (options, step): (&adamw::Options, u64),
    ) -> Result<f64, TrainerError> {
        let (loss, gradient) = self.supervised_gradient(sequences, tokens)?;
        self.units.update(&self.plan.units, options, step, &gradient)?;
        Ok(loss)
    }

    /// This rank's part of the loss, and every tensor's gradient norm by its name, which the first
    /// rank alone has.
    pub(super) fn supervised_grad_norms(
        &self,
        sequences: &[Sequence],
        tokens: usize,
    ) -> Result<(f64, Vec<(String, f64)>), TrainerError> {
        let (loss, gradient) = self.supervised_gradient(sequences, tokens)?;
        let units = self.all_units(|unit| self.units.gather_f32(unit, &gradient[unit]))?;
        let of_unit = |(spec, flat): (&crate::model::UnitSpec, Array)| {
            let flat = flat.into_host();
            let parts = spec.tensors.iter().zip(spec.parts(&flat));
            parts
                .map(|(tensor, part)| (tensor.name.clone(), adamw::squared_norm(part).sqrt()))
                .collect::<Vec<_>>()
        };
        Ok((loss, self.plan.units.iter().zip(units).flat_map(of_unit).collect()))
    }

    /// Cross entropy of the completions' tokens in nats and its gradient, over `tokens`, those of
    /// all ranks.
    fn supervised_gradient(
        &self,
        sequences: &[Sequence],
        tokens: usize,
    ) -> Result<(f64, Gradient), TrainerError> {
        let mut loss = 0.0;
        let gradient = self.gradient(sequences, 1.0, |_, new| {
            loss -= new.iter().sum::<f64>();
            Ok(vec![-1.0 / tokens as f64; new.len()])
        })?;
        Ok((loss / tokens as f64, gradient))
    }

    /// Forward, then `loss` chunk by chunk in order (log-probabilities in, their gradient out),
    /// then, where no rank's loss has refused, backward.
    fn gradient(
        &self,
        sequences: &[Sequence],
        temperature: f32,
        mut loss: impl FnMut(&Chunk, &[f64]) -> Result<Vec<f64>, TrainerError>,
    ) -> Result<Gradient, TrainerError> {
        let (shape, plain) = (self.shape(), Contract { temperature, ..Contract::PLAIN });
        let (mut chunks, prompt_lens) = self.pack(sequences);
        let root = pass::forward(shape, &Supply::of(&self.units), &mut chunks, true, None)?;
        let targets: Vec<Vec<Target>> =
            chunks.iter().map(|chunk| head::targets(chunk, &prompt_lens)).collect();
        let new: Vec<Vec<f64>> = self.device.map(&mut chunks, |i, chunk| {
            let scored = head::log_probs(shape, &root, chunk, &targets[i], &plain);
            scored.iter().map(|one| f64::from(one.ratio.get())).collect()
        });
        drop(root);
        let of_chunk = |(chunk, new): (&Chunk, &Vec<f64>)| {
            Ok(loss(chunk, new)?.into_iter().map(|d| d as f32).collect())
        };
        let upstream = chunks.iter().zip(&new).map(of_chunk).collect();
        let upstream: Vec<Vec<f32>> = self.units.agree(upstream)?;
        pass::backward(shape, &self.units, &chunks, &|root, index, chunk, grads| {
            let (targets, up) = (&targets[index], &upstream[index]);
            head::backward(shape, root, chunk, targets, up, temperature, grads)
        })
    }
}
