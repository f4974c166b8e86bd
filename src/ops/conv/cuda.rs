//! The convolution on the device, forward and backward bit for bit the CPU's (kernels/conv.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut};

use crate::ops::array::cuda::add_partials;
use crate::ops::cuda::{launch, Floats, Gpu, Kernel, OrFail, Spans};
use crate::ops::pages::cuda::States;
use crate::ops::weights::{cuda::widen_transposed, Part};

/// Channels of one block of threads.
const TILE: u32 = 128;
/// And of one that sums rows: small, since there are few such threads.
const WARP: u32 = 32;

/// One layer's weights as its [`Convolution`](super::Convolution) holds them.
#[derive(Clone, Debug)]
pub struct Layer {
    taps_kd: Floats,
    /// Zeros where the checkpoint has none.
    bias_d: Floats,
}

impl Layer {
    /// From `conv1d.weight` `[D, 1, K]` and bias `[D]`; an empty bias is none.
    #[must_use]
    pub fn new(w_dk: Part<'_>, bias_d: Part<'_>, channels: usize) -> Self {
        let w_dk = w_dk.bytes();
        let taps = widen_transposed(w_dk.gpu(), &w_dk.view(), w_dk.dtype(), channels);
        let bias_d = match bias_d.is_empty() {
            true => Floats::zeros(w_dk.gpu(), channels),
            false => bias_d.bytes().widened(),
        };
        Self { taps_kd: Floats::new(w_dk.gpu(), taps), bias_d }
    }

    #[must_use]
    pub fn channels(&self) -> usize {
        self.bias_d.len()
    }

    /// Floats of one sequence's state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.taps_kd.len() - self.bias_d.len()
    }

    #[must_use]
    pub fn weights(&self) -> Weights<'_> {
        Weights { taps_kd: self.taps_kd.view(), bias_d: self.bias_d.view() }
    }
}

/// Weights of one layer, f32: taps `[K, D]`, tap-major as [`super::Conv`] has them, bias `[D]`.
#[derive(Debug)]
pub struct Weights<'a> {
    pub taps_kd: CudaView<'a, f32>,
    pub bias_d: CudaView<'a, f32>,
}

impl Weights<'_> {
    fn channels(&self) -> u32 {
        self.bias_d.len() as u32
    }

    fn taps(&self) -> u32 {
        let taps = self.taps_kd.len() / self.bias_d.len();
        assert_eq!(self.taps_kd.len(), taps * self.bias_d.len(), "taps are not [{taps}, D]");
        taps as u32
    }
}

/// y[T, D] = round(silu(taps)) of packed rows x[T, D], in x's dtype; each span's state advances.
#[must_use]
pub fn forward(weights: &Weights<'_>, x_td: &Floats, spans: &Spans, states: &States) -> Floats {
    let (gpu, channels, taps) = (x_td.gpu(), weights.channels(), weights.taps());
    assert_eq!(x_td.len(), spans.tokens as usize * channels as usize, "x is not [T, D]");
    let y_td = Floats::uninit(gpu, x_td.len(), x_td.dtype());
    if spans.tokens == 0 {
        return y_td;
    }
    let state = states.conv(gpu, spans, (taps - 1) as usize * channels as usize);
    let (x, y) = (x_td.rows(channels as usize), y_td.rows(channels as usize));
    let even = x.is_even(channels as usize) && state.is_even() && y.is_even(channels as usize);
    // A span of one row reads all that it stores beside.
    let advances = states.is_paged() && spans.longest == 1 && taps > 1;
    let tiles = channels.div_ceil(if even { 8 * TILE } else { TILE });
    if advances {
        launch!(gpu, Kernel::conv_step, (spans.tokens, tiles), TILE, 0;
            &x, &weights.taps_kd, &weights.bias_d, &state, &channels, &taps, &u32::from(even), &y);
        return y_td;
    }
    let (starts, span_of_token) = (spans.starts.address(gpu), spans.span_of_token.address(gpu));
    launch!(gpu, Kernel::conv_forward, (spans.tokens, tiles), TILE, 0;
        &x, &weights.taps_kd, &weights.bias_d, &state, &starts, &span_of_token, &channels, &taps,
        &u32::from(even), &y);
    if states.is_paged() {
        launch!(gpu, Kernel::conv_advance, (spans.count, channels.div_ceil(TILE)), TILE, 0;
            &x, &state, &starts, &spans.lens.address(gpu), &channels, &taps);
    }
    y_td
}

/// Gradients, as the CPU's backward takes them: dx[T, D] overwritten; `dw[D, K]` and `dbias[D]`
/// added to, each span's own sum in order.
#[derive(Debug)]
pub struct Gradients<'a> {
    pub x_td: CudaViewMut<'a, f32>,
    pub w_dk: CudaViewMut<'a, f32>,
    pub bias_d: CudaViewMut<'a, f32>,
}

/// For sequences that start from nothing. Takes T · D floats of scratch, and D · (K + 1) a span.
pub fn backward(
    gpu: &Gpu,
    weights: &Weights<'_>,
    x_td: &CudaView<'_, f32>,
    spans: &Spans,
    dy_td: &CudaView<'_, f32>,
    gradients: &mut Gradients<'_>,
) {
    let (channels, taps) = (weights.channels(), weights.taps());
    assert_eq!(x_td.len(), spans.tokens as usize * channels as usize, "x is not [T, D]");
    assert!(x_td.len() == dy_td.len() && x_td.len() == gradients.x_td.len(), "x, dy, dx differ");
    assert_eq!(gradients.w_dk.len(), weights.taps_kd.len(), "dw is not [D, K]");
    assert_eq!(gradients.bias_d.len(), channels as usize, "dbias is not [D]");
    if spans.tokens == 0 {
        return;
    }
    let tiles = channels.div_ceil(TILE);
    let [starts, lens, span_of_token] =
        [&spans.starts, &spans.lens, &spans.span_of_token].map(|list| list.address(gpu));
    let mut dpre_td = gpu.uninit::<f32>(x_td.len());
    launch!(gpu, Kernel::conv_backward_pre, (spans.tokens, tiles), TILE, 0;
        x_td, &weights.taps_kd, &weights.bias_d, dy_td, &starts, &span_of_token, &channels, &taps,
        &mut dpre_td);
    launch!(gpu, Kernel::conv_backward_input, (spans.tokens, tiles), TILE, 0;
        &dpre_td, &weights.taps_kd, &starts, &lens, &span_of_token, &channels, &taps,
        &mut gradients.x_td);
    let spans = spans.count as usize;
    let mut w_dk = gpu.uninit::<f32>(spans * gradients.w_dk.len());
    let mut bias_d = gpu.uninit::<f32>(spans * gradients.bias_d.len());
    let tiles = channels.div_ceil(WARP);
    launch!(gpu, Kernel::conv_backward_weights, (tiles * spans as u32, taps + 1), WARP, 0;
        &dpre_td, x_td, &starts, &lens, &tiles, &channels, &taps, &mut w_dk, &mut bias_d);
    add_partials(gpu, &w_dk, &mut gradients.w_dk);
    add_partials(gpu, &bias_d, &mut gradients.bias_d);
}
