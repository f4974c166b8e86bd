//! The scheduler's rules over plain lists: nothing is indexed, remembered or reused.

use std::collections::{HashMap, VecDeque};

use gapscope::base::{BlockId, RequestId, TokenId};
use gapscope::config::FreeListOrder;
use gapscope::engine::{
    Admission, CacheKind, GenerationRequest, Layout, Limits, Request, SampledToken, Scheduler,
    StepPlan,
};

use super::{Share, EOS};

pub struct Model {
    pub limits: Limits,
    pub num_usable: usize,
    pub free: VecDeque<u32>,
    lifo: bool,
    /// How many tokens a block of each group holds: all of a request's in a Mamba group.
    tokens_per_block: Vec<usize>,
    num_mamba_groups: usize,
    waiting: Vec<ModelRequest>,
    running: Vec<ModelRequest>,
    /// Who has held each block, in order.
    holders: HashMap<u32, Vec<RequestId>>,
}

pub struct ModelRequest {
    id: RequestId,
    /// Prompt and completion.
    pub tokens: Vec<TokenId>,
    /// A completion is full at this many tokens.
    full: usize,
    ignore_eos: bool,
    computed: usize,
    /// By group.
    tables: Vec<Vec<u32>>,
    was_preempted: bool,
}

impl Model {
    pub fn new(layout: &Layout, limits: Limits, num_blocks: u32, order: FreeListOrder) -> Self {
        let block_tokens = layout.block_tokens.map_or(0, |tokens| tokens as usize);
        let tokens_per_block = layout.groups.iter().map(|group| match group.kind {
            CacheKind::Mamba => usize::MAX,
            CacheKind::Attention => block_tokens,
        });
        Self {
            limits,
            num_usable: num_blocks as usize - 1,
            free: (1..num_blocks).collect(),
            lifo: order == FreeListOrder::Lifo,
            tokens_per_block: tokens_per_block.collect(),
            num_mamba_groups: layout.num_mamba_groups,
            waiting: Vec::new(),
            running: Vec::new(),
            holders: HashMap::new(),
        }
    }

    pub fn add(&mut self, asked: &GenerationRequest) {
        let full = asked.prompt.len() + asked.max_new_tokens as usize;
        self.waiting.push(ModelRequest {
            id: asked.id,
            tokens: asked.prompt.clone(),
            full: full.min(self.limits.max_model_len as usize),
            ignore_eos: asked.ignore_eos,
            computed: 0,
            tables: vec![Vec::new(); self.tokens_per_block.len()],
            was_preempted: false,
        });
    }

    /// Whether it was alive.
    pub fn abort(&mut self, id: RequestId) -> bool {
        if let Some(index) = self.running.iter().position(|request| request.id == id) {
            let request = self.running.remove(index);
            self.give_back(&request);
            return true;
        }
        let before = self.waiting.len();
        self.waiting.retain(|request| request.id != id);
        self.waiting.len() < before
    }

    /// What the plan must be: its entries and who is preempted.
    pub fn schedule(&mut self) -> (Vec<Share>, Vec<RequestId>) {
        let (mut shares, mut preempted) = (Vec::new(), Vec::new());
        let mut budget = self.limits.max_num_batched_tokens as usize;
        let mut index = 0;
        while index < self.running.len() && budget > 0 {
            let mut request = self.running.remove(index);
            let scheduled = budget.min(request.tokens.len() - request.computed);
            while !self.take(&mut request, scheduled) && self.running.len() > index {
                let victim = self.running.pop().unwrap();
                preempted.push(victim.id);
                self.preempt(victim);
            }
            if !self.take(&mut request, scheduled) {
                preempted.push(request.id);
                self.preempt(request);
                break;
            }
            budget -= scheduled;
            shares.push(advance(&mut request, scheduled, Admission::Running));
            self.running.insert(index, request);
            index += 1;
        }
        while preempted.is_empty() && budget > 0 && !self.waiting.is_empty() {
            let mut request = self.waiting.remove(0);
            let scheduled = budget.min(request.tokens.len());
            let cut = scheduled < request.tokens.len() && !self.limits.enable_chunked_prefill;
            let crowded = self.running.len() == self.limits.max_num_seqs as usize;
            if cut || crowded || !self.take(&mut request, scheduled) {
                self.waiting.insert(0, request);
                break;
            }
            budget -= scheduled;
            let was = request.was_preempted;
            let admission = if was { Admission::Resumed } else { Admission::New };
            shares.push(advance(&mut request, scheduled, admission));
            self.running.push(request);
        }
        (shares, preempted)
    }

    /// Takes in the step's tokens; who is done, in schedule order.
    pub fn update(&mut self, plan: &StepPlan, sampled: &[Option<SampledToken>]) -> Vec<RequestId> {
        let mut done = Vec::new();
        for (scheduled, sampled) in plan.scheduled.iter().zip(sampled) {
            let Some(sampled) = sampled else { continue };
            let is_it = |request: &ModelRequest| request.id == scheduled.request;
            let index = self.running.iter().position(is_it).unwrap();
            let request = &mut self.running[index];
            request.tokens.push(sampled.token);
            let ended = sampled.token.get() == EOS && !request.ignore_eos;
            if ended || request.tokens.len() == request.full {
                let request = self.running.remove(index);
                self.give_back(&request);
                done.push(request.id);
            }
        }
        done
    }

    pub fn running(&self, id: RequestId) -> &ModelRequest {
        self.running.iter().find(|request| request.id == id).unwrap()
    }

    /// Queues, tables, owners, histories and the free list, entry by entry.
    pub fn compare(&self, scheduler: &Scheduler) {
        let waiting: Vec<RequestId> = scheduler.waiting().map(Request::id).collect();
        assert_eq!(waiting, self.waiting.iter().map(|request| request.id).collect::<Vec<_>>());
        assert_eq!(scheduler.running().len(), self.running.len());
        assert!(scheduler
            .pool()
            .free_blocks()
            .map(|block| block.get())
            .eq(self.free.iter().copied()));

        let mut owners = vec![None; self.num_usable + 1];
        for (found, expected) in scheduler.running().iter().zip(&self.running) {
            assert_eq!(found.id(), expected.id);
            assert_eq!(found.computed_tokens() as usize, expected.computed);
            assert_eq!(found.num_tokens() as usize, expected.tokens.len());
            let (state, attention) = expected.tables.split_at(self.num_mamba_groups);
            assert_eq!(found.state_blocks().len(), state.len());
            for (taken, table) in found.state_blocks().iter().zip(state) {
                assert_eq!([taken.block.get()], table[..]);
                let holders = &self.holders[&taken.block.get()];
                assert_eq!(taken.generation.get() as usize, holders.len());
                let previous = holders.len().checked_sub(2).map(|index| holders[index]);
                assert_eq!(taken.previous_owner, previous);
            }
            assert_eq!(found.attn_blocks().len(), attention.len());
            for (blocks, table) in found.attn_blocks().iter().zip(attention) {
                assert!(blocks.iter().map(|block| block.get()).eq(table.iter().copied()));
            }
            for &block in expected.tables.iter().flatten() {
                let other = owners[block as usize].replace(expected.id);
                assert_eq!(other, None, "block {block} has two owners");
            }
        }
        let held = owners.iter().flatten().count();
        assert_eq!(held + self.free.len(), self.num_usable, "a block is lost");
        for (block, owner) in (0..).zip(owners) {
            assert_eq!(scheduler.pool().record(BlockId::new(block)).owner, owner);
        }
    }

    /// The blocks for `scheduled` more tokens, group after group; none if they are not all there.
    fn take(&mut self, request: &mut ModelRequest, scheduled: usize) -> bool {
        let tokens = request.computed + scheduled;
        let missing: Vec<usize> = std::iter::zip(&self.tokens_per_block, &request.tables)
            .map(|(&per_block, table)| tokens.div_ceil(per_block) - table.len())
            .collect();
        if missing.iter().sum::<usize>() > self.free.len() {
            return false;
        }
        for (table, missing) in request.tables.iter_mut().zip(missing) {
            for _ in 0..missing {
                let block = self.free.pop_front().unwrap();
                self.holders.entry(block).or_default().push(request.id);
                table.push(block);
            }
        }
        true
    }

    fn give_back(&mut self, request: &ModelRequest) {
        for &block in request.tables.iter().flat_map(|table| table.iter().rev()) {
            if self.lifo {
                self.free.push_front(block);
            } else {
                self.free.push_back(block);
            }
        }
    }

    fn preempt(&mut self, mut request: ModelRequest) {
        self.give_back(&request);
        request.tables.iter_mut().for_each(Vec::clear);
        request.computed = 0;
        request.was_preempted = true;
        self.waiting.insert(0, request);
    }
}

fn advance(request: &mut ModelRequest, scheduled: usize, admission: Admission) -> Share {
    let before = request.computed;
    request.computed += scheduled;
    (request.id, before, scheduled, request.computed == request.tokens.len(), admission)
}
