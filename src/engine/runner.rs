//! One forward pass over a batch: rows in, logits out, caches written.
//!
//! Decode rows come first and read their state unconditionally; prefill rows start from their
//! block's state where something is computed already, from zero otherwise. As in vLLM's mixer the
//! prefill rows of a layer run and store before its decode rows load. Stores are serial in row
//! order, so two rows that write one address have one outcome. Everything between loads and stores
//! runs in parallel over chunks of rows; invariant numbers do not depend on how rows are cut.

use super::faults::{bump_ulp, is_first_request};
use super::prepared::{Holds, Part, Prepared};
use super::{CacheView, LayerPlace, Layout, StepBatch};
use crate::base::{Contract, GroupId, LayerId, LogProb, TokenId};
use crate::config::Fault;
use crate::model::{Block, Model, Numerics, Residual, Span, Spans};
use crate::ops::array::{Array, Device};
use crate::ops::attention::{Contexts, Projected};
use crate::ops::extremes::Extremes;
use crate::ops::pages::{KeyValueView, Pages, StateView};
use crate::ops::routing::Choice;
use crate::ops::sampling::log_prob_rows;
use crate::ops::sheet::Sheet;
use crate::ops::state::States;

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
    groups: Vec<Holds>,
    /// Width of slot x stride in a prefill row's state load and store. Decode is always 64 bits.
    state_index_bits: u32,
    faults: Vec<Fault>,
    device: Device,
}

/// A part on its way through the layers.
#[derive(Debug)]
struct Chunk<'a> {
    part: &'a Part,
    /// The residual stream, `[T, H]`.
    x: Residual,
    /// The same between a layer's mixer and its feed-forward, where somebody looks.
    middle: Option<Array>,
}

impl Chunk<'_> {
    /// What follows a layer's mixer.
    fn feed_forward(&mut self, num: &Numerics, block: &Block, watched: bool) {
        self.middle = (watched && block.has_feed_forward()).then(|| self.x.settle(num).clone());
        block.feed_forward(num, &mut self.x);
    }
}

impl Runner {
    #[must_use]
    pub fn new(num: Numerics, layout: &Layout, model: Model, state_index_bits: u32) -> Self {
        let device = model.root.device();
        let (places, faults) = (layout.layers.clone(), Vec::new());
        let groups = Holds::of(layout);
        Self { model, num, places, groups, state_index_bits, faults, device }
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

    /// Writes down what a pass over the batch looks up, so that every context may have up to
    /// `longest` tokens; 0 for as many as they have.
    #[must_use]
    pub fn prepare(&self, sheet: &mut Sheet, batch: &StepBatch, longest: u32) -> Prepared {
        Prepared::on(sheet, (&self.device, &self.groups), batch, longest)
    }

    /// What left the last layer, `[num_tokens, H]`, the padding's rows last.
    pub fn forward(
        &self,
        pages: &mut Pages,
        batch: &StepBatch,
        observe: Option<Observer<'_>>,
    ) -> Array {
        let mut sheet = Sheet::new(&self.device);
        let prepared = self.prepare(&mut sheet, batch, 0);
        sheet.send(None);
        self.forward_prepared(pages, batch, &prepared, observe)
    }

    /// The same of a batch whose sheet is sent.
    pub fn forward_prepared(
        &self,
        pages: &mut Pages,
        batch: &StepBatch,
        prepared: &Prepared,
        observe: Option<Observer<'_>>,
    ) -> Array {
        let embedded = prepared.parts.iter().map(|part| {
            let x = Residual::new(self.model.root.embed(&self.num, &part.tokens));
            Chunk { part, x, middle: None }
        });
        let mut chunks: Vec<Chunk<'_>> = embedded.collect();
        let mut watch = Watch { num: &self.num, observe, part: 0 };
        watch.stream(&mut chunks);
        for (layer, block) in self.model.blocks.iter().enumerate() {
            let LayerPlace { group, view } = &self.places[layer];
            let at = At { layer, block, group: *group };
            match view {
                CacheView::State(view) => {
                    // The prefills' stores come before the decodes' loads.
                    let (decodes, prefills) = chunks.split_at_mut(prepared.num_decodes);
                    let bits = self.state_index_bits;
                    self.mamba(pages, batch, prefills, (at, view), bits, &mut watch);
                    self.mamba(pages, batch, decodes, (at, view), u64::BITS, &mut watch);
                }
                CacheView::KeyValue(view) => {
                    self.attention(pages, &mut chunks, (at, view), &mut watch);
                }
            }
            if self.faults.contains(&Fault::LayerUlp) && layer == self.model.blocks.len() / 2 {
                self.bump_first_request(batch, &mut chunks[..prepared.num_decodes]);
            }
            if block.has_feed_forward() {
                watch.middle(&chunks);
            }
            watch.stream(&mut chunks);
        }
        let parts = chunks.into_iter().map(|chunk| chunk.x.into_settled(&self.num)).collect();
        Array::concat(&self.device, parts)
    }

    /// Whether a pass over decode rows is the same launches whatever the numbers are: without
    /// experts, whose shares the host deals out, and without turns, which it computes.
    #[must_use]
    pub fn records(&self) -> bool {
        self.device.records()
            && self.faults.is_empty()
            && self.model.blocks.iter().all(Block::is_launches_alone)
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
        let at_once = self.device.logit_rows();
        let part = |(i, targets): (usize, &[TokenId])| {
            let start = first + i * at_once;
            let rows = x_th.row_range(self.hidden(), start..start + targets.len());
            log_prob_rows(&self.logits(&rows), self.vocab(), targets, contract)
        };
        targets.chunks(at_once).enumerate().flat_map(part).collect()
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
        chunks: &mut [Chunk<'_>],
        (at, view): (At<'_>, &StateView),
        bits: u32,
        watch: &mut Watch<'_, '_>,
    ) {
        let At { block, group, .. } = at;
        // Every load comes before any store.
        let load = |chunk: &Chunk<'_>| {
            let mut states = States::load(pages, view, chunk.part.states(group), bits);
            if self.faults.contains(&Fault::DecodeUpdateDiffers) && is_decode(batch, chunk) {
                let token = |row: usize| batch.tokens[batch.span(row).start];
                lose_windows(&mut states, chunk.part.rows.clone().map(token));
            }
            states
        };
        let loaded: Vec<_> = chunks.iter().map(load).collect();
        let mut work: Vec<_> = chunks.iter_mut().zip(loaded).collect();
        let watched = watch.observe.is_some();
        self.device.map(&mut work, |_, (chunk, states)| {
            block.mix_mamba(&self.num, &chunk.part.spans, states, &mut chunk.x);
            chunk.feed_forward(&self.num, block, watched);
        });
        for (chunk, states) in &work {
            states.store_conv(pages, view, chunk.part.states(group));
        }
        for (chunk, states) in &work {
            states.store_ssm(pages, view, chunk.part.states(group), bits);
            watch.written(at.layer, chunk, || states.extremes());
        }
    }

    fn attention(
        &self,
        pages: &mut Pages,
        chunks: &mut [Chunk<'_>],
        (at, view): (At<'_>, &KeyValueView),
        watch: &mut Watch<'_, '_>,
    ) {
        let At { block, group, .. } = at;
        let projected: Vec<Projected> = self
            .device
            .map(chunks, |_, chunk| block.project(&self.num, &chunk.part.spans, &mut chunk.x));
        for (chunk, own) in chunks.iter().zip(&projected) {
            own.store(pages, view, &chunk.part.spans, chunk.part.tables(group));
            watch.written(at.layer, chunk, || Some(extremes(own, &chunk.part.spans, view)));
        }
        let (pages, watched) = (&*pages, watch.observe.is_some());
        self.device.map(chunks, |i, chunk| {
            let spans = &chunk.part.spans;
            let contexts = Contexts::load(pages, view, spans, chunk.part.tables(group));
            block.mix_attention(&self.num, spans, &projected[i], &contexts, &mut chunk.x);
            chunk.feed_forward(&self.num, block, watched);
        });
    }

    /// See [`Fault::LayerUlp`].
    fn bump_first_request(&self, batch: &StepBatch, decodes: &mut [Chunk<'_>]) {
        for chunk in decodes {
            let rows = chunk.part.rows.clone().zip(chunk.part.spans.iter());
            for (_, span) in rows.filter(|&(row, _)| is_first_request(batch, row)) {
                let element = span.start * self.hidden();
                bump_ulp(chunk.x.settle(&self.num), element, self.num.residual_dtype);
            }
        }
    }
}

fn is_decode(batch: &StepBatch, chunk: &Chunk<'_>) -> bool {
    chunk.part.rows.start < batch.num_decodes
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
struct Watch<'n, 'a> {
    num: &'n Numerics,
    observe: Option<Observer<'a>>,
    /// The next one.
    part: usize,
}

impl Watch<'_, '_> {
    fn stream(&mut self, chunks: &mut [Chunk<'_>]) {
        let Some(observe) = &mut self.observe else { return };
        for chunk in chunks {
            let x_th = chunk.x.settle(self.num);
            observe(Seen::Stream { part: self.part, x_th: &x_th.on_host() });
        }
        self.part += 1;
    }

    fn middle(&mut self, chunks: &[Chunk<'_>]) {
        let Some(observe) = &mut self.observe else { return };
        for x_th in chunks.iter().filter_map(|chunk| chunk.middle.as_ref()) {
            observe(Seen::Stream { part: self.part, x_th: &x_th.on_host() });
        }
        self.part += 1;
    }

    fn written(
        &mut self,
        layer: usize,
        chunk: &Chunk<'_>,
        extremes: impl FnOnce() -> Option<Vec<Extremes>>,
    ) {
        let Some(observe) = &mut self.observe else { return };
        for (row, extremes) in chunk.part.rows.clone().zip(extremes().unwrap_or_default()) {
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
