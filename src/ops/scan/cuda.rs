//! The selective scan on the device, bit for bit the CPU's (kernels/scan.cu,
//! kernels/state_update.cu).

// A struct that a kernel takes by value is promised to be plain numbers; launches are raw calls.
#![allow(unsafe_code)]

mod backward;

pub use backward::{backward, RowGradients, WeightGradients};

use cudarc::driver::{CudaView, DevicePtr, DeviceRepr};

use crate::config::{Arithmetic, Dtype};
use crate::ops::cuda::{dtype_code, launch, Floats, Gpu, Kernel, OrFail, RowsArgument, Spans};
use crate::ops::pages::cuda::{StateArgument, States};
use crate::ops::weights::{cuda::decays, Part};

/// Channels of one block of threads.
const TILE: u32 = 64;
/// Channels of one block of threads that updates single rows.
const UPDATE_TILE: u32 = 128;
/// Blocks of it that a multiprocessor holds: as its launch bounds say.
const UPDATE_BLOCKS: u32 = 5;
/// States that a thread holds in registers; other counts go through memory.
const IN_REGISTERS: u32 = 16;

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
            a_dn: Floats::new(gpu, decays(gpu, &a_log_dn.view())),
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
    /// log2(e)·A = -log2(e)·exp(A_log), `[D, N]`.
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

/// Packed rows of all sequences, in one dtype: see [`super::Rows`].
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
