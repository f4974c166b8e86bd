//! What a run of the engine will do to its requests, without a tensor.
//!
//! Scheduler, pool and batch are the engine's own. In place of pages there is a memory that knows
//! of every byte who stored it last; in place of the runner, a pass that loads and stores at the
//! runner's addresses in the runner's order. A read that does not find the request's own bytes
//! makes all that the request samples from then on wrong, until a preemption lets it start again.
//!
//! Three things cannot be foreseen: an end token, that two requests happen to sample the same
//! tokens, so that one's bytes do for the other, and that a wrong state gives the same rounded
//! log-probability, as on a token that the model is sure of. Everything else is exact in invariant
//! numerics: who has a gap, from which token on, and why.

use std::collections::HashMap;

use super::{
    BlockPool, EngineError, Finished, GenerationRequest, Layout, Life, Limits, PersistentBatch,
    SampledToken, Scheduler, Statistics, StepBatch,
};
use crate::base::{
    BlockId, CompletionIndex, Contract, EngineStep, LayerId, LogProb, RequestId, TokenId,
    WeightVersion,
};
use crate::config::{EngineConfig, Sleep};

mod lives;
mod memory;
mod shadow;
#[cfg(test)]
mod tests;

use shadow::Shadow;

/// An engine of tags. Pool order, owners and tags outlive a call, as the engine's outlive a step of
/// the loop.
#[derive(Clone, Debug)]
pub struct Replay {
    scheduler: Scheduler,
    batch: PersistentBatch,
    shadow: Shadow,
    /// Whether no call leaves its pool to the next.
    drops_pool: bool,
}

/// What will become of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forecast {
    pub id: RequestId,
    /// Tokens.
    pub sampled: u32,
    /// In order; the last one is not preempted.
    pub lives: Vec<Life>,
    /// The first sampled token that comes of bytes which are not the request's own; `None` if
    /// there is no such token, and so no gap.
    pub first_wrong: Option<CompletionIndex>,
    /// Why: what the request read in the engine step in which a life of it went wrong, one entry a
    /// block and cause. Later reads of that life are not looked at. A life that goes wrong and
    /// samples nothing before it is preempted has entries all the same.
    pub misreads: Vec<Misread>,
}

/// A read that did not find the request's own bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Misread {
    pub cause: Cause,
    pub engine_step: EngineStep,
    /// The first layer in which it happened.
    pub layer: LayerId,
    /// The request's own block.
    pub block: BlockId,
    /// Whose bytes it read; `None` if they were the zeros of the start.
    pub found: Option<Source>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// A life began as a decode row, over a state block that was not zeros any more.
    StaleState,
    /// The scan's state was stored at a wrapped address and read at the right one, or the other
    /// way round.
    Wrapped,
    /// A store at a wrapped address had hit the block, or a store had hit the wrapped bytes.
    Overwritten,
}

/// Who stored some bytes, and for which of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    pub request: RequestId,
    pub block: BlockId,
}

impl Replay {
    /// Of an engine with this layout, block count and configuration, before its first step. There
    /// is no replay of a prefix cache: what is found there depends on the tokens that are sampled.
    #[must_use]
    pub fn new(layout: Layout, num_blocks: u32, config: &EngineConfig) -> Self {
        assert_eq!(layout.prefix_block_tokens, None, "a prefix cache is not replayed");
        let shadow = Shadow::new(&layout, num_blocks, config.state_index_bits);
        let pool = BlockPool::new(num_blocks, config.free_list);
        Self {
            scheduler: Scheduler::new(Limits::from(config), layout, pool),
            batch: PersistentBatch::new(config.batch_split, config.force_prefill),
            shadow,
            drops_pool: config.sleep == Sleep::DropPool,
        }
    }

    /// Runs requests to their ends, as `Engine::generate` does, and each one to its limit of
    /// tokens. Forecasts come back in the order of the requests. Of the prompts' tokens it only
    /// matters which are alike.
    ///
    /// # Errors
    /// A request that could never run; nothing has been replayed then.
    pub fn generate(
        &mut self,
        requests: Vec<GenerationRequest>,
    ) -> Result<Vec<Forecast>, EngineError> {
        let to_the_limit = |request| GenerationRequest { ignore_eos: true, ..request };
        let ids = self.scheduler.add_all(requests.into_iter().map(to_the_limit))?;
        let mut done: HashMap<RequestId, Forecast> = HashMap::with_capacity(ids.len());
        while self.scheduler.has_unfinished() {
            done.extend(self.step()?.into_iter().map(|forecast| (forecast.id, forecast)));
        }
        if self.drops_pool {
            self.scheduler.renew_pool();
            self.shadow.clear_pages();
        }
        let of = |id| done.remove(id).expect("one forecast a request");
        Ok(ids.iter().map(of).collect())
    }

    /// One engine step; returns the forecasts of the requests that it finished.
    fn step(&mut self) -> Result<Vec<Forecast>, EngineError> {
        let Some(plan) = self.scheduler.schedule() else { return Ok(Vec::new()) };
        let batch = self.batch.build(&plan, &self.scheduler);
        self.scheduler.note_rows(&plan, &batch.rows);
        let prompt_lens = batch.rows.iter().map(|row| {
            let request = self.scheduler.request(&plan.scheduled[row.plan_index]);
            request.prompt_len()
        });
        self.shadow.forward(&batch, prompt_lens, self.scheduler.pool());
        let finished = self.scheduler.update(&plan, &sampled(&batch))?;
        Ok(finished.into_iter().map(|one| self.forecast(one)).collect())
    }

    fn forecast(&mut self, finished: Finished) -> Forecast {
        let done = finished.into_completion(Contract::PLAIN, WeightVersion::new(0), 0);
        let accounts = self.shadow.leave(done.id);
        assert_eq!(accounts.len(), done.lives.len(), "{}: one account a life", done.id);
        let ends = done.lives[1..].iter().map(|life| life.sampled_before as usize);
        let ends = ends.chain([done.tokens.len()]);
        let first_wrong_of = |((life, wrong_since), end): ((&Life, Option<EngineStep>), usize)| {
            let first = life.sampled_before as usize;
            let is_wrong = |one: &SampledToken| wrong_since.is_some_and(|at| at <= one.engine_step);
            let place = done.tokens[first..end].iter().position(is_wrong)?;
            Some(CompletionIndex::new((first + place) as u32))
        };
        let wrong_since = accounts.iter().map(|(wrong_since, _)| *wrong_since);
        let first_wrong = done.lives.iter().zip(wrong_since).zip(ends).find_map(first_wrong_of);
        Forecast {
            id: done.id,
            sampled: done.tokens.len() as u32,
            first_wrong,
            misreads: accounts.into_iter().flat_map(|(_, misreads)| misreads).collect(),
            lives: done.lives,
        }
    }

    #[must_use]
    pub fn statistics(&self) -> Statistics {
        self.scheduler.statistics()
    }
}

/// A token of no meaning wherever the batch samples, in the plan's order.
fn sampled(batch: &StepBatch) -> Vec<Option<SampledToken>> {
    let mut sampled = vec![None; batch.rows.len()];
    for (index, row) in batch.rows.iter().enumerate().filter(|(_, row)| row.samples) {
        sampled[row.plan_index] = Some(batch.sampled(index, TokenId::new(0), LogProb::new(0.0)));
    }
    sampled
}
