//! Who is hit by whose stores, by integer arithmetic on the completions' block ids and engine
//! steps.
//!
//! Written apart from the replay on purpose: no memory is kept. A request's cache is damaged if
//! between a store of its own and the read that wants it back, any other store went to one of the
//! same bytes. Only for runs without preemption, with prompts of two chunks at most, in which
//! prefills are told by their prompts: nothing else is on record in full.

use std::collections::BTreeMap;
use std::ops::Range;

use gapscope::base::{RequestId, TokenId};
use gapscope::engine::{CacheView, Completion, Phase};

use super::case::Outcome;

/// When something happens within a run: engine step, layer, turn within the layer, part (of a Mamba
/// layer, all rows store their convolutions first, then their scans), row.
type Time = (u64, usize, u64, u64, u64);

/// Turns within a Mamba layer.
const PREFILLS_STORE: u64 = 1;
const DECODES_LOAD: u64 = 2;
const DECODES_STORE: u64 = 3;
/// Turns within an attention layer.
const ALL_STORE: u64 = 1;
const ALL_GATHER: u64 = 2;

/// One row of one batch, read from a completion.
#[derive(Clone, Copy, Debug)]
struct Row {
    step: u64,
    place: u64,
    /// Positions.
    start: u64,
    end: u64,
    /// The completion's token that is sampled at this row or, for a first chunk, after it.
    token: u32,
}

#[derive(Debug)]
struct Store {
    time: Time,
    buffer: usize,
    bytes: Range<u64>,
    request: usize,
    layer: usize,
    /// Tokens behind it, if it is a scan state.
    state_of: Option<u64>,
}

/// Sizes in bytes.
struct Sizes {
    page: u64,
    element: u64,
    conv: u64,
    ssm: u64,
    /// K, or V, of one token.
    token: u64,
    block_tokens: u64,
    index_mask: u64,
}

pub struct Addresses<'a> {
    outcome: &'a Outcome,
    sizes: Sizes,
    rows: Vec<Vec<Row>>,
    stores: Vec<Store>,
}

impl<'a> Addresses<'a> {
    pub fn new(outcome: &'a Outcome) -> Self {
        let mamba = outcome.hf.mamba.as_ref().expect("a hybrid");
        let attention = outcome.hf.attention.as_ref().expect("a hybrid");
        let layout = &outcome.layout;
        let element = layout.state_stride.map_or(1, |stride| layout.page_bytes / stride);
        let sizes = Sizes {
            page: layout.page_bytes,
            element,
            conv: 4 * (mamba.d_inner * (mamba.d_conv - 1)) as u64,
            ssm: element * (mamba.d_inner * mamba.d_state) as u64,
            token: 4 * (attention.kv_heads * attention.head_dim) as u64,
            block_tokens: layout.block_tokens.map_or(0, u64::from),
            index_mask: (1 << outcome.bits) - 1,
        };
        let mut rows: Vec<Vec<Row>> = outcome.completions.iter().map(rows_of).collect();
        place_first_chunks(&mut rows);
        let mut one = Self { outcome, sizes, rows, stores: Vec::new() };
        one.stores = (0..one.rows.len()).flat_map(|request| one.stores_of(request)).collect();
        one.stores.sort_by_key(|store| store.time);
        one
    }

    /// Whoever read bytes that another store had hit, and the first sampled token that comes of it.
    pub fn collateral(&self) -> BTreeMap<RequestId, u32> {
        let hit = |request: usize| {
            let layers = 0..self.outcome.layout.layers.len();
            let first = layers.filter_map(|layer| self.first_hit(request, layer)).min()?;
            Some((self.outcome.completions[request].id, first))
        };
        (0..self.rows.len()).filter_map(hit).collect()
    }

    fn is_prefill(&self, request: usize, row: &Row) -> bool {
        row.start < self.outcome.completions[request].prompt.len() as u64
    }

    /// The blocks of a layer's group.
    fn blocks(&self, request: usize, layer: usize) -> Vec<u64> {
        let (done, layout) = (&self.outcome.completions[request], &self.outcome.layout);
        let group = layout.layers[layer].group.index();
        match group.checked_sub(layout.num_mamba_groups) {
            None => vec![done.state_blocks()[group].block.get().into()],
            Some(nth) => {
                let each =
                    done.attn_blocks().len() / (layout.groups.len() - layout.num_mamba_groups);
                let own = &done.attn_blocks()[nth * each..(nth + 1) * each];
                own.iter().map(|block| block.get().into()).collect()
            }
        }
    }

    fn conv(&self, block: u64) -> Range<u64> {
        block * self.sizes.page..block * self.sizes.page + self.sizes.conv
    }

    fn ssm(&self, block: u64, prefill: bool) -> Range<u64> {
        let Sizes { page, element, conv, ssm, index_mask, .. } = self.sizes;
        let product = block * (page / element);
        let offset = if prefill { product & index_mask } else { product };
        conv + offset * element..conv + offset * element + ssm
    }

    /// K and V of some positions, a pair of ranges a block.
    fn key_values(&self, blocks: &[u64], positions: Range<u64>) -> Vec<Range<u64>> {
        let Sizes { page, token, block_tokens, .. } = self.sizes;
        let mut ranges = Vec::new();
        for (block, first) in blocks.iter().zip((0..).step_by(block_tokens as usize)) {
            let from = positions.start.clamp(first, first + block_tokens) - first;
            let to = positions.end.clamp(first, first + block_tokens) - first;
            let values = block * page + block_tokens * token;
            ranges.push(block * page + from * token..block * page + to * token);
            ranges.push(values + from * token..values + to * token);
        }
        ranges.retain(|range| range.start < range.end);
        ranges
    }

    fn stores_of(&self, request: usize) -> Vec<Store> {
        let mut stores = Vec::new();
        for (layer, place) in self.outcome.layout.layers.iter().enumerate() {
            let blocks = self.blocks(request, layer);
            for row in &self.rows[request] {
                let prefill = self.is_prefill(request, row);
                let turn = if prefill { PREFILLS_STORE } else { DECODES_STORE };
                let mut push = |buffer, turn, part, bytes, state_of| {
                    let time = (row.step, layer, turn, part, row.place);
                    stores.push(Store { time, buffer, bytes, request, layer, state_of });
                };
                match place.view {
                    CacheView::State(view) => {
                        push(view.buffer, turn, 0, self.conv(blocks[0]), None);
                        push(view.buffer, turn, 1, self.ssm(blocks[0], prefill), Some(row.end));
                    }
                    CacheView::KeyValue(view) => {
                        for bytes in self.key_values(&blocks, row.start..row.end) {
                            push(view.buffer, ALL_STORE, 0, bytes, None);
                        }
                    }
                }
            }
        }
        stores
    }

    /// The first token that comes of a hit in this layer.
    fn first_hit(&self, request: usize, layer: usize) -> Option<u32> {
        let blocks = self.blocks(request, layer);
        let rows = &self.rows[request];
        let is_hit = |pair: &&[Row]| {
            let (from, to) = (&pair[0], &pair[1]);
            let (stored_by, read_by) =
                (self.is_prefill(request, from), self.is_prefill(request, to));
            match self.outcome.layout.layers[layer].view {
                CacheView::State(view) => {
                    let store = if stored_by { PREFILLS_STORE } else { DECODES_STORE };
                    let load = if read_by { 0 } else { DECODES_LOAD };
                    let after = |part| (from.step, layer, store, part, from.place);
                    let before = (to.step, layer, load, 0, 0);
                    let (conv, ssm) = (self.conv(blocks[0]), self.ssm(blocks[0], stored_by));
                    // A state that is looked for elsewhere is lost without a hit.
                    let looks_there = ssm == self.ssm(blocks[0], read_by);
                    // Of several hits the last one decides: it may put the same bytes back.
                    let alike = |store: &Store| {
                        store.bytes == ssm && self.is_alike(request, layer, from.end, store)
                    };
                    let last = self.hits(view.buffer, &ssm, after(1), before).last();
                    self.hits(view.buffer, &conv, after(0), before).next().is_some()
                        || looks_there && last.is_some_and(|store| !alike(store))
                }
                CacheView::KeyValue(view) => {
                    let after = (from.step, layer, ALL_GATHER, 0, 0);
                    let before = (to.step, layer, ALL_GATHER, 0, 0);
                    let own = |store: &Store| (store.request, store.layer) == (request, layer);
                    self.key_values(&blocks, 0..from.end)
                        .iter()
                        .flat_map(|bytes| self.hits(view.buffer, bytes, after, before))
                        .any(|store| !own(store))
                }
            }
        };
        rows.windows(2).find(is_hit).map(|pair| pair[1].token)
    }

    /// The stores between two times that went to any of the bytes, in order.
    fn hits<'b>(
        &'b self,
        buffer: usize,
        bytes: &'b Range<u64>,
        after: Time,
        before: Time,
    ) -> impl Iterator<Item = &'b Store> {
        let from = self.stores.partition_point(|store| store.time <= after);
        let between = self.stores[from..].iter().take_while(move |store| store.time < before);
        between.filter(move |store| {
            store.buffer == buffer && store.bytes.start < bytes.end && bytes.start < store.bytes.end
        })
    }

    /// Rollouts of a prompt have one and the same state after the same tokens of it.
    fn is_alike(&self, request: usize, layer: usize, tokens: u64, store: &Store) -> bool {
        let prompt = |request: usize| -> &[TokenId] { &self.outcome.completions[request].prompt };
        let first = |request: usize| prompt(request).get(..tokens as usize);
        store.layer == layer
            && store.state_of == Some(tokens)
            && first(request).is_some()
            && first(request) == first(store.request)
    }
}

/// The rows of a completion, the first chunk's place still unknown where a second one follows.
fn rows_of(done: &Completion) -> Vec<Row> {
    let [life] = done.lives.as_slice() else { panic!("{} was preempted", done.id) };
    let prompt = done.prompt.len() as u32;
    let mut rows = Vec::new();
    if life.scheduled_tokens < prompt {
        let (step, end) = (life.engine_step.get(), life.scheduled_tokens.into());
        rows.push(Row { step, place: UNKNOWN, start: 0, end, token: 0 });
    }
    for (token, one) in (0..).zip(&done.tokens) {
        let start = u64::from(one.computed_tokens);
        let end = start + u64::from(one.scheduled_tokens);
        let before = rows.last().map_or(0, |row: &Row| row.end);
        assert_eq!(before, start, "{}: a prompt of more than two chunks", done.id);
        assert_eq!(one.phase == Phase::Prefill, token == 0, "{}: an odd split", done.id);
        let step = one.engine_step.get();
        rows.push(Row { step, place: one.batch_row.into(), start, end, token });
    }
    rows
}

const UNKNOWN: u64 = u64::MAX;

/// Of a batch one row at most samples nothing: it has the place that no other row has.
fn place_first_chunks(rows: &mut [Vec<Row>]) {
    let mut places: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for row in rows.iter().flatten() {
        places.entry(row.step).or_default().push(row.place);
    }
    for row in rows.iter_mut().flatten().filter(|row| row.place == UNKNOWN) {
        let taken = &places[&row.step];
        let free: Vec<u64> = (0..taken.len() as u64).filter(|at| !taken.contains(at)).collect();
        let [place] = free[..] else { panic!("engine step {}: rows {taken:?}", row.step) };
        row.place = place;
    }
}
