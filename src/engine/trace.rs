//! What the engine saw, engine step by engine step: the batch before and after its reorder, who
//! held which block before, what was written, and digests of the residual stream.
//!
//! A trace is plain data, bounded in bytes; what does not fit is counted. It only looks: neither
//! the pool nor a number of the run depends on it.

use super::split::{in_decode_region, RowShape};
use super::{Admission, Phase, Scheduler, Seen, StateBlock, StepBatch, StepPlan};
use crate::base::{BlockId, EngineIndex, EngineStep, RequestId};
use crate::config::BatchSplit;
use crate::model::row_digests;
use crate::ops::extremes::Extremes;

/// What to watch, and how much of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WatchList {
    /// Engine steps with this request in the batch, and digests of its rows alone; `None` watches
    /// every engine step and every row.
    pub request: Option<RequestId>,
    /// Of memory that a trace may hold, about.
    pub max_bytes: u64,
}

/// What was seen since the last look.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    pub steps: Vec<TracedStep>,
    /// Engine steps that were left out when the trace was full.
    pub cut: u64,
    bytes: u64,
}

impl Trace {
    /// What several engines were seen to do, in the order of their engine steps.
    #[must_use]
    pub fn merged(traces: Vec<Self>) -> Self {
        let mut all = Self::default();
        for trace in traces {
            all.steps.extend(trace.steps);
            all.cut += trace.cut;
            all.bytes += trace.bytes;
        }
        all.steps.sort_by_key(|step| (step.engine_step, step.engine));
        all
    }
}

/// One engine step.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedStep {
    /// Of several, whose it is.
    pub engine: EngineIndex,
    pub engine_step: EngineStep,
    /// The step's token budget.
    pub budget: u32,
    /// Running requests that lost their blocks in this step, last running first.
    pub preempted: Vec<RequestId>,
    /// Requests that were not admitted yet.
    pub waiting: usize,
    /// In the order in which they ran; decodes first.
    pub rows: Vec<TracedRow>,
    /// By layer, over the watched rows: what they wrote to the layer's cache. Empty where the
    /// device does not show it.
    pub written: Vec<Extremes>,
}

/// One row of the batch.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedRow {
    pub request: RequestId,
    pub admission: Admission,
    pub scheduled_tokens: u32,
    pub computed_tokens: u32,
    pub prompt_tokens: u32,
    /// Whether these tokens reach its last one, so that one is sampled.
    pub samples: bool,
    /// Its place before the batch was reordered.
    pub place_before: usize,
    /// Whether the reorder took it for a decode.
    pub is_decode_before: bool,
    /// Whether the split then ran it as one.
    pub is_decode: bool,
    /// One a Mamba group.
    pub state_blocks: Vec<StateBlock>,
    /// By attention group.
    pub attn_blocks: Vec<Vec<BlockId>>,
    /// `[parts, scheduled_tokens]`: digests of the residual stream after each of
    /// [`crate::model::Plan::parts`]; empty for rows that are not watched.
    pub stream: Vec<u64>,
}

/// Collects a trace while the engine runs.
#[derive(Debug)]
pub(super) struct Tracer {
    list: WatchList,
    trace: Trace,
}

/// One engine step while it runs.
pub(super) struct Watching {
    step: TracedStep,
    hidden: usize,
    /// Tokens of the batch, each with its row where that is watched.
    tokens: Vec<Option<usize>>,
    /// The part that is coming in, and how many of its tokens have.
    at: (usize, usize),
}

impl Tracer {
    pub(super) fn new(list: WatchList) -> Self {
        Self { list, trace: Trace::default() }
    }

    pub(super) fn take(&mut self) -> Trace {
        std::mem::take(&mut self.trace)
    }

    /// `None` where the engine step is not to be watched, or has no room any more.
    pub(super) fn begin(
        &mut self,
        plan: &StepPlan,
        batch: &StepBatch,
        scheduler: &Scheduler,
        policy: BatchSplit,
        hidden: usize,
    ) -> Option<Watching> {
        let watched = |request| self.list.request.is_none_or(|only| only == request);
        if !batch.rows.iter().any(|row| watched(row.request)) {
            return None;
        }
        if self.trace.cut > 0 || self.trace.bytes >= self.list.max_bytes {
            self.trace.cut += 1;
            return None;
        }
        let row = |index: usize| row(plan, batch, scheduler, policy, index);
        let step = TracedStep {
            engine: EngineIndex::default(),
            engine_step: plan.engine_step,
            budget: scheduler.limits().max_num_batched_tokens,
            preempted: plan.preempted.clone(),
            waiting: scheduler.waiting().len(),
            rows: (0..batch.rows.len()).map(row).collect(),
            written: Vec::new(),
        };
        let tokens = batch.rows.iter().enumerate().flat_map(|(index, row)| {
            let mine = watched(row.request).then_some(index);
            (0..row.scheduled_tokens).map(move |_| mine)
        });
        Some(Watching { step, hidden, tokens: tokens.collect(), at: (0, 0) })
    }

    pub(super) fn end(&mut self, watching: Watching) {
        self.trace.bytes += watching.step.bytes();
        self.trace.steps.push(watching.step);
    }
}

impl Watching {
    pub(super) fn see(&mut self, seen: Seen<'_>) {
        match seen {
            Seen::Stream { part, x_th } => self.stream(part, x_th),
            Seen::Written { layer, row, extremes } => {
                let written = &mut self.step.written;
                written.resize(written.len().max(layer + 1), Extremes::default());
                if self.step.rows.get(row).is_some_and(|row| !row.stream.is_empty()) {
                    written[layer].merge(&extremes);
                }
            }
        }
    }

    fn stream(&mut self, part: usize, x_th: &[f32]) {
        if self.at.0 != part {
            self.at = (part, 0);
        }
        for x_h in x_th.chunks_exact(self.hidden) {
            // Padding has tokens beyond the rows'.
            if let Some(&Some(row)) = self.tokens.get(self.at.1) {
                self.step.rows[row].stream.extend(row_digests(self.hidden, x_h));
            }
            self.at.1 += 1;
        }
    }
}

impl TracedStep {
    /// About what it takes in memory.
    fn bytes(&self) -> u64 {
        let of_row = |row: &TracedRow| {
            let blocks: usize = row.attn_blocks.iter().map(Vec::len).sum();
            size_of::<TracedRow>()
                + row.state_blocks.len() * size_of::<StateBlock>()
                + blocks * size_of::<BlockId>()
                + row.stream.len() * size_of::<u64>()
        };
        self.rows.iter().map(of_row).sum::<usize>() as u64
    }

    /// The rows as they stood before the reorder.
    #[must_use]
    pub fn before_the_reorder(&self) -> Vec<&TracedRow> {
        let mut rows: Vec<&TracedRow> = self.rows.iter().collect();
        rows.sort_by_key(|row| row.place_before);
        rows
    }

    /// The request's row, if it is in the batch.
    #[must_use]
    pub fn row_of(&self, request: RequestId) -> Option<&TracedRow> {
        self.rows.iter().find(|row| row.request == request)
    }
}

fn row(
    plan: &StepPlan,
    batch: &StepBatch,
    scheduler: &Scheduler,
    policy: BatchSplit,
    index: usize,
) -> TracedRow {
    let row = &batch.rows[index];
    let scheduled = &plan.scheduled[row.plan_index];
    let request = scheduler.request(scheduled);
    let (scheduled_tokens, computed_tokens) = (row.scheduled_tokens, row.computed_tokens);
    let prompt_tokens = request.prompt_len();
    let shape =
        RowShape { scheduled: scheduled_tokens, computed: computed_tokens, prompt: prompt_tokens };
    TracedRow {
        request: row.request,
        admission: scheduled.admission,
        scheduled_tokens,
        computed_tokens,
        prompt_tokens,
        samples: row.samples,
        place_before: row.place_before,
        is_decode_before: in_decode_region(&shape, policy),
        is_decode: row.phase == Phase::Decode,
        state_blocks: request.state_blocks().to_vec(),
        attn_blocks: request.attn_blocks().to_vec(),
        stream: Vec::new(),
    }
}
