//! Products by a library, for fast arithmetic: it contracts multiply and add, and the order of a
//! sum follows the shape (one row is a dot product in lanes, long rows are cut where the caches
//! end) and this machine's caches. The same product of the same shape gives the same bits.

// A call of the library takes pointers; the lengths behind them are asserted before each.
#![allow(unsafe_code)]

use gemm::Parallelism;

use super::Into;
use crate::config::Dtype;
use crate::ops::round::slice_to_dtype;

/// y = x · Wᵀ + bias, the weight as checkpoints store it: forward and backward read the same
/// `[N, K]`.
#[derive(Clone, Debug)]
pub struct Linear {
    w_nk: Vec<f32>,
    /// Empty where the projection has none.
    bias_n: Vec<f32>,
    inner: usize,
    outputs: usize,
}

impl Linear {
    /// From a weight `[N, K]` and a bias `[N]`, empty where there is none.
    #[must_use]
    pub fn new(w_nk: &[f32], bias_n: &[f32], inner: usize) -> Self {
        let outputs = w_nk.len() / inner;
        assert_eq!(w_nk.len(), outputs * inner, "the weight is not [{outputs}, {inner}]");
        assert!(bias_n.is_empty() || bias_n.len() == outputs, "a bias of {}", bias_n.len());
        Self { w_nk: w_nk.to_vec(), bias_n: bias_n.to_vec(), inner, outputs }
    }

    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    #[must_use]
    pub fn inner(&self) -> usize {
        self.inner
    }

    /// y[M, N] = round(x[M, K] · Wᵀ + bias).
    #[must_use]
    pub fn forward(&self, x_mk: &[f32], dtype: Dtype) -> Vec<f32> {
        let m = x_mk.len() / self.inner;
        let mut y_mn = vec![0.0; m * self.outputs];
        let (x, w) = (rows(x_mk, self.inner), columns(&self.w_nk, self.inner));
        product([m, self.outputs, self.inner], x, w, Into::Overwrite, &mut y_mn);
        if !self.bias_n.is_empty() {
            for y_n in y_mn.chunks_exact_mut(self.outputs) {
                y_n.iter_mut().zip(&self.bias_n).for_each(|(y, b)| *y += b);
            }
        }
        slice_to_dtype(&mut y_mn, dtype);
        y_mn
    }

    /// `dx[M, K] (+)= dy[M, N] · W`.
    pub fn input_gradient(&self, dy_mn: &[f32], into: Into, dx_mk: &mut [f32]) {
        let m = dy_mn.len() / self.outputs;
        let (dy, w) = (rows(dy_mn, self.outputs), rows(&self.w_nk, self.inner));
        product([m, self.inner, self.outputs], dy, w, into, dx_mk);
    }

    /// `dW[N, K] += dyᵀ · x`.
    pub fn weight_gradient(&self, dy_mn: &[f32], x_mk: &[f32], dw_nk: &mut [f32]) {
        let m = dy_mn.len() / self.outputs;
        let (dy, x) = (columns(dy_mn, self.outputs), rows(x_mk, self.inner));
        product([self.outputs, self.inner, m], dy, x, Into::Add, dw_nk);
    }
}

/// A matrix and the steps from one row and one column to the next.
#[derive(Clone, Copy)]
struct Matrix<'a> {
    values: &'a [f32],
    row: usize,
    column: usize,
}

/// Whose rows lie one after another.
fn rows(values: &[f32], width: usize) -> Matrix<'_> {
    Matrix { values, row: width, column: 1 }
}

/// The transpose of one whose rows, of `width`, lie one after another.
fn columns(values: &[f32], width: usize) -> Matrix<'_> {
    Matrix { values, row: 1, column: width }
}

/// `c[M, N] (+)= a[M, K] · b[K, N]`.
fn product([m, n, k]: [usize; 3], a: Matrix<'_>, b: Matrix<'_>, into: Into, c_mn: &mut [f32]) {
    assert_eq!(a.values.len(), m * k, "the left side is not [{m}, {k}]");
    assert_eq!(b.values.len(), k * n, "the right side is not [{k}, {n}]");
    assert_eq!(c_mn.len(), m * n, "the product is not [{m}, {n}]");
    let adds = into == Into::Add;
    // SAFETY: the three slices hold [M, K], [K, N] and [M, N] elements under their strides, which
    // are those of `rows` or `columns`; the written one is borrowed alone.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c_mn.as_mut_ptr(),
            1,
            n as isize,
            adds,
            a.values.as_ptr(),
            a.column as isize,
            a.row as isize,
            b.values.as_ptr(),
            b.column as isize,
            b.row as isize,
            f32::from(u8::from(adds)),
            1.0,
            false,
            false,
            false,
            // Chunks of rows already run on every core.
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, random};

    /// M, N, K: one row, which the library has a way of its own for, and remainders of tiles.
    const CASES: [(usize, usize, usize); 6] =
        [(1, 1, 1), (1, 64, 128), (2, 17, 3), (7, 128, 4), (13, 31, 33), (33, 64, 700)];

    #[test]
    fn all_three_products_against_f64() {
        for (m, n, k) in CASES {
            let (x, w, dy) = (random(m * k, 1), random(n * k, 2), random(m * n, 3));
            let bias = random(n, 4);
            let linear = Linear::new(&w, &bias, k);
            let dot = |len: usize, a: &dyn Fn(usize) -> f32, b: &dyn Fn(usize) -> f32| {
                (0..len).map(|i| f64::from(a(i)) * f64::from(b(i))).sum::<f64>()
            };
            let y = linear.forward(&x, Dtype::F32);
            let want = (0..m * n).map(|at| {
                let (row, col) = (at / n, at % n);
                f64::from(bias[col]) + dot(k, &|i| x[row * k + i], &|i| w[col * k + i])
            });
            // Sums of up to 700 products of standard normals.
            assert_close("y", &y, want, 2e-4);
            let (mut dx, mut dw) = (vec![1.0; m * k], vec![1.0; n * k]);
            linear.input_gradient(&dy, Into::Add, &mut dx);
            linear.weight_gradient(&dy, &x, &mut dw);
            let want =
                (0..m * k).map(|at| 1.0 + dot(n, &|j| dy[at / k * n + j], &|j| w[j * k + at % k]));
            assert_close("dx", &dx, want, 2e-4);
            let want = (0..n * k)
                .map(|at| 1.0 + dot(m, &|row| dy[row * n + at / k], &|row| x[row * k + at % k]));
            assert_close("dw", &dw, want, 2e-4);
            linear.input_gradient(&dy, Into::Overwrite, &mut dx);
            let want = (0..m * k).map(|at| dot(n, &|j| dy[at / k * n + j], &|j| w[j * k + at % k]));
            assert_close("dx anew", &dx, want, 2e-4);
        }
    }

    /// What makes it fast is what makes it differ: a row alone is summed in another order.
    #[test]
    fn a_row_depends_on_its_batch_and_on_nothing_else() {
        let (n, k) = (36, 64);
        let (x, linear) = (random(23 * k, 3), Linear::new(&random(n * k, 4), &[], k));
        let together = linear.forward(&x, Dtype::F32);
        assert_eq!(together, linear.forward(&x, Dtype::F32));
        let alone: Vec<f32> =
            x.chunks_exact(k).flat_map(|row| linear.forward(row, Dtype::F32)).collect();
        assert_ne!(alone, together);
    }

    #[test]
    fn no_rows_are_no_product() {
        let linear = Linear::new(&random(6, 1), &[], 3);
        assert!(linear.forward(&[], Dtype::F32).is_empty());
    }
}
