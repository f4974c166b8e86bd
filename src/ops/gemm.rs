//! Matrix products. Invariant ones have one order: for every output, the inner index ascends in a
//! single f32 accumulator, multiply and add rounded once. The bits of an output depend on its
//! own row and column alone, so any batch, split or tile gives the same. Fast ones are a library's.
//!
//! Shape letters: M rows of activations, N outputs, K inner.

#[cfg(feature = "cuda")]
pub mod cuda;

pub mod library;
mod projection;

pub use projection::{Joined, Projection};

use super::round::slice_to_dtype;
use super::simd::{fused, vectorized};
use crate::config::Dtype;

/// Columns of one packed panel: one AVX-512 register, two AVX2 registers.
const PANEL: usize = 16;
/// Rows of one register tile; independent sums that hide the latency of the adds.
const TILE: usize = 8;
/// Inner elements between two stores of a tile's sums, which a compiler does not always keep in
/// registers.
const DEPTH: usize = 4;

/// The right-hand side of a product, laid out in panels of 16 columns: `[N / 16][K][16]`, the last
/// panel padded with zeros.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Packed {
    inner: usize,
    outputs: usize,
    panels: Vec<f32>,
}

impl Packed {
    /// From a weight `[N, K]` as checkpoints store it: the product is x · Wᵀ.
    #[must_use]
    pub fn from_weight(w_nk: &[f32], outputs: usize, inner: usize) -> Self {
        Self::pack(outputs, inner, w_nk.len(), |k, n| w_nk[n * inner + k])
    }

    /// From a row-major matrix `[K, N]`: the product is x · B.
    #[must_use]
    pub fn from_matrix(b_kn: &[f32], inner: usize, outputs: usize) -> Self {
        Self::pack(outputs, inner, b_kn.len(), |k, n| b_kn[k * outputs + n])
    }

    fn pack(outputs: usize, inner: usize, len: usize, at: impl Fn(usize, usize) -> f32) -> Self {
        assert_eq!(len, outputs * inner, "a [{outputs}, {inner}] matrix has {len} elements");
        let mut panels = vec![0.0; outputs.div_ceil(PANEL) * inner * PANEL];
        for (p, panel) in panels.chunks_exact_mut((inner * PANEL).max(1)).enumerate() {
            let first = p * PANEL;
            let width = PANEL.min(outputs - first);
            for (k, row) in panel.chunks_exact_mut(PANEL).enumerate() {
                for (lane, value) in row[..width].iter_mut().enumerate() {
                    *value = at(k, first + lane);
                }
            }
        }
        Self { inner, outputs, panels }
    }

    /// K.
    #[must_use]
    pub fn inner(&self) -> usize {
        self.inner
    }

    /// N.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs
    }
}

/// What becomes of an output's finished sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Into {
    Overwrite,
    /// One more addition, after the sum is complete.
    Add,
}

/// y[M, N] from x[M, K] and packed [K, N].
pub fn gemm(x_mk: &[f32], packed: &Packed, into: Into, y_mn: &mut [f32]) {
    let (k, n) = (packed.inner, packed.outputs);
    assert!(k > 0 && n > 0, "a product of an empty matrix");
    let m = x_mk.len() / k;
    assert_eq!(x_mk.len(), m * k, "x is not [{m}, {k}]");
    assert_eq!(y_mn.len(), m * n, "y is not [{m}, {n}]");
    vectorized(
        #[inline(always)]
        || {
            for (p, panel) in packed.panels.chunks_exact(k * PANEL).enumerate() {
                let column = Column { first: p * PANEL, stride: n, into };
                let mut row = 0;
                while row < m {
                    row += match m - row {
                        TILE.. => tile::<TILE>(x_mk, k, row, panel, &column, y_mn),
                        4.. => tile::<4>(x_mk, k, row, panel, &column, y_mn),
                        2.. => tile::<2>(x_mk, k, row, panel, &column, y_mn),
                        _ => tile::<1>(x_mk, k, row, panel, &column, y_mn),
                    };
                }
            }
        },
    );
}

/// Where a tile's results go: `width` columns from `first` in rows of `stride`.
struct Column {
    first: usize,
    stride: usize,
    into: Into,
}

/// Adds one row's products, the inner index ascending.
#[inline(always)]
fn add_products(a: &[f32], b: &[[f32; PANEL]], sum: &mut [f32; PANEL]) {
    let mut so_far = *sum;
    for (a, b) in a.iter().zip(b) {
        for lane in 0..PANEL {
            so_far[lane] = fused(*a, b[lane], so_far[lane]);
        }
    }
    *sum = so_far;
}

/// ROWS × 16 outputs; returns ROWS.
#[inline(always)]
fn tile<const ROWS: usize>(
    x_mk: &[f32],
    k: usize,
    row: usize,
    panel: &[f32],
    column: &Column,
    y_mn: &mut [f32],
) -> usize {
    let rows: [&[f32]; ROWS] = std::array::from_fn(|r| &x_mk[(row + r) * k..][..k]);
    let mut sums = [[0.0_f32; PANEL]; ROWS];
    let (panel, _) = panel.as_chunks::<PANEL>();
    let (whole, rest) = panel.as_chunks::<DEPTH>();
    for (depth, b) in whole.iter().enumerate() {
        for (row, sum) in rows.iter().zip(&mut sums) {
            add_products(&row[depth * DEPTH..][..DEPTH], b, sum);
        }
    }
    for (row, sum) in rows.iter().zip(&mut sums) {
        add_products(&row[whole.len() * DEPTH..], rest, sum);
    }
    let width = PANEL.min(column.stride - column.first);
    for (r, sum) in sums.iter().enumerate() {
        let y = &mut y_mn[(row + r) * column.stride + column.first..][..width];
        match column.into {
            Into::Overwrite => y.copy_from_slice(&sum[..width]),
            Into::Add => y.iter_mut().zip(sum).for_each(|(y, s)| *y += s),
        }
    }
    ROWS
}

/// dW[N, K] += dyᵀ · x for y = x · Wᵀ; rows ascend.
pub fn weight_gradient(dy_mn: &[f32], x_mk: &[f32], outputs: usize, dw_nk: &mut [f32]) {
    let m = dy_mn.len() / outputs;
    let inner = dw_nk.len() / outputs;
    assert_eq!(dy_mn.len(), m * outputs, "dy is not [{m}, {outputs}]");
    assert_eq!(x_mk.len(), m * inner, "x is not [{m}, {inner}]");
    if m == 0 {
        return;
    }
    let mut dy_nm = vec![0.0; dy_mn.len()];
    for (row, values) in dy_mn.chunks_exact(outputs).enumerate() {
        for (n, &value) in values.iter().enumerate() {
            dy_nm[n * m + row] = value;
        }
    }
    gemm(&dy_nm, &Packed::from_matrix(x_mk, m, inner), Into::Add, dw_nk);
}

/// `dbias[N]` += the rows' sum, rows ascending; nothing where there is no bias.
pub fn bias_gradient(dy_mn: &[f32], dbias_n: &mut [f32]) {
    if !dbias_n.is_empty() {
        for dy_n in dy_mn.chunks_exact(dbias_n.len()) {
            dbias_n.iter_mut().zip(dy_n).for_each(|(sum, d)| *sum += d);
        }
    }
}

/// A projection: the weight packed both ways, so that forward and backward ascend over memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Linear {
    forward: Packed,
    /// Empty where no gradient is ever asked for.
    backward: Packed,
    /// Empty where the projection has none.
    bias_n: Vec<f32>,
}

impl Linear {
    /// From a weight `[N, K]` and a bias `[N]`, empty where there is none; `trains` also packs the
    /// weight for [`Self::input_gradient`].
    #[must_use]
    pub fn new(w_nk: &[f32], bias_n: &[f32], inner: usize, trains: bool) -> Self {
        let outputs = w_nk.len() / inner;
        assert!(bias_n.is_empty() || bias_n.len() == outputs, "a bias of {}", bias_n.len());
        let backward =
            if trains { Packed::from_matrix(w_nk, outputs, inner) } else { Packed::default() };
        let forward = Packed::from_weight(w_nk, outputs, inner);
        Self { forward, backward, bias_n: bias_n.to_vec() }
    }

    #[must_use]
    pub fn outputs(&self) -> usize {
        self.forward.outputs
    }

    #[must_use]
    pub fn inner(&self) -> usize {
        self.forward.inner
    }

    /// y[M, N] = round(x[M, K] · Wᵀ + bias).
    #[must_use]
    pub fn forward(&self, x_mk: &[f32], dtype: Dtype) -> Vec<f32> {
        let mut y_mn = vec![0.0; x_mk.len() / self.inner() * self.outputs()];
        gemm(x_mk, &self.forward, Into::Overwrite, &mut y_mn);
        if !self.bias_n.is_empty() {
            for y_n in y_mn.chunks_exact_mut(self.outputs()) {
                y_n.iter_mut().zip(&self.bias_n).for_each(|(y, b)| *y += b);
            }
        }
        slice_to_dtype(&mut y_mn, dtype);
        y_mn
    }

    /// `dx[M, K] (+)= dy[M, N] · W`.
    pub fn input_gradient(&self, dy_mn: &[f32], into: Into, dx_mk: &mut [f32]) {
        assert_eq!(self.backward.inner, self.forward.outputs, "packed without a backward");
        gemm(dy_mn, &self.backward, into, dx_mk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};

    /// M, N, K: every remainder of tile and panel, and the shapes of the tiny model.
    const CASES: [(usize, usize, usize); 9] = [
        (1, 1, 1),
        (1, 16, 64),
        (2, 17, 3),
        (3, 36, 128),
        (7, 128, 4),
        (8, 256, 64),
        (13, 31, 33),
        (32, 64, 128),
        (33, 5, 7),
    ];

    #[test]
    fn equals_the_plain_loop_bit_for_bit_and_f64_within_rounding() {
        for (m, n, k) in CASES {
            let (x, w) = (random(m * k, 1), random(n * k, 2));
            let y = Linear::new(&w, &[], k, false).forward(&x, Dtype::F32);
            for row in 0..m {
                for col in 0..n {
                    let terms = || (0..k).map(|i| (x[row * k + i], w[col * k + i]));
                    let plain = terms().fold(0.0_f32, |sum, (a, b)| a.mul_add(b, sum));
                    let exact: f64 = terms().map(|(a, b)| f64::from(a) * f64::from(b)).sum();
                    let got = y[row * n + col];
                    assert_eq!(got.to_bits(), plain.to_bits(), "{m} {n} {k} at {row} {col}");
                    // k roundings of relative size 2^-24 each, and one of the size below.
                    let size: f64 = terms().map(|(a, b)| f64::from(a * b).abs()).sum();
                    let bound = (k + 1) as f64 * 2_f64.powi(-24) * size + 1e-30;
                    assert!((f64::from(got) - exact).abs() <= bound, "{m} {n} {k}");
                }
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_batch() {
        let (n, k) = (36, 64);
        let (x, linear) = (random(23 * k, 3), Linear::new(&random(n * k, 4), &[], k, false));
        let together = linear.forward(&x, Dtype::F32);
        for row in 0..23 {
            let alone = linear.forward(&x[row * k..][..k], Dtype::F32);
            assert_eq!(alone, together[row * n..][..n], "row {row}");
        }
    }

    #[test]
    fn gradients_are_the_transposed_products() {
        for (m, n, k) in CASES {
            let (x, w, dy) = (random(m * k, 5), random(n * k, 6), random(m * n, 7));
            let linear = Linear::new(&w, &[], k, true);
            let (mut dx, mut dw) = (vec![1.0; m * k], vec![1.0; n * k]);
            linear.input_gradient(&dy, Into::Add, &mut dx);
            weight_gradient(&dy, &x, n, &mut dw);
            let product =
                |a: &[f32], b: &[f32], ia: usize, ib: usize| f64::from(a[ia]) * f64::from(b[ib]);
            let want_dx = (0..m * k).map(|i| {
                1.0 + (0..n).map(|j| product(&dy, &w, i / k * n + j, j * k + i % k)).sum::<f64>()
            });
            let want_dw = (0..n * k).map(|i| {
                1.0 + (0..m).map(|r| product(&dy, &x, r * n + i / k, r * k + i % k)).sum::<f64>()
            });
            // Sums of up to 256 products of standard normals: |partial| < 60, 512 roundings.
            assert_close("dx", &dx, want_dx, 5e-5);
            assert_close("dw", &dw, want_dw, 5e-5);
        }
    }
}
