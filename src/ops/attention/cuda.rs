//! Attention on the device, forward and backward bit for bit the CPU's (kernels/attention.cu).

// A struct that a kernel takes by value is promised to be plain numbers; launches are raw calls.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr, DeviceRepr};

use super::Heads;
use crate::base::BlockId;
use crate::config::Dtype;
use crate::ops::cuda::{dtype_code, launch, Gpu, Kernel, OrFail, Spans};
use crate::ops::pages::cuda::{BlockTables, KeyValueArgument, Pages};
use crate::ops::pages::KeyValueView;
use crate::ops::spans::Span;

/// Threads of a block: one query of one head.
const BLOCK: u32 = 128;
/// Scratch of a launch. Rows go in turns to fit.
const SCRATCH_BYTES: u64 = 1 << 30;

/// `struct Heads` of kernels/attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct HeadsArgument {
    query: u32,
    key_value: u32,
    width: u32,
    scale: f32,
}

// SAFETY: plain numbers, laid out as the kernels' struct of the same fields.
unsafe impl DeviceRepr for HeadsArgument {}

impl From<Heads> for HeadsArgument {
    fn from(heads: Heads) -> Self {
        let Heads { query, key_value, width } = heads;
        assert_eq!(query % key_value, 0, "query heads are no multiple of key/value heads");
        let [query, key_value, width] = [query, key_value, width].map(|count| count as u32);
        Self { query, key_value, width, scale: heads.scale() }
    }
}

/// Packed rows of all sequences: q `[T, Q·E]`, k and v `[T, G·E]`.
#[derive(Debug)]
pub struct Rows<'a> {
    pub q: CudaView<'a, f32>,
    pub k: CudaView<'a, f32>,
    pub v: CudaView<'a, f32>,
}

impl Rows<'_> {
    fn assert_shapes(&self, heads: Heads, spans: &Spans) {
        let (rows, Self { q, k, v }) = (spans.tokens as usize, self);
        assert_eq!(q.len(), rows * heads.query_row(), "q is not [T, Q, E]");
        assert!(k.len() == rows * heads.key_value_row() && v.len() == k.len(), "k and v differ");
    }
}

/// Where a batch's keys and values lie in a layer's pages. One stream orders what is written and
/// what is read.
#[derive(Debug)]
pub struct Paged {
    view: KeyValueView,
    argument: KeyValueArgument,
    tables: BlockTables,
    /// What the argument points into.
    _buffer: Arc<CudaSlice<u8>>,
}

impl Paged {
    /// One block table a span, each with room for the span's last position.
    #[must_use]
    pub fn new(pages: &Pages, view: &KeyValueView, spans: &[Span], tables: &[&[BlockId]]) -> Self {
        let tokens = |span: &Span| u32::try_from(span.positions().end).expect("32-bit positions");
        let rows = tables.iter().copied().zip(spans.iter().map(tokens));
        let tables = BlockTables::upload(pages.gpu(), view.block_tokens, rows);
        let argument = view.argument(pages, &tables);
        Self { view: *view, argument, tables, _buffer: pages.buffer(view.buffer) }
    }

    fn assert_fits(&self, spans: &Spans) {
        assert_eq!(self.tables.len(), spans.count as usize, "one block table a span");
    }
}

/// Writes keys and values `[T, G·E]` into pages, at their positions.
pub fn store(
    gpu: &Gpu,
    places: &Paged,
    spans: &Spans,
    k: &CudaView<'_, f32>,
    v: &CudaView<'_, f32>,
) {
    let Paged { view, argument, .. } = places;
    assert!(k.len() == spans.tokens as usize * view.row && v.len() == k.len(), "k and v differ");
    places.assert_fits(spans);
    if spans.tokens == 0 {
        return;
    }
    let kernel = match view.dtype {
        Dtype::F32 => Kernel::attention_store_f32,
        Dtype::Bf16 => Kernel::attention_store_bf16,
    };
    launch!(gpu, kernel, (spans.tokens, (view.row as u32).div_ceil(BLOCK)), BLOCK, 0;
        k, v, argument, &spans.positions, &spans.span_of_token);
}

/// out[T, Q·E] from q[T, Q·E] over pages, which hold the rows' own keys and values already.
pub fn forward_paged(
    gpu: &Gpu,
    heads: Heads,
    q: &CudaView<'_, f32>,
    places: &Paged,
    spans: &Spans,
    dtype: Dtype,
    out: &mut CudaViewMut<'_, f32>,
) {
    assert_eq!(q.len(), spans.tokens as usize * heads.query_row(), "q is not [T, Q, E]");
    assert_eq!(q.len(), out.len(), "q and out differ");
    let Paged { view, argument, tables, .. } = places;
    places.assert_fits(spans);
    assert_eq!(view.row, heads.key_value_row(), "the pages hold other heads");
    if spans.tokens == 0 {
        return;
    }
    let kernel = match view.dtype {
        Dtype::F32 => Kernel::attention_paged_f32,
        Dtype::Bf16 => Kernel::attention_paged_bf16,
    };
    let (longest, shape) = (tables.longest(), HeadsArgument::from(heads));
    let room = Room::new(gpu, kernel, heads, spans.tokens, longest);
    for (first, rows) in room.turns(spans.tokens) {
        launch!(gpu, kernel, (rows, shape.query), BLOCK, room.shared_bytes;
            q, argument, &spans.positions, &spans.span_of_token, &shape, &first, &longest,
            &dtype_code(dtype), &room.address, &mut *out);
    }
}

/// out[T, Q·E]: every sequence's own rows, seen whole.
pub fn forward(
    gpu: &Gpu,
    heads: Heads,
    rows: &Rows<'_>,
    spans: &Spans,
    dtype: Dtype,
    out: &mut CudaViewMut<'_, f32>,
) {
    rows.assert_shapes(heads, spans);
    let Rows { q, k, v } = rows;
    assert_eq!(q.len(), out.len(), "q and out differ");
    if spans.tokens == 0 {
        return;
    }
    let (kernel, longest) = (Kernel::attention_own, spans.longest);
    let shape = HeadsArgument::from(heads);
    let room = Room::new(gpu, kernel, heads, spans.tokens, longest);
    for (first, rows) in room.turns(spans.tokens) {
        launch!(gpu, kernel, (rows, shape.query), BLOCK, room.shared_bytes;
            q, k, v, &spans.starts, &spans.span_of_token, &shape, &first, &longest,
            &dtype_code(dtype), &room.address, &mut *out);
    }
}

/// Where the blocks of a launch keep their probabilities: in shared memory, or, where a context is
/// too long for it, in memory that as many rows share as fit.
struct Room {
    shared_bytes: u32,
    rows_at_once: u32,
    /// Of `spill`; 0 where shared memory does.
    address: u64,
    _spill: Option<CudaSlice<f32>>,
}

impl Room {
    fn new(gpu: &Gpu, kernel: Kernel, heads: Heads, rows: u32, longest: u32) -> Self {
        let bytes = u64::from(longest) * 4;
        if bytes <= gpu.dynamic_shared_bytes() {
            let shared_bytes = bytes as u32;
            gpu.allow_shared(kernel, shared_bytes);
            return Self { shared_bytes, rows_at_once: rows, address: 0, _spill: None };
        }
        let fits = SCRATCH_BYTES / (bytes * heads.query as u64);
        let rows_at_once = fits.clamp(1, u64::from(rows)) as u32;
        let spill = gpu.uninit::<f32>(rows_at_once as usize * heads.query * longest as usize);
        let address = spill.device_ptr(gpu.stream()).0;
        Self { shared_bytes: 0, rows_at_once, address, _spill: Some(spill) }
    }

    /// `(first, rows)` of each launch.
    fn turns(&self, rows: u32) -> impl Iterator<Item = (u32, u32)> {
        let at_once = self.rows_at_once;
        (0..rows).step_by(at_once as usize).map(move |first| (first, at_once.min(rows - first)))
    }
}

/// Gradients of whole sequences, overwritten: dq[T, Q·E], dk and dv [T, G·E].
#[derive(Debug)]
pub struct Gradients<'a> {
    pub q: CudaViewMut<'a, f32>,
    pub k: CudaViewMut<'a, f32>,
    pub v: CudaViewMut<'a, f32>,
}

/// The probabilities are recomputed, for as many rows at a time as the scratch holds; queries
/// ascend over all turns, so every sum has the CPU's order.
pub fn backward(
    gpu: &Gpu,
    heads: Heads,
    rows: &Rows<'_>,
    spans: &Spans,
    dout: &CudaView<'_, f32>,
    gradients: &mut Gradients<'_>,
) {
    rows.assert_shapes(heads, spans);
    let Rows { q, k, v } = rows;
    assert!(dout.len() == q.len() && gradients.q.len() == q.len(), "q, dout, dq differ");
    assert!(gradients.k.len() == k.len() && gradients.v.len() == k.len(), "k, dk, dv differ");
    if spans.tokens == 0 {
        return;
    }
    for sums in [&mut gradients.k, &mut gradients.v] {
        gpu.stream().memset_zeros(sums).or_fail("zero a gradient");
    }
    let (longest, shape) = (spans.longest, HeadsArgument::from(heads));
    let row = u64::from(longest) * heads.query as u64;
    let at_once = (SCRATCH_BYTES / (2 * 4 * row)).clamp(1, u64::from(spans.tokens)) as u32;
    let [mut p, mut dscore] = [(); 2].map(|()| gpu.uninit::<f32>(at_once as usize * row as usize));
    for first in (0..spans.tokens).step_by(at_once as usize) {
        let rows = at_once.min(spans.tokens - first);
        launch!(gpu, Kernel::attention_backward_query, (rows, shape.query), BLOCK, 0;
            q, k, v, dout, &spans.starts, &spans.span_of_token, &shape, &first, &longest, &mut p,
            &mut dscore, &mut gradients.q);
        launch!(gpu, Kernel::attention_backward_key, (spans.tokens, shape.key_value), BLOCK, 0;
            q, dout, &p, &dscore, &spans.starts, &spans.lens, &spans.span_of_token, &shape, &first,
            &(first + rows), &longest, &mut gradients.k, &mut gradients.v);
    }
}
