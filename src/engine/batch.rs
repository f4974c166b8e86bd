//! From a plan to the rows of one forward pass: the one place where ids become device integers.
//!
//! Rows persist from step to step, as in vLLM (`v1/worker/gpu_input_batch.py`): who leaves makes a
//! hole, who joins fills the lowest one, then the last row moves into the lowest hole left, then
//! the rows are reordered. So the place of a row depends on the batch's history, and with it, under
//! some policies, the kernel that it runs through.

use std::collections::HashMap;

use super::split::{num_decodes, reorder, RowShape};
use super::{
    Admission, Layout, Phase, Request, SampledToken, Scheduled, Scheduler, StepPlan, NULL_BLOCK,
};
use crate::base::{BlockId, EngineStep, GroupId, LogProb, Position, RequestId, TokenId};
use crate::config::{BatchSplit, EngineConfig, Fault};
use crate::model::Span;

/// The batch order, kept between steps.
#[derive(Clone, Debug)]
pub struct PersistentBatch {
    policy: BatchSplit,
    force_prefill: bool,
    /// The largest captured size, if batches of decodes are filled up to one.
    captured_up_to: Option<usize>,
    /// Whether padding rows have blocks of their own to write to, or the first live row's.
    padding_writes: bool,
    rows: Vec<RequestId>,
}

/// One forward pass. Ragged tables are flat, row after row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepBatch {
    pub engine_step: EngineStep,
    /// The first `num_decodes` run through the decode kernels, the rest through the prefill
    /// kernels.
    pub rows: Vec<Row>,
    pub num_decodes: usize,
    /// Idle decode rows behind the others, where all are decodes: a token each, whose result
    /// nobody reads.
    pub padding_rows: usize,
    /// Whether all rows are decodes and, with the padding, as many as a captured size.
    pub is_captured: bool,
    /// `[num_tokens]` of all rows, then those of the padding.
    pub tokens: Vec<TokenId>,
    /// The block tables of row 0's groups in group order, then row 1's, …, then the padding's.
    blocks: Vec<BlockId>,
    /// `[rows · groups + 1]` where each table begins in `blocks`.
    block_starts: Vec<u32>,
    num_groups: usize,
}

/// One row of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    pub request: RequestId,
    /// The request's place in `StepPlan::scheduled`; `Scheduler::update` expects its token there.
    pub plan_index: usize,
    pub phase: Phase,
    /// Its place before the batch was reordered.
    pub place_before: usize,
    /// Where the row's tokens begin in `StepBatch::tokens`.
    pub token_start: usize,
    /// Tokens computed before this step: the position of the row's first token.
    pub computed_tokens: u32,
    pub scheduled_tokens: u32,
    /// Whether a token is sampled after the row's last one.
    pub samples: bool,
    /// Of a first row: whether its block's state is one that the request kept when it was
    /// preempted, and starts from.
    pub keeps_state: bool,
}

impl Row {
    /// The row's place among the packed tokens.
    #[must_use]
    pub fn span(&self) -> Span {
        Span {
            start: self.token_start,
            len: self.scheduled_tokens as usize,
            position: Position::new(self.computed_tokens),
        }
    }

    /// Whether a prefill row starts from its block's state, or from zero. A decode row has no such
    /// choice: its kernel reads the block whatever it holds.
    #[must_use]
    pub fn has_initial_state(&self) -> bool {
        self.computed_tokens > 0 || self.keeps_state
    }
}

/// As many rows as a batch of so many decodes has under vLLM's `cudagraph_capture_sizes`: 1, 2, 4,
/// then multiples of 8, up to `largest`. A batch that no size holds runs as it is.
fn captured_size(rows: usize, largest: usize) -> Option<usize> {
    let size = match rows {
        0..=2 => rows,
        3..=4 => 4,
        _ => rows.next_multiple_of(8),
    };
    (size <= largest).then_some(size)
}

impl PersistentBatch {
    /// With `force_prefill` every row is a prefill, also those of one token.
    #[must_use]
    pub fn new(policy: BatchSplit, force_prefill: bool) -> Self {
        let (captured_up_to, padding_writes) = (None, false);
        Self { policy, force_prefill, captured_up_to, padding_writes, rows: Vec::new() }
    }

    /// As an engine's configuration has it.
    #[must_use]
    pub fn of(config: &EngineConfig) -> Self {
        Self {
            captured_up_to: (!config.enforce_eager).then_some(config.max_num_seqs as usize),
            padding_writes: config.faults.contains(&Fault::PaddingWrites),
            ..Self::new(config.batch_split, config.force_prefill)
        }
    }

    /// Every step's plan comes here once, in order; `scheduler` is the one that made it, with the
    /// plan in flight.
    #[must_use]
    pub fn build(&mut self, plan: &StepPlan, scheduler: &Scheduler) -> StepBatch {
        let placed = place(&self.rows, &plan.scheduled);
        let shape = |&index: &usize| {
            let Scheduled { scheduled_tokens, computed_tokens, .. } = plan.scheduled[index];
            let prompt = scheduler.request(&plan.scheduled[index]).prompt_len();
            RowShape { scheduled: scheduled_tokens, computed: computed_tokens, prompt }
        };
        let shapes: Vec<RowShape> = placed.iter().map(shape).collect();
        let (order, num_decodes) = self.classify(&shapes);
        let mut batch = StepBatch::empty(plan.engine_step, scheduler.layout().groups.len());
        batch.num_decodes = num_decodes;
        for place in order {
            let scheduled = &plan.scheduled[placed[place]];
            batch.push((placed[place], place), scheduled, scheduler.request(scheduled));
        }
        self.rows.clear();
        self.rows.extend(batch.rows.iter().map(|row| row.request));
        assert_eq!(batch.tokens.len(), plan.num_tokens() as usize, "every planned token has a row");
        if let (Some(largest), true) = (self.captured_up_to, num_decodes == batch.rows.len()) {
            if let Some(size) = captured_size(num_decodes, largest) {
                batch.pad(size - num_decodes, scheduler.layout(), self.padding_writes);
                batch.is_captured = true;
            }
        }
        batch
    }

    /// The order of the rows, and how many of them are decodes.
    fn classify(&self, shapes: &[RowShape]) -> (Vec<usize>, usize) {
        if self.force_prefill {
            return ((0..shapes.len()).collect(), 0);
        }
        let order = reorder(shapes, self.policy);
        let query_lens: Vec<u32> = order.iter().map(|&row| shapes[row].scheduled).collect();
        let flags: Vec<bool> = order.iter().map(|&row| shapes[row].is_prefilling()).collect();
        let flags = (self.policy == BatchSplit::IsPrefilling).then_some(flags.as_slice());
        (order, num_decodes(&query_lens, flags))
    }
}

impl StepBatch {
    /// The padding's included.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.rows.len() + self.padding_rows
    }

    /// A row's place among the packed tokens; padding rows are counted on behind the others.
    #[must_use]
    pub fn span(&self, row: usize) -> Span {
        let padding = || {
            let start = self.tokens.len() - self.padding_rows + (row - self.rows.len());
            Span { start, len: 1, position: Position::new(0) }
        };
        self.rows.get(row).map_or_else(padding, Row::span)
    }

    /// The row's token ids in this step.
    #[must_use]
    pub fn row_tokens(&self, row: usize) -> &[TokenId] {
        let Span { start, len, .. } = self.rows[row].span();
        &self.tokens[start..start + len]
    }

    /// The row's block table in a group. Of a Mamba group the block that its state is stored to,
    /// and before it, where it is another one, the block that the state is read from; of an
    /// attention group one block every `block_tokens` positions.
    #[must_use]
    pub fn blocks(&self, row: usize, group: GroupId) -> &[BlockId] {
        assert!(group.index() < self.num_groups, "group {group} of {}", self.num_groups);
        let table = row * self.num_groups + group.index();
        &self.blocks[self.block_starts[table] as usize..self.block_starts[table + 1] as usize]
    }

    /// The record of a token that was sampled after a row.
    #[must_use]
    pub fn sampled(&self, row: usize, token: TokenId, logp: LogProb) -> SampledToken {
        let Row { phase, computed_tokens, scheduled_tokens, request, samples, .. } = self.rows[row];
        assert!(samples, "{request} samples nothing in engine step {}", self.engine_step);
        SampledToken {
            token,
            logp,
            engine_step: self.engine_step,
            phase,
            scheduled_tokens,
            computed_tokens,
            batch_row: row as u32,
            batch_rows: self.rows.len() as u32,
            padding_rows: self.padding_rows as u32,
        }
    }

    /// A batch of one's own making, outside any scheduler: each row's request, phase, tokens,
    /// number of tokens computed before, and block table a group.
    #[must_use]
    pub fn of_rows<'a>(
        num_groups: usize,
        rows: impl IntoIterator<Item = (RequestId, Phase, &'a [TokenId], u32, Vec<Vec<BlockId>>)>,
    ) -> Self {
        let mut batch = Self::empty(EngineStep::new(0), num_groups);
        for (request, phase, tokens, computed_tokens, tables) in rows {
            assert_eq!(tables.len(), num_groups, "{request} has a table in every group");
            let scheduled_tokens = tokens.len() as u32;
            let plan_index = batch.rows.len();
            if phase == Phase::Decode {
                assert_eq!(batch.num_decodes, plan_index, "decode rows come first");
                batch.num_decodes += 1;
            }
            batch.rows.push(Row {
                request,
                plan_index,
                phase,
                place_before: plan_index,
                token_start: batch.tokens.len(),
                computed_tokens,
                scheduled_tokens,
                samples: true,
                keeps_state: false,
            });
            batch.tokens.extend_from_slice(tokens);
            for table in tables {
                batch.blocks.extend(table);
                batch.block_starts.push(batch.blocks.len() as u32);
            }
        }
        batch
    }

    fn empty(engine_step: EngineStep, num_groups: usize) -> Self {
        Self {
            engine_step,
            rows: Vec::new(),
            num_decodes: 0,
            padding_rows: 0,
            is_captured: false,
            tokens: Vec::new(),
            blocks: Vec::new(),
            block_starts: vec![0],
            num_groups,
        }
    }

    fn push(
        &mut self,
        (plan_index, place_before): (usize, usize),
        scheduled: &Scheduled,
        request: &Request,
    ) {
        let &Scheduled { computed_tokens, scheduled_tokens, samples, .. } = scheduled;
        let is_decode = self.rows.len() < self.num_decodes;
        let phase = if is_decode { Phase::Decode } else { Phase::Prefill };
        let request_id = request.id();
        self.rows.push(Row {
            request: request_id,
            plan_index,
            phase,
            place_before,
            token_start: self.tokens.len(),
            computed_tokens,
            scheduled_tokens,
            samples,
            keeps_state: computed_tokens == 0 && request.keeps_state(),
        });
        let end = computed_tokens + scheduled_tokens;
        assert_eq!(end, request.computed_tokens(), "{request_id} advanced when it was planned");
        self.tokens.extend((computed_tokens..end).map(|position| request.token(position)));
        for (group, state) in request.state_blocks().iter().enumerate() {
            let source = request.state_source(group);
            self.blocks.extend((source != state.block).then_some(source));
            self.blocks.push(state.block);
            self.block_starts.push(self.blocks.len() as u32);
        }
        for table in request.attn_blocks() {
            self.blocks.extend_from_slice(table);
            self.block_starts.push(self.blocks.len() as u32);
        }
        let tables = self.rows.len() * self.num_groups;
        assert_eq!(self.block_starts.len(), tables + 1, "{request_id} has a table in every group");
    }

    /// Appends idle rows: one token each in the null block, or with their states in the first
    /// row's.
    fn pad(&mut self, padding: usize, layout: &Layout, writes: bool) {
        for _ in 0..padding {
            self.tokens.push(TokenId::new(0));
            for group in (0..self.num_groups).map(|group| GroupId::new(group as u16)) {
                let shared = writes && group.index() < layout.num_mamba_groups;
                let first = self.blocks(0, group).last().copied();
                let block = first.filter(|_| shared).unwrap_or(NULL_BLOCK);
                self.blocks.push(block);
                self.block_starts.push(self.blocks.len() as u32);
            }
        }
        self.padding_rows = padding;
    }
}

/// The plan index of every row after leaving, joining and condensing; before reordering.
fn place(previous: &[RequestId], scheduled: &[Scheduled]) -> Vec<usize> {
    let entries = || scheduled.iter().enumerate();
    let running = |entry: &Scheduled| entry.admission == Admission::Running;
    // Who is in the plan and was in the batch stays. A request that was passed over for a step has
    // left and joins again.
    let mut absent: HashMap<RequestId, usize> = entries()
        .filter(|(_, entry)| running(entry))
        .map(|(index, entry)| (entry.request, index))
        .collect();
    let mut rows: Vec<Option<usize>> = previous.iter().map(|id| absent.remove(id)).collect();

    let joining = |admission: Admission| {
        entries().filter(move |(_, entry)| entry.admission == admission).map(|(index, _)| index)
    };
    let back = joining(Admission::Running).filter(|&i| absent.contains_key(&scheduled[i].request));
    let mut lowest_hole = 0;
    for index in joining(Admission::New).chain(back).chain(joining(Admission::Resumed)) {
        while rows.get(lowest_hole).is_some_and(Option::is_some) {
            lowest_hole += 1;
        }
        match rows.get_mut(lowest_hole) {
            Some(hole) => *hole = Some(index),
            None => rows.push(Some(index)),
        }
    }
    while let Some(holes_before) = rows[lowest_hole..].iter().position(Option::is_none) {
        lowest_hole += holes_before;
        let last = rows.pop().flatten();
        if let Some(hole) = rows.get_mut(lowest_hole) {
            *hole = last;
        }
    }
    let rows: Vec<usize> = rows.into_iter().flatten().collect();
    assert_eq!(rows.len(), scheduled.len(), "one row a scheduled request");
    rows
}

#[cfg(test)]
mod tests;
