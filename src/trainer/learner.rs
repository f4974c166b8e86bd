//! The trainer: scores sequences before any update, and updates.
//!
//! It deals the sequences to its ranks, sends each the same call, and puts their results together,
//! in the caller's order and, where they are sums, in rank order.

mod snapshot;

use std::cell::{Cell, OnceCell};
use std::sync::Arc;
use std::time::Duration;

use super::collective::{Collective, SharedMemory, PATIENCE};
use super::deal::Deal;
pub use super::worker::Prediction;
use super::worker::{Minibatch, Worker};
use super::world::World;
use super::{
    adamw, grpo, Experience, Inspection, Sequence, SequenceScores, TrainerError, UpdateReport,
    WeightSet,
};
pub use snapshot::TrainerSnapshot;

use crate::base::{Contract, WeightVersion};
use crate::config::{Dtype, TrainerConfig, Update};
use crate::model::{Numerics, Plan};
use crate::ops::array::Device;
use crate::rollout::Routes;

/// A model that is sharded over ranks.
pub struct Trainer {
    plan: Arc<Plan>,
    dtype: Dtype,
    config: Arc<TrainerConfig>,
    world: World,
    /// Whether there are start weights, for a KL.
    is_frozen: bool,
    /// Optimizer updates of the whole run, the warm start's included.
    version: WeightVersion,
    /// Of the optimizer, which a warm start's end sets back to 0.
    updates: u64,
    /// Scoring passes so far, which a planted fault draws from.
    passes: Cell<u64>,
    /// Of weights that nothing changes.
    fingerprints: OnceCell<Vec<u64>>,
}

impl Trainer {
    /// `config.ranks` ranks that share one device, over a model's f32 master weights.
    ///
    /// # Errors
    /// [`TrainerError::NoThread`], where several are more threads than the machine starts.
    pub fn new(
        device: &Device,
        plan: Plan,
        num: Numerics,
        config: TrainerConfig,
        master: &[Vec<f32>],
    ) -> Result<Self, TrainerError> {
        let ends = SharedMemory::world(config.ranks as usize).into_iter();
        let ends = ends.map(|end| (Box::new(end) as Box<dyn Collective>, device.clone()));
        Self::over(ends.collect(), (plan, num), config, master, PATIENCE)
    }

    /// The same over several devices, which are different GPUs: a rank each, in order. The weights
    /// of [`Self::hand_over`] are left on the first.
    ///
    /// # Errors
    /// [`TrainerError::NoLink`], where NCCL is missing or refuses; as [`Self::new`].
    #[cfg(feature = "cuda")]
    pub fn over_gpus(
        gpus: &[Device],
        plan: Plan,
        num: Numerics,
        config: TrainerConfig,
        master: &[Vec<f32>],
    ) -> Result<Self, TrainerError> {
        assert_eq!(gpus.len(), config.ranks as usize, "a GPU a rank");
        let ends = super::collective::Nccl::world(gpus)?.into_iter().zip(gpus);
        let ends = ends.map(|(end, gpu)| (Box::new(end) as Box<dyn Collective>, gpu.clone()));
        Self::over(ends.collect(), (plan, num), config, master, PATIENCE)
    }

    fn over(
        ends: Vec<(Box<dyn Collective>, Device)>,
        (plan, num): (Plan, Numerics),
        config: TrainerConfig,
        master: &[Vec<f32>],
        patience: Duration,
    ) -> Result<Self, TrainerError> {
        let (plan, config) = (Arc::new(plan), Arc::new(config));
        let worker = |(end, device): (Box<dyn Collective>, Device)| {
            Worker::new(end, &device, (&plan, num), &config, master)
        };
        let world = World::new(ends.into_iter().map(worker).collect(), patience)?;
        Ok(Self {
            plan,
            dtype: num.dtype,
            config,
            world,
            is_frozen: false,
            version: WeightVersion::new(0),
            updates: 0,
            passes: Cell::new(0),
            fingerprints: OnceCell::new(),
        })
    }

    #[must_use]
    pub fn version(&self) -> WeightVersion {
        self.version
    }

    /// Keeps today's weights as the KL's reference.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn freeze_reference(&mut self) -> Result<(), TrainerError> {
        self.is_frozen = true;
        self.on_all(Worker::freeze)
    }

    fn on_all(
        &mut self,
        work: impl Fn(&mut Worker) + Send + Sync + 'static,
    ) -> Result<(), TrainerError> {
        let done = self.world.each_mut(move |worker| {
            work(worker);
            Ok(())
        })?;
        assert_eq!(done.len(), self.world.size(), "every rank answers");
        Ok(())
    }

    /// Every unit in the compute dtype, as the engine takes them: on a device, without a copy where
    /// nothing changes them and one rank has all of them.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn hand_over(&self) -> Result<WeightSet, TrainerError> {
        Ok(WeightSet { version: self.version, units: self.first(Worker::hand_over)? })
    }

    /// Gathers every unit on every rank, as a pass does, and keeps none.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn gather_all(&self) -> Result<(), TrainerError> {
        self.first(Worker::gather_all)
    }

    /// Each unit's whole f32 master weights; of a trainer that only scores, as it scores with them.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn master(&self) -> Result<Vec<Vec<f32>>, TrainerError> {
        self.first(Worker::master)
    }

    /// The fingerprint of every tensor that scoring uses, in the plan's order.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn fingerprints(&self) -> Result<Vec<u64>, TrainerError> {
        if let Some(known) = self.fingerprints.get() {
            return Ok(known.clone());
        }
        let all = self.first(Worker::fingerprints)?;
        if self.config.update == Update::None {
            self.fingerprints.get_or_init(|| all.clone());
        }
        Ok(all)
    }

    /// What the first rank has gathered.
    fn first<T: Send + 'static>(
        &self,
        work: impl Fn(&Worker) -> Result<T, TrainerError> + Send + Sync + 'static,
    ) -> Result<T, TrainerError> {
        Ok(self.world.each(work)?.swap_remove(0))
    }

    fn deal<'a>(&self, sequences: impl IntoIterator<Item = &'a Sequence>) -> Deal {
        let len = |sequence: &Sequence| {
            let (prompt, all) = (sequence.prompt_len, sequence.tokens.len());
            assert!(0 < prompt && prompt <= all, "a prompt of {prompt} in {all} tokens");
            all
        };
        Deal::new(sequences.into_iter().map(len), self.world.size())
    }

    /// What the ranks make of the sequences that each was dealt, in the caller's order.
    fn dealt<T: Send + 'static>(
        &self,
        sequences: &[Sequence],
        work: impl Fn(&Worker, &[Sequence]) -> Result<Vec<T>, TrainerError> + Send + Sync + 'static,
    ) -> Result<Vec<T>, TrainerError> {
        let deal = self.deal(sequences);
        let parts = deal.parts(sequences);
        let done = self.world.each(move |worker| work(worker, &parts[worker.index()]))?;
        Ok(deal.gathered(done))
    }

    /// The `trainer` leg: every completion token's log-probability, with the weights as they are.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn score(
        &self,
        sequences: &[Sequence],
        contract: &Contract,
    ) -> Result<Vec<SequenceScores>, TrainerError> {
        self.passes.set(self.passes.get() + 1);
        let (pass, contract) = (self.passes.get(), *contract);
        self.dealt(sequences, move |worker, own| worker.score(own, &contract, pass))
    }

    /// What `see` makes of each completion token, for each sequence. It is called from several
    /// threads; of the logits no more than a few rows a thread exist at once.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn map_logits<T: Send + 'static>(
        &self,
        sequences: &[Sequence],
        see: impl Fn(Prediction<'_>) -> T + Send + Sync + 'static,
    ) -> Result<Vec<Vec<T>>, TrainerError> {
        let places = self.deal(sequences).of_ranks().to_vec();
        self.dealt(sequences, move |worker, own| {
            let places = &places[worker.index()];
            worker
                .map_logits(own, |seen| see(Prediction { sequence: places[seen.sequence], ..seen }))
        })
    }

    /// Every hidden state and logit of whole sequences, for comparison with other implementations.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn inspect(&self, sequences: &[Sequence]) -> Result<Vec<Inspection>, TrainerError> {
        self.dealt(sequences, Worker::inspect)
    }

    /// Where the model's routers send every token of the sequences; of a model without experts,
    /// nowhere.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn routes(&self, sequences: &[Sequence]) -> Result<Vec<Routes>, TrainerError> {
        self.dealt(sequences, Worker::routes)
    }

    /// `[sequences][parts][tokens]`: digests of the residual stream after each of [`Plan::parts`].
    ///
    /// # Errors
    /// Those of a rank.
    pub fn streams(&self, sequences: &[Sequence]) -> Result<Vec<Vec<Vec<u64>>>, TrainerError> {
        self.dealt(sequences, Worker::streams)
    }

    /// Which sequences scoring takes together, in order: indices into the list.
    #[must_use]
    pub fn packs(&self, sequences: &[Sequence]) -> Vec<Vec<usize>> {
        let deal = self.deal(sequences);
        let most = self.config.max_tokens_per_chunk as usize;
        let of_rank = |own: &Vec<usize>| {
            let lens = own.iter().map(|&index| sequences[index].tokens.len());
            super::pass::packs(lens, most)
                .into_iter()
                .map(|chunk| chunk.iter().map(|&at| own[at]).collect())
                .collect::<Vec<Vec<usize>>>()
        };
        deal.of_ranks().iter().flat_map(of_rank).collect()
    }

    /// One step of GRPO: `updates_per_step` minibatches, in order.
    ///
    /// # Errors
    /// A loss or gradient that is not finite or not defined; no weight of any rank has then been
    /// changed by the minibatch it happened in. Those of a rank.
    pub fn update(
        &mut self,
        experiences: &[Experience],
        contract: &Contract,
    ) -> Result<Vec<UpdateReport>, TrainerError> {
        let reference = self.reference_scores(experiences, contract)?;
        let size = experiences.len().div_ceil(self.config.updates_per_step as usize).max(1);
        let mut reports = Vec::new();
        for (i, part) in experiences.chunks(size).enumerate() {
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
        if !self.is_frozen {
            return Ok(None);
        }
        let sequences: Vec<Sequence> = experiences.iter().map(|e| e.sequence.clone()).collect();
        let contract = *contract;
        self.dealt(&sequences, move |worker, own| worker.score_frozen(own, &contract)).map(Some)
    }

    fn update_minibatch(
        &mut self,
        experiences: &[Experience],
        reference: Option<&[SequenceScores]>,
        contract: &Contract,
    ) -> Result<UpdateReport, TrainerError> {
        let temperature = if contract.is_greedy() { 1.0 } else { contract.temperature };
        let mut counts = grpo::Counts::default();
        experiences.iter().for_each(|experience| counts.add(&experience.mask));
        if counts.tokens == 0 {
            return Err(TrainerError::NoTokens);
        }
        let deal = self.deal(experiences.iter().map(|experience| &experience.sequence));
        let parts = deal.parts(experiences);
        let references = reference.map(|all| deal.parts(all));
        let (options, step) = (adamw::Options::from(&*self.config), self.updates + 1);
        let done = self.world.each_mut(move |worker| {
            let rank = worker.index();
            let reference = references.as_ref().map(|all| &all[rank][..]);
            let experiences = &parts[rank];
            let batch = Minibatch { experiences, reference, temperature, counts };
            worker.learn(&batch, (&options, step))
        })?;
        self.count_update();
        let (losses, norms): (Vec<_>, Vec<_>) = done.into_iter().unzip();
        let loss = losses.into_iter().reduce(grpo::Loss::and).expect("there is a rank");
        let (grad_norm, learning_rate) = (norms[0], options.rate(step));
        Ok(UpdateReport { terms: loss.finish(), grad_norm, learning_rate })
    }

    fn count_update(&mut self) {
        self.updates += 1;
        self.version = WeightVersion::new(self.version.get() + 1);
    }

    /// The loss and every tensor's gradient norm by its Hugging Face name, without an update.
    ///
    /// # Errors
    /// [`TrainerError::NoTokens`], and those of a rank.
    pub fn supervised_grad_norms(
        &self,
        sequences: &[Sequence],
    ) -> Result<(f64, Vec<(String, f64)>), TrainerError> {
        let (tokens, parts) = self.supervised(sequences)?;
        let done = self
            .world
            .each(move |worker| worker.supervised_grad_norms(&parts[worker.index()], tokens))?;
        let (losses, mut norms): (Vec<f64>, Vec<_>) = done.into_iter().unzip();
        Ok((losses.iter().sum(), norms.swap_remove(0)))
    }

    /// One supervised step on the completions of `sequences`; returns the loss before it, the mean
    /// cross entropy in nats.
    ///
    /// # Errors
    /// As [`Self::update`].
    pub fn warm_step(&mut self, sequences: &[Sequence]) -> Result<f64, TrainerError> {
        let (tokens, parts) = self.supervised(sequences)?;
        let learning_rate = self.config.warm_start.learning_rate;
        let options = adamw::Options { learning_rate, ..adamw::Options::from(&*self.config) };
        let step = self.updates + 1;
        let losses = self.world.each_mut(move |worker| {
            worker.warm_step(&parts[worker.index()], tokens, (&options, step))
        })?;
        self.count_update();
        Ok(losses.iter().sum())
    }

    /// Completion tokens in all, and each rank's sequences.
    fn supervised(
        &self,
        sequences: &[Sequence],
    ) -> Result<(usize, Vec<Vec<Sequence>>), TrainerError> {
        let parts = self.deal(sequences).parts(sequences);
        match sequences.iter().map(|s| s.tokens.len() - s.prompt_len).sum() {
            0 => Err(TrainerError::NoTokens),
            tokens => Ok((tokens, parts)),
        }
    }

    /// Ends the warm start: the loop begins with a fresh optimizer.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn end_warm_start(&mut self) -> Result<(), TrainerError> {
        self.updates = 0;
        self.on_all(|worker| worker.units.reset_optimizer())
    }
}

#[cfg(test)]
mod tests;
