//! One forward pass in which tags move instead of tensors: the loads and stores of the runner.

use std::collections::HashMap;
use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::memory::{Bytes, Content, Found, LifeId, Memory, Stored};
use super::{Cause, Misread, Source};
use crate::base::{BlockId, EngineStep, GroupId, LayerId, RequestId, TokenId};
use crate::engine::{BlockPool, CacheView, LayerPlace, Layout, Phase, Row, StepBatch};
use crate::ops::pages::{KeyValueView, StateView};

/// The pages' tags, and what is known of every life.
#[derive(Clone, Debug)]
pub struct Shadow {
    places: Vec<LayerPlace>,
    state_index_bits: u32,
    memory: Memory,
    /// By life id; kept when a life has ended, because its bytes are still there.
    accounts: Vec<Account>,
    /// The lives so far of every request that is not done.
    lives: HashMap<RequestId, Vec<LifeId>>,
    /// The rows of the pass under way.
    visits: Vec<Visit>,
}

/// What is known of one life.
#[derive(Clone, Debug)]
struct Account {
    request: RequestId,
    /// Hash of its tokens so far, while they are of the prompt.
    prompt_hash: u64,
    /// What its state blocks hold.
    content: Content,
    /// Through which kernels it stored them.
    stored_by: Phase,
    /// Everything it computes from this engine step on is wrong.
    wrong_since: Option<EngineStep>,
    misreads: Vec<Misread>,
    /// When a store at a wrapped address last hit a block of its own.
    hit: Option<EngineStep>,
    /// When a pass last looked at all its loads and stores, and left it in a state that a further
    /// decode row would not change.
    looked_at: Option<EngineStep>,
}

/// A row of the pass under way.
#[derive(Clone, Copy, Debug)]
struct Visit {
    life: LifeId,
    /// What the row's stores hold, if all is right.
    content: Content,
    /// It was at rest when the pass began.
    rested: bool,
}

/// A layer and its cache.
struct At<View> {
    layer: LayerId,
    group: GroupId,
    view: View,
}

impl Account {
    /// Nothing has happened since all was looked at: a decode row would find its own bytes (or is
    /// wrong already) and store what is there.
    fn is_at_rest(&self) -> bool {
        self.looked_at > self.hit
    }

    fn is_wrong_before(&self, engine_step: EngineStep) -> bool {
        self.wrong_since.is_some_and(|since| since < engine_step)
    }

    /// What a row of this life stores now.
    fn stores(&self, visit: &Visit) -> Content {
        match self.wrong_since {
            None => visit.content,
            Some(_) => Content::Life(visit.life),
        }
    }
}

impl Shadow {
    pub fn new(layout: &Layout, num_blocks: u32, state_index_bits: u32) -> Self {
        Self {
            places: layout.layers.clone(),
            state_index_bits,
            memory: Memory::new(layout.num_buffers, num_blocks, layout.page_bytes),
            accounts: Vec::new(),
            lives: HashMap::new(),
            visits: Vec::new(),
        }
    }

    /// `prompt_lens` are the rows' prompts' lengths in tokens; `pool` is as the batch's plan left
    /// it.
    pub fn forward(
        &mut self,
        batch: &StepBatch,
        prompt_lens: impl Iterator<Item = u32>,
        pool: &BlockPool,
    ) {
        self.arrive(batch, prompt_lens);
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
        self.depart(batch);
    }

    /// A request is done: when each of its lives went wrong, and why.
    pub fn leave(&mut self, request: RequestId) -> Vec<(Option<EngineStep>, Vec<Misread>)> {
        let lives = self.lives.remove(&request).expect("a request that is done had rows");
        let take = |life: LifeId| {
            let account = &mut self.accounts[life.index()];
            (account.wrong_since, std::mem::take(&mut account.misreads))
        };
        lives.into_iter().map(take).collect()
    }

    fn arrive(&mut self, batch: &StepBatch, prompt_lens: impl Iterator<Item = u32>) {
        self.visits.clear();
        for ((index, row), prompt_len) in batch.rows.iter().enumerate().zip(prompt_lens) {
            if row.computed_tokens == 0 {
                self.begin_life(row);
            }
            let life = *self.lives[&row.request].last().expect("a life began with its first row");
            let account = &mut self.accounts[life.index()];
            let content = if row.computed_tokens + row.scheduled_tokens <= prompt_len {
                account.prompt_hash = hash_on(account.prompt_hash, batch.row_tokens(index));
                Content::Prompt(account.prompt_hash)
            } else {
                Content::Life(life)
            };
            self.visits.push(Visit { life, content, rested: account.is_at_rest() });
        }
    }

    fn begin_life(&mut self, row: &Row) {
        let life = LifeId::new(self.accounts.len());
        self.lives.entry(row.request).or_default().push(life);
        self.accounts.push(Account {
            request: row.request,
            prompt_hash: 0,
            content: Content::Life(life),
            stored_by: row.phase,
            wrong_since: None,
            misreads: Vec::new(),
            hit: None,
            looked_at: None,
        });
    }

    fn depart(&mut self, batch: &StepBatch) {
        for (row, visit) in batch.rows.iter().zip(&self.visits) {
            let account = &mut self.accounts[visit.life.index()];
            account.content = account.stores(visit);
            account.stored_by = row.phase;
            // A prefill row, or one still in its prompt, is followed by one that stores otherwise.
            let repeats =
                row.phase == Phase::Decode && account.content == Content::Life(visit.life);
            if !repeats {
                account.looked_at = None;
            } else if !visit.rested {
                account.looked_at = Some(batch.engine_step);
            }
        }
    }
    /// One part of the batch, all prefills or all decodes: every load comes before the first store.
    fn mamba(
        &mut self,
        batch: &StepBatch,
        rows: Range<usize>,
        at: &At<StateView>,
        pool: &BlockPool,
    ) {
        for index in rows.clone() {
            let (row, life) = (&batch.rows[index], self.visits[index].life);
            let account = &self.accounts[life.index()];
            let is_loaded = row.phase == Phase::Decode || row.has_initial_state();
            if is_loaded && !account.is_wrong_before(batch.engine_step) && !rests(row, account) {
                self.load_state(batch, index, at);
            }
        }
        for index in rows {
            let (row, visit) = (&batch.rows[index], self.visits[index]);
            let account = &self.accounts[visit.life.index()];
            if !rests(row, account) {
                let block = batch.blocks(index, at.group)[0];
                let content = account.stores(&visit);
                self.store_state(row.phase, at, block, (visit.life, content));
                self.notify(batch.engine_step, row.phase, at, block, pool);
            }
        }
    }

    fn load_state(&mut self, batch: &StepBatch, index: usize, at: &At<StateView>) {
        let (row, life) = (&batch.rows[index], self.visits[index].life);
        let block = batch.blocks(index, at.group)[0];
        let account = &self.accounts[life.index()];
        let is_first = !row.has_initial_state();
        let wraps = self.ssm(at, block, Phase::Prefill) != self.ssm(at, block, Phase::Decode);
        let ssm_cause = match wraps && account.stored_by != row.phase {
            true => Cause::Wrapped,
            false => Cause::Overwritten,
        };
        let content = account.content;
        let parts = [
            (at.view.conv_bytes(block), 0, Cause::Overwritten),
            (self.ssm(at, block, row.phase), at.view.ssm_offset, ssm_cause),
        ];
        for (bytes, offset, cause) in parts {
            let own = Bytes { content, group: at.group, page_start: bytes.start - offset };
            let expected = (!is_first).then_some(own);
            if let Some(found) = self.memory.misread(at.view.buffer, &bytes, expected) {
                let cause = if is_first { Cause::StaleState } else { cause };
                self.note(batch.engine_step, life, (cause, at.layer, block), found);
            }
        }
    }

    fn store_state(
        &mut self,
        phase: Phase,
        at: &At<StateView>,
        block: BlockId,
        (life, content): (LifeId, Content),
    ) {
        let parts =
            [(at.view.conv_bytes(block), 0), (self.ssm(at, block, phase), at.view.ssm_offset)];
        for (bytes, offset) in parts {
            let own = Bytes { content, group: at.group, page_start: bytes.start - offset };
            self.memory.store(at.view.buffer, &bytes, Stored { bytes: own, life, block });
        }
    }

    /// A store at a wrapped address wakes whoever owns the pages that it went to.
    fn notify(
        &mut self,
        engine_step: EngineStep,
        phase: Phase,
        at: &At<StateView>,
        block: BlockId,
        pool: &BlockPool,
    ) {
        let bytes = self.ssm(at, block, phase);
        if bytes == self.ssm(at, block, Phase::Decode) {
            return;
        }
        for page in self.memory.pages(&bytes) {
            let owner = pool.record(page).owner;
            let lives = owner.and_then(|owner| self.lives.get(&owner));
            if let Some(life) = lives.and_then(|lives| lives.last()) {
                self.accounts[life.index()].hit = Some(engine_step);
            }
        }
    }

    /// Decode kernels index in 64 bits; only the prefill scan has the knob.
    fn ssm(&self, at: &At<StateView>, block: BlockId, phase: Phase) -> Range<u64> {
        let bits = match phase {
            Phase::Prefill => self.state_index_bits,
            Phase::Decode => u64::BITS,
        };
        at.view.ssm_bytes(block, bits)
    }

    /// All rows store, then each reads all its positions.
    fn attention(&mut self, batch: &StepBatch, at: &At<KeyValueView>) {
        for (index, row) in batch.rows.iter().enumerate() {
            let life = self.visits[index].life;
            let end = row.computed_tokens + row.scheduled_tokens;
            for (block, tokens) in
                at.blocks(batch.blocks(index, at.group), row.computed_tokens..end)
            {
                let stored = Stored { bytes: at.own(life, block), life, block };
                for bytes in at.view.token_bytes(block, tokens) {
                    self.memory.store(at.view.buffer, &bytes, stored);
                }
            }
        }
        for (index, row) in batch.rows.iter().enumerate() {
            let life = self.visits[index].life;
            let account = &self.accounts[life.index()];
            if !account.is_wrong_before(batch.engine_step) && !rests(row, account) {
                self.gather(batch, index, at);
            }
        }
    }

    fn gather(&mut self, batch: &StepBatch, index: usize, at: &At<KeyValueView>) {
        let (row, life) = (&batch.rows[index], self.visits[index].life);
        let end = row.computed_tokens + row.scheduled_tokens;
        for (block, tokens) in at.blocks(batch.blocks(index, at.group), 0..end) {
            for bytes in at.view.token_bytes(block, tokens) {
                let own = at.own(life, block);
                if let Some(found) = self.memory.misread(at.view.buffer, &bytes, Some(own)) {
                    let what = (Cause::Overwritten, at.layer, block);
                    self.note(batch.engine_step, life, what, found);
                }
            }
        }
    }

    /// Takes a misread down, once a cause and block.
    fn note(
        &mut self,
        engine_step: EngineStep,
        life: LifeId,
        (cause, layer, block): (Cause, LayerId, BlockId),
        found: Found,
    ) {
        let found = match found {
            Found::Zeros => None,
            Found::Stored(Stored { life, block, .. }) => {
                Some(Source { request: self.accounts[life.index()].request, block })
            }
        };
        let account = &mut self.accounts[life.index()];
        account.wrong_since.get_or_insert(engine_step);
        if !account.misreads.iter().any(|one| (one.cause, one.block) == (cause, block)) {
            account.misreads.push(Misread { cause, engine_step, layer, block, found });
        }
    }
}

/// Whether a row's loads and stores may be passed over.
fn rests(row: &Row, account: &Account) -> bool {
    row.phase == Phase::Decode && account.is_at_rest()
}

/// One token after the other, so that it does not depend on how a prompt is cut into chunks.
fn hash_on(hash: u64, tokens: &[TokenId]) -> u64 {
    tokens.iter().fold(hash, |hash, token| xxh3_64_with_seed(&token.get().to_le_bytes(), hash))
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
