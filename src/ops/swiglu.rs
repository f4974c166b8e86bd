//! The gated activation silu(gate) · up, computed in f32 and rounded once. Element by element.

#[cfg(feature = "cuda")]
pub mod cuda;

use super::array::Array;
use super::round::to_dtype;
use super::simd::{silu, silu_derivative, vectorized};
use crate::config::Dtype;

/// gate ← round(silu(gate) · up); any shape, the same for both.
pub fn forward(gate: &mut [f32], up: &[f32], dtype: Dtype) {
    assert_eq!(gate.len(), up.len(), "gate and up differ");
    vectorized(
        #[inline(always)]
        || {
            for (g, u) in gate.iter_mut().zip(up) {
                *g = to_dtype(silu(*g) * u, dtype);
            }
        },
    );
}

/// From dy: dgate and dup, overwritten.
pub fn backward(gate: &[f32], up: &[f32], dy: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
    assert!(gate.len() == up.len() && gate.len() == dy.len(), "gate, up and dy differ");
    assert!(gate.len() == dgate.len() && gate.len() == dup.len(), "gradients differ");
    vectorized(
        #[inline(always)]
        || {
            for i in 0..gate.len() {
                dgate[i] = dy[i] * up[i] * silu_derivative(gate[i]);
                dup[i] = dy[i] * silu(gate[i]);
            }
        },
    );
}

impl Array {
    /// round(silu(self) · up).
    #[must_use]
    pub fn swiglu(&self, up: &Self, dtype: Dtype) -> Self {
        match self {
            Self::Cpu(gate) => {
                let mut y = gate.clone();
                forward(&mut y, up.cpu(), dtype);
                Self::Cpu(y)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(gate) => {
                assert_eq!(gate.dtype(), dtype, "the inputs are rounded to the output's dtype");
                Self::Cuda(cuda::forward(gate, up.cuda()))
            }
        }
    }

    /// Of [`Self::swiglu`]: the gradients by gate and up.
    #[must_use]
    pub fn swiglu_backward(&self, up: &Self, dy: &Self) -> [Self; 2] {
        let (mut dgate, mut dup) = (self.zeros_like(), self.zeros_like());
        match self {
            Self::Cpu(gate) => {
                backward(gate, up.cpu(), dy.cpu(), dgate.cpu_mut(), dup.cpu_mut());
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(gate) => {
                let (dgate, dup) = (dgate.cuda_mut(), dup.cuda_mut());
                let (wide_gate, wide_up) = (gate.widened(), up.cuda().widened());
                let inputs = (&wide_gate.view(), &wide_up.view());
                let dy = dy.cuda().view();
                let mut dgate = dgate.view_mut();
                cuda::backward(gate.gpu(), inputs, &dy, &mut dgate, &mut dup.view_mut());
            }
        }
        [dgate, dup]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, finite_difference, random, weighted, wide};

    fn oracle(gate: &[f64], up: &[f64]) -> Vec<f64> {
        gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
    }

    #[test]
    fn forward_against_f64_and_backward_against_finite_differences() {
        for len in [1, 15, 16, 100] {
            let (gate, up, dy) = (random(len, 1), random(len, 2), random(len, 3));
            let mut y = gate.clone();
            forward(&mut y, &up, Dtype::F32);
            assert_close("y", &y, oracle(&wide(&gate), &wide(&up)), 1e-6);
            let (mut dgate, mut dup) = (vec![0.0; len], vec![0.0; len]);
            backward(&gate, &up, &dy, &mut dgate, &mut dup);
            let by_gate = finite_difference(&gate, |g| weighted(&dy, &oracle(g, &wide(&up))));
            let by_up = finite_difference(&up, |u| weighted(&dy, &oracle(&wide(&gate), u)));
            assert_close("dgate", &dgate, by_gate, 1e-5);
            assert_close("dup", &dup, by_up, 1e-5);
        }
    }
}
