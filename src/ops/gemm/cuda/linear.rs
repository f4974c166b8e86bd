//! A weight and its bias on the device: its half of [`Projection`](super::super::Projection).

use super::{bias_gradient, forward, input_gradient, weight_gradient, Weight};
use crate::config::{Arithmetic, Dtype};
use crate::ops::array::SliceMut;
use crate::ops::cuda::Floats;
use crate::ops::gemm::Into;
use crate::ops::weights::{cuda::Bytes, Part};

/// y = x · Wᵀ + bias.
#[derive(Clone, Debug)]
pub struct Linear {
    w_nk: Bytes,
    bias_n: Option<Floats>,
    outputs: usize,
    inner: usize,
    arithmetic: Arithmetic,
}

impl Linear {
    /// From a weight `[N, K]` and a bias `[N]`, empty where there is none.
    #[must_use]
    pub fn new(w_nk: Part<'_>, bias_n: Part<'_>, inner: usize, arithmetic: Arithmetic) -> Self {
        assert_eq!(w_nk.len() % inner, 0, "the weight is not [N, {inner}]");
        let outputs = w_nk.len() / inner;
        let bias_n = (!bias_n.is_empty()).then(|| bias_n.bytes().widened());
        Self { w_nk: w_nk.bytes().aligned(), bias_n, outputs, inner, arithmetic }
    }

    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    #[must_use]
    pub fn inner(&self) -> usize {
        self.inner
    }

    fn weight(&self) -> Weight<'_> {
        Weight {
            bytes_nk: self.w_nk.view(),
            dtype: self.w_nk.dtype(),
            outputs: self.outputs,
            inner: self.inner,
        }
    }

    /// y[M, N] = round(x[M, K] · Wᵀ + bias).
    #[must_use]
    pub fn forward(&self, x_mk: &Floats, dtype: Dtype) -> Floats {
        let bias_n = self.bias_n.as_ref().map(Floats::view);
        forward(x_mk, &self.weight(), bias_n.as_ref(), self.arithmetic, dtype)
    }

    /// `dx[M, K] (+)= dy[M, N] · W`.
    pub fn input_gradient(&self, dy_mn: &Floats, into: Into, dx_mk: &mut Floats) {
        input_gradient(dy_mn, &self.weight(), into, dx_mk);
    }

    /// `dW[N, K] += dyᵀ · x`.
    pub fn weight_gradient(&self, dy_mn: &Floats, x_mk: &Floats, mut dw_nk: SliceMut<'_>) {
        weight_gradient(dy_mn, &x_mk.in_rows(x_mk.len()), self.outputs, dw_nk.cuda());
    }

    /// `dbias[N] += Σ dy`; nothing where there is no bias.
    pub fn bias_gradient(&self, dy_mn: &Floats, mut dbias_n: SliceMut<'_>) {
        if !dbias_n.is_empty() {
            bias_gradient(dy_mn.gpu(), &dy_mn.view(), dbias_n.cuda());
        }
    }
}
