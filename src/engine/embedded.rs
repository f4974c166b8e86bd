//! The engine as the loop sees it: weights in, completions out.
//!
//! One step is four verbs: schedule, build, run, update. Pool order, owners and bytes outlive the
//! step and every weight update.

mod loaded;
mod sleep;
mod snapshot;

use std::collections::HashMap;

use self::loaded::Loaded;
use super::faults::{self, HandOver, Strike};
use super::trace::Tracer;
use super::{
    BlockMemory, BlockPool, CacheSpec, Completion, EngineError, Feed, GenerationRequest, Layout,
    Limits, Moment, Observer, PersistentBatch, Phase, Row, Runner, SampledToken, Scheduler,
    Scratch, Seen, Statistics, StepBatch, Trace, WatchList,
};
use crate::base::{Contract, LogProb, LogprobsMode, Noise, Position, TokenId, WeightVersion};
use crate::config::{EngineConfig, Fault, CPU_MEMORY};
use crate::model::{Numerics, Plan};
use crate::ops::array::{Array, Device};
use crate::ops::pages::Pages;
use crate::ops::sampling::{log_prob_rows, sample_rows, Noises};

/// The embedded engine.
#[derive(Debug)]
pub struct Engine {
    device: Device,
    plan: Plan,
    num: Numerics,
    config: EngineConfig,
    contract: Contract,
    noise: Noise,
    scheduler: Scheduler,
    batch: PersistentBatch,
    pages: Pages,
    loaded: Option<Loaded>,
    /// The newest that was loaded.
    version: Option<WeightVersion>,
    hand_over: HandOver,
    strike: Strike,
    tracer: Option<Tracer>,
    is_asleep: bool,
}

impl Engine {
    /// An engine without weights, its pool zeroed and its free list in order. The number of blocks
    /// is the configuration's, without a look at the device: see [`super::measured_memory`].
    ///
    /// # Errors
    /// A layout that cannot be, a pool too small for one request or too large for this machine, a
    /// planted fault that this model has no place for.
    pub fn new(
        device: &Device,
        plan: Plan,
        num: Numerics,
        config: EngineConfig,
        contract: Contract,
        seed: u64,
    ) -> Result<Self, EngineError> {
        let memory = block_memory(&plan, &num, &config, 1);
        let num_blocks = layout(&plan, &num, &config)?.num_blocks(&memory)?;
        Self::with_blocks(device, plan, num, config, contract, seed, num_blocks)
    }

    /// The same with a pool of so many blocks, whatever the configuration says of them.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_blocks(
        device: &Device,
        plan: Plan,
        num: Numerics,
        config: EngineConfig,
        contract: Contract,
        seed: u64,
        num_blocks: u32,
    ) -> Result<Self, EngineError> {
        faults::check(&config.faults, &plan, device)?;
        let layout = layout(&plan, &num, &config)?;
        let pages = sleep::pages(device, &layout, num_blocks)?;
        let pool = BlockPool::new(num_blocks, config.free_list);
        Ok(Self {
            device: device.clone(),
            scheduler: Scheduler::new(Limits::from(&config), layout, pool)
                .with_faults(&config.faults),
            batch: PersistentBatch::of(&config),
            noise: Noise::new(seed),
            loaded: None,
            version: None,
            hand_over: HandOver::new(&config.faults),
            strike: Strike::new(&config.faults),
            tracer: None,
            is_asleep: false,
            plan,
            num,
            config,
            contract,
            pages,
        })
    }

    /// Runs requests to their ends; completions come back in the order of the requests.
    ///
    /// # Errors
    /// A request that could never run, and nothing has been generated then; or a block that is
    /// given back twice.
    pub fn generate(
        &mut self,
        requests: Vec<GenerationRequest>,
    ) -> Result<Vec<Completion>, EngineError> {
        self.generate_told(requests, &mut |_| {})
    }

    /// The same, and `tell` hears how far each engine step has come.
    ///
    /// # Errors
    /// As [`Self::generate`].
    pub fn generate_told(
        &mut self,
        requests: Vec<GenerationRequest>,
        tell: &mut dyn FnMut(Moment<'_>),
    ) -> Result<Vec<Completion>, EngineError> {
        let ids = self.scheduler.add_all(requests)?;
        let order: HashMap<_, _> = ids.iter().zip(0..).map(|(&id, index)| (id, index)).collect();
        let mut done: Vec<Completion> = Vec::with_capacity(ids.len());
        while self.scheduler.has_unfinished() {
            done.extend(self.step(tell)?);
        }
        done.sort_by_key(|completion| order[&completion.id]);
        assert_eq!(done.len(), ids.len(), "one completion a request");
        Ok(done)
    }

    /// One engine step; returns the completions that it finished.
    ///
    /// # Errors
    /// As [`Scheduler::update`].
    fn step(&mut self, tell: &mut dyn FnMut(Moment<'_>)) -> Result<Vec<Completion>, EngineError> {
        assert!(!self.is_asleep, "an engine makes no step while it sleeps");
        tell(Moment::Begun);
        let Some(plan) = self.scheduler.schedule() else { return Ok(Vec::new()) };
        let batch = self.batch.build(&plan, &self.scheduler);
        self.scheduler.note_rows(&plan, &batch.rows);
        tell(Moment::Built(&batch));
        self.strike.before(&batch, self.scheduler.layout(), &mut self.pages);
        let loaded = self.loaded.as_mut().expect("weights are loaded before the first step");
        let mut watching = self.tracer.as_mut().and_then(|tracer| {
            let policy = self.config.batch_split;
            tracer.begin(&plan, &batch, &self.scheduler, policy, loaded.runner.hidden())
        });
        let mut see = watching.as_mut().map(|watching| |seen: Seen<'_>| watching.see(seen));
        let observe = see.as_mut().map(|see| see as Observer<'_>);
        let draw = Draw { noise: &self.noise, contract: &self.contract };
        let unlabelled = unlabelled(&self.config.faults, &self.contract);
        let is_plain = observe.is_none() && unlabelled.is_none() && !self.contract.has_filters();
        let drawn = if is_plain && batch.is_captured && loaded.runner.records() {
            let (parts, longest) = ((&loaded.runner, &mut self.pages), self.config.max_model_len);
            let noise = (0..batch.num_rows()).map(|row| draw.noise(&batch, row)).collect();
            loaded.captured.step(parts, &batch, noise, draw.contract, longest)
        } else {
            let x_th = loaded.runner.forward(&mut self.pages, &batch, observe);
            draw.each(&loaded.runner, unlabelled.as_ref(), &batch, &x_th)
        };
        if let (Some(tracer), Some(watching)) = (&mut self.tracer, watching) {
            tracer.end(watching);
        }
        let sampled = in_plan_order(&batch, &drawn);
        tell(Moment::Sampled);
        let finished = self.scheduler.update(&plan, &sampled)?;
        let complete = |one: super::Finished| {
            one.into_completion(self.contract, loaded.version, loaded.fingerprint)
        };
        let completions = finished.into_iter().map(complete).collect();
        tell(Moment::Updated);
        Ok(completions)
    }

    /// Looks on from the next step on, or no more.
    pub fn watch(&mut self, list: Option<WatchList>) {
        self.tracer = list.map(Tracer::new);
    }

    /// What was seen since [`Self::watch`] or the last call of this; `None` where nobody looks.
    pub fn take_trace(&mut self) -> Option<Trace> {
        self.tracer.as_mut().map(Tracer::take)
    }

    /// The `prefill` leg: each sequence's tokens from `prompt_len` on, scored by one forced prefill
    /// in a private pool.
    #[must_use]
    pub fn score_prefill<'a>(&self, sequences: &[(&'a [TokenId], usize)]) -> Vec<Vec<LogProb>> {
        let (runner, device) = (&self.loaded().runner, &self.device);
        let mut scores = Vec::with_capacity(sequences.len());
        for group in sequences.chunks(device.sequences_at_once()) {
            let feed = |(sequence, &(tokens, _)): (usize, &(&'a [TokenId], usize))| Feed {
                sequence,
                phase: Phase::Prefill,
                tokens,
            };
            let feeds: Vec<_> = group.iter().enumerate().map(feed).collect();
            let x_th = self.scratch(group.len()).feed(runner, &feeds, None);
            let mut end = 0;
            let place = |&(tokens, prompt_len): &(&'a [TokenId], usize)| {
                end += tokens.len();
                (end - tokens.len() + prompt_len - 1, &tokens[prompt_len..])
            };
            let mut work: Vec<_> = group.iter().map(place).collect();
            scores.extend(device.map(&mut work, |_, &mut (first, targets)| {
                runner.log_probs(&self.contract, &x_th, first, targets)
            }));
        }
        scores
    }

    /// A private pool with room for `sequences`, to feed [`Self::runner`] with.
    #[must_use]
    pub fn scratch(&self, sequences: usize) -> Scratch {
        Scratch::new(&self.device, self.scheduler.layout(), sequences)
    }

    /// Where it computes.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The model's shape.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
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
    let spec = CacheSpec::of_model(&plan.config, num.dtype, num.state_dtype, len);
    let layout = Layout::new(&spec)?;
    Ok(if config.enable_prefix_caching { layout.with_prefix_cache() } else { layout })
}

/// What the number of blocks is made from, of each of so many engines on one device.
#[must_use]
pub fn block_memory(
    plan: &Plan,
    num: &Numerics,
    config: &EngineConfig,
    engines: u32,
) -> BlockMemory {
    BlockMemory {
        engines,
        device_memory: config.device_memory.unwrap_or(CPU_MEMORY),
        gpu_memory_utilization: config.gpu_memory_utilization,
        used_bytes: plan.num_parameters() * num.dtype.bytes(),
        num_gpu_blocks_override: config.num_gpu_blocks_override,
    }
}

/// Of what the recorded log-probabilities are under a planted fault, whatever the contract says.
fn unlabelled(faults: &[Fault], contract: &Contract) -> Option<Contract> {
    let plain = Contract { logprobs_mode: LogprobsMode::ProcessedLogprobs, ..Contract::PLAIN };
    let temperature = contract.temperature;
    let of = |fault: &Fault| match fault {
        Fault::UnlabelledTemperature => Some(Contract { temperature, ..plain }),
        Fault::UnlabelledFilters => {
            Some(Contract { logprobs_mode: plain.logprobs_mode, temperature: 1.0, ..*contract })
        }
        _ => None,
    };
    faults.iter().find_map(of)
}

/// What a token is drawn by.
struct Draw<'a> {
    noise: &'a Noise,
    contract: &'a Contract,
}

impl Draw<'_> {
    /// In [0, 1), of the token after a row; a padding row's is of no meaning.
    fn noise(&self, batch: &StepBatch, row: usize) -> f64 {
        let of_request = |at: &Row| {
            let position = Position::new(at.computed_tokens + at.scheduled_tokens);
            self.noise.uniform(at.request, position)
        };
        batch.rows.get(row).map_or(0.0, of_request)
    }

    /// A token after every row, from what left the last layer; where nobody asks for one, nothing
    /// is computed and the row's is of no meaning.
    fn each(
        &self,
        runner: &Runner,
        unlabelled: Option<&Contract>,
        batch: &StepBatch,
        x_th: &Array,
    ) -> Vec<(TokenId, LogProb)> {
        let rows: Vec<usize> =
            (0..batch.rows.len()).filter(|&row| batch.rows[row].samples).collect();
        let device = runner.device();
        let share = rows.len().div_ceil(device.parallelism()).clamp(1, device.logit_rows());
        let draw = |rows: &[usize]| {
            let last = |&row: &usize| {
                let span = batch.span(row);
                span.start + span.len - 1
            };
            let last: Vec<usize> = rows.iter().map(last).collect();
            let logits = runner.logits(&x_th.gather_rows(runner.hidden(), &last));
            let noise = rows.iter().map(|&row| self.noise(batch, row)).collect();
            let noise = Noises::new(device, noise);
            let mut drawn = sample_rows(&logits, runner.vocab(), &noise, self.contract).read();
            if let Some(other) = unlabelled {
                let tokens: Vec<TokenId> = drawn.iter().map(|(token, _)| *token).collect();
                let others = log_prob_rows(&logits, runner.vocab(), &tokens, other);
                drawn.iter_mut().zip(others).for_each(|(one, logp)| one.1 = logp);
            }
            drawn
        };
        let mut parts: Vec<&[usize]> = rows.chunks(share).collect();
        let drawn = device.map(&mut parts, |_, rows| draw(rows));
        let mut all = vec![(TokenId::new(0), LogProb::new(f32::NAN)); batch.rows.len()];
        rows.iter().zip(drawn.into_iter().flatten()).for_each(|(&row, one)| all[row] = one);
        all
    }
}

/// One entry a scheduled request, in the plan's order: the token sampled after its row, if any.
fn in_plan_order(batch: &StepBatch, drawn: &[(TokenId, LogProb)]) -> Vec<Option<SampledToken>> {
    let mut sampled = vec![None; batch.rows.len()];
    for (row, (at, &(token, logp))) in batch.rows.iter().zip(drawn).enumerate() {
        sampled[at.plan_index] = at.samples.then(|| batch.sampled(row, token, logp));
    }
    sampled
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
        let error = Engine::new(&Device::Cpu, plan, num, config.engine, Contract::PLAIN, 0)
            .expect_err("no room");
        let expected = "the pool of 4294967295 blocks takes 3377699719741440 bytes, which this \
            machine does not give: lower engine.num_gpu_blocks_override, engine.device_memory or \
            engine.gpu_memory_utilization";
        assert_eq!(error.to_string(), expected);
    }
}
