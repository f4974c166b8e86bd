//! What runs next: limits and queues in, a plan out. vLLM V1's rules
//! (`v1/core/sched/scheduler.py`), no tensors.
//!
//! There are no phases: every request has tokens, and computed tokens that chase them. One token
//! budget a step goes to the running requests in order, then to waiting ones; no chunk is too
//! short. A running request that finds no block preempts the last running one, which gives up all
//! its blocks and starts again from position 0 when its turn comes. With a prefix cache a request
//! starts behind the tokens of which it finds the blocks.
//!
//! ```text
//! while let Some(plan) = scheduler.schedule() {
//!     let batch = rows.build(&plan, &scheduler);
//!     let sampled = forward(&batch); // one entry a scheduled request, in the plan's order
//!     finished.extend(scheduler.update(&plan, &sampled));
//! }
//! ```

mod admission;
mod kept_states;
mod prefix;

use std::collections::{HashSet, VecDeque};

use serde::{Deserialize, Serialize};

use super::{
    Admission, BlockPool, EngineError, Finished, GenerationRequest, Layout, PoolSnapshot, Request,
    Row, SampledToken, Scheduled, StepPlan,
};
use crate::base::{BlockId, EngineStep, RequestId, WeightVersion};
use crate::config::{EngineConfig, Fault};

/// Owns every request and the block pool. `schedule` and `update` alternate.
#[derive(Clone, Debug)]
pub struct Scheduler {
    limits: Limits,
    layout: Layout,
    pool: BlockPool,
    waiting: VecDeque<Request>,
    /// In the order of admission, which is the order of scheduling.
    running: Vec<Request>,
    /// The ids of both.
    alive: HashSet<RequestId>,
    engine_steps: u64,
    preemptions: u64,
    scheduled_tokens: u64,
    /// A plan is out and its tokens are not in.
    in_flight: bool,
    /// Of the weights that compute what is scheduled.
    weight_version: WeightVersion,
    faults: Vec<Fault>,
    /// Blocks that requests of this step found and do not hold yet, where the fault is planted that
    /// pins them late.
    unpinned: Vec<(RequestId, Vec<BlockId>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of one step.
    pub max_num_batched_tokens: u32,
    /// Running requests.
    pub max_num_seqs: u32,
    /// Tokens of one request, prompt and completion.
    pub max_model_len: u32,
    pub enable_chunked_prefill: bool,
}

impl From<&EngineConfig> for Limits {
    fn from(config: &EngineConfig) -> Self {
        Self {
            max_num_batched_tokens: config.max_num_batched_tokens,
            max_num_seqs: config.max_num_seqs,
            max_model_len: config.max_model_len,
            enable_chunked_prefill: config.enable_chunked_prefill,
        }
    }
}

/// Counted over the engine's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statistics {
    pub engine_steps: u64,
    pub preemptions: u64,
    /// Over all engine steps, those computed again after a preemption included.
    pub scheduled_tokens: u64,
    pub blocks_taken: u64,
}

/// What a checkpoint keeps of an idle scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerSnapshot {
    pub pool: PoolSnapshot,
    pub engine_steps: u64,
    pub preemptions: u64,
    pub scheduled_tokens: u64,
}

impl Scheduler {
    #[must_use]
    pub fn new(limits: Limits, layout: Layout, pool: BlockPool) -> Self {
        let Limits { max_num_batched_tokens, max_num_seqs, max_model_len, .. } = limits;
        assert!(max_num_batched_tokens > 0 && max_num_seqs > 0 && max_model_len > 1, "{limits:?}");
        Self {
            limits,
            layout,
            pool,
            waiting: VecDeque::new(),
            running: Vec::new(),
            alive: HashSet::new(),
            engine_steps: 0,
            preemptions: 0,
            scheduled_tokens: 0,
            in_flight: false,
            weight_version: WeightVersion::default(),
            faults: Vec::new(),
            unpinned: Vec::new(),
        }
    }

    /// Appends a request to the waiting ones.
    ///
    /// # Errors
    /// A request that could never finish under the limits, or whose id is alive; the engine is
    /// then as it was.
    pub fn add(&mut self, asked: GenerationRequest) -> Result<(), EngineError> {
        self.admissible(&asked)?;
        self.alive.insert(asked.id);
        self.waiting.push_back(Request::new(asked));
        Ok(())
    }

    /// Appends all of these, or none where one is refused; returns their ids.
    ///
    /// # Errors
    /// As [`Self::add`], of the first one that is refused.
    pub fn add_all(
        &mut self,
        asked: impl IntoIterator<Item = GenerationRequest>,
    ) -> Result<Vec<RequestId>, EngineError> {
        let mut added = Vec::new();
        for request in asked {
            let id = request.id;
            if let Err(error) = self.add(request) {
                for id in added {
                    self.abort(id);
                }
                return Err(error);
            }
            added.push(id);
        }
        Ok(added)
    }

    /// The next step, or `None` if no request is alive. Blocks are taken and tokens count as
    /// computed from here on.
    pub fn schedule(&mut self) -> Option<StepPlan> {
        assert!(!self.in_flight, "the tokens of engine step {} are not in yet", self.engine_steps);
        if !self.has_unfinished() {
            return None;
        }
        self.in_flight = true;
        self.engine_steps += 1;
        let engine_step = EngineStep::new(self.engine_steps);
        let mut plan = StepPlan { engine_step, scheduled: Vec::new(), preempted: Vec::new() };
        plan.scheduled.reserve(self.running.len());
        let budget = self.schedule_running(&mut plan, self.limits.max_num_batched_tokens);
        if plan.preempted.is_empty() {
            self.schedule_waiting(&mut plan, budget);
        }
        for (request, blocks) in std::mem::take(&mut self.unpinned) {
            self.pool.share(blocks, request);
        }
        assert!(plan.num_tokens() > 0, "live requests, yet nothing can run: {self:?}");
        self.scheduled_tokens += u64::from(plan.num_tokens());
        Some(plan)
    }

    /// The tokens of the plan's step: one entry a scheduled request, in the plan's order, `Some`
    /// where it samples. Returns the requests that are done, in schedule order, with their blocks
    /// given back in this order.
    ///
    /// # Errors
    /// A block is given back that its request does not hold: the pool cannot be relied on.
    pub fn update(
        &mut self,
        plan: &StepPlan,
        sampled: &[Option<SampledToken>],
    ) -> Result<Vec<Finished>, EngineError> {
        assert!(
            self.in_flight && plan.engine_step.get() == self.engine_steps,
            "not the plan in flight"
        );
        assert_eq!(sampled.len(), plan.scheduled.len(), "one entry a scheduled request");
        self.in_flight = false;
        let mut done = Vec::new();
        for (scheduled, token) in plan.scheduled.iter().zip(sampled) {
            let Scheduled { request: id, samples, running_index, .. } = *scheduled;
            assert_eq!(token.is_some(), samples, "{id}: a token exactly where the plan samples");
            let Some(token) = *token else { continue };
            let request = &mut self.running[running_index];
            assert_eq!(request.id(), id, "the plan's places are the running ones");
            if let Some(reason) = request.push(token, self.limits.max_model_len) {
                request.release_blocks(&mut self.pool)?;
                if self.faults.contains(&Fault::FreeTwice) {
                    request.release_blocks(&mut self.pool)?;
                }
                done.push((running_index, reason));
            }
        }
        if done.is_empty() {
            return Ok(Vec::new());
        }
        let mut done = done.into_iter().peekable();
        let mut finished = Vec::new();
        for (index, request) in std::mem::take(&mut self.running).into_iter().enumerate() {
            if let Some((_, finish_reason)) = done.next_if(|&(first, _)| first == index) {
                self.alive.remove(&request.id());
                finished.push(Finished { request, finish_reason });
            } else {
                self.running.push(request);
            }
        }
        Ok(finished)
    }

    /// Drops a request and gives its blocks back; false if it is not alive. Only between steps.
    pub fn abort(&mut self, id: RequestId) -> bool {
        assert!(!self.in_flight, "{id} is aborted while engine step {} is out", self.engine_steps);
        if !self.alive.remove(&id) {
            return false;
        }
        if let Some(index) = self.running.iter().position(|request| request.id() == id) {
            let request = self.running.remove(index);
            request.release_blocks(&mut self.pool).expect("a running request holds its blocks");
        } else if let Some(index) = self.waiting.iter().position(|request| request.id() == id) {
            let request = self.waiting.remove(index).expect("just found");
            request.release_blocks(&mut self.pool).expect("a kept state is its request's");
        }
        true
    }

    #[must_use]
    pub fn has_unfinished(&self) -> bool {
        !self.alive.is_empty()
    }

    /// The request behind an entry of the plan in flight.
    #[must_use]
    pub fn request(&self, scheduled: &Scheduled) -> &Request {
        let request = &self.running[scheduled.running_index];
        assert_eq!(request.id(), scheduled.request, "not an entry of the plan in flight");
        request
    }

    /// The batch says how its rows will run: whoever begins a life in this plan keeps it on record.
    pub fn note_rows(&mut self, plan: &StepPlan, rows: &[Row]) {
        for row in rows {
            let Scheduled { admission, running_index, .. } = plan.scheduled[row.plan_index];
            if admission != Admission::Running {
                let request = &mut self.running[running_index];
                request.begin_life(plan.engine_step, row.phase, row.scheduled_tokens);
            }
        }
    }

    /// In schedule order.
    #[must_use]
    pub fn running(&self) -> &[Request] {
        &self.running
    }

    /// In the order in which they will be admitted.
    pub fn waiting(&self) -> impl ExactSizeIterator<Item = &Request> {
        self.waiting.iter()
    }

    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    #[must_use]
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    #[must_use]
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    #[must_use]
    pub fn statistics(&self) -> Statistics {
        Statistics {
            engine_steps: self.engine_steps,
            preemptions: self.preemptions,
            scheduled_tokens: self.scheduled_tokens,
            blocks_taken: self.pool.taken(),
        }
    }

    /// Only when idle: between two steps of the loop no request is alive.
    #[must_use]
    pub fn snapshot(&self) -> SchedulerSnapshot {
        assert!(!self.has_unfinished(), "{} requests are alive", self.alive.len());
        SchedulerSnapshot {
            pool: self.pool.snapshot(),
            engine_steps: self.engine_steps,
            preemptions: self.preemptions,
            scheduled_tokens: self.scheduled_tokens,
        }
    }

    /// Goes on with a virgin pool. Only when idle.
    pub fn renew_pool(&mut self) {
        assert!(!self.has_unfinished(), "{} requests are alive", self.alive.len());
        self.pool.renew();
    }

    /// Goes on from a snapshot. Only when idle.
    ///
    /// # Errors
    /// A pool of another size or a damaged one; the scheduler is then as it was.
    pub fn restore(&mut self, snapshot: SchedulerSnapshot) -> Result<(), EngineError> {
        assert!(!self.has_unfinished(), "{} requests are alive", self.alive.len());
        self.pool.restore(snapshot.pool)?;
        self.engine_steps = snapshot.engine_steps;
        self.preemptions = snapshot.preemptions;
        self.scheduled_tokens = snapshot.scheduled_tokens;
        Ok(())
    }

    /// Returns the budget that is left.
    fn schedule_running(&mut self, plan: &mut StepPlan, mut budget: u32) -> u32 {
        let mut index = 0;
        while index < self.running.len() && budget > 0 {
            let request = &self.running[index];
            let computed_tokens = request.computed_tokens();
            // At least 1: the last token of a running request is never computed. vLLM's cap at
            // max_model_len - 1 never binds here, because a request stops when it has max_model_len
            // tokens.
            let needed = request.num_tokens() - computed_tokens;
            let row = self.layout.row_tokens_max(computed_tokens);
            let scheduled_tokens = needed.min(budget).min(row);
            if !self.advance_or_preempt(index, scheduled_tokens, plan) {
                break;
            }
            self.remember(index, computed_tokens);
            budget -= scheduled_tokens;
            plan.push(&self.running, index, Admission::Running, computed_tokens);
            index += 1;
        }
        budget
    }

    /// Preempts from the back until the request's blocks are found; false if it had to preempt
    /// itself.
    fn advance_or_preempt(&mut self, index: usize, tokens: u32, plan: &mut StepPlan) -> bool {
        let now = plan.engine_step;
        while !self.running[index].advance(tokens, &self.layout, &mut self.pool, now) {
            if self.running.len() == index + 1 && self.give_up_kept_states() {
                continue;
            }
            let mut victim = self.running.pop().expect("the request itself is running");
            let keeps_state = self.faults.contains(&Fault::KeepStateOnPreempt);
            victim.preempt(&mut self.pool, keeps_state);
            self.preemptions += 1;
            plan.preempted.push(victim.id());
            self.waiting.push_front(victim);
            if self.running.len() == index {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests;
