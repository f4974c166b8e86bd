//! Attention on the device, forward and backward bit for bit the CPU's (kernels/attention.cu,
//! kernels/attention_backward.cu).

// A struct that a kernel takes by value is promised to be plain numbers; launches are raw calls.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DeviceRepr};

use super::Heads;
use crate::config::Dtype;
use crate::ops::cuda::{launch, Floats, Gpu, Kernel, OrFail, RowsArgument, Spans};
use crate::ops::pages::cuda::{KeyValueArgument, Pages};
use crate::ops::pages::{KeyValueView, Tables};
use crate::ops::simd::LANES;

/// Threads of a block: one query of one head or a few.
const BLOCK: u32 = 128;
/// Scratch of a launch. Rows go in turns to fit.
const SCRATCH_BYTES: u64 = 1 << 30;

/// `struct Heads` of kernels/attention.cuh.
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

/// Packed rows of all sequences for the backward: q `[T, Q·E]`, k and v `[T, G·E]`.
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
    rows: usize,
    longest: u32,
    /// What the argument points into.
    _buffer: Arc<CudaSlice<u8>>,
}

impl Paged {
    #[must_use]
    pub fn new(pages: &Pages, view: &KeyValueView, tables: &Tables) -> Self {
        Self {
            view: *view,
            argument: view.argument(pages, tables),
            rows: tables.len(),
            longest: tables.longest(),
            _buffer: pages.buffer(view.buffer),
        }
    }

    fn assert_fits(&self, spans: &Spans) {
        assert_eq!(self.rows, spans.count as usize, "one block table a span");
    }
}

/// Writes keys and values `[T, G·E]` into pages of their dtype, at their positions.
pub fn store(places: &Paged, spans: &Spans, k: &Floats, v: &Floats) {
    let (Paged { view, argument, .. }, gpu) = (places, k.gpu());
    assert!(k.len() == spans.tokens as usize * view.row && v.len() == k.len(), "k and v differ");
    assert!(k.dtype() == view.dtype && v.dtype() == view.dtype, "pages of another dtype");
    places.assert_fits(spans);
    if spans.tokens == 0 {
        return;
    }
    let (positions, span_of_token) =
        (spans.positions.address(gpu), spans.span_of_token.address(gpu));
    let grid = (spans.tokens, (view.row as u32).div_ceil(BLOCK));
    launch!(gpu, Kernel::attention_store, grid, BLOCK, 0;
        &k.rows(view.row), &v.rows(view.row), argument, &positions, &span_of_token);
}

/// `struct Queries` of kernels/attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct QueriesArgument {
    q: RowsArgument,
    k: RowsArgument,
    v: RowsArgument,
    pages: KeyValueArgument,
    starts: u64,
    span_of_token: u64,
    positions: u64,
    heads: HeadsArgument,
    first: u32,
    longest: u32,
    even: u32,
    spill: u64,
    out: RowsArgument,
}

// SAFETY: plain numbers, laid out as the kernels' struct of the same fields.
unsafe impl DeviceRepr for QueriesArgument {}

/// What a row sees.
#[derive(Clone, Copy, Debug)]
pub enum Seen<'a> {
    /// Its sequence's own rows, k and v `[T, G·E]`, of which the batch has all.
    Own { k: &'a Floats, v: &'a Floats },
    /// Pages, which hold the rows' own keys and values already.
    Paged(&'a Paged),
}

/// out[T, Q·E] from q[T, Q·E], in its dtype.
#[must_use]
pub fn forward(heads: Heads, q: &Floats, seen: Seen<'_>, spans: &Spans) -> Floats {
    let gpu = q.gpu();
    assert_eq!(q.len(), spans.tokens as usize * heads.query_row(), "q is not [T, Q, E]");
    let out = Floats::uninit(gpu, q.len(), q.dtype());
    if spans.tokens == 0 {
        return out;
    }
    let row = heads.key_value_row();
    let dense;
    let seen = match seen {
        // Keys that were normed lie by themselves, their values still between others.
        Seen::Own { k, v } if k.rows(row).pitch() != v.rows(row).pitch() => {
            dense = [k, v].map(|rows| rows.rounded_to(rows.dtype()));
            Seen::Own { k: &dense[0], v: &dense[1] }
        }
        seen => seen,
    };
    // Lanes of the sum of a score are all one thread's: it reads whole sixteens at a time.
    let whole = heads.width.is_multiple_of(LANES);
    let (k, v, pages, longest, is_even) = match seen {
        Seen::Own { k, v } => {
            assert_eq!(k.len(), spans.tokens as usize * row, "k is not [T, G, E]");
            assert!(v.len() == k.len() && k.dtype() == q.dtype() && v.dtype() == q.dtype());
            let (k, v) = (k.rows(row), v.rows(row));
            assert_eq!(k.pitch(), v.pitch(), "k and v lie alike");
            let is_even = whole && k.is_even(row) && v.is_even(row);
            (k, v, KeyValueArgument::NONE, spans.longest, is_even)
        }
        Seen::Paged(places) => {
            places.assert_fits(spans);
            assert_eq!(places.view.row, row, "the pages hold other heads");
            assert_eq!(places.view.dtype, q.dtype(), "pages of another dtype");
            let is_even = whole && places.argument.is_even();
            (RowsArgument::NONE, RowsArgument::NONE, places.argument, places.longest, is_even)
        }
    };
    let room = Room::new(gpu, heads, spans.tokens, longest);
    let queries = QueriesArgument {
        q: q.rows(heads.query_row()),
        k,
        v,
        pages,
        starts: spans.starts.address(gpu),
        span_of_token: spans.span_of_token.address(gpu),
        positions: spans.positions.address(gpu),
        heads: HeadsArgument::from(heads),
        first: 0,
        longest,
        even: u32::from(is_even),
        spill: room.spill.as_ref().map_or(0, |spill| spill.rows(1).address()),
        out: out.rows(heads.query_row()),
    };
    for (first, rows) in room.turns(spans.tokens) {
        let grid = (rows, heads.query as u32 / room.heads_at_once);
        launch!(gpu, room.kernel, grid, BLOCK, room.shared_bytes;
            &QueriesArgument { first, ..queries });
    }
    out
}

/// How many heads a block works on, and where it keeps their probabilities: in shared memory, or,
/// where a context is too long for it, in memory that as many rows share as fit.
struct Room {
    kernel: Kernel,
    heads_at_once: u32,
    shared_bytes: u32,
    rows_at_once: u32,
    spill: Option<Floats>,
}

impl Room {
    fn new(gpu: &Arc<Gpu>, heads: Heads, rows: u32, longest: u32) -> Self {
        let bytes = |heads_at_once: u32, keys: u32| {
            u64::from(heads_at_once) * (u64::from(keys) + heads.width as u64) * 4
        };
        let fits = |heads_at_once: u32| bytes(heads_at_once, longest) <= gpu.dynamic_shared_bytes();
        let share = heads.query / heads.key_value;
        let is_four = share.is_multiple_of(4) && fits(4);
        let (kernel, heads_at_once) = match is_four {
            true => (Kernel::attention_forward_4, 4),
            false => (Kernel::attention_forward, 1),
        };
        let shared = if fits(heads_at_once) { longest } else { 0 };
        let shared_bytes = bytes(heads_at_once, shared) as u32;
        gpu.allow_shared(kernel, shared_bytes);
        if fits(heads_at_once) {
            return Self { kernel, heads_at_once, shared_bytes, rows_at_once: rows, spill: None };
        }
        let row = u64::from(longest) * heads.query as u64;
        let rows_at_once = (SCRATCH_BYTES / (row * 4)).clamp(1, u64::from(rows)) as u32;
        let spill = Floats::uninit(gpu, rows_at_once as usize * row as usize, Dtype::F32);
        Self { kernel, heads_at_once, shared_bytes, rows_at_once, spill: Some(spill) }
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
    let [starts, lens, span_of_token] =
        [&spans.starts, &spans.lens, &spans.span_of_token].map(|list| list.address(gpu));
    for first in (0..spans.tokens).step_by(at_once as usize) {
        let rows = at_once.min(spans.tokens - first);
        launch!(gpu, Kernel::attention_backward_query, (rows, shape.query), BLOCK, 0;
            q, k, v, dout, &starts, &span_of_token, &shape, &first, &longest, &mut p, &mut dscore,
            &mut gradients.q);
        launch!(gpu, Kernel::attention_backward_key, (spans.tokens, shape.key_value), BLOCK, 0;
            q, dout, &p, &dscore, &starts, &lens, &span_of_token, &shape, &first, &(first + rows),
            &longest, &mut gradients.k, &mut gradients.v);
    }
}
