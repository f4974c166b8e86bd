//! A weight on its device, and the products of arrays by it.

#[cfg(feature = "cuda")]
use super::cuda;
use super::{bias_gradient, library, weight_gradient, Into, Linear};
use crate::config::{Arithmetic, Dtype};
use crate::ops::array::{Array, SliceMut};
use crate::ops::weights::{Part, Purpose};

/// y = x · Wᵀ + bias: see [`Linear`] and [`library::Linear`]. Which one is settled at load.
#[derive(Clone, Debug)]
pub enum Projection {
    Cpu(Linear),
    Library(library::Linear),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Linear),
}

impl Projection {
    /// From a weight `[N, K]` and a bias `[N]`, empty where there is none. One that trains also has
    /// what [`Self::input_gradient`] needs.
    #[must_use]
    pub fn new(w_nk: Part<'_>, bias_n: Part<'_>, inner: usize, purpose: Purpose) -> Self {
        let Purpose { arithmetic, trains } = purpose;
        match (w_nk, bias_n) {
            (Part::Cpu(w_nk), Part::Cpu(bias_n)) => match arithmetic {
                Arithmetic::Invariant => Self::Cpu(Linear::new(w_nk, bias_n, inner, trains)),
                Arithmetic::Fast => Self::Library(library::Linear::new(w_nk, bias_n, inner)),
            },
            #[cfg(feature = "cuda")]
            (w_nk, bias_n) => Self::Cuda(cuda::Linear::new(w_nk, bias_n, inner, arithmetic)),
        }
    }

    /// N.
    #[must_use]
    pub fn outputs(&self) -> usize {
        match self {
            Self::Cpu(linear) => linear.outputs(),
            Self::Library(linear) => linear.outputs(),
            #[cfg(feature = "cuda")]
            Self::Cuda(linear) => linear.outputs(),
        }
    }

    /// K.
    #[must_use]
    pub fn inner(&self) -> usize {
        match self {
            Self::Cpu(linear) => linear.inner(),
            Self::Library(linear) => linear.inner(),
            #[cfg(feature = "cuda")]
            Self::Cuda(linear) => linear.inner(),
        }
    }

    /// y[M, N] = round(x[M, K] · Wᵀ + bias).
    #[must_use]
    pub fn forward(&self, x_mk: &Array, dtype: Dtype) -> Array {
        match self {
            Self::Cpu(linear) => Array::Cpu(linear.forward(x_mk.cpu(), dtype)),
            Self::Library(linear) => Array::Cpu(linear.forward(x_mk.cpu(), dtype)),
            #[cfg(feature = "cuda")]
            Self::Cuda(linear) => Array::Cuda(linear.forward(x_mk.cuda(), dtype)),
        }
    }

    /// `dx[M, K] (+)= dy[M, N] · W`.
    pub fn input_gradient(&self, dy_mn: &Array, into: Into, dx_mk: &mut Array) {
        match self {
            Self::Cpu(linear) => linear.input_gradient(dy_mn.cpu(), into, dx_mk.cpu_mut()),
            Self::Library(linear) => linear.input_gradient(dy_mn.cpu(), into, dx_mk.cpu_mut()),
            #[cfg(feature = "cuda")]
            Self::Cuda(linear) => linear.input_gradient(dy_mn.cuda(), into, dx_mk.cuda_mut()),
        }
    }

    /// `dW[N, K] += dyᵀ · x` for this projection's x[M, K]; invariant rows ascend.
    pub fn weight_gradient(&self, dy_mn: &Array, x_mk: &Array, mut dw_nk: SliceMut<'_>) {
        match self {
            Self::Cpu(linear) => {
                weight_gradient(dy_mn.cpu(), x_mk.cpu(), linear.outputs(), dw_nk.cpu());
            }
            Self::Library(linear) => {
                linear.weight_gradient(dy_mn.cpu(), x_mk.cpu(), dw_nk.cpu());
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(linear) => {
                let (dy, x) = (dy_mn.cuda(), x_mk.cuda());
                cuda::weight_gradient(
                    dy.gpu(),
                    &dy.view(),
                    &x.view(),
                    linear.outputs(),
                    dw_nk.cuda(),
                );
            }
        }
    }

    /// `dbias[N] += Σ dy`, rows ascending; nothing where there is no bias.
    pub fn bias_gradient(&self, dy_mn: &Array, mut dbias_n: SliceMut<'_>) {
        match self {
            Self::Cpu(_) | Self::Library(_) => bias_gradient(dy_mn.cpu(), dbias_n.cpu()),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) if dbias_n.is_empty() => {}
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => {
                let dy = dy_mn.cuda();
                cuda::bias_gradient(dy.gpu(), &dy.view(), dbias_n.cuda());
            }
        }
    }
}
