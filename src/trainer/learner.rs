//! The trainer: scores sequences before any update, and updates.

mod rows;
mod snapshot;

use std::cell::Cell;

use super::collective::SharedMemory;
use super::head::{self, Scored, Target};
use super::minibatch::GrpoChunk;
use super::pass::{self, Chunk, Gradient, Shape, Units};
use super::units::ShardedUnits;
use super::{
    adamw, grpo, planted, Experience, Inspection, Sequence, SequenceScores, TrainerError,
    UpdateReport, WeightSet,
};
pub use rows::Prediction;
pub use snapshot::TrainerSnapshot;

use crate::base::{Contract, TokenId, WeightVersion};
use crate::config::{Fault, TrainerConfig, Update};
use crate::model::{Block, Numerics, Plan};
use crate::ops::array::{Array, Device};
use crate::ops::weights::Weights;

/// One rank of the trainer.
pub struct Trainer {
    device: Device,
    plan: Plan,
    num: Numerics,
    config: TrainerConfig,
    units: ShardedUnits,
    /// The start weights, where a KL is asked for.
    frozen: Option<Frozen>,
    /// Optimizer updates of the whole run, the warm start's included.
    version: WeightVersion,
    /// Scoring passes so far, which a planted fault draws from.
    passes: Cell<u64>,
}

struct Frozen(Vec<Weights>);

impl Units for Frozen {
    fn gather(&self, index: usize) -> Result<Weights, TrainerError> {
        Ok(self.0[index].clone())
    }
}

/// The sharded weights as scoring sees them with the planted fault.
struct Faulty<'a>(&'a Trainer);

impl Units for Faulty<'_> {
    fn gather(&self, index: usize) -> Result<Weights, TrainerError> {
        let unit = self.0.units.gather(index)?;
        // One element of the final norm is the next value of its dtype.
        let first = self.0.plan.units[0].tensors[0].len();
        Ok(if index == 0 { unit.with_ulp(first) } else { unit })
    }
}

impl Trainer {
    /// One rank that is the whole world, over a model's f32 master weights.
    #[must_use]
    pub fn new(
        device: &Device,
        plan: Plan,
        num: Numerics,
        config: TrainerConfig,
        master: &[Vec<f32>],
    ) -> Self {
        let device = device.clone();
        let world = SharedMemory::world(1).pop().expect("a world of one rank");
        let trains = config.update == Update::Adamw;
        let weights = (&plan, master);
        let units = ShardedUnits::new(Box::new(world), &device, num.dtype, weights, trains);
        let (version, passes) = (WeightVersion::new(0), Cell::new(0));
        Self { device, plan, num, config, units, frozen: None, version, passes }
    }

    fn shape(&self) -> Shape<'_> {
        Shape { plan: &self.plan, num: &self.num, device: &self.device }
    }

    #[must_use]
    pub fn version(&self) -> WeightVersion {
        self.version
    }

    /// Keeps today's weights as the KL's reference.
    ///
    /// # Errors
    /// [`TrainerError::RankLeft`].
    pub fn freeze_reference(&mut self) -> Result<(), TrainerError> {
        self.frozen = Some(Frozen(self.hand_over()?.units));
        Ok(())
    }

    /// Every unit in the compute dtype, as the engine takes them: on a device, without a copy where
    /// nothing changes them.
    ///
    /// # Errors
    /// [`TrainerError::RankLeft`].
    pub fn hand_over(&self) -> Result<WeightSet, TrainerError> {
        let gather = |index| self.units.gather(index);
        let units = (0..self.plan.units.len()).map(gather).collect::<Result<_, _>>()?;
        Ok(WeightSet { version: self.version, units })
    }

    /// Each unit's whole f32 master weights; of a trainer that only scores, as it scores with them.
    ///
    /// # Errors
    /// [`TrainerError::RankLeft`].
    pub fn master(&self) -> Result<Vec<Vec<f32>>, TrainerError> {
        (0..self.plan.units.len()).map(|index| self.units.copy_master(index)).collect()
    }

    /// The fingerprint of every tensor that scoring uses, in the plan's order.
    ///
    /// # Errors
    /// [`TrainerError::RankLeft`].
    pub fn fingerprints(&self) -> Result<Vec<u64>, TrainerError> {
        let mut all = self.units.fingerprints(&self.plan)?;
        if self.has_fault() {
            let root = &self.plan.units[0];
            let changed = root.fingerprints(&Faulty(self).gather(0)?);
            all.splice(..changed.len(), changed);
        }
        Ok(all)
    }

    fn has_fault(&self) -> bool {
        self.config.faults.contains(&Fault::TrainerWeightUlp)
    }

    fn with_units<T>(
        &self,
        body: impl FnOnce(&dyn Units) -> Result<T, TrainerError>,
    ) -> Result<T, TrainerError> {
        if self.has_fault() {
            body(&Faulty(self))
        } else {
            body(&self.units)
        }
    }

    /// The `trainer` leg: every completion token's log-probability, with the weights as they are.
    ///
    /// # Errors
    /// [`TrainerError::RankLeft`].
    pub fn score(
        &self,
        sequences: &[Sequence],
        contract: &Contract,
    ) -> Result<Vec<SequenceScores>, TrainerError> {
        self.passes.set(self.passes.get() + 1);
        self.with_units(|units| self.score_with(units, sequences, contract, &self.config.faults))
    }

    fn score_with(
        &self,
        units: &dyn Units,
        sequences: &[Sequence],
        contract: &Contract,
        faults: &[Fault],
    ) -> Result<Vec<SequenceScores>, TrainerError> {
        let (mut chunks, mut prompt_lens) = self.pack(sequences);
        let pad = self.plan.config.pad_token_id.unwrap_or(TokenId::new(0));
        let pass = self.passes.get();
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

    /// Every hidden state and logit of whole sequences, for comparison with other implementations.
    ///
    /// # Errors
    /// [`TrainerError::RankLeft`].
    pub fn inspect(&self, sequences: &[Sequence]) -> Result<Vec<Inspection>, TrainerError> {
        let (mut chunks, _) = self.pack(sequences);
        let (h, v) = (self.plan.config.hidden_size, self.plan.config.vocab_size);
        let mut inspections = vec![Inspection::default(); sequences.len()];
        let mut keep = |chunk: &Chunk, x_th: &[f32]| {
            for (span, &sequence) in chunk.spans.iter().zip(&chunk.sequences) {
                inspections[sequence].hidden.push(x_th[span.floats(h)].to_vec());
            }
        };
        let mut routers = vec![Vec::new(); sequences.len()];
        let mut observe = |block: &Block, chunks: &[Chunk]| {
            for chunk in chunks {
                keep(chunk, &chunk.x.settled().to_host());
                let logits_te = block.router_logits(&self.num, &chunk.spans, chunk.x.settled());
                let Some(logits_te) = logits_te else { continue };
                let logits_te = logits_te.into_host();
                let experts = logits_te.len() / chunk.tokens.len();
                for (span, &sequence) in chunk.spans.iter().zip(&chunk.sequences) {
                    routers[sequence].push(logits_te[span.floats(experts)].to_vec());
                }
            }
        };
        let root = self.with_units(|units| {
            pass::forward(self.shape(), units, &mut chunks, false, Some(&mut observe))
        })?;
        for chunk in &chunks {
            keep(chunk, &root.norm(&self.num, chunk.x.settled()).into_host());
        }
        for (inspection, router) in inspections.iter_mut().zip(routers) {
            inspection.router_logits = router;
        }
        for chunk in &chunks {
            let logits_tv = root.logits(&self.num, chunk.x.settled()).into_host();
            for (span, &sequence) in chunk.spans.iter().zip(&chunk.sequences) {
                inspections[sequence].logits = logits_tv[span.floats(v)].to_vec();
            }
        }
        Ok(inspections)
    }

    fn pack(&self, sequences: &[Sequence]) -> (Vec<Chunk>, Vec<usize>) {
        for sequence in sequences {
            let (prompt, all) = (sequence.prompt_len, sequence.tokens.len());
            assert!(0 < prompt && prompt <= all, "a prompt of {prompt} in {all} tokens");
        }
        let tokens: Vec<&[TokenId]> = sequences.iter().map(|s| s.tokens.as_slice()).collect();
        let chunks = pass::pack(&self.device, &tokens, self.config.max_tokens_per_chunk as usize);
        (chunks, sequences.iter().map(|sequence| sequence.prompt_len).collect())
    }

    /// One step of GRPO: `updates_per_step` minibatches, in order.
    ///
    /// # Errors
    /// A loss or gradient that is not finite or not defined; no weight has then been changed by
    /// the minibatch it happened in.
    pub fn update(
        &mut self,
        experiences: &[Experience],
        contract: &Contract,
    ) -> Result<Vec<UpdateReport>, TrainerError> {
        let reference = self.reference_scores(experiences, contract)?;
        let size = experiences.len().div_ceil(self.config.updates_per_step as usize).max(1);
        let parts = experiences.chunks(size).enumerate();
        let mut reports = Vec::new();
        for (i, part) in parts {
            let reference = reference.as_ref().map(|all| &all[i * size..][..part.len()]);
            reports.push(self.update_minibatch(part, reference, contract)?);
        }
        Ok(reports)
    }

    /// By the frozen weights, where there are any.
    fn reference_scores(
        &self,
        experiences: &[Experience],
        contract: &Contract,
    ) -> Result<Option<Vec<SequenceScores>>, TrainerError> {
        let Some(frozen) = &self.frozen else { return Ok(None) };
        let sequences: Vec<Sequence> = experiences.iter().map(|e| e.sequence.clone()).collect();
        self.score_with(frozen, &sequences, contract, &[]).map(Some)
    }

    fn update_minibatch(
        &mut self,
        experiences: &[Experience],
        reference: Option<&[SequenceScores]>,
        contract: &Contract,
    ) -> Result<UpdateReport, TrainerError> {
        let temperature = if contract.is_greedy() { 1.0 } else { contract.temperature };
        let sequences: Vec<Sequence> = experiences.iter().map(|e| e.sequence.clone()).collect();
        let mut counts = grpo::Counts::default();
        experiences.iter().for_each(|experience| counts.add(&experience.mask));
        let mut loss = grpo::Loss::new(grpo::Options::from(&self.config), counts)?;
        let gradient = self.gradient(&sequences, temperature, |chunk, new| {
            loss.add(&GrpoChunk::new(chunk, experiences, reference, new).borrow())
        })?;
        let options = adamw::Options::from(&self.config);
        let grad_norm = self.apply(&options, gradient)?;
        let learning_rate = options.rate(self.units.updates);
        Ok(UpdateReport { terms: loss.finish(), grad_norm, learning_rate })
    }

    fn apply(&mut self, options: &adamw::Options, gradient: Gradient) -> Result<f64, TrainerError> {
        let norm = self.units.update(&self.plan, options, gradient)?;
        self.version = WeightVersion::new(self.version.get() + 1);
        Ok(norm)
    }

    /// Forward, then `loss` chunk by chunk in order (log-probabilities in, their gradient out),
    /// then backward.
    fn gradient(
        &self,
        sequences: &[Sequence],
        temperature: f32,
        mut loss: impl FnMut(&Chunk, &[f64]) -> Result<Vec<f64>, TrainerError>,
    ) -> Result<Gradient, TrainerError> {
        let (shape, plain) = (self.shape(), Contract { temperature, ..Contract::PLAIN });
        let (mut chunks, prompt_lens) = self.pack(sequences);
        let root = pass::forward(shape, &self.units, &mut chunks, true, None)?;
        let targets: Vec<Vec<Target>> =
            chunks.iter().map(|chunk| head::targets(chunk, &prompt_lens)).collect();
        let new: Vec<Vec<f64>> = self.device.map(&mut chunks, |i, chunk| {
            let scored = head::log_probs(shape, &root, chunk, &targets[i], &plain);
            scored.iter().map(|one| f64::from(one.ratio.get())).collect()
        });
        let mut upstream: Vec<Vec<f32>> = Vec::with_capacity(chunks.len());
        for (chunk, new) in chunks.iter().zip(&new) {
            upstream.push(loss(chunk, new)?.into_iter().map(|d| d as f32).collect());
        }
        pass::backward(shape, &self.units, &chunks, &|root, index, chunk, grads| {
            let (targets, up) = (&targets[index], &upstream[index]);
            head::backward(shape, root, chunk, targets, up, temperature, grads)
        })
    }

    /// Mean cross entropy of the completions' tokens, in nats, and its gradient.
    fn supervised_gradient(&self, sequences: &[Sequence]) -> Result<(f64, Gradient), TrainerError> {
        let tokens: usize = sequences.iter().map(|s| s.tokens.len() - s.prompt_len).sum();
        if tokens == 0 {
            return Err(TrainerError::NoTokens);
        }
        let mut loss = 0.0;
        let gradient = self.gradient(sequences, 1.0, |_, new| {
            loss -= new.iter().sum::<f64>();
            Ok(vec![-1.0 / tokens as f64; new.len()])
        })?;
        Ok((loss / tokens as f64, gradient))
    }

    /// The loss and every tensor's gradient norm by its Hugging Face name, without an update.
    ///
    /// # Errors
    /// [`TrainerError::NoTokens`].
    pub fn supervised_grad_norms(
        &self,
        sequences: &[Sequence],
    ) -> Result<(f64, Vec<(String, f64)>), TrainerError> {
        let (loss, gradient) = self.supervised_gradient(sequences)?;
        let of_unit = |(spec, flat): (&crate::model::UnitSpec, &Array)| {
            let flat = flat.to_host();
            let parts = spec.tensors.iter().zip(spec.parts(&flat));
            parts
                .map(|(tensor, part)| (tensor.name.clone(), adamw::squared_norm(part).sqrt()))
                .collect::<Vec<_>>()
        };
        Ok((loss, self.plan.units.iter().zip(&gradient).flat_map(of_unit).collect()))
    }

    /// One supervised step on the completions of `sequences`; returns the loss before it.
    ///
    /// # Errors
    /// As [`Self::update`].
    pub fn warm_step(&mut self, sequences: &[Sequence]) -> Result<f64, TrainerError> {
        let (loss, gradient) = self.supervised_gradient(sequences)?;
        let learning_rate = self.config.warm_start.learning_rate;
        let options = adamw::Options { learning_rate, ..adamw::Options::from(&self.config) };
        self.apply(&options, gradient)?;
        Ok(loss)
    }

    /// Ends the warm start: the loop begins with a fresh optimizer.
    pub fn end_warm_start(&mut self) {
        self.units.reset_optimizer();
    }
}
