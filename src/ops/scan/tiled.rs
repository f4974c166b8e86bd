//! The scan of fast arithmetic: in tiles, f32 inside, as Mamba's own prefill kernel has it.
//!
//! A tile's rows are scanned from zero, next to the product of their decays, and what the tile
//! began with is applied to both: h_t = local_t + (∏ exp(Δ·A))·h_start. How many rows a tile has
//! follows the row count, so a decode, a prefill and a packed training row round differently. The
//! state is f32 until the rows end; its cache rounds it where it is stored.

use super::super::simd::{decay, fold, fused, silu, softplus, vectorized, LANES};
use super::{to_dtype, Rows, Scan};
use crate::config::Dtype;

/// Rows of a tile, by the rows of the sequence: what one thread of the Mamba kernel scans (Gu and
/// Dao 2023, `selective_scan_fwd_kernel.cuh`).
fn tile_rows(rows: usize) -> usize {
    match rows {
        0..=128 => 4,
        129..=256 => 8,
        _ => 16,
    }
}

impl Scan {
    /// y[T, D]; the f32 state advances by T rows.
    pub(super) fn forward_tiled(
        &self,
        h_dn: &mut [f32],
        rows: Rows<'_>,
        dtype: Dtype,
        y_td: &mut [f32],
    ) {
        let (d, n) = (self.channels(), self.states());
        let t_len = y_td.len() / d;
        let tile = tile_rows(t_len);
        let mut scratch = vec![0.0; 2 * n];
        vectorized(
            #[inline(always)]
            || {
                for first in (0..t_len).step_by(tile) {
                    let end = t_len.min(first + tile);
                    for channel in 0..d {
                        let h_n = &mut h_dn[channel * n..][..n];
                        let a_n = &self.a_dn[channel * n..][..n];
                        let (local_n, decay_n) = scratch.split_at_mut(n);
                        local_n.fill(0.0);
                        decay_n.fill(1.0);
                        for t in first..end {
                            let at = t * d + channel;
                            let x = rows.c_td[at];
                            let delta = softplus(rows.dt_td[at] + self.dt_bias_d[channel]);
                            let (b_n, c_n) = (&rows.b_tn[t * n..][..n], &rows.c_tn[t * n..][..n]);
                            advance(local_n, decay_n, a_n, b_n, delta, delta * x);
                            let sum = output(local_n, decay_n, h_n, c_n);
                            let y = fused(self.skip_d[channel], x, sum) * silu(rows.z_td[at]);
                            y_td[at] = to_dtype(y, dtype);
                        }
                        for ((h, local), decay) in h_n.iter_mut().zip(local_n).zip(decay_n) {
                            *h = fused(*decay, *h, *local);
                        }
                    }
                }
            },
        );
    }
}

/// One channel, one row, of a tile that starts from zero.
#[inline(always)]
fn advance(
    local_n: &mut [f32],
    decay_n: &mut [f32],
    a_n: &[f32],
    b_n: &[f32],
    delta: f32,
    input: f32,
) {
    for (((local, decayed), a), b) in local_n.iter_mut().zip(decay_n).zip(a_n).zip(b_n) {
        let step = decay(delta, *a);
        *local = fused(step, *local, input * b);
        *decayed *= step;
    }
}

/// Σ_n h·C with h = local + decay · start, in the lanes of `simd`.
#[inline(always)]
fn output(local_n: &[f32], decay_n: &[f32], start_n: &[f32], c_n: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; LANES];
    let (local, local_rest) = local_n.as_chunks::<LANES>();
    let (decay, decay_rest) = decay_n.as_chunks::<LANES>();
    let (start, start_rest) = start_n.as_chunks::<LANES>();
    let (c, c_rest) = c_n.as_chunks::<LANES>();
    for (((local, decay), start), c) in local.iter().zip(decay).zip(start).zip(c) {
        for lane in 0..LANES {
            let h = fused(decay[lane], start[lane], local[lane]);
            lanes[lane] = fused(h, c[lane], lanes[lane]);
        }
    }
    for (lane, local) in local_rest.iter().enumerate() {
        let h = fused(decay_rest[lane], start_rest[lane], *local);
        lanes[lane] = fused(h, c_rest[lane], lanes[lane]);
    }
    fold(lanes)
}
