//! What a request and the prefix cache have to do with each other.

use super::Request;
use crate::base::{BlockId, EngineStep, GroupId};
use crate::engine::{BlockPool, CachedBlock, Filled, Hit, Layout, Origin, PrefixHash, StateBlock};

impl Request {
    /// Hashes of its full blocks but one that holds its last token: that token must be computed,
    /// to sample after it.
    pub(in crate::engine) fn findable(&mut self, root: PrefixHash, block: u32) -> &[PrefixHash] {
        let count = (self.num_tokens() - 1) / block;
        self.hash_to(count as usize, root, block);
        &self.hashes[..count as usize]
    }

    fn hash_to(&mut self, count: usize, root: PrefixHash, block: u32) {
        while self.hashes.len() < count {
            let before = self.hashes.last().copied().unwrap_or(root);
            let first = self.hashes.len() as u32 * block;
            let hash = before.then((first..first + block).map(|position| self.token(position)));
            self.hashes.push(hash);
        }
    }

    /// Begins a life behind a hit with `tokens` more, as [`Self::advance`] does; false where there
    /// are not enough blocks. Where it `pins`, the found blocks are the request's own from here on.
    pub(in crate::engine) fn admit(
        &mut self,
        hit: &Hit,
        tokens: u32,
        layout: &Layout,
        (pool, pins): (&mut BlockPool, bool),
        now: EngineStep,
    ) -> bool {
        assert!(self.computed == 0 && self.attn_blocks.is_empty(), "a life begins");
        if hit.tokens == 0 {
            return self.advance(tokens, layout, pool, now);
        }
        let freed = hit.ids().filter(|&block| pins && pool.record(block).owner.is_none()).count();
        let new = layout.blocks_for(hit.tokens + tokens) - layout.blocks_for(hit.tokens);
        if new + freed as u64 > pool.free_blocks().len() as u64 {
            return false;
        }
        if pins {
            pool.share(hit.ids(), self.id());
        }
        let ids = |group: &Vec<CachedBlock>| group.iter().map(|one| one.block).collect();
        let tables: Vec<Vec<BlockId>> = hit.blocks.iter().map(ids).collect();
        let (boundaries, attention) = tables.split_at(layout.num_mamba_groups);
        (self.boundaries, self.attn_blocks) = (boundaries.to_vec(), attention.to_vec());
        self.cached = hit.blocks.concat();
        self.computed = hit.tokens;
        let has_room = self.advance(tokens, layout, pool, now);
        assert!(has_room, "{}: the blocks were just counted", self.id());
        true
    }

    /// States go to new blocks from here on; what was stored so far stays as it is.
    pub(super) fn turn_to(&mut self, taken: &[StateBlock]) {
        self.boundaries.resize(taken.len(), Vec::new());
        for (boundaries, full) in self.boundaries.iter_mut().zip(&self.state_blocks) {
            boundaries.push(full.block);
        }
        self.state_blocks = taken.to_vec();
    }

    /// The blocks that the last row, which began behind `before` tokens, fills: the prefix cache
    /// can find them from here on.
    pub(in crate::engine) fn remember(
        &mut self,
        before: u32,
        block: u32,
        root: PrefixHash,
        origin: &Origin,
        pool: &mut BlockPool,
    ) {
        let full = before / block..self.computed / block;
        self.hash_to(full.end as usize, root, block);
        let mut enter = |place: u32, group: usize, held: BlockId| {
            let &Origin { filled_by, weight_version, engine_step } = origin;
            let tokens = (place + 1) * block;
            pool.remember(Filled {
                hash: self.hashes[place as usize],
                group: GroupId::new(group as u16),
                cached: CachedBlock { block: held, filled_by, weight_version, tokens },
                engine_step,
            });
        };
        for place in full {
            // A row of a model with states ends at a block's end at the latest.
            for (group, state) in self.state_blocks.iter().enumerate() {
                enter(place, group, state.block);
            }
            for (group, table) in (self.state_blocks.len()..).zip(&self.attn_blocks) {
                enter(place, group, table[place as usize]);
            }
        }
    }
}
