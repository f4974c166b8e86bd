//! The engine as the loop sees it: weights in, completions out.
//!
//! One step is four verbs: schedule, build, run, update. Pool order, owners and bytes outlive the
//! step and every weight update.

mod snapshot;

use std::collections::HashMap;

use rayon::prelude::*;

use super::{
    BlockMemory, BlockPool, CacheSpec, Completion, EngineError, Feed, GenerationRequest, Layout,
    Limits, PersistentBatch, Phase, Runner, SampledToken, Scheduler, Scratch, Statistics,
    StepBatch,
};
use crate::base::{Contract, LogProb, Noise, Position, TokenId, WeightVersion};
use crate::config::{EngineConfig, Fault};
use crate::model::{combine_fingerprints, Model, Numerics, Plan, UnitBytes};
use crate::ops::pages::Pages;
use crate::ops::sampling::Sampler;

/// The embedded engine.
#[derive(Debug)]
pub struct Engine {
    plan: Plan,
    num: Numerics,
    config: EngineConfig,
    contract: Contract,
    noise: Noise,
    scheduler: Scheduler,
    batch: PersistentBatch,
    pages: Pages,
    weights: Option<Weights>,
}

/// What is loaded now.
#[derive(Debug)]
struct Weights {
    runner: Runner,
    version: WeightVersion,
    /// A tensor each, in the plan's order.
    fingerprints: Vec<u64>,
    fingerprint: u64,
}

impl Engine {
    /// An engine without weights, its pool zeroed and its free list in order.
    ///
    /// # Errors
    /// A layout that cannot be, a pool too small for one request or too large for this machine.
    pub fn new(
        plan: Plan,
        num: Numerics,
        config: EngineConfig,
        contract: Contract,
        seed: u64,
    ) -> Result<Self, EngineError> {
        let layout = layout(&plan, &num, &config)?;
        let num_blocks = layout.num_blocks(&block_memory(&plan, &num, &config))?;
        if !Pages::fit(layout.num_buffers, num_blocks, layout.page_bytes) {
            let bytes = layout.block_bytes() * u64::from(num_blocks);
            return Err(EngineError::PoolTooLarge { num_blocks, bytes });
        }
        let pages = Pages::new(layout.num_buffers, num_blocks, layout.page_bytes);
        let pool = BlockPool::new(num_blocks, config.free_list);
        Ok(Self {
            scheduler: Scheduler::new(Limits::from(&config), layout, pool),
            batch: PersistentBatch::new(config.batch_split, config.force_prefill),
            noise: Noise::new(seed),
            weights: None,
            plan,
            num,
            config,
            contract,
            pages,
        })
    }

    /// Takes new weights, between steps only. Pool and pages stay as they are.
    pub fn load(&mut self, version: WeightVersion, mut units: Vec<UnitBytes>) {
        assert!(!self.scheduler.has_unfinished(), "weights change between steps, not within one");
        if self.config.faults.contains(&Fault::EngineWeightUlp) {
            units[0].bump_ulp(self.plan.units[0].tensors[0].len());
        }
        let of_unit = |(unit, spec): (&UnitBytes, &crate::model::UnitSpec)| {
            unit.fingerprints(spec).collect::<Vec<_>>()
        };
        let fingerprints: Vec<u64> = units.iter().zip(&self.plan.units).flat_map(of_unit).collect();
        let model = Model::load(&self.plan, &units);
        let bits = self.config.state_index_bits;
        let layout = self.scheduler.layout();
        let runner = Runner::new(self.num, layout, model, bits);
        let fingerprint = combine_fingerprints(&fingerprints);
        self.weights = Some(Weights { runner, version, fingerprints, fingerprint });
    }

    fn weights(&self) -> &Weights {
        self.weights.as_ref().expect("weights are loaded before the first step")
    }

    /// Runs requests to their ends; completions come back in the order of the requests.
    ///
    /// # Errors
    /// A request that could never run; nothing has been generated then.
    pub fn generate(
        &mut self,
        requests: Vec<GenerationRequest>,
    ) -> Result<Vec<Completion>, EngineError> {
        let ids = self.scheduler.add_all(requests)?;
        let order: HashMap<_, _> = ids.iter().zip(0..).map(|(&id, index)| (id, index)).collect();
        let mut done: Vec<Completion> = Vec::with_capacity(ids.len());
        while self.scheduler.has_unfinished() {
            done.extend(self.step());
        }
        done.sort_by_key(|completion| order[&completion.id]);
        assert_eq!(done.len(), ids.len(), "one completion a request");
        Ok(done)
    }

    /// One engine step; returns the completions that it finished.
    pub fn step(&mut self) -> Vec<Completion> {
        let Some(plan) = self.scheduler.schedule() else { return Vec::new() };
        let batch = self.batch.build(&plan, &self.scheduler);
        self.scheduler.note_rows(&plan, &batch.rows);
        let weights = self.weights.as_ref().expect("weights are loaded before the first step");
        let x_th = weights.runner.forward(&mut self.pages, &batch, &mut |_| {});
        let sampled = sample(&weights.runner, &self.noise, &self.contract, &batch, &x_th);
        let finished = self.scheduler.update(&plan, &sampled);
        let complete = |one: super::Finished| {
            one.into_completion(self.contract, weights.version, weights.fingerprint)
        };
        finished.into_iter().map(complete).collect()
    }

    /// The `prefill` leg: each sequence's tokens from `prompt_len` on, scored by one forced prefill
    /// in a private pool.
    #[must_use]
    pub fn score_prefill<'a>(&self, sequences: &[(&'a [TokenId], usize)]) -> Vec<Vec<LogProb>> {
        let runner = &self.weights().runner;
        let mut scores = Vec::with_capacity(sequences.len());
        for group in sequences.chunks(rayon::current_num_threads()) {
            let feed = |(sequence, &(tokens, _)): (usize, &(&'a [TokenId], usize))| Feed {
                sequence,
                phase: Phase::Prefill,
                tokens,
            };
            let feeds: Vec<_> = group.iter().enumerate().map(feed).collect();
            let x_th = self.scratch(group.len()).feed(runner, &feeds, &mut |_| {});
            let width = x_th.len() / group.iter().map(|(tokens, _)| tokens.len()).sum::<usize>();
            let mut rest = x_th.as_slice();
            let rows = group.iter().map(|(tokens, _)| {
                let (mine, after) = rest.split_at(tokens.len() * width);
                rest = after;
                mine
            });
            let work: Vec<_> = group.iter().zip(rows).collect();
            let score = |(&(tokens, prompt_len), x_th): &(&(&[TokenId], usize), &[f32])| {
                score_targets(runner, &self.contract, tokens, prompt_len, x_th)
            };
            scores.par_extend(work.par_iter().map(score));
        }
        scores
    }

    /// A private pool with room for `sequences`, to feed [`Self::runner`] with.
    #[must_use]
    pub fn scratch(&self, sequences: usize) -> Scratch {
        Scratch::new(self.scheduler.layout(), sequences)
    }

    /// The loaded model.
    #[must_use]
    pub fn runner(&self) -> &Runner {
        &self.weights().runner
    }

    /// xxh3 of every loaded tensor, in the plan's order.
    #[must_use]
    pub fn fingerprints(&self) -> &[u64] {
        &self.weights().fingerprints
    }

    #[must_use]
    pub fn layout(&self) -> &Layout {
        self.scheduler.layout()
    }

    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        self.scheduler.pool()
    }

    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.scheduler.statistics()
    }
}

/// The layout of a model's cache under an engine's configuration.
///
/// # Errors
/// As [`Layout::new`].
pub fn layout(plan: &Plan, num: &Numerics, config: &EngineConfig) -> Result<Layout, EngineError> {
    let len = config.max_model_len;
    Layout::new(&CacheSpec::of_model(&plan.config, num.dtype, num.state_dtype, len))
}

/// What the number of blocks is made from.
#[must_use]
pub fn block_memory(plan: &Plan, num: &Numerics, config: &EngineConfig) -> BlockMemory {
    BlockMemory {
        device_memory: config.device_memory,
        gpu_memory_utilization: config.gpu_memory_utilization,
        weight_bytes: plan.num_parameters() * num.dtype.bytes(),
        num_gpu_blocks_override: config.num_gpu_blocks_override,
    }
}

/// Rows whose logits exist at once, a thread.
const LOGIT_ROWS: usize = 64;

/// One entry a scheduled request, in the plan's order: the token sampled after its row, if any.
fn sample(
    runner: &Runner,
    noise: &Noise,
    contract: &Contract,
    batch: &StepBatch,
    x_th: &[f32],
) -> Vec<Option<SampledToken>> {
    let width = x_th.len() / batch.tokens.len();
    let rows: Vec<usize> = (0..batch.rows.len()).filter(|&row| batch.rows[row].samples).collect();
    let share = rows.len().div_ceil(rayon::current_num_threads()).clamp(1, LOGIT_ROWS);
    let draw = |rows: &[usize]| {
        let last = |&row: &usize| {
            let end = batch.rows[row].span().floats(width).end;
            &x_th[end - width..end]
        };
        let logits = runner.logits(&rows.iter().flat_map(last).copied().collect::<Vec<_>>());
        let mut sampler = Sampler::default();
        let one = |(&row, logits_v): (&usize, &[f32])| {
            let at = batch.rows[row];
            let position = Position::new(at.computed_tokens + at.scheduled_tokens);
            let uniform = noise.uniform(at.request, position);
            let (token, logp) = sampler.sample(logits_v, uniform, contract);
            (at.plan_index, batch.sampled(row, token, logp))
        };
        rows.iter().zip(logits.chunks_exact(runner.vocab())).map(one).collect::<Vec<_>>()
    };
    let drawn: Vec<_> = rows.par_chunks(share).flat_map_iter(draw).collect();
    let mut sampled = vec![None; batch.rows.len()];
    for (plan_index, token) in drawn {
        sampled[plan_index] = Some(token);
    }
    sampled
}

/// log p of each token from `prompt_len` on, from the sequence's own rows `[T, H]`.
fn score_targets(
    runner: &Runner,
    contract: &Contract,
    tokens: &[TokenId],
    prompt_len: usize,
    x_th: &[f32],
) -> Vec<LogProb> {
    let width = x_th.len() / tokens.len();
    let rows = &x_th[(prompt_len - 1) * width..(tokens.len() - 1) * width];
    let mut sampler = Sampler::default();
    let mut scores = Vec::with_capacity(tokens.len() - prompt_len);
    let targets = tokens[prompt_len..].chunks(LOGIT_ROWS);
    for (targets, rows) in targets.zip(rows.chunks(LOGIT_ROWS * width)) {
        let logits = runner.logits(rows);
        let each = targets.iter().zip(logits.chunks_exact(runner.vocab()));
        scores.extend(each.map(|(token, row)| sampler.log_prob(row, *token, contract)));
    }
    scores
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use crate::model::Preset;

    /// More than any machine addresses, so that none tries.
    #[test]
    fn a_pool_that_no_machine_holds_is_refused() {
        let text = "name = \"x\"\nmodel.preset = \"jamba-3b-shape\"\n\
            engine.num_gpu_blocks_override = 4294967295\n";
        let config = config::parse(text, "test.toml", &[]).expect("a valid config");
        let plan = Plan::new(Preset::Jamba3bShape.config());
        let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
        let error = Engine::new(plan, num, config.engine, Contract::PLAIN, 0).expect_err("no room");
        let expected = "the pool of 4294967295 blocks takes 3377699719741440 bytes, which this \
            machine does not give: lower engine.num_gpu_blocks_override or engine.device_memory";
        assert_eq!(error.to_string(), expected);
    }
}
