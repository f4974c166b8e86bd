//! Mamba-1's selective scan with its gate. Prefill and decode run the same `step`: the scan is
//! that step in a loop, so a sequence cut anywhere gives the same bits.
//!
//! Shape letters: T rows of one sequence, D channels, N states a channel. For a row:
//! Δ = softplus(δ + bias); h ← exp(Δ·A)·h + (Δ·c)·B; y = round((Σ_n h·C + D·c) · silu(z)).
//! exp(Δ·A) is taken as 2^(Δ·log2(e)A). The sum over n follows the lanes of `simd`. A bf16 state is
//! rounded after every row, because a decode that goes through its cache page cannot help doing so;
//! y uses h before that rounding. All of this is invariant arithmetic's; fast arithmetic's scan is
//! in `tiled`.

mod backward;
#[cfg(feature = "cuda")]
pub mod cuda;
mod selective;
mod tiled;

pub use backward::{RowGradients, WeightGradients, GROUP};
pub use selective::{InputGradients, Inputs, SelectiveScan, Sums};

use super::round::{slice_to_dtype, to_dtype};
use super::simd::{decay, exp, fold, fused, silu, softplus, vectorized, LANES};
use crate::config::{Arithmetic, Dtype};

/// Weights of one layer's scan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scan {
    /// log2(e)·A = -log2(e)·exp(A_log), `[D, N]`.
    a_dn: Vec<f32>,
    /// The skip weight `D`, `[D]`.
    skip_d: Vec<f32>,
    dt_bias_d: Vec<f32>,
    arithmetic: Arithmetic,
}

/// A sequence's rows, each already in the compute dtype.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// The convolution's output, `[T, D]`.
    pub c_td: &'a [f32],
    /// dt_proj's output without its bias, `[T, D]`.
    pub dt_td: &'a [f32],
    /// `[T, N]`.
    pub b_tn: &'a [f32],
    /// `[T, N]`.
    pub c_tn: &'a [f32],
    /// The gate, `[T, D]`.
    pub z_td: &'a [f32],
}

/// One channel, one row: advances the channel's N states, returns Σ_n h·C.
#[inline(always)]
fn step(h_n: &mut [f32], a_n: &[f32], b_n: &[f32], c_n: &[f32], delta: f32, x: f32) -> f32 {
    let input = delta * x;
    let mut lanes = [0.0_f32; LANES];
    let (h_whole, h_rest) = h_n.as_chunks_mut::<LANES>();
    let (a_whole, a_rest) = a_n.as_chunks::<LANES>();
    let (b_whole, b_rest) = b_n.as_chunks::<LANES>();
    let (c_whole, c_rest) = c_n.as_chunks::<LANES>();
    for (((h, a), b), c) in h_whole.iter_mut().zip(a_whole).zip(b_whole).zip(c_whole) {
        for lane in 0..LANES {
            h[lane] = fused(decay(delta, a[lane]), h[lane], input * b[lane]);
            lanes[lane] = fused(h[lane], c[lane], lanes[lane]);
        }
    }
    for (lane, h) in h_rest.iter_mut().enumerate() {
        *h = fused(decay(delta, a_rest[lane]), *h, input * b_rest[lane]);
        lanes[lane] = fused(*h, c_rest[lane], lanes[lane]);
    }
    fold(lanes)
}

impl Scan {
    /// From the checkpoint's `A_log` `[D, N]`, `D` `[D]` and `dt_proj.bias` `[D]`.
    #[must_use]
    pub fn new(a_log_dn: &[f32], skip_d: &[f32], dt_bias_d: &[f32]) -> Self {
        assert_eq!(skip_d.len(), dt_bias_d.len(), "D and dt_proj.bias differ");
        assert_eq!(a_log_dn.len() % skip_d.len(), 0, "A_log is not [{}, N]", skip_d.len());
        let mut a_dn = a_log_dn.to_vec();
        vectorized(
            #[inline(always)]
            || a_dn.iter_mut().for_each(|a| *a = -exp(*a) * std::f32::consts::LOG2_E),
        );
        let (skip_d, dt_bias_d) = (skip_d.to_vec(), dt_bias_d.to_vec());
        Self { a_dn, skip_d, dt_bias_d, arithmetic: Arithmetic::Invariant }
    }

    /// The same weights under another arithmetic.
    #[must_use]
    pub fn under(self, arithmetic: Arithmetic) -> Self {
        Self { arithmetic, ..self }
    }

    fn channels(&self) -> usize {
        self.skip_d.len()
    }

    fn states(&self) -> usize {
        self.a_dn.len() / self.channels()
    }

    /// Floats of one sequence's state, `[D, N]`.
    #[must_use]
    pub fn state_len(&self) -> usize {
        self.a_dn.len()
    }

    /// y[T, D]; the state advances by T rows, rounded to `state_dtype` after each in invariant
    /// arithmetic, after the last in fast.
    pub fn forward(
        &self,
        h_dn: &mut [f32],
        rows: Rows<'_>,
        dtype: Dtype,
        state_dtype: Dtype,
        y_td: &mut [f32],
    ) {
        self.assert_shapes(rows, y_td.len());
        assert_eq!(h_dn.len(), self.state_len(), "scan state");
        if self.arithmetic == Arithmetic::Fast {
            self.forward_tiled(h_dn, rows, dtype, y_td);
            return slice_to_dtype(h_dn, state_dtype);
        }
        vectorized(
            #[inline(always)]
            || {
                for (t, y_d) in y_td.chunks_exact_mut(self.channels()).enumerate() {
                    self.row(h_dn, rows, t, dtype, y_d);
                    if state_dtype == Dtype::Bf16 {
                        h_dn.iter_mut().for_each(|h| *h = to_dtype(*h, state_dtype));
                    }
                }
            },
        );
    }

    #[inline(always)]
    fn row(&self, h_dn: &mut [f32], rows: Rows<'_>, t: usize, dtype: Dtype, y_d: &mut [f32]) {
        let (d, n) = (self.channels(), self.states());
        let (b_n, c_n) = (&rows.b_tn[t * n..][..n], &rows.c_tn[t * n..][..n]);
        let (c_d, z_d) = (&rows.c_td[t * d..][..d], &rows.z_td[t * d..][..d]);
        // y holds Δ until its channel is done, then Σ h·C, then the gated output.
        for ((y, dt), bias) in y_d.iter_mut().zip(&rows.dt_td[t * d..][..d]).zip(&self.dt_bias_d) {
            *y = softplus(dt + bias);
        }
        let channels = h_dn.chunks_exact_mut(n).zip(self.a_dn.chunks_exact(n));
        for ((h_n, a_n), (y, &x)) in channels.zip(y_d.iter_mut().zip(c_d)) {
            *y = step(h_n, a_n, b_n, c_n, *y, x);
        }
        for (((y, x), skip), z) in y_d.iter_mut().zip(c_d).zip(&self.skip_d).zip(z_d) {
            *y = to_dtype(fused(*skip, *x, *y) * silu(*z), dtype);
        }
    }

    fn assert_shapes(&self, rows: Rows<'_>, y_len: usize) {
        let (d, n) = (self.channels(), self.states());
        let t = y_len / d;
        assert_eq!(y_len, t * d, "y is not [{t}, {d}]");
        for (name, len, width) in [
            ("c", rows.c_td.len(), d),
            ("dt", rows.dt_td.len(), d),
            ("z", rows.z_td.len(), d),
            ("B", rows.b_tn.len(), n),
            ("C", rows.c_tn.len(), n),
        ] {
            assert_eq!(len, t * width, "{name} is not [{t}, {width}]");
        }
    }
}

#[cfg(test)]
mod tests;
