//! The scan's gradients, for a sequence that starts from a zero state: the states are recomputed,
//! then walked back, p_t = g_t·C_t + exp(Δ_{t+1}·A)·p_{t+1} (Mamba, Gu and Dao 2023).
//!
//! Shape letters as in the forward. Sums over n follow the lanes of `simd`; those over channels are
//! each [`GROUP`]'s own, folded in halves, then the groups ascending.

use std::f32::consts::LN_2;

use super::{Rows, Scan};
use crate::config::{Arithmetic, Dtype};
use crate::ops::simd::{
    decay, fold, fused, sigmoid, silu, silu_derivative, softplus, vectorized, LANES,
};

/// Channels whose terms of dB and dC are folded before they are added to the others': a warp's.
pub const GROUP: usize = 32;

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

/// What is kept while a sequence is walked back.
struct Walk {
    /// By the state after the row at hand, `[D, N]`; before it once the row is done.
    p_dn: Vec<f32>,
    /// The sequence's own sums: by log2(e)·A over A_log, by the skip and by dt's bias.
    a_log_dn: Vec<f32>,
    skip_d: Vec<f32>,
    dt_bias_d: Vec<f32>,
    /// A group's terms of one row, `[GROUP, N]` each.
    db_gn: Vec<f32>,
    dc_gn: Vec<f32>,
}

impl Scan {
    /// The sequence's own sums, rows descending, are added to `dweights`. Takes T · D · N floats. A
    /// rounded state passes its gradient straight through; fast arithmetic rounds none on the way.
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
        let h_tdn = self.states_of(rows, state_dtype, dy_td.len() / d);
        let mut walk = Walk {
            p_dn: vec![0.0; d * n],
            a_log_dn: vec![0.0; d * n],
            skip_d: vec![0.0; d],
            dt_bias_d: vec![0.0; d],
            db_gn: vec![0.0; GROUP * n],
            dc_gn: vec![0.0; GROUP * n],
        };
        drows.b_tn.fill(0.0);
        drows.c_tn.fill(0.0);
        for (t, dy_d) in dy_td.chunks_exact(d).enumerate().rev() {
            let h_dn = &h_tdn[t * d * n..][..d * n];
            vectorized(
                #[inline(always)]
                || self.backward_row(rows, t, h_dn, dy_d, drows, &mut walk),
            );
        }
        // dA_log = A·dA.
        let a_log_dn = walk.a_log_dn.iter().zip(&self.a_dn).map(|(sum, a)| sum * (a * LN_2));
        dweights.a_log_dn.iter_mut().zip(a_log_dn).for_each(|(sum, own)| *sum += own);
        for (sums, own) in
            [(&mut *dweights.skip_d, &walk.skip_d), (&mut *dweights.dt_bias_d, &walk.dt_bias_d)]
        {
            sums.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
    }

    /// `[T + 1, D, N]`: before each row the state as that row read it.
    fn states_of(&self, rows: Rows<'_>, state_dtype: Dtype, t_len: usize) -> Vec<f32> {
        let (d, n) = (self.channels(), self.states());
        let row_dtype = match self.arithmetic {
            Arithmetic::Invariant => state_dtype,
            Arithmetic::Fast => Dtype::F32,
        };
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
            self.forward(&mut after[..d * n], one, Dtype::F32, row_dtype, &mut y_td);
        }
        h_tdn
    }

    #[inline(always)]
    fn backward_row(
        &self,
        rows: Rows<'_>,
        t: usize,
        h_dn: &[f32],
        dy_d: &[f32],
        drows: &mut RowGradients<'_>,
        walk: &mut Walk,
    ) {
        let (d, n) = (self.channels(), self.states());
        let (b_n, c_n) = (&rows.b_tn[t * n..][..n], &rows.c_tn[t * n..][..n]);
        for (i, &dy) in dy_d.iter().enumerate() {
            let (at, lane) = (t * d + i, i % GROUP);
            if lane == 0 {
                walk.db_gn.fill(0.0);
                walk.dc_gn.fill(0.0);
            }
            let (x, z, raw) = (rows.c_td[at], rows.z_td[at], rows.dt_td[at] + self.dt_bias_d[i]);
            let (channel, term) = (i * n..(i + 1) * n, lane * n..(lane + 1) * n);
            let delta = softplus(raw);
            let fixed = Channel { delta, input: delta * x, g: dy * silu(z) };
            let [y, by_b, by_a] = fixed.backward(States {
                h_n: &h_dn[channel.clone()],
                a_n: &self.a_dn[channel.clone()],
                b_n,
                c_n,
                p_n: &mut walk.p_dn[channel.clone()],
                da_n: &mut walk.a_log_dn[channel],
                db_n: &mut walk.db_gn[term.clone()],
                dc_n: &mut walk.dc_gn[term],
            });
            let (skip, g) = (self.skip_d[i], fixed.g);
            drows.z_td[at] = dy * fused(skip, x, y) * silu_derivative(z);
            drows.c_td[at] = fused(skip, g, delta * by_b);
            walk.skip_d[i] = fused(g, x, walk.skip_d[i]);
            let slope = if raw > 20.0 { 1.0 } else { sigmoid(raw) };
            drows.dt_td[at] = fused(x, by_b, by_a * LN_2) * slope;
            walk.dt_bias_d[i] += drows.dt_td[at];
            if lane + 1 == GROUP || i + 1 == d {
                add_group(&mut walk.db_gn, &mut drows.b_tn[t * n..][..n]);
                add_group(&mut walk.dc_gn, &mut drows.c_tn[t * n..][..n]);
            }
        }
    }
}

/// Folds a group's terms in halves and adds what comes of it.
#[inline(always)]
fn add_group(terms_gn: &mut [f32], sums_n: &mut [f32]) {
    let mut half = terms_gn.len() / 2;
    while half >= sums_n.len() {
        let (kept, folded) = terms_gn.split_at_mut(half);
        kept.iter_mut().zip(folded).for_each(|(kept, folded)| *kept += *folded);
        half /= 2;
    }
    sums_n.iter_mut().zip(terms_gn).for_each(|(sum, term)| *sum += *term);
}

/// What one channel's states share in one row: Δ, Δ·x, the gradient by Σ h·C.
struct Channel {
    delta: f32,
    input: f32,
    g: f32,
}

/// One channel's states in one row as the row read them, and where their gradients go: `db_n` and
/// `dc_n` are overwritten, `da_n` is added to.
struct States<'a> {
    h_n: &'a [f32],
    a_n: &'a [f32],
    b_n: &'a [f32],
    c_n: &'a [f32],
    p_n: &'a mut [f32],
    da_n: &'a mut [f32],
    db_n: &'a mut [f32],
    dc_n: &'a mut [f32],
}

impl Channel {
    /// Σ h·C of the row, Σ p·B, and the gradient by Δ through the decays, over ln 2.
    #[inline(always)]
    fn backward(&self, s: States<'_>) -> [f32; 3] {
        let mut sums = [[0.0_f32; LANES]; 3];
        let (h, h_rest) = s.h_n.as_chunks::<LANES>();
        let (a, a_rest) = s.a_n.as_chunks::<LANES>();
        let (b, b_rest) = s.b_n.as_chunks::<LANES>();
        let (c, c_rest) = s.c_n.as_chunks::<LANES>();
        let (p, p_rest) = s.p_n.as_chunks_mut::<LANES>();
        let (da, da_rest) = s.da_n.as_chunks_mut::<LANES>();
        let (db, db_rest) = s.db_n.as_chunks_mut::<LANES>();
        let (dc, dc_rest) = s.dc_n.as_chunks_mut::<LANES>();
        for k in 0..h.len() {
            let (h, a, b, c) = (h[k], a[k], b[k], c[k]);
            for lane in 0..LANES {
                let out = (&mut p[k][lane], &mut da[k][lane], &mut db[k][lane], &mut dc[k][lane]);
                let so_far = sums.each_mut().map(|sum| &mut sum[lane]);
                self.backward_state(h[lane], a[lane], b[lane], c[lane], out, so_far);
            }
        }
        for lane in 0..h_rest.len() {
            let out =
                (&mut p_rest[lane], &mut da_rest[lane], &mut db_rest[lane], &mut dc_rest[lane]);
            let (h, a, b, c) = (h_rest[lane], a_rest[lane], b_rest[lane], c_rest[lane]);
            self.backward_state(h, a, b, c, out, sums.each_mut().map(|sum| &mut sum[lane]));
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
        (p, da, db, dc): (&mut f32, &mut f32, &mut f32, &mut f32),
        [y, by_b, by_a]: [&mut f32; 3],
    ) {
        let Self { delta, input, g } = *self;
        let decay = decay(delta, a);
        let now = fused(decay, h, input * b);
        let p_now = fused(g, c, *p);
        let by_decay = p_now * (decay * h);
        *dc = g * now;
        *db = p_now * input;
        *da = fused(by_decay, delta, *da);
        *p = p_now * decay;
        *y = fused(now, c, *y);
        *by_b = fused(p_now, b, *by_b);
        *by_a = fused(by_decay, a, *by_a);
    }
}
