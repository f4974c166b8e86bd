//! Rows of the embedding by token, and the gradient back to them.
//!
//! Shape letters: T rows, V vocabulary, H hidden.

#[cfg(feature = "cuda")]
pub mod cuda;

use super::array::{Array, SliceMut};
#[cfg(feature = "cuda")]
use super::cuda::Floats;
#[cfg(feature = "cuda")]
use super::weights::cuda::Bytes;
use super::weights::Part;
use crate::base::TokenId;

/// The embedding `[V, H]` on its device.
#[derive(Clone, Debug)]
pub enum Embedding {
    Cpu(Vec<f32>),
    #[cfg(feature = "cuda")]
    Cuda(Bytes),
}

impl Embedding {
    #[must_use]
    pub fn new(table_vh: Part<'_>) -> Self {
        match table_vh {
            Part::Cpu(table_vh) => Self::Cpu(table_vh.to_vec()),
            #[cfg(feature = "cuda")]
            table_vh => Self::Cuda(table_vh.bytes()),
        }
    }

    /// x[T, H], `width` being H.
    #[must_use]
    pub fn forward(&self, width: usize, tokens: &[TokenId]) -> Array {
        match self {
            Self::Cpu(table_vh) => {
                let row = |token: &TokenId| &table_vh[token.index() * width..][..width];
                Array::Cpu(tokens.iter().flat_map(row).copied().collect())
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(table_vh) => {
                let gpu = table_vh.gpu();
                let (bytes, dtype) = (table_vh.view(), table_vh.dtype());
                Array::Cuda(Floats::new(gpu, cuda::forward(gpu, &bytes, dtype, width, tokens)))
            }
        }
    }

    /// Adds each row of dx[T, H] to its token's row of `dtable[V, H]`, rows ascending.
    pub fn backward(
        &self,
        width: usize,
        tokens: &[TokenId],
        dx_th: &Array,
        mut dtable_vh: SliceMut<'_>,
    ) {
        assert_eq!(dx_th.len(), tokens.len() * width, "one row a token");
        match self {
            Self::Cpu(_) => {
                let sums = dtable_vh.cpu();
                for (token, dx_h) in tokens.iter().zip(dx_th.cpu().chunks_exact(width)) {
                    let row = &mut sums[token.index() * width..][..width];
                    row.iter_mut().zip(dx_h).for_each(|(sum, d)| *sum += d);
                }
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(table_vh) => {
                let dx_th = dx_th.cuda().view();
                cuda::backward(table_vh.gpu(), width, tokens, &dx_th, dtable_vh.cuda());
            }
        }
    }
}
