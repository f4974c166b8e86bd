//! Rows of the embedding by token, and the gradient back to them.
//!
//! Shape letters: T rows, V vocabulary, H hidden.

#[cfg(feature = "cuda")]
pub mod cuda;

use std::ops::Deref;

use super::array::{Array, Device, SliceMut};
#[cfg(feature = "cuda")]
use super::sheet::Numbers;
use super::sheet::Sheet;
#[cfg(feature = "cuda")]
use super::weights::cuda::Bytes;
use super::weights::Part;
use crate::base::TokenId;
use crate::config::Dtype;

/// Tokens of packed rows, where their embeddings are looked up.
#[derive(Clone, Debug)]
pub struct Tokens {
    list: Vec<TokenId>,
    /// The same for kernels.
    #[cfg(feature = "cuda")]
    numbers: Numbers,
}

impl Tokens {
    #[must_use]
    pub fn on(sheet: &mut Sheet, list: Vec<TokenId>) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = sheet;
        Self {
            #[cfg(feature = "cuda")]
            numbers: sheet.list(list.iter().map(|token| token.get())),
            list,
        }
    }

    /// The same on a sheet of their own.
    #[must_use]
    pub fn new(device: &Device, list: Vec<TokenId>) -> Self {
        let mut sheet = Sheet::new(device);
        let tokens = Self::on(&mut sheet, list);
        sheet.send(None);
        tokens
    }
}

impl Deref for Tokens {
    type Target = [TokenId];

    fn deref(&self) -> &[TokenId] {
        &self.list
    }
}

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

    /// x[T, H], `width` being H, in `dtype`, which is the table's or wider.
    #[must_use]
    pub fn forward(&self, width: usize, tokens: &Tokens, dtype: Dtype) -> Array {
        #[cfg(not(feature = "cuda"))]
        let _ = dtype;
        match self {
            Self::Cpu(table_vh) => {
                let row = |token: &TokenId| &table_vh[token.index() * width..][..width];
                Array::Cpu(tokens.iter().flat_map(row).copied().collect())
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(table_vh) => {
                let vocabulary = table_vh.len() / width;
                let outside = tokens.iter().find(|token| token.index() >= vocabulary);
                assert!(outside.is_none(), "token {outside:?} of {vocabulary}");
                Array::Cuda(cuda::forward(table_vh, width, &tokens.numbers, dtype))
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
