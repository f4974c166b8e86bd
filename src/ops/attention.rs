//! Causal attention of one sequence: exact maximum, then Σ exp, then Σ p·v with keys ascending.
//! A query sees nothing but its own keys, so any chunking, paging or batch gives the same bits.
//!
//! Shape letters: T query rows, S keys (the context, S >= T), Q query heads, G key/value heads,
//! E head width. Query row t sits at absolute position S - T + t. Scores are q·k / sqrt(E) in f32,
//! p = exp(score - max) is rounded to the compute dtype, as an mma takes it; the sum is not.

#[cfg(feature = "cuda")]
pub mod cuda;

use super::array::Array;
use super::pages::{KeyValueView, Pages, Tables};
use super::round::to_dtype;
use super::simd::{dot, exp, fused, sum_by, vectorized};
use super::spans::Spans;
use crate::config::Dtype;

/// Head counts and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    pub query: usize,
    pub key_value: usize,
    pub width: usize,
}

impl Heads {
    /// Floats of one row of q (and of the output).
    #[must_use]
    pub fn query_row(self) -> usize {
        self.query * self.width
    }

    /// Floats of one row of k or v.
    #[must_use]
    pub fn key_value_row(self) -> usize {
        self.key_value * self.width
    }

    fn shared(self, head: usize) -> usize {
        head / (self.query / self.key_value)
    }

    fn scale(self) -> f32 {
        1.0 / (self.width as f32).sqrt()
    }
}

/// Unnormalised probabilities of one query over its keys; returns their sum.
#[inline(always)]
fn probabilities(heads: Heads, q_e: &[f32], k_sge: &[f32], group: usize, p_s: &mut [f32]) -> f32 {
    let row = heads.key_value_row();
    let scale = heads.scale();
    let mut max = f32::NEG_INFINITY;
    for (s, p) in p_s.iter_mut().enumerate() {
        *p = dot(q_e, &k_sge[s * row + group * heads.width..][..heads.width]) * scale;
        max = max.max(*p);
    }
    p_s.iter_mut().for_each(|p| *p = exp(*p - max));
    sum_by(p_s.len(), |s| p_s[s])
}

/// out[T, Q·E] from q[T, Q·E], k and v [S, G·E].
pub fn forward(heads: Heads, q: &[f32], k: &[f32], v: &[f32], dtype: Dtype, out: &mut [f32]) {
    let (t_len, s_len) = shape(heads, q, k, v);
    assert_eq!(q.len(), out.len(), "q and out differ");
    let mut p = vec![0.0; s_len];
    vectorized(
        #[inline(always)]
        || {
            let rows =
                q.chunks_exact(heads.query_row()).zip(out.chunks_exact_mut(heads.query_row()));
            for (t, (q_row, out_row)) in rows.enumerate() {
                let seen = s_len - t_len + t + 1;
                let by_head =
                    q_row.chunks_exact(heads.width).zip(out_row.chunks_exact_mut(heads.width));
                for (head, (q_e, out_e)) in by_head.enumerate() {
                    let p_s = &mut p[..seen];
                    let total = probabilities(heads, q_e, k, heads.shared(head), p_s);
                    weigh(heads, p_s, v, heads.shared(head), dtype, out_e);
                    out_e.iter_mut().for_each(|o| *o = to_dtype(*o / total, dtype));
                }
            }
        },
    );
}

/// out_e = Σ_s round(p_s) · v_s, s ascending.
#[inline(always)]
fn weigh(heads: Heads, p_s: &[f32], v: &[f32], group: usize, dtype: Dtype, out_e: &mut [f32]) {
    out_e.fill(0.0);
    for (s, &p) in p_s.iter().enumerate() {
        let p = to_dtype(p, dtype);
        let v_e = &v[s * heads.key_value_row() + group * heads.width..][..heads.width];
        for (o, v) in out_e.iter_mut().zip(v_e) {
            *o = fused(p, *v, *o);
        }
    }
}

fn shape(heads: Heads, q: &[f32], k: &[f32], v: &[f32]) -> (usize, usize) {
    assert_eq!(heads.query % heads.key_value, 0, "query heads are no multiple of key/value heads");
    let (t, s) = (q.len() / heads.query_row(), k.len() / heads.key_value_row());
    assert_eq!(q.len(), t * heads.query_row(), "q is not [T, Q, E]");
    assert!(k.len() == s * heads.key_value_row() && v.len() == k.len(), "k and v differ");
    assert!(t <= s, "{t} queries over {s} keys");
    (t, s)
}

/// Gradients of a whole sequence (S = T), overwritten: dq[T, Q·E], dk and dv [T, G·E].
#[derive(Debug)]
pub struct Gradients<'a> {
    pub q: &'a mut [f32],
    pub k: &'a mut [f32],
    pub v: &'a mut [f32],
}

/// The probabilities are recomputed; queries ascend, so every sum has one order.
pub fn backward(
    heads: Heads,
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dout: &[f32],
    gradients: &mut Gradients<'_>,
) {
    let (t_len, s_len) = shape(heads, q, k, v);
    assert_eq!(t_len, s_len, "backward takes whole sequences");
    gradients.k.fill(0.0);
    gradients.v.fill(0.0);
    let (mut p, mut dp) = (vec![0.0; s_len], vec![0.0; s_len]);
    vectorized(
        #[inline(always)]
        || {
            for t in 0..t_len {
                for head in 0..heads.query {
                    let (p_s, dp_s) = (&mut p[..=t], &mut dp[..=t]);
                    backward_query(heads, (t, head), q, k, v, dout, (p_s, dp_s), gradients);
                }
            }
        },
    );
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn backward_query(
    heads: Heads,
    (t, head): (usize, usize),
    q: &[f32],
    k: &[f32],
    v: &[f32],
    dout: &[f32],
    (p_s, dp_s): (&mut [f32], &mut [f32]),
    gradients: &mut Gradients<'_>,
) {
    let width = heads.width;
    let at = t * heads.query_row() + head * width;
    let group = heads.shared(head);
    let row = |s: usize| s * heads.key_value_row() + group * width;
    let (q_e, dout_e) = (&q[at..][..width], &dout[at..][..width]);
    let total = probabilities(heads, q_e, k, group, p_s);
    for (s, (p, dp)) in p_s.iter_mut().zip(dp_s.iter_mut()).enumerate() {
        *p /= total;
        *dp = dot(dout_e, &v[row(s)..][..width]);
        for (dv, d) in gradients.v[row(s)..][..width].iter_mut().zip(dout_e) {
            *dv = fused(*p, *d, *dv);
        }
    }
    let mean = dot(p_s, dp_s);
    let dq_e = &mut gradients.q[at..][..width];
    dq_e.fill(0.0);
    for (s, (p, dp)) in p_s.iter().zip(dp_s.iter()).enumerate() {
        let dscore = p * (dp - mean) * heads.scale();
        for e in 0..width {
            dq_e[e] = fused(dscore, k[row(s) + e], dq_e[e]);
            let dk = &mut gradients.k[row(s) + e];
            *dk = fused(dscore, q_e[e], *dk);
        }
    }
}

/// Rows that have been projected: q `[T, Q·E]`, k and v `[T, G·E]`; or the gradients by them.
#[derive(Clone, Debug)]
pub struct Projected {
    pub q: Array,
    pub k: Array,
    pub v: Array,
}

/// The keys and values that a chunk's sequences may see; a sequence's own rows are last.
#[derive(Debug)]
pub enum Contexts {
    /// Nothing but the rows themselves: sequences from their start.
    Own,
    /// Copied from the cache's pages, `[S, G·E]` each, one pair a span.
    Cpu(Vec<(Vec<f32>, Vec<f32>)>),
    /// Where they lie in the cache's pages.
    #[cfg(feature = "cuda")]
    Cuda(cuda::Paged),
}

impl Projected {
    /// Writes each span's keys and values to its blocks.
    pub fn store(&self, pages: &mut Pages, view: &KeyValueView, spans: &Spans, tables: &Tables) {
        assert_eq!(spans.len(), tables.len(), "one block table a span");
        match (&self.k, &self.v) {
            (Array::Cpu(k), Array::Cpu(v)) => {
                for (row, span) in spans.iter().enumerate() {
                    let (at, start) = (span.floats(view.row), span.position.index());
                    view.store(pages, tables.table(row), start, &k[at.clone()], &v[at]);
                }
            }
            #[cfg(feature = "cuda")]
            (k, v) => {
                let places = cuda::Paged::new(pages.cuda(), view, tables);
                cuda::store(&places, spans.cuda(), k.cuda(), v.cuda());
            }
        }
    }

    /// The heads' output, `[T, Q·E]`: see [`forward`].
    #[must_use]
    pub fn attend(&self, heads: Heads, spans: &Spans, contexts: &Contexts, dtype: Dtype) -> Array {
        match &self.q {
            Array::Cpu(q) => {
                let mut mixed = vec![0.0; q.len()];
                for (i, span) in spans.iter().enumerate() {
                    let (wide, narrow) =
                        (span.floats(heads.query_row()), span.floats(heads.key_value_row()));
                    let (k, v) = match contexts {
                        Contexts::Own => (&self.k.cpu()[narrow.clone()], &self.v.cpu()[narrow]),
                        Contexts::Cpu(seen) => (seen[i].0.as_slice(), seen[i].1.as_slice()),
                        #[cfg(feature = "cuda")]
                        Contexts::Cuda(_) => panic!("a context of another device"),
                    };
                    forward(heads, &q[wide.clone()], k, v, dtype, &mut mixed[wide]);
                }
                Array::Cpu(mixed)
            }
            #[cfg(feature = "cuda")]
            Array::Cuda(q) => {
                assert_eq!(q.dtype(), dtype, "heads attend in their own dtype");
                let seen = match contexts {
                    Contexts::Own => cuda::Seen::Own { k: self.k.cuda(), v: self.v.cuda() },
                    Contexts::Cuda(places) => cuda::Seen::Paged(places),
                    Contexts::Cpu(_) => panic!("a context of another device"),
                };
                Array::Cuda(cuda::forward(heads, q, seen, spans.cuda()))
            }
        }
    }

    /// The gradients by the rows of whole sequences, from that by the heads' output.
    #[must_use]
    pub fn backward(&self, heads: Heads, spans: &Spans, dmixed: &Array) -> Self {
        let [mut q, mut k, mut v] = [&self.q, &self.k, &self.v].map(Array::zeros_like);
        match dmixed {
            Array::Cpu(dmixed) => {
                for span in spans.iter() {
                    let (wide, narrow) =
                        (span.floats(heads.query_row()), span.floats(heads.key_value_row()));
                    let mut gradients = Gradients {
                        q: &mut q.cpu_mut()[wide.clone()],
                        k: &mut k.cpu_mut()[narrow.clone()],
                        v: &mut v.cpu_mut()[narrow.clone()],
                    };
                    let rows = &self.q.cpu()[wide.clone()];
                    let (keys, values) = (&self.k.cpu()[narrow.clone()], &self.v.cpu()[narrow]);
                    backward(heads, rows, keys, values, &dmixed[wide], &mut gradients);
                }
            }
            #[cfg(feature = "cuda")]
            Array::Cuda(dmixed) => {
                let mut gradients = cuda::Gradients {
                    q: q.cuda_mut().view_mut(),
                    k: k.cuda_mut().view_mut(),
                    v: v.cuda_mut().view_mut(),
                };
                let (gpu, spans, dmixed) = (dmixed.gpu(), spans.cuda(), dmixed.view());
                let [q, k, v] = [&self.q, &self.k, &self.v].map(|rows| rows.cuda().widened());
                let rows = cuda::Rows { q: q.view(), k: k.view(), v: v.view() };
                cuda::backward(gpu, heads, &rows, spans, &dmixed, &mut gradients);
            }
        }
        Self { q, k, v }
    }
}

impl Contexts {
    /// Each span's context in a layer's pages, its own rows included, which are stored already.
    #[must_use]
    pub fn load(pages: &Pages, view: &KeyValueView, spans: &Spans, tables: &Tables) -> Self {
        assert_eq!(spans.len(), tables.len(), "one block table a span");
        #[cfg(feature = "cuda")]
        if let Pages::Cuda(pages) = pages {
            return Self::Cuda(cuda::Paged::new(pages, view, tables));
        }
        let gather = |(row, span): (usize, &super::spans::Span)| {
            let seen = span.positions().end;
            let (mut k, mut v) = (vec![0.0; seen * view.row], vec![0.0; seen * view.row]);
            view.gather(pages, tables.table(row), &mut k, &mut v);
            (k, v)
        };
        Self::Cpu(spans.iter().enumerate().map(gather).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, finite_difference, random, weighted, wide};

    /// T, query heads, key/value heads, width: plain, grouped, one key head, odd width.
    const CASES: [(usize, usize, usize, usize); 5] =
        [(1, 1, 1, 1), (5, 4, 4, 16), (7, 4, 2, 16), (4, 6, 1, 8), (3, 2, 1, 20)];

    fn heads((_, query, key_value, width): (usize, usize, usize, usize)) -> Heads {
        Heads { query, key_value, width }
    }

    fn oracle(heads: Heads, q: &[f64], k: &[f64], v: &[f64]) -> Vec<f64> {
        let (qr, kr, e) = (heads.query_row(), heads.key_value_row(), heads.width);
        (0..q.len())
            .map(|at| {
                let (t, head, i) = (at / qr, at % qr / e, at % e);
                let group = head * heads.key_value / heads.query;
                let score = |s: usize| {
                    let dot: f64 =
                        (0..e).map(|j| q[t * qr + head * e + j] * k[s * kr + group * e + j]).sum();
                    (dot / (e as f64).sqrt()).exp()
                };
                let total: f64 = (0..=t).map(score).sum();
                (0..=t).map(|s| score(s) / total * v[s * kr + group * e + i]).sum()
            })
            .collect()
    }

    #[test]
    fn forward_against_f64_and_split_anywhere() {
        for case in CASES {
            let (h, t) = (heads(case), case.0);
            let q = random(t * h.query_row(), 1);
            let (k, v) = (random(t * h.key_value_row(), 2), random(t * h.key_value_row(), 3));
            let mut out = vec![0.0; q.len()];
            forward(h, &q, &k, &v, Dtype::F32, &mut out);
            assert_close("out", &out, oracle(h, &wide(&q), &wide(&k), &wide(&v)), 2e-6);
            for row in 0..t {
                let mut one = vec![0.0; h.query_row()];
                let seen = (row + 1) * h.key_value_row();
                let q_row = &q[row * h.query_row()..][..h.query_row()];
                forward(h, q_row, &k[..seen], &v[..seen], Dtype::F32, &mut one);
                assert_eq!(one, out[row * h.query_row()..][..h.query_row()], "row {row}");
            }
        }
    }

    #[test]
    fn backward_against_finite_differences() {
        for case in CASES {
            let (h, t) = (heads(case), case.0);
            let (q, dout) = (random(t * h.query_row(), 4), random(t * h.query_row(), 5));
            let (k, v) = (random(t * h.key_value_row(), 6), random(t * h.key_value_row(), 7));
            let (mut dq, mut dk, mut dv) =
                (vec![1.0; q.len()], vec![1.0; k.len()], vec![1.0; k.len()]);
            let mut gradients = Gradients { q: &mut dq, k: &mut dk, v: &mut dv };
            backward(h, &q, &k, &v, &dout, &mut gradients);
            let (q64, k64, v64) = (wide(&q), wide(&k), wide(&v));
            let by_q = finite_difference(&q, |q| weighted(&dout, &oracle(h, q, &k64, &v64)));
            let by_k = finite_difference(&k, |k| weighted(&dout, &oracle(h, &q64, k, &v64)));
            let by_v = finite_difference(&v, |v| weighted(&dout, &oracle(h, &q64, &k64, v)));
            assert_close("dq", &dq, by_q, 1e-5);
            assert_close("dk", &dk, by_k, 1e-5);
            assert_close("dv", &dv, by_v, 1e-5);
        }
    }
}
