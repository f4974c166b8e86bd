//! Mamba's causal depthwise convolution with its silu: the taps are added in one order, oldest
//! first, whether a column comes from this call or from the cached state.
//!
//! Shape letters: T rows of one sequence, D channels, K taps. The state is the last K-1 columns
//! before the silu, `[K-1, D]`, oldest first, as vLLM keeps it.

#[cfg(feature = "cuda")]
pub mod cuda;

use super::array::{Array, SliceMut};
#[cfg(feature = "cuda")]
use super::cuda::Floats;
use super::round::to_dtype;
use super::simd::{fused, silu, silu_derivative, vectorized};
use super::spans::Spans;
use super::state::States;
use super::weights::Part;
use crate::config::Dtype;

/// Weights of one layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Conv {
    channels: usize,
    /// `[K, D]`: tap-major, so that channels lie side by side.
    taps_kd: Vec<f32>,
    bias_d: Vec<f32>,
}

impl Conv {
    /// From the checkpoint's `conv1d.weight` `[D, 1, K]` and bias `[D]`, zeros if there is none.
    #[must_use]
    pub fn new(w_dk: &[f32], bias_d: &[f32]) -> Self {
        let channels = bias_d.len();
        let taps = w_dk.len() / channels;
        assert_eq!(w_dk.len(), channels * taps, "the weight is not [{channels}, 1, {taps}]");
        let taps_kd =
            (0..taps * channels).map(|i| w_dk[i % channels * taps + i / channels]).collect();
        Self { channels, taps_kd, bias_d: bias_d.to_vec() }
    }

    fn taps(&self) -> usize {
        self.taps_kd.len() / self.channels
    }

    /// Floats of one sequence's state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        (self.taps() - 1) * self.channels
    }

    /// The column `back` places before row `t`: from this call, or from the state before it.
    #[inline(always)]
    fn column<'a>(&self, state: &'a [f32], x_td: &'a [f32], t: usize, back: usize) -> &'a [f32] {
        let d = self.channels;
        match t.checked_sub(back) {
            Some(row) => &x_td[row * d..][..d],
            None => &state[(self.taps() - 1 + t - back) * d..][..d],
        }
    }

    /// pre[T, D] = bias + Σ_k w_k · x[t-K+1+k], k ascending.
    #[inline(always)]
    fn sum_taps(&self, state: &[f32], x_td: &[f32], t: usize, pre_d: &mut [f32]) {
        pre_d.copy_from_slice(&self.bias_d);
        for (k, w) in self.taps_kd.chunks_exact(self.channels).enumerate() {
            let x = self.column(state, x_td, t, self.taps() - 1 - k);
            for ((pre, w), x) in pre_d.iter_mut().zip(w).zip(x) {
                *pre = fused(*w, *x, *pre);
            }
        }
    }

    /// y[T, D] = round(silu(taps)); the state advances to the last K-1 columns.
    pub fn forward(&self, state: &mut [f32], x_td: &[f32], dtype: Dtype, y_td: &mut [f32]) {
        assert_eq!(state.len(), self.state_len(), "conv state");
        assert_eq!(x_td.len(), y_td.len(), "x and y differ");
        vectorized(
            #[inline(always)]
            || {
                for (t, y) in y_td.chunks_exact_mut(self.channels).enumerate() {
                    self.sum_taps(state, x_td, t, y);
                    y.iter_mut().for_each(|v| *v = to_dtype(silu(*v), dtype));
                }
            },
        );
        advance(state, x_td);
    }

    /// For a sequence that starts from nothing: `dx[T, D]` overwritten; `dw[D, K]`, laid out as the
    /// checkpoint's, and `dbias[D]`: its own sums, rows ascending, are added.
    pub fn backward(
        &self,
        x_td: &[f32],
        dy_td: &[f32],
        dx_td: &mut [f32],
        dw_dk: &mut [f32],
        dbias_d: &mut [f32],
    ) {
        let (d, taps) = (self.channels, self.taps());
        assert!(x_td.len() == dy_td.len() && x_td.len() == dx_td.len(), "x, dy, dx differ");
        dx_td.fill(0.0);
        let start = vec![0.0; self.state_len()];
        let (mut own_dk, mut own_d) = (vec![0.0; d * taps], vec![0.0; d]);
        let mut dpre = vec![0.0; d];
        vectorized(
            #[inline(always)]
            || {
                for (t, dy) in dy_td.chunks_exact(d).enumerate() {
                    self.sum_taps(&start, x_td, t, &mut dpre);
                    for i in 0..d {
                        dpre[i] = dy[i] * silu_derivative(dpre[i]);
                        own_d[i] += dpre[i];
                    }
                    for (k, w) in self.taps_kd.chunks_exact(d).enumerate() {
                        let Some(row) = t.checked_sub(taps - 1 - k) else { continue };
                        let (x, dx) = (&x_td[row * d..][..d], &mut dx_td[row * d..][..d]);
                        for i in 0..d {
                            dx[i] = fused(dpre[i], w[i], dx[i]);
                            let own = &mut own_dk[i * taps + k];
                            *own = fused(dpre[i], x[i], *own);
                        }
                    }
                }
            },
        );
        dw_dk.iter_mut().zip(&own_dk).for_each(|(dw, own)| *dw += own);
        dbias_d.iter_mut().zip(&own_d).for_each(|(dbias, own)| *dbias += own);
    }
}

/// Keeps the last columns of state ++ x.
fn advance(state: &mut [f32], x_td: &[f32]) {
    if let Some(skip) = x_td.len().checked_sub(state.len()) {
        state.copy_from_slice(&x_td[skip..]);
    } else {
        state.copy_within(x_td.len().., 0);
        let kept = state.len() - x_td.len();
        state[kept..].copy_from_slice(x_td);
    }
}

/// A layer's convolution on its device.
#[derive(Clone, Debug)]
pub enum Convolution {
    Cpu(Conv),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Layer),
}

impl Convolution {
    /// From `conv1d.weight` `[D, 1, K]` and bias `[D]`; an empty bias is none.
    #[must_use]
    pub fn new(w_dk: Part<'_>, bias_d: Part<'_>, channels: usize) -> Self {
        match (w_dk, bias_d) {
            (Part::Cpu(w_dk), Part::Cpu(bias_d)) => {
                let none = vec![0.0; channels];
                Self::Cpu(Conv::new(w_dk, if bias_d.is_empty() { &none } else { bias_d }))
            }
            #[cfg(feature = "cuda")]
            (w_dk, bias_d) => Self::Cuda(cuda::Layer::new(w_dk, bias_d, channels)),
        }
    }

    /// Floats of one sequence's state.
    #[must_use]
    pub fn state_len(&self) -> usize {
        match self {
            Self::Cpu(conv) => conv.state_len(),
            #[cfg(feature = "cuda")]
            Self::Cuda(conv) => conv.state_len(),
        }
    }

    /// y[T, D] from x[T, D]; each span's state advances.
    #[must_use]
    pub fn forward(&self, states: &mut States, spans: &Spans, x: &Array, dtype: Dtype) -> Array {
        assert_eq!(spans.len(), states.len(), "one state a sequence");
        match self {
            Self::Cpu(conv) => {
                let (x, mut y) = (x.cpu(), vec![0.0; x.len()]);
                for (span, state) in spans.iter().zip(states.cpu_mut()) {
                    let rows = span.floats(conv.channels);
                    conv.forward(&mut state.conv, &x[rows.clone()], dtype, &mut y[rows]);
                }
                Array::Cpu(y)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(conv) => {
                let x = x.cuda();
                assert_eq!(x.dtype(), dtype, "rows are convolved in their own dtype");
                Array::Cuda(cuda::forward(&conv.weights(), x, spans.cuda(), states.cuda()))
            }
        }
    }

    /// For sequences from their start: returns dx[T, D], adds to the weight's gradient and, where
    /// there is a bias, to its own.
    #[must_use]
    pub fn backward(
        &self,
        spans: &Spans,
        x: &Array,
        dy: &Array,
        mut dw_dk: SliceMut<'_>,
        mut dbias_d: SliceMut<'_>,
    ) -> Array {
        let mut dx = x.zeros_like();
        match self {
            Self::Cpu(conv) => {
                // The gradient by an absent bias is computed and dropped: it is D sums.
                let mut dropped = vec![0.0; conv.channels];
                let dbias_d = if dbias_d.is_empty() { &mut dropped } else { dbias_d.cpu() };
                let (x, dy, dx) = (x.cpu(), dy.cpu(), dx.cpu_mut());
                for span in spans.iter() {
                    let rows = span.floats(conv.channels);
                    let (x, dy) = (&x[rows.clone()], &dy[rows.clone()]);
                    conv.backward(x, dy, &mut dx[rows], dw_dk.cpu(), dbias_d);
                }
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(conv) => {
                let (x, dy) = (x.cuda(), dy.cuda().view());
                let mut dropped = Floats::zeros(x.gpu(), conv.channels());
                let bias_d = match dbias_d.is_empty() {
                    true => dropped.view_mut(),
                    false => dbias_d.cuda().slice_mut(..),
                };
                let mut gradients = cuda::Gradients {
                    x_td: dx.cuda_mut().view_mut(),
                    w_dk: dw_dk.cuda().slice_mut(..),
                    bias_d,
                };
                let (weights, spans, wide) = (conv.weights(), spans.cuda(), x.widened());
                cuda::backward(x.gpu(), &weights, &wide.view(), spans, &dy, &mut gradients);
            }
        }
        dx
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, finite_difference, random, weighted, wide};

    /// T, D, K.
    const CASES: [(usize, usize, usize); 5] =
        [(1, 1, 4), (2, 3, 4), (9, 16, 4), (5, 20, 2), (3, 4, 1)];

    fn oracle(x: &[f64], w_dk: &[f64], bias: &[f64]) -> Vec<f64> {
        let (d, taps) = (bias.len(), w_dk.len() / bias.len());
        (0..x.len())
            .map(|i| {
                let (t, c) = (i / d, i % d);
                let terms = (0..taps).filter(|k| t + k + 1 >= taps);
                let pre = bias[c]
                    + terms
                        .map(|k| w_dk[c * taps + k] * x[(t + k + 1 - taps) * d + c])
                        .sum::<f64>();
                pre / (1.0 + (-pre).exp())
            })
            .collect()
    }

    #[test]
    fn forward_against_f64() {
        for (t, d, k) in CASES {
            let (x, w, bias) = (random(t * d, 1), random(d * k, 2), random(d, 3));
            let conv = Conv::new(&w, &bias);
            let (mut y, mut state) = (vec![0.0; t * d], vec![0.0; conv.state_len()]);
            conv.forward(&mut state, &x, Dtype::F32, &mut y);
            assert_close("y", &y, oracle(&wide(&x), &wide(&w), &wide(&bias)), 2e-6);
        }
    }

    #[test]
    fn any_split_gives_the_same_bits_and_state() {
        let (t, d, k) = (9, 16, 4);
        let (x, conv) = (random(t * d, 4), Conv::new(&random(d * k, 5), &random(d, 6)));
        let (mut whole, mut end) = (vec![0.0; t * d], vec![0.0; conv.state_len()]);
        conv.forward(&mut end, &x, Dtype::F32, &mut whole);
        for cut in 1..t {
            let (mut y, mut state) = (vec![0.0; t * d], vec![0.0; conv.state_len()]);
            let (first, second) = y.split_at_mut(cut * d);
            conv.forward(&mut state, &x[..cut * d], Dtype::F32, first);
            conv.forward(&mut state, &x[cut * d..], Dtype::F32, second);
            assert_eq!((&y, &state), (&whole, &end), "cut at {cut}");
        }
    }

    #[test]
    fn backward_against_finite_differences() {
        for (t, d, k) in CASES {
            let (x, w, bias, dy) =
                (random(t * d, 7), random(d * k, 8), random(d, 9), random(t * d, 10));
            let (mut dx, mut dw, mut dbias) = (vec![1.0; t * d], vec![0.0; d * k], vec![0.0; d]);
            Conv::new(&w, &bias).backward(&x, &dy, &mut dx, &mut dw, &mut dbias);
            let (x64, w64, b64) = (wide(&x), wide(&w), wide(&bias));
            let by_x = finite_difference(&x, |x| weighted(&dy, &oracle(x, &w64, &b64)));
            let by_w = finite_difference(&w, |w| weighted(&dy, &oracle(&x64, w, &b64)));
            let by_b = finite_difference(&bias, |b| weighted(&dy, &oracle(&x64, &w64, b)));
            assert_close("dx", &dx, by_x, 1e-5);
            assert_close("dw", &dw, by_w, 1e-5);
            assert_close("dbias", &dbias, by_b, 1e-5);
        }
    }
}
