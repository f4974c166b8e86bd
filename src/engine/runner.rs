//! One forward pass over a batch: rows in, logits out, caches written.
//!
//! Decode rows come first and read their state unconditionally; prefill rows start from their
//! block's state where something is computed already, from zero otherwise. As in vLLM's mixer the
//! prefill rows of a layer run and store before its decode rows load. Stores are serial in row
//! order, so two rows that write one address have one outcome. Everything between loads and stores
//! runs in parallel over chunks of rows; invariant numbers do not depend on how rows are cut.

use std::ops::Range;

use super::faults::{bump_ulp, is_first_request};
use super::{CacheView, LayerPlace, Layout, Phase, Row, StepBatch};
use crate::base::{Contract, GroupId, LayerId, LogProb, TokenId};
use crate::config::Fault;
use crate::model::{Block, Model, Numerics, Span, Spans};
use crate::ops::array::{Array, Device};
use crate::ops::attention::{Contexts, Projected, Tables};
use crate::ops::extremes::Extremes;
use crate::ops::pages::{KeyValueView, Pages, StateView};
use crate::ops::routing::Choice;
use crate::ops::sampling::log_prob_rows;
use crate::ops::state::{StateRow, States};

/// Watches a forward pass.
pub type Observer<'a> = &'a mut dyn FnMut(Seen<'_>);

/// What there is to see of a forward pass.
#[derive(Debug)]
pub enum Seen<'a> {
    /// The residual stream after a part of the model, by its place in
    /// [`crate::model::Plan::parts`]: some of the batch's rows, `[T, H]`. Parts come in order, and
    /// the rows of each.
    Stream { part: usize, x_th: &'a [f32] },
    /// What one row of the batch wrote to a layer's cache: its recurrent state, or its keys and
    /// values.
    Written { layer: usize, row: usize, extremes: Extremes },
}

/// The model as the engine runs it, over pages that the caller owns.
#[derive(Debug)]
pub struct Runner {
    model: Model,
    num: Numerics,
    places: Vec<LayerPlace>,
    /// Width of slot x stride in a prefill row's state load and store. Decode is always 64 bits.
    state_index_bits: u32,
    faults: Vec<Fault>,
    device: Device,
}

/// Rows that go through a layer together, and their tokens in the batch.
#[derive(Debug)]
struct Chunk {
    rows: Range<usize>,
    spans: Spans,
    /// The residual stream, `[T, H]`.
    x_th: Array,
    /// The same between a layer's mixer and its feed-forward, where somebody looks.
    middle: Option<Array>,
}

impl Chunk {
    /// What follows a layer's mixer.
    fn feed_forward(&mut self, num: &Numerics, block: &Block, watched: bool) {
        self.middle = (watched && block.has_feed_forward()).then(|| self.x_th.clone());
        block.feed_forward(num, &mut self.x_th);
    }
}

impl Runner {
    /// Rows whose logits exist at once, a thread.
    pub const LOGIT_ROWS: usize = 64;

    #[must_use]
    pub fn new(num: Numerics, layout: &Layout, model: Model, state_index_bits: u32) -> Self {
        let device = model.root.device();
        let (places, faults) = (layout.layers.clone(), Vec::new());
        Self { model, num, places, state_index_bits, faults, device }
    }

    /// With what is planted in it.
    #[must_use]
    pub fn with_faults(self, faults: &[Fault]) -> Self {
        Self { faults: faults.to_vec(), ..self }
    }

    /// Entries of the vocabulary.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.model.root.vocab()
    }

    /// Width of the residual stream.
    #[must_use]
    pub fn hidden(&self) -> usize {
        self.model.root.hidden()
    }

    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What left the last layer, `[num_tokens, H]`, the padding's rows last.
    pub fn forward(
        &self,
        pages: &mut Pages,
        batch: &StepBatch,
        observe: Option<Observer<'_>>,
    ) -> Array {
        let mut chunks = self.cut(batch, 0..batch.num_decodes + batch.padding_rows);
        let num_decodes = chunks.len();
        if batch.padding_rows == 0 {
            chunks.extend(self.cut(batch, batch.num_decodes..batch.rows.len()));
        }
        let mut watch = Watch { observe, part: 0 };
        watch.stream(chunks.iter().map(|chunk| &chunk.x_th));
        for (layer, block) in self.model.blocks.iter().enumerate() {
            let LayerPlace { group, view } = &self.places[layer];
            let at = At { layer, block, group: *group };
            match view {
                CacheView::State(view) => {
                    // The prefills' stores come before the decodes' loads.
                    let (decodes, prefills) = chunks.split_at_mut(num_decodes);
                    let bits = self.state_index_bits;
                    self.mamba(pages, batch, prefills, (at, view), bits, &mut watch);
                    self.mamba(pages, batch, decodes, (at, view), u64::BITS, &mut watch);
                }
                CacheView::KeyValue(view) => {
                    self.attention(pages, batch, &mut chunks, (at, view), &mut watch);
                }
            }
            if self.faults.contains(&Fault::LayerUlp) && layer == self.model.blocks.len() / 2 {
                self.bump_first_request(batch, &mut chunks[..num_decodes]);
            }
            if block.has_feed_forward() {
                watch.stream(chunks.iter().filter_map(|chunk| chunk.middle.as_ref()));
            }
            watch.stream(chunks.iter().map(|chunk| &chunk.x_th));
        }
        let parts = chunks.into_iter().map(|chunk| chunk.x_th).collect();
        Array::concat(&self.device, parts)
    }

    /// The rows after the final norm, `[T, H]`.
    #[must_use]
    pub fn norm(&self, x_th: &Array) -> Array {
        self.model.root.norm(&self.num, x_th)
    }

    /// Logits `[T, V]` of rows that left the last layer.
    #[must_use]
    pub fn logits(&self, x_th: &Array) -> Array {
        self.model.root.logits(&self.num, x_th)
    }

    /// log p of each target under the contract, from the rows `first..` of x[T, H], one a target.
    #[must_use]
    pub fn log_probs(
        &self,
        contract: &Contract,
        x_th: &Array,
        first: usize,
        targets: &[TokenId],
    ) -> Vec<LogProb> {
        let part = |(i, targets): (usize, &[TokenId])| {
            let start = first + i * Self::LOGIT_ROWS;
            let rows = x_th.row_range(self.hidden(), start..start + targets.len());
            log_prob_rows(&self.logits(&rows), self.vocab(), targets, contract)
        };
        targets.chunks(Self::LOGIT_ROWS).enumerate().flat_map(part).collect()
    }

    /// Where rows that left the mixer of a layer, `x[T, H]`, go: `[T, K]`. `None` for a layer
    /// without experts.
    #[must_use]
    pub fn routes(&self, layer: LayerId, x_th: Vec<f32>) -> Option<Vec<Choice>> {
        let block = &self.model.blocks[layer.index()];
        block.routes(&self.num, &self.device.upload(x_th))
    }

    /// One part of the batch, all prefills or all decodes. `bits` is the width of the ssm state's
    /// address: decode and convolution index in 64 bits, only the prefill scan has the knob.
    fn mamba(
        &self,
        pages: &mut Pages,
        batch: &StepBatch,
        chunks: &mut [Chunk],
        (at, view): (At<'_>, &StateView),
        bits: u32,
        watch: &mut Watch<'_>,
    ) {
        let At { block, group, .. } = at;
        let places = |chunk: &Chunk| -> Vec<StateRow> {
            let place = |row: usize| state_row(batch, row, group);
            chunk.rows.clone().map(place).collect()
        };
        // Every load comes before any store.
        let load = |chunk: &Chunk| {
            let rows = places(chunk);
            let mut states = States::load(pages, view, &rows, bits);
            if self.faults.contains(&Fault::DecodeUpdateDiffers) && is_decode(batch, chunk) {
                let token = |row: usize| batch.tokens[batch.span(row).start];
                lose_windows(&mut states, chunk.rows.clone().map(token));
            }
            (states, rows)
        };
        let loaded: Vec<_> = chunks.iter().map(load).collect();
        let mut work: Vec<_> = chunks.iter_mut().zip(loaded).collect();
        let watched = watch.observe.is_some();
        self.device.map(&mut work, |_, (chunk, (states, _))| {
            block.mix_mamba(&self.num, &chunk.spans, states, &mut chunk.x_th);
            chunk.feed_forward(&self.num, block, watched);
        });
        for (_, (states, rows)) in &work {
            states.store_conv(pages, view, rows);
        }
        for (chunk, (states, rows)) in &work {
            states.store_ssm(pages, view, rows, bits);
            watch.written(at.layer, chunk, || states.extremes());
        }
    }

    fn attention(
        &self,
        pages: &mut Pages,
        batch: &StepBatch,
        chunks: &mut [Chunk],
        (at, view): (At<'_>, &KeyValueView),
        watch: &mut Watch<'_>,
    ) {
        let At { block, group, .. } = at;
        let tables = |chunk: &Chunk| -> Tables<'_> {
            chunk.rows.clone().map(|row| batch.blocks(row, group)).collect()
        };
        let projected: Vec<Projected> =
            self.device.map(chunks, |_, chunk| block.project(&self.num, &chunk.spans, &chunk.x_th));
        for (chunk, own) in chunks.iter().zip(&projected) {
            own.store(pages, view, &chunk.spans, &tables(chunk));
            watch.written(at.layer, chunk, || Some(extremes(own, &chunk.spans, view)));
        }
        let (pages, watched) = (&*pages, watch.observe.is_some());
        self.device.map(chunks, |i, chunk| {
            let contexts = Contexts::load(pages, view, &chunk.spans, &tables(chunk));
            let x_th = &mut chunk.x_th;
            block.mix_attention(&self.num, &chunk.spans, &projected[i], &contexts, x_th);
            chunk.feed_forward(&self.num, block, watched);
        });
    }

    /// Cuts rows into as many chunks as the device works on at once, as even in tokens as whole
    /// rows allow, and embeds their tokens. Invariant numbers do not depend on it.
    fn cut(&self, batch: &StepBatch, rows: Range<usize>) -> Vec<Chunk> {
        let tokens: usize = rows.clone().map(|row| batch.span(row).len).sum();
        let share = tokens.div_ceil(self.device.parallelism());
        let mut parts: Vec<(Range<usize>, Vec<Span>)> = Vec::new();
        let len = |spans: &[Span]| spans.last().map_or(0, |span| span.start + span.len);
        for row in rows {
            if parts.last().is_none_or(|(_, spans)| len(spans) >= share) {
                parts.push((row..row, Vec::new()));
            }
            let (rows, spans) = parts.last_mut().expect("one was just pushed if there was none");
            rows.end = row + 1;
            spans.push(Span { start: len(spans), ..batch.span(row) });
        }
        let chunk = |(rows, spans): (Range<usize>, Vec<Span>)| {
            let first = batch.span(rows.start).start;
            let tokens = &batch.tokens[first..first + len(&spans)];
            let x_th = self.model.root.embed(tokens);
            Chunk { rows, spans: Spans::new(&self.device, spans), x_th, middle: None }
        };
        parts.into_iter().map(chunk).collect()
    }

    /// See [`Fault::LayerUlp`].
    fn bump_first_request(&self, batch: &StepBatch, decodes: &mut [Chunk]) {
        for chunk in decodes {
            let rows = chunk.rows.clone().zip(chunk.spans.iter());
            for (_, span) in rows.filter(|&(row, _)| is_first_request(batch, row)) {
                let element = span.start * self.hidden();
                bump_ulp(&mut chunk.x_th, element, self.num.residual_dtype);
            }
        }
    }
}

fn is_decode(batch: &StepBatch, chunk: &Chunk) -> bool {
    chunk.rows.start < batch.num_decodes
}

/// See [`Fault::DecodeUpdateDiffers`].
fn lose_windows(states: &mut States, tokens: impl Iterator<Item = TokenId>) {
    for (state, token) in states.cpu_mut().iter_mut().zip(tokens) {
        if token.get().is_multiple_of(Fault::DECODE_EVERY) {
            state.conv.fill(0.0);
        }
    }
}

/// A layer on its way.
#[derive(Clone, Copy)]
struct At<'a> {
    layer: usize,
    block: &'a Block,
    group: GroupId,
}

/// Tells an observer, if there is one, what it sees. Without one nothing is copied or looked at.
struct Watch<'a> {
    observe: Option<Observer<'a>>,
    /// The next one.
    part: usize,
}

impl Watch<'_> {
    fn stream<'x>(&mut self, chunks: impl Iterator<Item = &'x Array>) {
        let Some(observe) = &mut self.observe else { return };
        for x_th in chunks {
            observe(Seen::Stream { part: self.part, x_th: &x_th.on_host() });
        }
        self.part += 1;
    }

    fn written(
        &mut self,
        layer: usize,
        chunk: &Chunk,
        extremes: impl FnOnce() -> Option<Vec<Extremes>>,
    ) {
        let Some(observe) = &mut self.observe else { return };
        for (row, extremes) in chunk.rows.clone().zip(extremes().unwrap_or_default()) {
            observe(Seen::Written { layer, row, extremes });
        }
    }
}

/// Of each span's keys and values.
fn extremes(own: &Projected, spans: &Spans, view: &KeyValueView) -> Vec<Extremes> {
    let (k, v) = (own.k.on_host(), own.v.on_host());
    let one = |span: &Span| {
        let mut found = Extremes::default();
        found.add(&k[span.floats(view.row)]);
        found.add(&v[span.floats(view.row)]);
        found
    };
    spans.iter().map(one).collect()
}

/// A decode row reads its block whatever it holds; a prefill row where something is computed. The
/// block that is read is another one than the one stored to where a prefix cache keeps it as it is.
fn state_row(batch: &StepBatch, index: usize, group: GroupId) -> StateRow {
    let reads = |row: &Row| row.phase == Phase::Decode || row.has_initial_state();
    // Padding rows are decodes.
    let reads = batch.rows.get(index).is_none_or(reads);
    let blocks = batch.blocks(index, group);
    StateRow { block: blocks[blocks.len() - 1], from: reads.then_some(blocks[0]) }
}
