//! RMSNorm as Jamba and Llama have it (transformers `JambaRMSNorm`): the mean square in f32, the
//! scaled row rounded to the compute dtype, then multiplied by the weight and rounded again.
//!
//! Shape letters: T rows, H width. Order: the lanes of `simd` over one row.

#[cfg(feature = "cuda")]
pub mod cuda;

use super::array::{Array, SliceMut};
use super::round::to_dtype;
use super::simd::{dot, sum_by, vectorized};
use crate::config::Dtype;

/// 1 / sqrt(mean(x²) + eps) of one row.
#[inline(always)]
fn inverse_rms(x_h: &[f32], eps: f32) -> f32 {
    let mean = dot(x_h, x_h) / x_h.len() as f32;
    1.0 / (mean + eps).sqrt()
}

/// y[T, H] = round(round(x · inverse rms) · w).
pub fn forward(x_th: &[f32], w_h: &[f32], eps: f32, dtype: Dtype, y_th: &mut [f32]) {
    assert_eq!(x_th.len(), y_th.len(), "x and y differ");
    vectorized(
        #[inline(always)]
        || {
            for (x, y) in x_th.chunks_exact(w_h.len()).zip(y_th.chunks_exact_mut(w_h.len())) {
                let scale = inverse_rms(x, eps);
                for ((y, x), w) in y.iter_mut().zip(x).zip(w_h) {
                    *y = to_dtype(to_dtype(x * scale, dtype) * w, dtype);
                }
            }
        },
    );
}

/// Rows whose gradients by w are summed by themselves.
pub const BLOCK: usize = 128;

/// `dx[T, H]` += gradient by x; `dw[H]` += gradient by w: the rows of each [`BLOCK`] ascending,
/// then the blocks' sums ascending.
pub fn backward(
    x_th: &[f32],
    w_h: &[f32],
    eps: f32,
    dy_th: &[f32],
    dx_th: &mut [f32],
    dw_h: &mut [f32],
) {
    assert!(x_th.len() == dy_th.len() && x_th.len() == dx_th.len(), "x, dy and dx differ");
    assert_eq!(w_h.len(), dw_h.len(), "w and dw differ");
    let width = w_h.len();
    let rows = x_th.chunks_exact(width).zip(dy_th.chunks_exact(width));
    let mut own = vec![0.0; width];
    let mut end_block = |own: &mut Vec<f32>| {
        dw_h.iter_mut().zip(&*own).for_each(|(dw, own)| *dw += own);
        own.fill(0.0);
    };
    vectorized(
        #[inline(always)]
        || {
            for (row, ((x, dy), dx)) in rows.zip(dx_th.chunks_exact_mut(width)).enumerate() {
                if row > 0 && row.is_multiple_of(BLOCK) {
                    end_block(&mut own);
                }
                let scale = inverse_rms(x, eps);
                let inner = sum_by(width, |i| dy[i] * w_h[i] * x[i]);
                let shrink = scale * scale * scale * inner / width as f32;
                for i in 0..width {
                    dx[i] += scale * dy[i] * w_h[i] - shrink * x[i];
                    own[i] += dy[i] * x[i] * scale;
                }
            }
            end_block(&mut own);
        },
    );
}

impl Array {
    /// Each row of `w`'s width, normed: see [`forward`].
    #[must_use]
    pub fn rms_norm(&self, w_h: &Self, eps: f32, dtype: Dtype) -> Self {
        match self {
            Self::Cpu(x_th) => {
                let mut y_th = vec![0.0; x_th.len()];
                forward(x_th, w_h.cpu(), eps, dtype, &mut y_th);
                Self::Cpu(y_th)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(x_th) => {
                let w_h = w_h.cuda();
                let x_th = x_th.in_rows(w_h.len());
                Self::Cuda(cuda::forward(&x_th, None, w_h, eps, dtype))
            }
        }
    }

    /// The residual sum self = round(self + delta), then each row normed: the same numbers as by
    /// [`Self::add_rounded`] and [`Self::rms_norm`], in one pass over memory where that pays.
    #[must_use]
    pub fn add_and_norm(
        &mut self,
        delta_th: &Self,
        residual_dtype: Dtype,
        w_h: &Self,
        eps: f32,
        dtype: Dtype,
    ) -> Self {
        match self {
            Self::Cpu(_) => {
                self.add_rounded(delta_th, residual_dtype);
                self.rms_norm(w_h, eps, dtype)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(x_th) => {
                assert_eq!(x_th.dtype(), residual_dtype, "the residual stream has one dtype");
                let delta_th = Some(delta_th.cuda());
                Self::Cuda(cuda::forward(x_th, delta_th, w_h.cuda(), eps, dtype))
            }
        }
    }

    /// Three narrow arrays of the same rows, each normed by its own weights.
    #[must_use]
    pub fn rms_norm_three(x: &[Self; 3], w: &[Self; 3], eps: f32, dtype: Dtype) -> [Self; 3] {
        match x {
            [Self::Cpu(_), ..] => {
                let norm = |i: usize| x[i].rms_norm(&w[i], eps, dtype);
                [norm(0), norm(1), norm(2)]
            }
            #[cfg(feature = "cuda")]
            _ => {
                assert_eq!(x[0].cuda().dtype(), dtype, "narrow rows are normed in their own dtype");
                let normed = cuda::forward_three(
                    x.each_ref().map(Self::cuda),
                    w.each_ref().map(Self::cuda),
                    eps,
                );
                normed.map(Self::Cuda)
            }
        }
    }

    /// Of [`Self::rms_norm`] at this input: adds to `dx_th` and to `dw_h`; see [`backward`].
    pub fn rms_norm_backward(
        &self,
        w_h: &Self,
        eps: f32,
        dy_th: &Self,
        dx_th: &mut Self,
        mut dw_h: SliceMut<'_>,
    ) {
        match self {
            Self::Cpu(x_th) => {
                backward(x_th, w_h.cpu(), eps, dy_th.cpu(), dx_th.cpu_mut(), dw_h.cpu());
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(x_th) => {
                let (w_h, dy_th) = (w_h.cuda().view(), dy_th.cuda().view());
                let (x, mut dx_th) = (x_th.widened(), dx_th.cuda_mut().view_mut());
                let dw_h = dw_h.cuda();
                cuda::backward(x_th.gpu(), &x.view(), &w_h, eps, &dy_th, &mut dx_th, dw_h);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, finite_difference, random, weighted, wide};

    const EPS: f32 = 1e-6;
    /// T, H: below, at and beside the lane width; the last has rows of two blocks.
    const CASES: [(usize, usize); 6] = [(1, 1), (2, 4), (3, 16), (4, 64), (2, 37), (BLOCK + 2, 3)];

    fn oracle(x: &[f64], w: &[f64]) -> Vec<f64> {
        let row = |x: &[f64]| {
            let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
            let scale = (mean + f64::from(EPS)).powf(-0.5);
            x.iter().zip(w).map(|(v, w)| v * scale * w).collect::<Vec<_>>()
        };
        x.chunks_exact(w.len()).flat_map(row).collect()
    }

    #[test]
    fn forward_against_f64() {
        for (t, h) in CASES {
            let (x, w) = (random(t * h, 1), random(h, 2));
            let mut y = vec![0.0; t * h];
            forward(&x, &w, EPS, Dtype::F32, &mut y);
            assert_close("y", &y, oracle(&wide(&x), &wide(&w)), 1e-6);
            // bf16 keeps 8 bits: two roundings of half an ulp each.
            forward(&x, &w, EPS, Dtype::Bf16, &mut y);
            assert_close("bf16 y", &y, oracle(&wide(&x), &wide(&w)), 2.0 * 2_f64.powi(-8));
            assert!(y.iter().all(|v| v.to_bits() & 0xffff == 0));
        }
    }

    #[test]
    fn backward_against_finite_differences() {
        for (t, h) in CASES {
            let (x, w, dy) = (random(t * h, 3), random(h, 4), random(t * h, 5));
            let (mut dx, mut dw) = (vec![0.0; t * h], vec![0.0; h]);
            backward(&x, &w, EPS, &dy, &mut dx, &mut dw);
            let by_x = finite_difference(&x, |x| weighted(&dy, &oracle(x, &wide(&w))));
            let by_w = finite_difference(&w, |w| weighted(&dy, &oracle(&wide(&x), w)));
            assert_close("dx", &dx, by_x, 1e-5);
            assert_close("dw", &dw, by_w, 1e-5);
        }
    }
}
