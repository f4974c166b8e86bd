//! The trainer's forward and backward over packed sequences, unit by unit.
//!
//! Sequences are packed into chunks without padding; state and context start anew at each
//! sequence. Chunks run in parallel and are cut by token counts alone, so that no number depends
//! on how many threads there are. A unit's weights are gathered before its forward, dropped after
//! it, and gathered again for its backward, which recomputes the layer from its saved input.

use rayon::prelude::*;

use super::TrainerError;
use crate::base::{Position, TokenId};
use crate::model::{Block, Numerics, Plan, Root, Span, UnitBytes};

/// Where a pass gets a unit's compute-dtype weights from.
pub(super) trait Units {
    /// The weights of unit `index` of the plan. Every rank asks in the same order.
    fn gather(&self, index: usize) -> Result<UnitBytes, TrainerError>;
}

/// Everything that fixes a forward.
#[derive(Clone, Copy)]
pub(super) struct Shape<'a> {
    pub plan: &'a Plan,
    pub num: &'a Numerics,
}

impl Shape<'_> {
    pub(super) fn root(&self, units: &dyn Units, trains: bool) -> Result<Root, TrainerError> {
        let flat = units.gather(0)?.to_f32();
        Ok(Root::load(&self.plan.config, &self.plan.units[0], &flat, trains))
    }

    fn block(&self, units: &dyn Units, layer: usize, trains: bool) -> Result<Block, TrainerError> {
        let spec = &self.plan.units[layer + 1];
        let flat = units.gather(layer + 1)?.to_f32();
        Ok(Block::load(&self.plan.config, self.plan.layers[layer], spec, &flat, trains))
    }
}

/// One chunk of packed sequences on its way through the layers.
#[derive(Debug)]
pub(super) struct Chunk {
    pub tokens: Vec<TokenId>,
    pub spans: Vec<Span>,
    /// Indices of the packed sequences, in the caller's list.
    pub sequences: Vec<usize>,
    /// The residual stream, `[T, H]`; after the pass, what left the last block.
    pub x_th: Vec<f32>,
    /// Each layer's input, where a backward will follow.
    inputs: Vec<Vec<f32>>,
}

/// Packs sequences in order; a chunk holds up to `max_tokens`, and at least one sequence.
pub(super) fn pack(sequences: &[&[TokenId]], max_tokens: usize) -> Vec<Chunk> {
    let mut chunks: Vec<Chunk> = Vec::new();
    for (index, tokens) in sequences.iter().enumerate() {
        let fits = |chunk: &Chunk| chunk.tokens.len() + tokens.len() <= max_tokens;
        if !chunks.last().is_some_and(fits) {
            chunks.push(Chunk {
                tokens: Vec::new(),
                spans: Vec::new(),
                sequences: Vec::new(),
                x_th: Vec::new(),
                inputs: Vec::new(),
            });
        }
        let chunk = chunks.last_mut().expect("one was just pushed where there was none");
        let (start, len) = (chunk.tokens.len(), tokens.len());
        chunk.spans.push(Span { start, len, position: Position::new(0) });
        chunk.sequences.push(index);
        chunk.tokens.extend_from_slice(tokens);
    }
    chunks
}

/// Runs every chunk through all layers. `observe` sees each layer and its input in turn. Returns
/// the root, whose head comes next.
pub(super) fn forward(
    shape: Shape<'_>,
    units: &dyn Units,
    chunks: &mut [Chunk],
    keep_inputs: bool,
    observe: &mut dyn FnMut(&Block, &[Chunk]),
) -> Result<Root, TrainerError> {
    let root = shape.root(units, false)?;
    chunks.par_iter_mut().for_each(|chunk| {
        chunk.inputs.clear();
        chunk.x_th = root.embed(chunk.tokens.iter().copied());
    });
    for layer in 0..shape.plan.layers.len() {
        let block = shape.block(units, layer, false)?;
        observe(&block, chunks);
        chunks.par_iter_mut().for_each(|chunk| {
            if keep_inputs {
                chunk.inputs.push(chunk.x_th.clone());
            }
            block.forward(shape.num, &chunk.spans, &mut chunk.x_th);
        });
    }
    Ok(root)
}

/// From the root, a chunk and its index: adds the root's gradient to the flat array, returns the
/// gradient by what left the last block.
pub(super) type HeadBackward<'a> = dyn Fn(&Root, usize, &Chunk, &mut [f32]) -> Vec<f32> + Sync + 'a;

/// A whole model's gradient, one flat f32 array a unit.
pub(super) type Gradient = Vec<Vec<f32>>;

/// From the gradient by what left the last block (made by `head`, which also adds the root's own),
/// back to the embedding. Chunks are taken in waves, and their gradients summed in chunk order.
pub(super) fn backward(
    shape: Shape<'_>,
    units: &dyn Units,
    chunks: &[Chunk],
    head: &HeadBackward<'_>,
) -> Result<Gradient, TrainerError> {
    let specs = &shape.plan.units;
    let mut total: Gradient = specs.iter().map(|spec| vec![0.0; spec.len()]).collect();
    let root = shape.root(units, true)?;
    let mut upstream = vec![Vec::new(); chunks.len()];
    accumulate(&mut total[0], &mut upstream, |index, dx_th, grads| {
        *dx_th = head(&root, index, &chunks[index], grads);
    });
    for layer in (0..shape.plan.layers.len()).rev() {
        let (block, spec) = (shape.block(units, layer, true)?, &specs[layer + 1]);
        accumulate(&mut total[layer + 1], &mut upstream, |index, dx_th, grads| {
            let chunk = &chunks[index];
            let x_th = &chunk.inputs[layer];
            block.backward(shape.num, spec, &chunk.spans, x_th, dx_th, grads);
        });
    }
    for (chunk, dx_th) in chunks.iter().zip(&upstream) {
        root.backward_embed(&specs[0], chunk.tokens.iter().copied(), dx_th, &mut total[0]);
    }
    Ok(total)
}

/// Chunks at once in memory; the sums do not depend on it.
const WAVE: usize = 8;

/// Runs `work` on every chunk's upstream gradient, in parallel, and adds what each leaves in its
/// own array to `total`, chunks ascending.
fn accumulate(
    total: &mut [f32],
    upstream: &mut [Vec<f32>],
    work: impl Fn(usize, &mut Vec<f32>, &mut [f32]) + Sync,
) {
    for (wave, part) in upstream.chunks_mut(WAVE).enumerate() {
        let one = |(i, dx_th): (usize, &mut Vec<f32>)| {
            let mut grads = vec![0.0; total.len()];
            work(wave * WAVE + i, dx_th, &mut grads);
            grads
        };
        let done: Vec<Vec<f32>> = part.par_iter_mut().enumerate().map(one).collect();
        for grads in done {
            total.iter_mut().zip(&grads).for_each(|(sum, g)| *sum += g);
        }
    }
}
