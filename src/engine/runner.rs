//! One forward pass over a batch: rows in, logits out, caches written.
//!
//! Decode rows come first and read their state unconditionally; prefill rows start from their
//! block's state where something is computed already, from zero otherwise. As in vLLM's mixer the
//! prefill rows of a layer run and store before its decode rows load. Stores are serial in row
//! order, so two rows that write one address have one outcome. Everything between loads and stores
//! runs in parallel over chunks of rows; no number depends on how rows are cut.

use std::ops::Range;

use rayon::prelude::*;

use super::{CacheView, LayerPlace, Layout, Phase, Row, StepBatch};
use crate::base::{BlockId, GroupId};
use crate::model::{Block, Context, MambaState, Model, Numerics, Projected, Span};
use crate::ops::pages::{KeyValueView, Pages, StateView};

/// The model as the engine runs it, over pages that the caller owns.
#[derive(Debug)]
pub struct Runner {
    model: Model,
    num: Numerics,
    places: Vec<LayerPlace>,
    /// Width of slot x stride in a prefill row's state load and store. Decode is always 64 bits.
    state_index_bits: u32,
}

/// Rows that one thread takes through a layer, and their tokens in the batch.
#[derive(Clone, Debug)]
struct Chunk {
    rows: Range<usize>,
    tokens: Range<usize>,
    spans: Vec<Span>,
}

impl Runner {
    #[must_use]
    pub fn new(num: Numerics, layout: &Layout, model: Model, state_index_bits: u32) -> Self {
        Self { model, num, places: layout.layers.clone(), state_index_bits }
    }

    /// Entries of the vocabulary.
    #[must_use]
    pub fn vocab(&self) -> usize {
        self.model.root.vocab()
    }

    /// What left the last layer, `[num_tokens, H]`. `observe` sees each layer's input in turn.
    pub fn forward(
        &self,
        pages: &mut Pages,
        batch: &StepBatch,
        observe: &mut dyn FnMut(&[f32]),
    ) -> Vec<f32> {
        let mut x_th = self.model.root.embed(batch.tokens.iter().copied());
        let decodes = cut(batch, 0..batch.num_decodes);
        let prefills = cut(batch, batch.num_decodes..batch.rows.len());
        let all = [decodes.as_slice(), &prefills].concat();
        for (layer, block) in self.model.blocks.iter().enumerate() {
            observe(&x_th);
            let LayerPlace { group, view } = &self.places[layer];
            match view {
                CacheView::State(view) => {
                    // The prefills' stores come before the decodes' loads.
                    for chunks in [&prefills, &decodes].into_iter().filter(|c| !c.is_empty()) {
                        self.mamba(pages, batch, chunks, block, (view, *group), &mut x_th);
                    }
                }
                CacheView::KeyValue(view) => {
                    self.attention(pages, batch, &all, block, (view, *group), &mut x_th);
                }
            }
        }
        x_th
    }

    /// The rows after the final norm, `[T, H]`.
    #[must_use]
    pub fn norm(&self, x_th: &[f32]) -> Vec<f32> {
        self.model.root.norm(&self.num, x_th)
    }

    /// Logits `[T, V]` of rows that left the last layer.
    #[must_use]
    pub fn logits(&self, x_th: &[f32]) -> Vec<f32> {
        self.model.root.logits(&self.num, x_th)
    }

    /// One part of the batch, all prefills or all decodes: its chunks are adjacent.
    fn mamba(
        &self,
        pages: &mut Pages,
        batch: &StepBatch,
        chunks: &[Chunk],
        block: &Block,
        (view, group): (&StateView, GroupId),
        x_th: &mut [f32],
    ) {
        let rows = chunks[0].rows.start..chunks[chunks.len() - 1].rows.end;
        let slot = |row: usize| batch.blocks(row, group)[0];
        let load = |row: usize| self.load_state(pages, view, block, &batch.rows[row], slot(row));
        let mut states: Vec<MambaState> = rows.clone().map(load).collect();
        let of_chunk = |chunk: &Chunk| chunk.rows.start - rows.start..chunk.rows.end - rows.start;
        let states_of = pieces(&mut states, chunks.iter().map(of_chunk));
        let width = x_th.len() / batch.tokens.len();
        let mut work: Vec<_> =
            chunks.iter().zip(residuals(x_th, width, chunks)).zip(states_of).collect();
        work.par_iter_mut().for_each(|((chunk, x_th), states)| {
            block.forward_mamba(&self.num, &chunk.spans, states, x_th);
        });
        for (row, state) in rows.zip(&states) {
            view.store_conv(pages, slot(row), &state.conv);
            view.store_ssm(pages, slot(row), self.index_bits(&batch.rows[row]), &state.ssm);
        }
    }

    /// Decode and convolution kernels index in 64 bits; only the prefill scan has the knob.
    fn index_bits(&self, row: &Row) -> u32 {
        match row.phase {
            Phase::Prefill => self.state_index_bits,
            Phase::Decode => u64::BITS,
        }
    }

    fn load_state(
        &self,
        pages: &Pages,
        view: &StateView,
        block: &Block,
        row: &Row,
        slot: BlockId,
    ) -> MambaState {
        let mut state = block.empty_state().expect("a Mamba layer has a state");
        if row.phase == Phase::Decode || row.has_initial_state() {
            view.load_conv(pages, slot, &mut state.conv);
            view.load_ssm(pages, slot, self.index_bits(row), &mut state.ssm);
        }
        state
    }

    fn attention(
        &self,
        pages: &mut Pages,
        batch: &StepBatch,
        chunks: &[Chunk],
        block: &Block,
        (view, group): (&KeyValueView, GroupId),
        x_th: &mut [f32],
    ) {
        let width = x_th.len() / batch.tokens.len();
        let project = |chunk: &Chunk| {
            let rows = chunk.tokens.start * width..chunk.tokens.end * width;
            block.project(&self.num, &chunk.spans, &x_th[rows])
        };
        let projected: Vec<Projected> = chunks.par_iter().map(project).collect();
        for (chunk, own) in chunks.iter().zip(&projected) {
            for (row, span) in chunk.rows.clone().zip(&chunk.spans) {
                let at = span.floats(view.row);
                let start = batch.rows[row].computed_tokens as usize;
                view.store(pages, batch.blocks(row, group), start, &own.k[at.clone()], &own.v[at]);
            }
        }
        let pages = &*pages;
        let gather = |row: usize| {
            let Row { computed_tokens, scheduled_tokens, .. } = batch.rows[row];
            let seen = (computed_tokens + scheduled_tokens) as usize;
            let (mut k, mut v) = (vec![0.0; seen * view.row], vec![0.0; seen * view.row]);
            view.gather(pages, batch.blocks(row, group), &mut k, &mut v);
            (k, v)
        };
        let mut work: Vec<_> =
            chunks.iter().zip(&projected).zip(residuals(x_th, width, chunks)).collect();
        work.par_iter_mut().for_each(|((chunk, own), x_th)| {
            let gathered: Vec<_> = chunk.rows.clone().map(gather).collect();
            let contexts: Vec<_> = gathered.iter().map(|(k, v)| Context { k, v }).collect();
            block.forward_attention(&self.num, &chunk.spans, &own.q, &contexts, x_th);
        });
    }
}

/// Cuts rows into one chunk a thread, as even in tokens as whole rows allow.
fn cut(batch: &StepBatch, rows: Range<usize>) -> Vec<Chunk> {
    let tokens: usize = batch.rows[rows.clone()].iter().map(|row| row.span().len).sum();
    let share = tokens.div_ceil(rayon::current_num_threads());
    let mut chunks: Vec<Chunk> = Vec::new();
    for row in rows {
        let Span { start, len, position } = batch.rows[row].span();
        let full = |chunk: &Chunk| chunk.tokens.len() >= share;
        if chunks.last().is_none_or(full) {
            chunks.push(Chunk { rows: row..row, tokens: start..start, spans: Vec::new() });
        }
        let chunk = chunks.last_mut().expect("one was just pushed where there was none");
        chunk.spans.push(Span { start: start - chunk.tokens.start, len, position });
        (chunk.rows.end, chunk.tokens.end) = (row + 1, start + len);
    }
    chunks
}

/// The given pieces of an array: ascending, disjoint, with anything between them left out.
fn pieces<T>(all: &mut [T], ranges: impl Iterator<Item = Range<usize>>) -> Vec<&mut [T]> {
    let (mut rest, mut at) = (all, 0);
    let take = |range: Range<usize>| {
        let (_, from) = std::mem::take(&mut rest).split_at_mut(range.start - at);
        let (piece, after) = from.split_at_mut(range.len());
        (rest, at) = (after, range.end);
        piece
    };
    ranges.map(take).collect()
}

/// The chunks' rows of x[T, H].
fn residuals<'a>(x_th: &'a mut [f32], width: usize, chunks: &[Chunk]) -> Vec<&'a mut [f32]> {
    let floats = |chunk: &Chunk| chunk.tokens.start * width..chunk.tokens.end * width;
    pieces(x_th, chunks.iter().map(floats))
}
