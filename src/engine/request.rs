//! A request inside the engine: its tokens, how far they are computed, and the blocks it holds.

mod cached;

use super::{
    BlockPool, CachedBlock, Completion, EngineError, FinishReason, GenerationRequest, Layout, Life,
    Phase, PrefixHash, SampledToken, StateBlock, TakenBlock,
};
use crate::base::{BlockId, Contract, EngineIndex, EngineStep, RequestId, TokenId, WeightVersion};

/// One request of the scheduler, waiting or running.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    asked: GenerationRequest,
    sampled: Vec<SampledToken>,
    /// Tokens of prompt and completion whose caches are computed, the scheduled ones included.
    computed: u32,
    /// One a Mamba group, in group order: where the next state is stored. Held from the first
    /// chunk to the end of this life.
    state_blocks: Vec<StateBlock>,
    /// By Mamba group, in the order of their tokens: blocks with the states of earlier block ends.
    /// Empty without a prefix cache.
    boundaries: Vec<Vec<BlockId>>,
    /// Whether the row in flight finds its state in the last of these, not in the state blocks.
    reads_boundary: bool,
    /// By attention group; each in the order of the tokens it holds.
    attn_blocks: Vec<Vec<BlockId>>,
    /// Of its full blocks, as far as they were asked for.
    hashes: Vec<PrefixHash>,
    /// Of this life, as are the next ones.
    cached: Vec<CachedBlock>,
    taken: Vec<TakenBlock>,
    preemptions: u32,
    /// Whether the state blocks were kept over the last preemption.
    keeps_state: bool,
    /// In order; the last one is the present one from its first row on, its attention blocks still
    /// to be filled in.
    lives: Vec<Life>,
}

/// A request that has its last token. Its blocks are given back; their ids are kept for the record.
#[derive(Clone, Debug, PartialEq)]
pub struct Finished {
    pub request: Request,
    pub finish_reason: FinishReason,
}

impl Finished {
    /// The record of the rollout; the arguments are what only the runner knows. An engine does not
    /// know whether there are others: its own is the first.
    #[must_use]
    pub fn into_completion(
        mut self,
        contract: Contract,
        weight_version: WeightVersion,
        engine_fingerprint: u64,
    ) -> Completion {
        self.request.end_life();
        let Request { asked, sampled, lives, preemptions, .. } = self.request;
        assert_eq!(lives.len() as u32, preemptions + 1, "every life began with a row");
        let cached_tokens = lives.last().map_or(0, Life::cached_tokens);
        Completion {
            id: asked.id,
            engine: EngineIndex::default(),
            prompt: asked.prompt,
            tokens: sampled,
            finish_reason: self.finish_reason,
            contract,
            weight_version,
            engine_fingerprint: Some(engine_fingerprint),
            lives,
            preemptions,
            cached_tokens,
        }
    }
}

impl Request {
    pub(super) fn new(asked: GenerationRequest) -> Self {
        Self {
            asked,
            sampled: Vec::new(),
            computed: 0,
            state_blocks: Vec::new(),
            boundaries: Vec::new(),
            reads_boundary: false,
            attn_blocks: Vec::new(),
            hashes: Vec::new(),
            cached: Vec::new(),
            taken: Vec::new(),
            preemptions: 0,
            keeps_state: false,
            lives: Vec::new(),
        }
    }

    #[must_use]
    pub fn id(&self) -> RequestId {
        self.asked.id
    }

    #[must_use]
    pub fn prompt_len(&self) -> u32 {
        self.asked.prompt.len() as u32
    }

    /// Prompt and completion so far.
    #[must_use]
    pub fn num_tokens(&self) -> u32 {
        self.prompt_len() + self.sampled.len() as u32
    }

    #[must_use]
    pub fn computed_tokens(&self) -> u32 {
        self.computed
    }

    #[must_use]
    pub fn preemptions(&self) -> u32 {
        self.preemptions
    }

    /// Whether its state blocks outlived its last preemption.
    #[must_use]
    pub fn keeps_state(&self) -> bool {
        self.keeps_state
    }

    #[must_use]
    pub fn sampled(&self) -> &[SampledToken] {
        &self.sampled
    }

    /// One a Mamba group: where the row in flight stores its state.
    #[must_use]
    pub fn state_blocks(&self) -> &[StateBlock] {
        &self.state_blocks
    }

    /// Where the row in flight finds the state of a Mamba group that it starts from.
    #[must_use]
    pub fn state_source(&self, mamba_group: usize) -> BlockId {
        match self.boundaries.get(mamba_group).and_then(|blocks| blocks.last()) {
            Some(&boundary) if self.reads_boundary => boundary,
            _ => self.state_blocks[mamba_group].block,
        }
    }

    /// By attention group; each in the order of the tokens it holds.
    #[must_use]
    pub fn attn_blocks(&self) -> &[Vec<BlockId>] {
        &self.attn_blocks
    }

    /// Of prompt or completion, counted from 0 over both.
    #[must_use]
    pub fn token(&self, position: u32) -> TokenId {
        match position.checked_sub(self.prompt_len()) {
            None => self.asked.prompt[position as usize],
            Some(sampled) => self.sampled[sampled as usize].token,
        }
    }

    /// Notes through which kernels this life's first tokens run, once its row is known.
    pub(super) fn begin_life(&mut self, engine_step: EngineStep, phase: Phase, tokens: u32) {
        assert_eq!(self.lives.len() as u32, self.preemptions, "one first row a life");
        self.lives.push(Life {
            engine_step,
            phase,
            scheduled_tokens: tokens,
            sampled_before: self.sampled.len() as u32,
            state_blocks: self.state_blocks.clone(),
            attn_blocks: Vec::new(),
            cached: Vec::new(),
            taken: Vec::new(),
        });
    }

    fn end_life(&mut self) {
        // A scheduler that is driven without a batch notes no rows.
        if let Some(life) = self.lives.last_mut() {
            life.attn_blocks = self.attn_blocks.concat();
            life.cached = std::mem::take(&mut self.cached);
            life.taken = std::mem::take(&mut self.taken);
        }
    }

    /// Takes every block that `tokens` more computed tokens need in engine step `now`, over all
    /// groups in group order, or none of them.
    pub(super) fn advance(
        &mut self,
        tokens: u32,
        layout: &Layout,
        pool: &mut BlockPool,
        now: EngineStep,
    ) -> bool {
        let is_due = match layout.prefix_block_tokens {
            Some(block) => self.computed.is_multiple_of(block),
            None => self.state_blocks.is_empty(),
        };
        let state = if is_due { layout.num_mamba_groups } else { 0 };
        let groups = layout.groups.len() - layout.num_mamba_groups;
        let held = self.attn_blocks.first().map_or(0, Vec::len);
        let each = layout.attention_blocks(self.computed + tokens) as usize - held;
        if state + groups * each > 0 {
            let Some(taken) = pool.take(state + groups * each, self.id()) else { return false };
            let entry = |taken: &StateBlock| TakenBlock { block: taken.block, engine_step: now };
            self.taken.extend(taken.iter().map(entry));
            if state > 0 {
                self.turn_to(&taken[..state]);
            }
            self.attn_blocks.resize(groups, Vec::new());
            for (blocks, taken) in
                self.attn_blocks.iter_mut().zip(taken[state..].chunks(each.max(1)))
            {
                blocks.extend(taken.iter().map(|taken| taken.block));
            }
        }
        self.reads_boundary = state > 0;
        self.computed += tokens;
        true
    }

    /// In group order, each group's list from its end. The ids stay here for the record.
    ///
    /// # Errors
    /// One of them was given back before.
    pub(super) fn release_blocks(&self, pool: &mut BlockPool) -> Result<(), EngineError> {
        self.release_states(pool)?;
        self.release_attention(pool)
    }

    fn release_states(&self, pool: &mut BlockPool) -> Result<(), EngineError> {
        for (group, state) in self.state_blocks.iter().enumerate() {
            pool.release([state.block], self.id())?;
            let boundaries = self.boundaries.get(group).into_iter().flatten();
            pool.release(boundaries.rev().copied(), self.id())?;
        }
        Ok(())
    }

    fn release_attention(&self, pool: &mut BlockPool) -> Result<(), EngineError> {
        let mut groups = self.attn_blocks.iter();
        groups.try_for_each(|group| pool.release(group.iter().rev().copied(), self.id()))
    }

    /// Loses all computed tokens, to compute them again from position 0, or from what the prefix
    /// cache then has of them. With `keeps_state` the state blocks stay its own, and what is in
    /// them is where it starts from.
    pub(super) fn preempt(&mut self, pool: &mut BlockPool, keeps_state: bool) {
        self.end_life();
        self.computed = 0;
        self.preemptions += 1;
        self.keeps_state = keeps_state;
        if !keeps_state {
            self.give_up_state(pool);
        }
        self.release_attention(pool).expect("a running request holds its blocks");
        self.attn_blocks.clear();
    }

    /// Gives the state blocks back; false if there are none.
    pub(super) fn give_up_state(&mut self, pool: &mut BlockPool) -> bool {
        self.keeps_state = false;
        self.release_states(pool).expect("a request holds its state blocks");
        self.boundaries.clear();
        !std::mem::take(&mut self.state_blocks).is_empty()
    }

    /// Appends a token and says whether it was the last.
    pub(super) fn push(&mut self, token: SampledToken, max_model_len: u32) -> Option<FinishReason> {
        self.sampled.push(token);
        let full = self.num_tokens() >= max_model_len;
        if !self.asked.ignore_eos && self.asked.eos_token_ids.contains(&token.token) {
            Some(FinishReason::Stop)
        } else if full || self.sampled.len() >= self.asked.max_new_tokens as usize {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}
