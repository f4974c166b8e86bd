//! The trainer's forward and backward over packed sequences, unit by unit.
//!
//! Sequences are packed into chunks without padding; state and context start anew at each
//! sequence. Chunks run in parallel and are cut by token counts alone, so that no number depends
//! on how many threads there are. A unit's weights are gathered before its forward, dropped after
//! it, and gathered again for its backward, which recomputes the layer from its saved input; its
//! gradient is summed over the ranks at once, and each keeps its shard. A rank without a chunk
//! takes part in all of it.

use super::planted::Planted;
use super::units::{ShardedUnits, Supply};
use super::TrainerError;
use crate::base::{Position, TokenId};
use crate::model::{Block, Numerics, Plan, Residual, Root, Span, Spans};
use crate::ops::array::{Array, Device};
use crate::ops::embedding::Tokens;
use crate::ops::sheet::Sheet;

/// Everything that fixes a forward.
#[derive(Clone, Copy)]
pub(super) struct Shape<'a> {
    pub plan: &'a Plan,
    pub num: &'a Numerics,
    pub device: &'a Device,
}

impl Shape<'_> {
    /// The root, after which comes unit `next`.
    fn root(
        &self,
        units: &Supply<'_>,
        next: Option<usize>,
        trains: bool,
    ) -> Result<Root, TrainerError> {
        let weights = units.gather(0, next)?;
        let purpose = self.num.purpose(trains);
        Ok(Root::load(&self.plan.config, &self.plan.units[0], &weights, purpose))
    }

    fn block(
        &self,
        units: &Supply<'_>,
        layer: usize,
        next: Option<usize>,
        trains: bool,
    ) -> Result<Block, TrainerError> {
        let spec = &self.plan.units[layer + 1];
        let weights = units.gather(layer + 1, next)?;
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

/// Which sequences of these lengths go into one chunk: in order, up to `max_tokens` in each, and at
/// least one sequence.
pub(super) fn packs(lens: impl IntoIterator<Item = usize>, max_tokens: usize) -> Vec<Vec<usize>> {
    let mut packs: Vec<Vec<usize>> = Vec::new();
    let mut tokens = 0;
    for (index, len) in lens.into_iter().enumerate() {
        match packs.last_mut().filter(|_| tokens + len <= max_tokens) {
            Some(pack) => {
                pack.push(index);
                tokens += len;
            }
            None => {
                packs.push(vec![index]);
                tokens = len;
            }
        }
    }
    packs
}

/// Sequences packed by [`packs`].
pub(super) fn pack(device: &Device, sequences: &[&[TokenId]], max_tokens: usize) -> Vec<Chunk> {
    let chunk = |members: Vec<usize>| {
        let (mut tokens, mut spans) = (Vec::new(), Vec::new());
        for &index in &members {
            let (start, len) = (tokens.len(), sequences[index].len());
            spans.push(Span { start, len, position: Position::new(0) });
            tokens.extend_from_slice(sequences[index]);
        }
        let mut sheet = Sheet::new(device);
        let chunk = Chunk {
            tokens: Tokens::on(&mut sheet, tokens),
            spans: Spans::on(&mut sheet, spans),
            sequences: members,
            x: Residual::new(device.zeros(0)),
            inputs: Vec::new(),
            planted: Planted::default(),
        };
        sheet.send(None);
        chunk
    };
    let lens = sequences.iter().map(|sequence| sequence.len());
    packs(lens, max_tokens).into_iter().map(chunk).collect()
}

/// Sees each layer and its input in turn.
pub(super) type Observer<'a> = &'a mut dyn FnMut(&Block, &[Chunk]);

/// Runs every chunk through all layers. Returns the root, whose head comes next.
pub(super) fn forward(
    shape: Shape<'_>,
    units: &Supply<'_>,
    chunks: &mut [Chunk],
    keep_inputs: bool,
    mut observe: Option<Observer<'_>>,
) -> Result<Root, TrainerError> {
    let layers = &shape.plan.layers;
    let next = |layer| (layer < layers.len()).then_some(layer + 1);
    let root = shape.root(units, next(0), false)?;
    shape.device.map(chunks, |_, chunk| {
        chunk.inputs.clear();
        let mut x_th = root.embed(shape.num, &chunk.tokens);
        chunk.planted.embedded(&mut x_th, shape.num.residual_dtype);
        chunk.x = Residual::new(x_th);
    });
    for (layer, kind) in layers.iter().enumerate() {
        let block = shape.block(units, layer, next(layer + 1), false)?;
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

/// A whole model's gradient, summed over the ranks: one rank's shard of each unit's.
pub(super) type Gradient = Vec<Array>;

/// From the gradient by what left the last block (made by `head`, which also adds the root's own),
/// back to the embedding. Chunks are taken in waves, and their gradients summed in chunk order.
pub(super) fn backward(
    shape: Shape<'_>,
    units: &ShardedUnits,
    chunks: &[Chunk],
    head: &HeadBackward<'_>,
) -> Result<Gradient, TrainerError> {
    let (specs, device, supply) = (&shape.plan.units, shape.device, Supply::of(units));
    let layers = shape.plan.layers.len();
    let mut of_root = device.zeros(specs[0].len());
    let root = shape.root(&supply, (layers > 0).then_some(layers), true)?;
    let mut upstream: Vec<Array> = chunks.iter().map(|_| device.zeros(0)).collect();
    accumulate(device, &mut of_root, &mut upstream, |index, dx_th, grads| {
        *dx_th = head(&root, index, &chunks[index], grads);
    });
    let mut of_layers = Vec::with_capacity(layers);
    for layer in (0..layers).rev() {
        let next = (layer > 0).then_some(layer);
        let (block, spec) = (shape.block(&supply, layer, next, true)?, &specs[layer + 1]);
        let mut of_layer = device.zeros(spec.len());
        accumulate(device, &mut of_layer, &mut upstream, |index, dx_th, grads| {
            let chunk = &chunks[index];
            let x_th = &chunk.inputs[layer];
            block.backward(shape.num, spec, &chunk.spans, x_th, dx_th, grads);
        });
        of_layers.push(units.reduce(layer + 1, of_layer)?);
    }
    for (chunk, dx_th) in chunks.iter().zip(&upstream) {
        root.backward_embed(&specs[0], &chunk.tokens, dx_th, &mut of_root);
    }
    let of_root = units.reduce(0, of_root)?;
    Ok(std::iter::once(of_root).chain(of_layers.into_iter().rev()).collect())
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
