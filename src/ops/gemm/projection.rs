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
    /// what [`Self::backward`] needs.
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

    /// From dy[M, N] and the forward's x[M, K]: `dx (+)= dy · W`, `dW[N, K] += dyᵀ · x` and, where
    /// there is a bias, `dbias[N] += Σ dy`. Both products take dy rounded to `dtype`, that of W and
    /// x; their sums are f32. Invariant rows ascend, but for bf16 on a GPU.
    pub fn backward(
        &self,
        dy_mn: &Array,
        x_mk: &Array,
        dtype: Dtype,
        (dw_nk, dbias_n): (SliceMut<'_>, SliceMut<'_>),
        (into, dx_mk): (Into, &mut Array),
    ) {
        self.bias_gradient(dy_mn, dbias_n);
        let dy_mn = dy_mn.rounded(dtype);
        self.weight_gradient(&dy_mn, x_mk, dw_nk);
        self.input_gradient(&dy_mn, into, dx_mk);
    }

    fn input_gradient(&self, dy_mn: &Array, into: Into, dx_mk: &mut Array) {
        match self {
            Self::Cpu(linear) => linear.input_gradient(dy_mn.cpu(), into, dx_mk.cpu_mut()),
            Self::Library(linear) => linear.input_gradient(dy_mn.cpu(), into, dx_mk.cpu_mut()),
            #[cfg(feature = "cuda")]
            Self::Cuda(linear) => linear.input_gradient(dy_mn.cuda(), into, dx_mk.cuda_mut()),
        }
    }

    fn weight_gradient(&self, dy_mn: &Array, x_mk: &Array, mut dw_nk: SliceMut<'_>) {
        let (dy, x) = (dy_mn, x_mk);
        match self {
            Self::Cpu(linear) => weight_gradient(dy.cpu(), x.cpu(), linear.outputs(), dw_nk.cpu()),
            Self::Library(linear) => linear.weight_gradient(dy.cpu(), x.cpu(), dw_nk.cpu()),
            #[cfg(feature = "cuda")]
            Self::Cuda(linear) => linear.weight_gradient(dy.cuda(), x.cuda(), dw_nk),
        }
    }

    /// Rows ascending.
    fn bias_gradient(&self, dy_mn: &Array, mut dbias_n: SliceMut<'_>) {
        match self {
            Self::Cpu(_) | Self::Library(_) => bias_gradient(dy_mn.cpu(), dbias_n.cpu()),
            #[cfg(feature = "cuda")]
            Self::Cuda(linear) => linear.bias_gradient(dy_mn.cuda(), dbias_n),
        }
    }
}

/// Several projections of one input, y_i = x · W_iᵀ + bias_i. Where their weights lie side by side
/// on a GPU the outputs are columns of one product.
#[derive(Clone, Debug)]
pub struct Joined<const COUNT: usize> {
    each: [Projection; COUNT],
    #[cfg(feature = "cuda")]
    whole: Option<cuda::Linear>,
}

impl<const COUNT: usize> Joined<COUNT> {
    /// From weights `[N_i, K]` and biases `[N_i]`, empty where there is none.
    #[must_use]
    pub fn new(parts: [(Part<'_>, Part<'_>); COUNT], inner: usize, purpose: Purpose) -> Self {
        Self {
            each: parts.map(|(w_nk, bias_n)| Projection::new(w_nk, bias_n, inner, purpose)),
            #[cfg(feature = "cuda")]
            whole: {
                let whole =
                    (Part::joined(parts.map(|part| part.0)), Part::joined(parts.map(|p| p.1)));
                let linear = |(w_nk, bias_n): (Part<'_>, Part<'_>)| {
                    cuda::Linear::new(w_nk, bias_n, inner, purpose.arithmetic)
                };
                whole.0.zip(whole.1).map(linear)
            },
        }
    }

    #[must_use]
    pub fn each(&self) -> &[Projection; COUNT] {
        &self.each
    }

    /// Of x[M, K] the outputs `[M, N_i]`.
    #[must_use]
    pub fn forward(&self, x_mk: &Array, dtype: Dtype) -> [Array; COUNT] {
        #[cfg(feature = "cuda")]
        if let (Some(whole), Array::Cuda(x_mk)) = (&self.whole, x_mk) {
            let all = whole.forward(x_mk, dtype);
            let mut end = 0;
            return self.each.each_ref().map(|one| {
                end += one.outputs();
                Array::Cuda(all.columns(whole.outputs(), end - one.outputs()..end))
            });
        }
        self.each.each_ref().map(|one| one.forward(x_mk, dtype))
    }
}
