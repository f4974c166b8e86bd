//! One forward pass in which tags move instead of tensors: the loads and stores of
//! [`Runner::forward`](crate::engine::Runner::forward), at its addresses and in its order.
//!
//! Most rows of a run are decode rows that find their own bytes and store what is there already. A
//! life that has had one such row is at rest: until somebody's store at a wrapped address goes to a
//! page of its own, only its keys and values are followed, because they grow.

use std::ops::Range;

use super::lives::{Lives, Visit};
use super::memory::{Bytes, Content, LifeId, Memory, Stored};
use super::{Cause, Misread};
use crate::base::{BlockId, EngineStep, GroupId, LayerId, RequestId};
use crate::engine::{BlockPool, CacheView, LayerPlace, Layout, Phase, StepBatch};
use crate::ops::pages::{KeyValueView, StateView};

#[derive(Clone, Debug)]
pub struct Shadow {
    places: Vec<LayerPlace>,
    state_index_bits: u32,
    memory: Memory,
    lives: Lives,
    /// The rows of the pass under way.
    visits: Vec<Visit>,
}

/// Of the two states that [`Shadow::parts`] gives.
const CONV: usize = 0;
const SSM: usize = 1;

/// A layer and its cache.
struct At<View> {
    layer: LayerId,
    group: GroupId,
    view: View,
}

impl Shadow {
    pub fn new(layout: &Layout, num_blocks: u32, state_index_bits: u32) -> Self {
        Self {
            places: layout.layers.clone(),
            state_index_bits,
            memory: Memory::new(layout.num_buffers, num_blocks, layout.page_bytes),
            lives: Lives::default(),
            visits: Vec::new(),
        }
    }

    /// `prompt_lens` are those of the rows, in tokens; `pool` is as the batch's plan left it.
    pub fn forward(
        &mut self,
        batch: &StepBatch,
        prompt_lens: impl Iterator<Item = u32>,
        pool: &BlockPool,
    ) {
        self.lives.arrive(batch, prompt_lens, &mut self.visits);
        let (decodes, prefills) = (0..batch.num_decodes, batch.num_decodes..batch.rows.len());
        for layer in 0..self.places.len() {
            let LayerPlace { group, view } = self.places[layer];
            let layer = LayerId::new(layer as u16);
            match view {
                CacheView::State(view) => {
                    for rows in [&prefills, &decodes] {
                        self.mamba(batch, rows.clone(), &At { layer, group, view }, pool);
                    }
                }
                CacheView::KeyValue(view) => self.attention(batch, &At { layer, group, view }),
            }
        }
        self.lives.depart(batch, &self.visits);
    }

    /// All pages are zeros again.
    pub fn clear_pages(&mut self) {
        self.memory.clear();
    }

    /// A request is done: since when each of its lives was wrong, and why.
    pub fn leave(&mut self, request: RequestId) -> Vec<(Option<EngineStep>, Vec<Misread>)> {
        self.lives.leave(request)
    }

    /// One part of the batch, all prefills or all decodes: every load comes before the first store,
    /// and every convolution's store before the first of an ssm state.
    fn mamba(
        &mut self,
        batch: &StepBatch,
        rows: Range<usize>,
        at: &At<StateView>,
        pool: &BlockPool,
    ) {
        for index in rows.clone() {
            let row = &batch.rows[index];
            let account = self.lives.account(self.visits[index].life);
            let is_loaded = row.phase == Phase::Decode || row.has_initial_state();
            if is_loaded && !account.is_wrong_before(batch.engine_step) && !account.rests(row) {
                self.load_state(batch, index, at);
            }
        }
        let stores = |shadow: &Self, index: &usize| {
            !shadow.lives.account(shadow.visits[*index].life).rests(&batch.rows[*index])
        };
        let storing: Vec<usize> = rows.filter(|index| stores(self, index)).collect();
        for part in [CONV, SSM] {
            storing.iter().for_each(|&index| self.store_state(batch, index, at, part));
        }
        storing.iter().for_each(|&index| self.wake_owners(batch, index, at, pool));
    }

    fn load_state(&mut self, batch: &StepBatch, index: usize, at: &At<StateView>) {
        let (row, life) = (&batch.rows[index], self.visits[index].life);
        let block = batch.blocks(index, at.group)[0];
        let account = self.lives.account(life);
        let moved = row.phase != account.stored_by
            && self.ssm(at, block, row.phase) != self.ssm(at, block, account.stored_by);
        let ssm_cause = if moved { Cause::Wrapped } else { Cause::Overwritten };
        let parts = self.parts(at, block, row.phase, account.content);
        for ((bytes, own), cause) in parts.into_iter().zip([Cause::Overwritten, ssm_cause]) {
            // A first row's right state is zeros.
            let (own, cause) = match row.has_initial_state() {
                true => (Some(own), cause),
                false => (None, Cause::StaleState),
            };
            if let Some(found) = self.memory.misread(at.view.buffer, &bytes, own) {
                self.lives.note(life, batch.engine_step, (cause, at.layer, block), found);
            }
        }
    }

    fn store_state(&mut self, batch: &StepBatch, index: usize, at: &At<StateView>, part: usize) {
        let (row, visit) = (&batch.rows[index], self.visits[index]);
        let block = batch.blocks(index, at.group)[0];
        let content = self.lives.account(visit.life).stores(&visit);
        let (range, bytes) = self.parts(at, block, row.phase, content)[part].clone();
        self.memory.store(at.view.buffer, &range, Stored { bytes, life: visit.life, block });
    }

    /// A store that went elsewhere is looked after by whoever owns the pages there.
    fn wake_owners(
        &mut self,
        batch: &StepBatch,
        index: usize,
        at: &At<StateView>,
        pool: &BlockPool,
    ) {
        let row = &batch.rows[index];
        let block = batch.blocks(index, at.group)[0];
        let ssm = self.ssm(at, block, row.phase);
        if ssm != self.ssm(at, block, Phase::Decode) {
            for owner in self.memory.pages(&ssm).filter_map(|page| pool.record(page).owner) {
                self.lives.wake(owner, batch.engine_step);
            }
        }
    }

    /// Where a layer's two states of a block are, and what makes bytes there their own.
    fn parts(
        &self,
        at: &At<StateView>,
        block: BlockId,
        phase: Phase,
        content: Content,
    ) -> [(Range<u64>, Bytes); 2] {
        let own = |range: Range<u64>, offset| {
            let page_start = range.start - offset;
            (range, Bytes { content, group: at.group, page_start })
        };
        let ssm = self.ssm(at, block, phase);
        [own(at.view.conv_bytes(block), 0), own(ssm, at.view.ssm_offset)]
    }

    /// Decode and convolution kernels index in 64 bits; only the prefill scan has the knob.
    fn ssm(&self, at: &At<StateView>, block: BlockId, phase: Phase) -> Range<u64> {
        let bits = match phase {
            Phase::Prefill => self.state_index_bits,
            Phase::Decode => u64::BITS,
        };
        at.view.ssm_bytes(block, bits)
    }

    /// All rows store, then each reads its positions.
    fn attention(&mut self, batch: &StepBatch, at: &At<KeyValueView>) {
        for (index, row) in batch.rows.iter().enumerate() {
            let life = self.visits[index].life;
            let table = batch.blocks(index, at.group);
            let end = row.computed_tokens + row.scheduled_tokens;
            for (block, tokens) in at.blocks(table, row.computed_tokens..end) {
                let stored = Stored { bytes: at.own(life, block), life, block };
                for range in at.view.token_bytes(block, tokens) {
                    self.memory.store(at.view.buffer, &range, stored);
                }
            }
        }
        for (index, row) in batch.rows.iter().enumerate() {
            let account = self.lives.account(self.visits[index].life);
            if !account.is_wrong_before(batch.engine_step) && !account.rests(row) {
                self.gather(batch, index, at);
            }
        }
    }

    fn gather(&mut self, batch: &StepBatch, index: usize, at: &At<KeyValueView>) {
        let (row, life) = (&batch.rows[index], self.visits[index].life);
        let end = row.computed_tokens + row.scheduled_tokens;
        for (block, tokens) in at.blocks(batch.blocks(index, at.group), 0..end) {
            let own = Some(at.own(life, block));
            for range in at.view.token_bytes(block, tokens) {
                if let Some(found) = self.memory.misread(at.view.buffer, &range, own) {
                    let what = (Cause::Overwritten, at.layer, block);
                    self.lives.note(life, batch.engine_step, what, found);
                }
            }
        }
    }
}

impl At<KeyValueView> {
    /// The blocks of a table that hold some positions, and which of each block's tokens these are.
    fn blocks<'a>(
        &self,
        table: &'a [BlockId],
        positions: Range<u32>,
    ) -> impl Iterator<Item = (BlockId, Range<u32>)> + use<'a> {
        let each = self.view.block_tokens;
        let Range { start, end } = positions;
        (start / each..end.div_ceil(each)).map(move |place| {
            let first = place * each;
            let tokens = start.max(first) - first..end.min(first + each) - first;
            (table[place as usize], tokens)
        })
    }

    /// Keys and values that a life has stored in a block of its own.
    fn own(&self, life: LifeId, block: BlockId) -> Bytes {
        let [keys, _] = self.view.token_bytes(block, 0..0);
        Bytes { content: Content::Life(life), group: self.group, page_start: keys.start }
    }
}
