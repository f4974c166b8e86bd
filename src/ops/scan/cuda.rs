//! The selective scan on the device, forward and backward bit for bit the CPU's (kernels/scan.cu,
//! kernels/state_update.cu).

// A struct that a kernel takes by value is promised to be plain numbers; launches are raw calls.
#![allow(unsafe_code)]

use std::borrow::Cow;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr, DeviceRepr};

use crate::config::{Arithmetic, Dtype};
use crate::ops::cuda::{
    blocks, dtype_code, launch, Floats, Gpu, Kernel, OrFail, RowsArgument, Spans, THREADS,
};
use crate::ops::pages::cuda::{StateArgument, States};
use crate::ops::simd::LANES;
use crate::ops::weights::{cuda::negative_exp, Part};

/// Channels of one block of threads.
const TILE: u32 = 64;
/// Channels of one block of threads that updates single rows.
const UPDATE_TILE: u32 = 128;
/// Blocks of it that a multiprocessor holds: as its launch bounds say.
const UPDATE_BLOCKS: u32 = 4;
/// States that a thread holds in registers; other counts go through memory.
const IN_REGISTERS: u32 = 16;
/// The backward's scratch: two numbers a row, channel and state. Channels go in turns to fit.
const SCRATCH_BYTES: u64 = 1 << 30;

/// One layer's weights as its [`SelectiveScan`](super::SelectiveScan) holds them.
#[derive(Clone, Debug)]
pub struct Layer {
    a_dn: Floats,
    skip_d: Floats,
    dt_bias_d: Floats,
    arithmetic: Arithmetic,
}

impl Layer {
    /// From the checkpoint's `A_log` `[D, N]`, `D` `[D]` and `dt_proj.bias` `[D]`.
    #[must_use]
    pub fn new(
        a_log_dn: Part<'_>,
        skip_d: Part<'_>,
        dt_bias_d: Part<'_>,
        arithmetic: Arithmetic,
    ) -> Self {
        let a_log_dn = a_log_dn.bytes().widened();
        let gpu = a_log_dn.gpu();
        Self {
            a_dn: Floats::new(gpu, negative_exp(gpu, &a_log_dn.view())),
            skip_d: skip_d.bytes().widened(),
            dt_bias_d: dt_bias_d.bytes().widened(),
            arithmetic,
        }
    }

    /// Floats of one sequence's state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.a_dn.len()
    }

    #[must_use]
    pub fn weights(&self) -> Weights<'_> {
        Weights {
            a_dn: self.a_dn.view(),
            skip_d: self.skip_d.view(),
            dt_bias_d: self.dt_bias_d.view(),
            arithmetic: self.arithmetic,
        }
    }
}

/// Weights of one layer's scan, f32.
#[derive(Debug)]
pub struct Weights<'a> {
    /// A = -exp(A_log), `[D, N]`.
    pub a_dn: CudaView<'a, f32>,
    pub skip_d: CudaView<'a, f32>,
    pub dt_bias_d: CudaView<'a, f32>,
    pub arithmetic: Arithmetic,
}

impl Weights<'_> {
    /// What the state is rounded to between two rows of one sequence.
    fn row_dtype(&self, state_dtype: Dtype) -> u32 {
        dtype_code(match self.arithmetic {
            Arithmetic::Invariant => state_dtype,
            Arithmetic::Fast => Dtype::F32,
        })
    }

    fn addresses(&self, gpu: &Gpu) -> [u64; 3] {
        [&self.a_dn, &self.skip_d, &self.dt_bias_d].map(|list| list.device_ptr(gpu.stream()).0)
    }

    fn channels(&self) -> u32 {
        assert_eq!(self.skip_d.len(), self.dt_bias_d.len(), "D and dt_proj.bias differ");
        self.skip_d.len() as u32
    }

    fn states(&self) -> u32 {
        assert_eq!(self.a_dn.len() % self.skip_d.len(), 0, "A is not [{}, N]", self.skip_d.len());
        (self.a_dn.len() / self.skip_d.len()) as u32
    }
}

/// Packed rows of all sequences for the backward, as the CPU's [`super::Rows`].
#[derive(Debug)]
pub struct Rows<'a> {
    pub c_td: CudaView<'a, f32>,
    pub dt_td: CudaView<'a, f32>,
    pub b_tn: CudaView<'a, f32>,
    pub c_tn: CudaView<'a, f32>,
    pub z_td: CudaView<'a, f32>,
}

/// Gradients of [`Rows`], overwritten.
#[derive(Debug)]
pub struct RowGradients<'a> {
    pub c_td: CudaViewMut<'a, f32>,
    pub dt_td: CudaViewMut<'a, f32>,
    pub b_tn: CudaViewMut<'a, f32>,
    pub c_tn: CudaViewMut<'a, f32>,
    pub z_td: CudaViewMut<'a, f32>,
}

/// Gradients of a layer's weights, added to, spans in order.
#[derive(Debug)]
pub struct WeightGradients<'a> {
    pub a_log_dn: CudaViewMut<'a, f32>,
    pub skip_d: CudaViewMut<'a, f32>,
    pub dt_bias_d: CudaViewMut<'a, f32>,
}

impl<'a> Rows<'a> {
    /// Of c, dt, B, C and z.
    #[must_use]
    pub fn of(each: &'a [Cow<'_, Floats>; 5]) -> Self {
        let [c_td, dt_td, b_tn, c_tn, z_td] = each.each_ref().map(|rows| rows.view());
        Self { c_td, dt_td, b_tn, c_tn, z_td }
    }

    fn assert_shapes(&self, spans: &Spans, d: u32, n: u32) {
        let t = spans.tokens as usize;
        for (name, len, width) in [
            ("c", self.c_td.len(), d),
            ("dt", self.dt_td.len(), d),
            ("z", self.z_td.len(), d),
            ("B", self.b_tn.len(), n),
            ("C", self.c_tn.len(), n),
        ] {
            assert_eq!(len, t * width as usize, "{name} is not [{t}, {width}]");
        }
    }
}

/// Packed rows of all sequences for the forward, in one dtype: see [`Rows`].
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    pub c_td: &'a Floats,
    pub dt_td: &'a Floats,
    pub b_tn: &'a Floats,
    pub c_tn: &'a Floats,
    pub z_td: &'a Floats,
}

/// `struct ScanInputs` of kernels/scan.cuh, with which both others begin.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct InputsArgument {
    rows: [RowsArgument; 5],
    weights: [u64; 3],
    state: StateArgument,
}

/// `struct Sequences` of kernels/scan.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SequencesArgument {
    inputs: InputsArgument,
    starts: u64,
    lens: u64,
    channels: u32,
    states: u32,
    row_dtype: u32,
    even: u32,
    spill: u64,
    y_td: RowsArgument,
}

// SAFETY: plain numbers, laid out as the kernels' struct of the same fields.
unsafe impl DeviceRepr for SequencesArgument {}

/// `struct Update` of kernels/state_update.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct UpdateArgument {
    inputs: InputsArgument,
    count: u32,
    even: u32,
    y_td: RowsArgument,
}

// SAFETY: as above.
unsafe impl DeviceRepr for UpdateArgument {}

impl Inputs<'_> {
    fn arguments(&self, tokens: usize, d: usize, n: usize) -> [RowsArgument; 5] {
        let Self { c_td, dt_td, b_tn, c_tn, z_td } = *self;
        [("c", c_td, d), ("dt", dt_td, d), ("B", b_tn, n), ("C", c_tn, n), ("z", z_td, d)].map(
            |(name, rows, width)| {
                assert_eq!(rows.len(), tokens * width, "{name} is not [{tokens}, {width}]");
                assert_eq!(rows.dtype(), c_td.dtype(), "{name} is of another dtype");
                rows.rows(width)
            },
        )
    }
}

/// y[T, D] of packed rows, in their dtype; each span's state advances, rounded to `state_dtype`
/// after each row, or in fast arithmetic after its last one; rows are in one order in both.
#[must_use]
pub fn forward(
    weights: &Weights<'_>,
    inputs: Inputs<'_>,
    spans: &Spans,
    states: &States,
    state_dtype: Dtype,
) -> Floats {
    let (gpu, d, n) = (inputs.c_td.gpu(), weights.channels(), weights.states());
    let rows = inputs.arguments(spans.tokens as usize, d as usize, n as usize);
    let y_td = Floats::uninit(gpu, inputs.c_td.len(), inputs.c_td.dtype());
    if spans.tokens == 0 {
        return y_td;
    }
    let state = states.ssm(gpu, spans, weights.a_dn.len(), state_dtype);
    let inputs = InputsArgument { rows, weights: weights.addresses(gpu), state };
    let y_td_rows = y_td.rows(d as usize);
    let even = rows[2].is_even(n as usize) && rows[3].is_even(n as usize);
    let whole_tiles = d.is_multiple_of(UPDATE_TILE) && n == IN_REGISTERS && state.is_even();
    if spans.longest == 1 && state.is_paged() && whole_tiles {
        let count = spans.count;
        let even = u32::from(even);
        let update = UpdateArgument { inputs, count, even, y_td: y_td_rows };
        // As many blocks as the device holds at once: each keeps its channels' weights for all of
        // its rows, and none comes after the others.
        let tiles = d / UPDATE_TILE;
        let groups = (gpu.multiprocessors() * UPDATE_BLOCKS / tiles).clamp(1, count);
        launch!(gpu, Kernel::state_update, (groups, tiles), UPDATE_TILE, 0; &update);
    } else {
        let spill = Floats::uninit(gpu, 3 * spill_len(n, spans, d), Dtype::F32);
        let sequences = SequencesArgument {
            inputs,
            starts: spans.starts.address(gpu),
            lens: spans.lens.address(gpu),
            channels: d,
            states: n,
            row_dtype: weights.row_dtype(state_dtype),
            even: u32::from(even),
            spill: spill.rows(1).address(),
            y_td: y_td_rows,
        };
        let is_16 = n == IN_REGISTERS;
        let kernel = if is_16 { Kernel::scan_forward_16 } else { Kernel::scan_forward_any };
        launch!(gpu, kernel, (spans.count, d.div_ceil(TILE)), TILE, 0; &sequences);
    }
    states.store_copies(gpu);
    y_td
}

/// Floats that hold the states of every span while a kernel runs; one where registers do.
fn spill_len(states: u32, spans: &Spans, channels: u32) -> usize {
    match states {
        IN_REGISTERS => 1,
        n => spans.count as usize * channels as usize * n as usize,
    }
}

/// For sequences that start from a zero state, as the CPU's: the states are recomputed, then
/// walked back.
pub fn backward(
    gpu: &Gpu,
    weights: &Weights<'_>,
    rows: &Rows<'_>,
    spans: &Spans,
    state_dtype: Dtype,
    dy_td: &CudaView<'_, f32>,
    (drows, dweights): (&mut RowGradients<'_>, &mut WeightGradients<'_>),
) {
    let (d, n) = (weights.channels(), weights.states());
    rows.assert_shapes(spans, d, n);
    assert_eq!(dy_td.len(), rows.c_td.len(), "dy is not [T, D]");
    drows.assert_like(rows);
    dweights.assert_like(weights);
    if spans.tokens == 0 {
        return;
    }
    let terms_of_channel = u64::from(spans.tokens) * u64::from(n);
    let fits = SCRATCH_BYTES / (2 * 4 * terms_of_channel);
    let whole_tiles = fits / u64::from(TILE) * u64::from(TILE);
    let most = if whole_tiles > 0 { whole_tiles } else { fits.max(1) }.min(u64::from(d)) as u32;
    let (starts, lens) = (spans.starts.address(gpu), spans.lens.address(gpu));
    let mut scratch = Scratch::new(gpu, spans, n, most);
    let mut spill = gpu.uninit::<f32>(spill_len(n, spans, d));
    for first in (0..d).step_by(most as usize) {
        let width = most.min(d - first);
        let kernel =
            if n == IN_REGISTERS { Kernel::scan_backward_16 } else { Kernel::scan_backward_any };
        launch!(gpu, kernel, (spans.count, width.div_ceil(TILE)), TILE, 0;
            &rows.c_td, &rows.dt_td, &rows.b_tn, &rows.c_tn, &rows.z_td, &weights.a_dn,
            &weights.skip_d, &weights.dt_bias_d, dy_td, &starts, &lens, &d, &n,
            &weights.row_dtype(state_dtype), &first, &width, &mut spill, &mut scratch.now_tnw,
            &mut scratch.db_tnw, &mut scratch.partials, &mut drows.c_td, &mut drows.dt_td,
            &mut drows.z_td);
        scratch.sum(gpu, spans, (first, width), n, drows, dweights);
    }
}

/// What a turn's channels leave to be summed.
struct Scratch {
    /// The states, then the terms of dC, `[T, N, width]`.
    now_tnw: CudaSlice<f32>,
    /// The terms of dB.
    db_tnw: CudaSlice<f32>,
    /// `[spans, N + 2, width]`.
    partials: CudaSlice<f32>,
}

impl Scratch {
    fn new(gpu: &Gpu, spans: &Spans, n: u32, most: u32) -> Self {
        let (n, most) = (n as usize, most as usize);
        let [now_tnw, db_tnw] =
            [(); 2].map(|()| gpu.uninit::<f32>(spans.tokens as usize * n * most));
        let partials = gpu.uninit(spans.count as usize * (n + 2) * most);
        Self { now_tnw, db_tnw, partials }
    }

    /// The sums: of dB and dC over channels, of the weights' over spans.
    fn sum(
        &self,
        gpu: &Gpu,
        spans: &Spans,
        (first, width): (u32, u32),
        n: u32,
        drows: &mut RowGradients<'_>,
        dweights: &mut WeightGradients<'_>,
    ) {
        let is_first = u32::from(first == 0);
        let grid = (spans.tokens, n.div_ceil(LANES as u32));
        let outputs = [(&self.db_tnw, &mut drows.b_tn), (&self.now_tnw, &mut drows.c_tn)];
        for (terms, out) in outputs {
            launch!(gpu, Kernel::scan_sum_channels, grid, STAGED, 0;
                terms, &n, &width, &is_first, out);
        }
        let len = u64::from(width) * u64::from(n + 2);
        launch!(gpu, Kernel::scan_sum_spans, (blocks(len), 1), THREADS, 0;
            &self.partials, &u64::from(spans.count), &n, &width, &u64::from(first),
            &mut dweights.a_log_dn, &mut dweights.skip_d, &mut dweights.dt_bias_d);
    }
}

/// Threads of a block that sums terms over channels: the channels that it stages at a time.
const STAGED: u32 = 256;

impl RowGradients<'_> {
    fn assert_like(&self, rows: &Rows<'_>) {
        for (name, found, want) in [
            ("dc", self.c_td.len(), rows.c_td.len()),
            ("ddt", self.dt_td.len(), rows.dt_td.len()),
            ("dz", self.z_td.len(), rows.z_td.len()),
            ("dB", self.b_tn.len(), rows.b_tn.len()),
            ("dC", self.c_tn.len(), rows.c_tn.len()),
        ] {
            assert_eq!(found, want, "{name} and its row differ");
        }
    }
}

impl WeightGradients<'_> {
    fn assert_like(&self, weights: &Weights<'_>) {
        for (name, found, want) in [
            ("A_log", self.a_log_dn.len(), weights.a_dn.len()),
            ("D", self.skip_d.len(), weights.skip_d.len()),
            ("dt_proj.bias", self.dt_bias_d.len(), weights.dt_bias_d.len()),
        ] {
            assert_eq!(found, want, "the gradient by {name} and its weight differ");
        }
    }
}
