//! The scan's gradients on the device, bit for bit the CPU's (kernels/scan_backward.cu).

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr, DeviceRepr};

use super::{Inputs, InputsArgument, Weights, IN_REGISTERS};
use crate::config::Dtype;
use crate::ops::cuda::{blocks, launch, Gpu, Kernel, OrFail, Spans, THREADS};
use crate::ops::pages::cuda::StateArgument;
use crate::ops::scan::GROUP;

/// Channels of one block of threads: whole groups.
const TILE: u32 = 64;
/// The states of every row, channel and state number. Channels go in turns to fit.
const SCRATCH_BYTES: u64 = 1 << 30;

/// Gradients of the rows, overwritten.
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

/// `struct Backward` of kernels/scan_backward.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct BackwardArgument {
    inputs: InputsArgument,
    dy_td: u64,
    starts: u64,
    lens: u64,
    channels: u32,
    states: u32,
    row_dtype: u32,
    even: u32,
    first: u32,
    width: u32,
    groups: u32,
    spill: u64,
    held_tnw: u64,
    groups_tgn: u64,
    partials: u64,
    dx_td: u64,
    ddt_td: u64,
    dz_td: u64,
}

// SAFETY: plain numbers, laid out as the kernels' struct of the same fields.
unsafe impl DeviceRepr for BackwardArgument {}

/// For sequences that start from a zero state, as the CPU's: the states are recomputed, then
/// walked back.
pub fn backward(
    weights: &Weights<'_>,
    inputs: Inputs<'_>,
    spans: &Spans,
    state_dtype: Dtype,
    dy_td: &CudaView<'_, f32>,
    (drows, dweights): (&mut RowGradients<'_>, &mut WeightGradients<'_>),
) {
    let (gpu, d, n) = (inputs.c_td.gpu(), weights.channels(), weights.states());
    let rows = inputs.arguments(spans.tokens as usize, d as usize, n as usize);
    assert_eq!(dy_td.len(), inputs.c_td.len(), "dy is not [T, D]");
    drows.assert_like(&inputs);
    dweights.assert_like(weights);
    if spans.tokens == 0 {
        return;
    }
    let most = channels_at_once(spans.tokens, d, n);
    let scratch = Scratch::new(gpu, spans, (d, n), most);
    let even = rows[2].is_even(n as usize) && rows[3].is_even(n as usize);
    let inputs =
        InputsArgument { rows, weights: weights.addresses(gpu), state: StateArgument::default() };
    for first in (0..d).step_by(most as usize) {
        let width = most.min(d - first);
        let argument = BackwardArgument {
            inputs,
            dy_td: dy_td.device_ptr(gpu.stream()).0,
            starts: spans.starts.address(gpu),
            lens: spans.lens.address(gpu),
            channels: d,
            states: n,
            row_dtype: weights.row_dtype(state_dtype),
            even: u32::from(even),
            first,
            width,
            groups: d.div_ceil(GROUP as u32),
            spill: scratch.spill.device_ptr(gpu.stream()).0,
            held_tnw: scratch.held_tnw.device_ptr(gpu.stream()).0,
            groups_tgn: scratch.groups_tgn.device_ptr(gpu.stream()).0,
            partials: scratch.partials.device_ptr(gpu.stream()).0,
            dx_td: drows.c_td.device_ptr(gpu.stream()).0,
            ddt_td: drows.dt_td.device_ptr(gpu.stream()).0,
            dz_td: drows.z_td.device_ptr(gpu.stream()).0,
        };
        let kernel =
            if n == IN_REGISTERS { Kernel::scan_backward_16 } else { Kernel::scan_backward_any };
        launch!(gpu, kernel, (spans.count, width.div_ceil(TILE)), TILE, 0; &argument);
        scratch.sum_spans(gpu, spans, (first, width), n, dweights);
    }
    scratch.sum_groups(gpu, spans, (d, n), drows);
}

/// Whole tiles of channels whose states fit the scratch; one where none does.
fn channels_at_once(tokens: u32, d: u32, n: u32) -> u32 {
    let tile_bytes = u64::from(tokens) * u64::from(n) * 4 * u64::from(TILE);
    let tiles = (SCRATCH_BYTES / tile_bytes).max(1);
    (tiles * u64::from(TILE)).min(u64::from(d)) as u32
}

/// What the kernels leave to one another.
struct Scratch {
    spill: CudaSlice<f32>,
    /// The states that each row leaves, `[T, N, width]`.
    held_tnw: CudaSlice<f32>,
    /// Terms of dB and dC, folded over groups of channels, `[T, groups, 2, N]`.
    groups_tgn: CudaSlice<f32>,
    /// `[spans, N + 2, width]`.
    partials: CudaSlice<f32>,
}

impl Scratch {
    fn new(gpu: &Gpu, spans: &Spans, (d, n): (u32, u32), most: u32) -> Self {
        let (tokens, count) = (spans.tokens as usize, spans.count as usize);
        let threads = most.next_multiple_of(TILE) as usize;
        let spilled = if n == IN_REGISTERS { 1 } else { count * threads * 2 * n as usize };
        let (d, n, most) = (d as usize, n as usize, most as usize);
        Self {
            spill: gpu.uninit(spilled),
            held_tnw: gpu.uninit(tokens * n * most),
            groups_tgn: gpu.uninit(tokens * d.div_ceil(GROUP) * 2 * n),
            partials: gpu.uninit(count * (n + 2) * most),
        }
    }

    fn sum_spans(
        &self,
        gpu: &Gpu,
        spans: &Spans,
        (first, width): (u32, u32),
        n: u32,
        dweights: &mut WeightGradients<'_>,
    ) {
        let len = u64::from(width) * u64::from(n + 2);
        launch!(gpu, Kernel::scan_sum_spans, (blocks(len), 1), THREADS, 0;
            &self.partials, &u64::from(spans.count), &n, &width, &u64::from(first),
            &mut dweights.a_log_dn, &mut dweights.skip_d, &mut dweights.dt_bias_d);
    }

    fn sum_groups(
        &self,
        gpu: &Gpu,
        spans: &Spans,
        (d, n): (u32, u32),
        drows: &mut RowGradients<'_>,
    ) {
        let (rows, groups) = (u64::from(spans.tokens), u64::from(d.div_ceil(GROUP as u32)));
        launch!(gpu, Kernel::scan_sum_groups, (blocks(rows * 2 * u64::from(n)), 1), THREADS, 0;
            &self.groups_tgn, &rows, &groups, &n, &mut drows.b_tn, &mut drows.c_tn);
    }
}

impl RowGradients<'_> {
    fn assert_like(&self, rows: &Inputs<'_>) {
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
