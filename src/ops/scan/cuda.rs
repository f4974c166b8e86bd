//! The selective scan on the device, forward and backward bit for bit the CPU's (kernels/scan.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};

use crate::config::{Arithmetic, Dtype};
use crate::ops::cuda::{dtype_code, launch, Floats, Gpu, Kernel, OrFail, Spans};
use crate::ops::pages::cuda::States;
use crate::ops::weights::{cuda::negative_exp, Part};

/// Channels of one block of threads.
const TILE: u32 = 64;
/// States that a thread holds in registers; other counts go through memory.
const IN_REGISTERS: u32 = 16;
/// The backward's scratch: three numbers a row, channel and state. Channels go in turns to fit.
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

    fn channels(&self) -> u32 {
        assert_eq!(self.skip_d.len(), self.dt_bias_d.len(), "D and dt_proj.bias differ");
        self.skip_d.len() as u32
    }

    fn states(&self) -> u32 {
        assert_eq!(self.a_dn.len() % self.skip_d.len(), 0, "A is not [{}, N]", self.skip_d.len());
        (self.a_dn.len() / self.skip_d.len()) as u32
    }
}

/// Packed rows of all sequences, as the CPU's [`super::Rows`].
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

impl Rows<'_> {
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

/// y[T, D] of packed rows; each span's state advances, rounded to `state_dtype` after each row, or
/// in fast arithmetic after its last one; rows are in one order in both.
pub fn forward(
    gpu: &Gpu,
    weights: &Weights<'_>,
    rows: &Rows<'_>,
    spans: &Spans,
    states: &States,
    (dtype, state_dtype): (Dtype, Dtype),
    y_td: &mut CudaViewMut<'_, f32>,
) {
    let (d, n) = (weights.channels(), weights.states());
    rows.assert_shapes(spans, d, n);
    assert_eq!(y_td.len(), rows.c_td.len(), "y is not [T, D]");
    if spans.tokens == 0 {
        return;
    }
    let state = states.ssm(gpu, spans, weights.a_dn.len(), state_dtype);
    let mut spill = gpu.uninit::<f32>(spill_len(n, spans, d));
    let kernel = if n == IN_REGISTERS { Kernel::scan_forward_16 } else { Kernel::scan_forward_any };
    launch!(gpu, kernel, (spans.count, d.div_ceil(TILE)), TILE, 0;
        &rows.c_td, &rows.dt_td, &rows.b_tn, &rows.c_tn, &rows.z_td, &weights.a_dn,
        &weights.skip_d, &weights.dt_bias_d, &state, &spans.starts, &spans.lens, &d, &n,
        &dtype_code(dtype), &weights.row_dtype(state_dtype), &mut spill, y_td);
    states.store_copies(gpu);
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
    let fits = SCRATCH_BYTES / (3 * 4 * terms_of_channel);
    let whole_tiles = fits / u64::from(TILE) * u64::from(TILE);
    let most = if whole_tiles > 0 { whole_tiles } else { fits.max(1) }.min(u64::from(d)) as u32;
    let mut scratch = Scratch::new(gpu, terms_of_channel as usize * most as usize);
    let mut spill = gpu.uninit::<f32>(spill_len(n, spans, d));
    for first in (0..d).step_by(most as usize) {
        let width = most.min(d - first);
        let kernel =
            if n == IN_REGISTERS { Kernel::scan_backward_16 } else { Kernel::scan_backward_any };
        launch!(gpu, kernel, (spans.count, width.div_ceil(TILE)), TILE, 0;
            &rows.c_td, &rows.dt_td, &rows.b_tn, &rows.c_tn, &rows.z_td, &weights.a_dn,
            &weights.skip_d, &weights.dt_bias_d, dy_td, &spans.starts, &spans.lens, &d, &n,
            &weights.row_dtype(state_dtype), &first, &width, &mut spill, &mut scratch.now_twn,
            &mut scratch.db_twn, &mut scratch.da_twn, &mut drows.c_td, &mut drows.dt_td,
            &mut drows.z_td);
        scratch.sum(gpu, spans, (first, width), n, drows, &mut dweights.a_log_dn);
    }
    let ddt_td = drows.dt_td.as_view();
    launch!(gpu, Kernel::scan_backward_weights, (d.div_ceil(TILE), 1), TILE, 0;
        &rows.c_td, &rows.z_td, dy_td, &ddt_td, &spans.starts, &spans.lens, &spans.count, &d,
        &mut dweights.skip_d, &mut dweights.dt_bias_d);
}

/// Terms of every row, channel of a turn, and state: `[T, width, N]` each.
struct Scratch {
    /// The states, then the terms of dC.
    now_twn: CudaSlice<f32>,
    db_twn: CudaSlice<f32>,
    da_twn: CudaSlice<f32>,
}

impl Scratch {
    fn new(gpu: &Gpu, len: usize) -> Self {
        let [now_twn, db_twn, da_twn] = [(); 3].map(|()| gpu.uninit::<f32>(len));
        Self { now_twn, db_twn, da_twn }
    }

    /// The terms' sums: of dB and dC over channels, of dA_log over rows.
    fn sum(
        &self,
        gpu: &Gpu,
        spans: &Spans,
        (first, width): (u32, u32),
        n: u32,
        drows: &mut RowGradients<'_>,
        da_log_dn: &mut CudaViewMut<'_, f32>,
    ) {
        let len = u64::from(spans.tokens) * u64::from(n);
        let is_first = u32::from(first == 0);
        let outputs = [(&self.db_twn, &mut drows.b_tn), (&self.now_twn, &mut drows.c_tn)];
        for (terms, out) in outputs {
            launch!(gpu, Kernel::scan_sum_channels, (blocks(len), 1), SUM_BLOCK, 0;
                terms, &len, &n, &width, &is_first, out);
        }
        let len = u64::from(width) * u64::from(n);
        launch!(gpu, Kernel::scan_sum_rows, (blocks(len), 1), SUM_BLOCK, 0;
            &self.da_twn, &spans.starts, &spans.lens, &spans.count, &len,
            &(u64::from(first) * u64::from(n)), da_log_dn);
    }
}

/// Threads of a block that sums terms.
const SUM_BLOCK: u32 = 128;

fn blocks(len: u64) -> u32 {
    u32::try_from(len.div_ceil(u64::from(SUM_BLOCK))).expect("a batch's rows fit in a grid")
}

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
