//! Mamba-1's selective scan with its gate. Prefill and decode run the same `step`: the scan is
//! that step in a loop, so a sequence cut anywhere gives the same bits.
//!
//! Shape letters: T rows of one sequence, D channels, N states a channel. For a row:
//! Δ = softplus(δ + bias); h ← exp(Δ·A)·h + (Δ·c)·B; y = round((Σ_n h·C + D·c) · silu(z)).
//! The sum over n follows the lanes of `simd`. A bf16 state is rounded after every row, because a
//! decode that goes through its cache page cannot help doing so; y uses h before that rounding.
//! All of this is invariant arithmetic's; fast arithmetic's scan is in `tiled`.

#[cfg(feature = "cuda")]
pub mod cuda;
mod selective;
mod tiled;

pub use selective::{InputGradients, Inputs, SelectiveScan, Sums};

use super::round::{slice_to_dtype, to_dtype};
use super::simd::{exp, fold, sigmoid, silu, silu_derivative, softplus, vectorized, LANES};
use crate::config::{Arithmetic, Dtype};

/// Weights of one layer's scan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scan {
    /// A = -exp(A_log), `[D, N]`.
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

/// Gradients of [`Rows`], overwritten.
#[derive(Debug)]
pub struct RowGradients<'a> {
    pub c_td: &'a mut [f32],
    pub dt_td: &'a mut [f32],
    pub b_tn: &'a mut [f32],
    pub c_tn: &'a mut [f32],
    pub z_td: &'a mut [f32],
}

/// Gradients of a layer's weights, added to.
#[derive(Debug)]
pub struct WeightGradients<'a> {
    pub a_log_dn: &'a mut [f32],
    pub skip_d: &'a mut [f32],
    pub dt_bias_d: &'a mut [f32],
}

impl WeightGradients<'_> {
    fn add(&mut self, other: &WeightGradients<'_>) {
        for (sums, terms) in [
            (&mut *self.a_log_dn, &*other.a_log_dn),
            (&mut *self.skip_d, &*other.skip_d),
            (&mut *self.dt_bias_d, &*other.dt_bias_d),
        ] {
            sums.iter_mut().zip(terms).for_each(|(sum, term)| *sum += term);
        }
    }
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
            h[lane] = exp(delta * a[lane]) * h[lane] + input * b[lane];
            lanes[lane] += h[lane] * c[lane];
        }
    }
    for (lane, h) in h_rest.iter_mut().enumerate() {
        *h = exp(delta * a_rest[lane]) * *h + input * b_rest[lane];
        lanes[lane] += *h * c_rest[lane];
    }
    fold(lanes)
}

impl Scan {
    /// From the checkpoint's `A_log` `[D, N]`, `D` `[D]` and `dt_proj.bias` `[D]`.
    #[must_use]
    pub fn new(a_log_dn: &[f32], skip_d: &[f32], dt_bias_d: &[f32]) -> Self {
        assert_eq!(skip_d.len(), dt_bias_d.len(), "D and dt_proj.bias differ");
        assert_eq!(a_log_dn.len() % skip_d.len(), 0, "A_log is not [{}, N]", skip_d.len());
        let a_dn = a_log_dn.iter().map(|&a| -exp(a)).collect();
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
            *y = to_dtype((*y + skip * x) * silu(*z), dtype);
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

    /// For a sequence that starts from a zero state, whose own sums, rows descending, are added to
    /// `dweights`. Recomputes the states (T · D · N floats), then walks back: p_t = g_t·C_t +
    /// exp(Δ_{t+1}·A)·p_{t+1} (Mamba, Gu and Dao 2023). A rounded state passes its gradient
    /// straight through; fast arithmetic rounds none on the way.
    pub fn backward(
        &self,
        rows: Rows<'_>,
        state_dtype: Dtype,
        dy_td: &[f32],
        drows: &mut RowGradients<'_>,
        dweights: &mut WeightGradients<'_>,
    ) {
        self.assert_shapes(rows, dy_td.len());
        let (d, n) = (self.channels(), self.states());
        let state_dtype = self.row_dtype(state_dtype);
        let t_len = dy_td.len() / d;
        // h_tdn[t] is the state before row t, as row t read it.
        let mut h_tdn = vec![0.0; (t_len + 1) * d * n];
        let mut y_td = vec![0.0; d];
        for t in 0..t_len {
            let (before, after) = h_tdn[t * d * n..].split_at_mut(d * n);
            after[..d * n].copy_from_slice(before);
            let one = Rows {
                c_td: &rows.c_td[t * d..][..d],
                dt_td: &rows.dt_td[t * d..][..d],
                b_tn: &rows.b_tn[t * n..][..n],
                c_tn: &rows.c_tn[t * n..][..n],
                z_td: &rows.z_td[t * d..][..d],
            };
            self.forward(&mut after[..d * n], one, Dtype::F32, state_dtype, &mut y_td);
        }
        let (mut a_log_dn, mut p_dn) = (vec![0.0; d * n], vec![0.0; d * n]);
        let (mut skip_d, mut dt_bias_d) = (vec![0.0; d], vec![0.0; d]);
        let mut own = WeightGradients {
            a_log_dn: &mut a_log_dn,
            skip_d: &mut skip_d,
            dt_bias_d: &mut dt_bias_d,
        };
        drows.b_tn.fill(0.0);
        drows.c_tn.fill(0.0);
        for t in (0..t_len).rev() {
            let (h_dn, dy_d) = (&h_tdn[t * d * n..][..d * n], &dy_td[t * d..][..d]);
            vectorized(
                #[inline(always)]
                || self.backward_row(rows, t, h_dn, dy_d, &mut p_dn, drows, &mut own),
            );
        }
        dweights.add(&own);
    }

    /// What the state is rounded to between two rows of one sequence.
    fn row_dtype(&self, state_dtype: Dtype) -> Dtype {
        match self.arithmetic {
            Arithmetic::Invariant => state_dtype,
            Arithmetic::Fast => Dtype::F32,
        }
    }

    /// `h_dn` is the state as row t read it; `p_dn` the gradient by the state after row t on entry,
    /// before it on exit.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // One row of three arrays of structs.
    fn backward_row(
        &self,
        rows: Rows<'_>,
        t: usize,
        h_dn: &[f32],
        dy_d: &[f32],
        p_dn: &mut [f32],
        drows: &mut RowGradients<'_>,
        dweights: &mut WeightGradients<'_>,
    ) {
        let (d, n) = (self.channels(), self.states());
        let (b_n, c_n) = (&rows.b_tn[t * n..][..n], &rows.c_tn[t * n..][..n]);
        let (db_n, dc_n) = (&mut drows.b_tn[t * n..][..n], &mut drows.c_tn[t * n..][..n]);
        for (i, &dy) in dy_d.iter().enumerate() {
            let at = t * d + i;
            let (x, z, raw) = (rows.c_td[at], rows.z_td[at], rows.dt_td[at] + self.dt_bias_d[i]);
            let channel = i * n..(i + 1) * n;
            let fixed = Channel { delta: softplus(raw), x, g: dy * silu(z) };
            let states = States {
                h_n: &h_dn[channel.clone()],
                a_n: &self.a_dn[channel.clone()],
                b_n,
                c_n,
                p_n: &mut p_dn[channel.clone()],
                da_log_n: &mut dweights.a_log_dn[channel],
                db_n: &mut *db_n,
                dc_n: &mut *dc_n,
            };
            let [y, dx, ddelta] = fixed.backward(states);
            let skip = self.skip_d[i];
            drows.z_td[at] = dy * (y + skip * x) * silu_derivative(z);
            drows.c_td[at] = dx + skip * fixed.g;
            dweights.skip_d[i] += fixed.g * x;
            let slope = if raw > 20.0 { 1.0 } else { sigmoid(raw) };
            drows.dt_td[at] = ddelta * slope;
            dweights.dt_bias_d[i] += drows.dt_td[at];
        }
    }
}

/// What one channel's states share in one row: Δ, the input, the gradient by Σ h·C.
struct Channel {
    delta: f32,
    x: f32,
    g: f32,
}

/// One channel's states in one row, and where their gradients go.
struct States<'a> {
    h_n: &'a [f32],
    a_n: &'a [f32],
    b_n: &'a [f32],
    c_n: &'a [f32],
    p_n: &'a mut [f32],
    da_log_n: &'a mut [f32],
    db_n: &'a mut [f32],
    dc_n: &'a mut [f32],
}

impl Channel {
    /// Σ h·C of the row, and the gradients by input and Δ; the sums follow the lanes.
    #[inline(always)]
    fn backward(&self, s: States<'_>) -> [f32; 3] {
        let mut sums = [[0.0_f32; LANES]; 3];
        let (h, h_rest) = s.h_n.as_chunks::<LANES>();
        let (a, a_rest) = s.a_n.as_chunks::<LANES>();
        let (b, b_rest) = s.b_n.as_chunks::<LANES>();
        let (c, c_rest) = s.c_n.as_chunks::<LANES>();
        let (p, p_rest) = s.p_n.as_chunks_mut::<LANES>();
        let (da, da_rest) = s.da_log_n.as_chunks_mut::<LANES>();
        let (db, db_rest) = s.db_n.as_chunks_mut::<LANES>();
        let (dc, dc_rest) = s.dc_n.as_chunks_mut::<LANES>();
        for k in 0..h.len() {
            let (h, a, b, c) = (h[k], a[k], b[k], c[k]);
            for lane in 0..LANES {
                let out = (&mut p[k][lane], &mut da[k][lane], &mut db[k][lane], &mut dc[k][lane]);
                let terms = self.backward_state(h[lane], a[lane], b[lane], c[lane], out);
                for (sum, term) in sums.iter_mut().zip(terms) {
                    sum[lane] += term;
                }
            }
        }
        for lane in 0..h_rest.len() {
            let out =
                (&mut p_rest[lane], &mut da_rest[lane], &mut db_rest[lane], &mut dc_rest[lane]);
            let (h, a, b, c) = (h_rest[lane], a_rest[lane], b_rest[lane], c_rest[lane]);
            for (sum, term) in sums.iter_mut().zip(self.backward_state(h, a, b, c, out)) {
                sum[lane] += term;
            }
        }
        sums.map(fold)
    }

    #[inline(always)]
    fn backward_state(
        &self,
        h: f32,
        a: f32,
        b: f32,
        c: f32,
        (p, da_log, db, dc): (&mut f32, &mut f32, &mut f32, &mut f32),
    ) -> [f32; 3] {
        let Self { delta, x, g } = *self;
        let decay = exp(delta * a);
        let decayed = decay * h;
        let now = decayed + delta * x * b;
        let p_now = *p + g * c;
        *dc += g * now;
        *db += p_now * delta * x;
        // dA · A, because A = -exp(A_log).
        *da_log += p_now * delta * decayed * a;
        *p = p_now * decay;
        [now * c, p_now * delta * b, p_now * (b * x + a * decayed)]
    }
}

#[cfg(test)]
mod tests;
