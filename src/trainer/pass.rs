//! The trainer's forward and backward over packed sequences, unit by unit.
//!
//! Sequences are packed into chunks without padding; state and context start anew at each
//! sequence. Chunks run in parallel and are cut by token counts alone, so that no number depends
//! on how many threads there are. A unit's weights are gathered before its forward, dropped after
//! it, and gathered again for its backward, which recomputes the layer from its saved input.

use super::planted::Planted;
use super::TrainerError;
use crate::base::{Position, TokenId};
use crate::model::{Block, Numerics, Plan, Residual, Root, Span, Spans};
use crate::ops::array::{Array, Device};
use crate::ops::embedding::Tokens;
use crate::ops::sheet::Sheet;
use crate::ops::weights::Weights;

/// Where a pass gets a unit's compute-dtype weights from.
pub(super) trait Units {
    /// The weights of unit `index` of the plan. Every rank asks in the same order.
    fn gather(&self, index: usize) -> Result<Weights, TrainerError>;
}

/// Everything that fixes a forward.
#[derive(Clone, Copy)]
pub(super) struct Shape<'a> {
    pub plan: &'a Plan,
    pub num: &'a Numerics,
    pub device: &'a Device,
}

impl Shape<'_> {
    pub(super) fn root(&self, units: &dyn Units, trains: bool) -> Result<Root, TrainerError> {
        let weights = units.gather(0)?;
        let purpose = self.num.purpose(trains);
        Ok(Root::load(&self.plan.config, &self.plan.units[0], &weights, purpose))
    }

    fn block(&self, units: &dyn Units, layer: usize, trains: bool) -> Result<Block, TrainerError> {
        let spec = &self.plan.units[layer + 1];
        let weights = units.gather(layer + 1)?;
        let (kind, purpose) = (self.plan.layers[layer], self.num.purpose(trains));
        Ok(Block::load(&self.plan.config, kind, spec, &weights, purpose))
    }
}

/// One chunk of packed sequences on its way through the layers.
#[derive(Debug)]
pub(super) struct Chunk {
    pub tokens: Tokens,
    pub spans: Spans,
    /// Indices of the packed sequences, in the caller's list.
    pub sequences: Vec<usize>,
    /// The residual stream, `[T, H]`; after the pass, what left the last block.
    pub x: Residual,
    /// Each layer's input, where a backward will follow.
    inputs: Vec<Array>,
    pub planted: Planted,
}

/// Packs sequences in order; a chunk holds up to `max_tokens`, and at least one sequence.
pub(super) fn pack(device: &Device, sequences: &[&[TokenId]], max_tokens: usize) -> Vec<Chunk> {
    let mut packed: Vec<(Vec<TokenId>, Vec<Span>, Vec<usize>)> = Vec::new();
    for (index, new) in sequences.iter().enumerate() {
        let fits = |tokens: &[TokenId]| tokens.len() + new.len() <= max_tokens;
        if !packed.last().is_some_and(|(tokens, ..)| fits(tokens)) {
            packed.push(Default::default());
        }
        let (tokens, spans, members) =
            packed.last_mut().expect("one was just pushed where there was none");
        let (start, len) = (tokens.len(), new.len());
        spans.push(Span { start, len, position: Position::new(0) });
        members.push(index);
        tokens.extend_from_slice(new);
    }
    let chunk = |(tokens, spans, sequences)| {
        let mut sheet = Sheet::new(device);
        let chunk = Chunk {
            tokens: Tokens::on(&mut sheet, tokens),
            spans: Spans::on(&mut sheet, spans),
            sequences,
            x: Residual::new(device.zeros(0)),
            inputs: Vec::new(),
            planted: Planted::default(),
        };
        sheet.send(None);
        chunk
    };
    packed.into_iter().map(chunk).collect()
}

/// Sees each layer and its input in turn.
pub(super) type Observer<'a> = &'a mut dyn FnMut(&Block, &[Chunk]);

/// Runs every chunk through all layers. Returns the root, whose head comes next.
pub(super) fn forward(
    shape: Shape<'_>,
    units: &dyn Units,
    chunks: &mut [Chunk],
    keep_inputs: bool,
    mut observe: Option<Observer<'_>>,
) -> Result<Root, TrainerError> {
    let root = shape.root(units, false)?;
    shape.device.map(chunks, |_, chunk| {
        chunk.inputs.clear();
        let mut x_th = root.embed(shape.num, &chunk.tokens);
        chunk.planted.embedded(&mut x_th, shape.num.residual_dtype);
        chunk.x = Residual::new(x_th);
    });
    for (layer, kind) in shape.plan.layers.iter().enumerate() {
        let block = shape.block(units, layer, false)?;
        if let Some(observe) = &mut observe {
            settle(shape, chunks);
            observe(&block, chunks);
        }
        shape.device.map(chunks, |_, chunk| {
            if keep_inputs {
                chunk.inputs.push(chunk.x.settle(shape.num).clone());
            }
            let spans = chunk.planted.spans(kind.mixer, &chunk.spans);
            block.forward(shape.num, spans, &mut chunk.x);
        });
    }
    settle(shape, chunks);
    Ok(root)
}

fn settle(shape: Shape<'_>, chunks: &mut [Chunk]) {
    shape.device.map(chunks, |_, chunk| {
        chunk.x.settle(shape.num);
    });
}

/// From the root, a chunk and its index: adds the root's gradient to the flat array, returns the
/// gradient by what left the last block.
pub(super) type HeadBackward<'a> = dyn Fn(&Root, usize, &Chunk, &mut Array) -> Array + Sync + 'a;

/// A whole model's gradient, one flat array a unit.
pub(super) type Gradient = Vec<Array>;

/// From the gradient by what left the last block (made by `head`, which also adds the root's own),
/// back to the embedding. Chunks are taken in waves, and their gradients summed in chunk order.
pub(super) fn backward(
    shape: Shape<'_>,
    units: &dyn Units,
    chunks: &[Chunk],
    head: &HeadBackward<'_>,
) -> Result<Gradient, TrainerError> {
    let specs = &shape.plan.units;
    let device = shape.device;
    let mut total: Gradient = specs.iter().map(|spec| device.zeros(spec.len())).collect();
    let root = shape.root(units, true)?;
    let mut upstream: Vec<Array> = chunks.iter().map(|_| device.zeros(0)).collect();
    accumulate(device, &mut total[0], &mut upstream, |index, dx_th, grads| {
        *dx_th = head(&root, index, &chunks[index], grads);
    });
    for layer in (0..shape.plan.layers.len()).rev() {
        let (block, spec) = (shape.block(units, layer, true)?, &specs[layer + 1]);
        accumulate(device, &mut total[layer + 1], &mut upstream, |index, dx_th, grads| {
            let chunk = &chunks[index];
            let x_th = &chunk.inputs[layer];
            block.backward(shape.num, spec, &chunk.spans, x_th, dx_th, grads);
        });
    }
    for (chunk, dx_th) in chunks.iter().zip(&upstream) {
        root.backward_embed(&specs[0], &chunk.tokens, dx_th, &mut total[0]);
    }
    Ok(total)
}

/// Chunks at once in memory, where a device runs as many at once; the sums do not depend on it.
const WAVE_MAX: usize = 8;

/// Runs `work` on every chunk's upstream gradient, in parallel, and adds what each leaves in its
/// own array to `total`, chunks ascending.
fn accumulate(
    device: &Device,
    total: &mut Array,
    upstream: &mut [Array],
    work: impl Fn(usize, &mut Array, &mut Array) + Sync,
) {
    let size = device.parallelism().min(WAVE_MAX);
    for (wave, part) in upstream.chunks_mut(size).enumerate() {
        let len = total.len();
        let done = device.map(part, |i, dx_th| {
            let mut grads = device.zeros(len);
            work(wave * size + i, dx_th, &mut grads);
            grads
        });
        done.iter().for_each(|grads| total.add_assign(grads));
    }
}
