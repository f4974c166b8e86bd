//! What rows are drawn by, and what has been drawn.

use std::ops::Deref;

#[cfg(feature = "cuda")]
use super::cuda;
use crate::base::{LogProb, TokenId};
use crate::ops::array::Device;
#[cfg(feature = "cuda")]
use crate::ops::sheet::Numbers;
use crate::ops::sheet::Sheet;

/// A number in [0, 1) for each row that is sampled from.
#[derive(Clone, Debug)]
pub struct Noises {
    list: Vec<f64>,
    /// The same for kernels, two words each.
    #[cfg(feature = "cuda")]
    numbers: Numbers,
}

impl Noises {
    #[must_use]
    pub fn on(sheet: &mut Sheet, list: Vec<f64>) -> Self {
        let outside = list.iter().find(|noise| !(0.0..1.0).contains(*noise));
        assert!(outside.is_none(), "noise of {outside:?} is not in [0, 1)");
        #[cfg(not(feature = "cuda"))]
        let _ = sheet;
        Self {
            #[cfg(feature = "cuda")]
            numbers: {
                let words = |noise: &f64| [noise.to_bits() as u32, (noise.to_bits() >> 32) as u32];
                sheet.list_within(2 * list.len(), list.iter().flat_map(words))
            },
            list,
        }
    }

    /// The same on a sheet of their own.
    #[must_use]
    pub fn new(device: &Device, list: Vec<f64>) -> Self {
        let mut sheet = Sheet::new(device);
        let noises = Self::on(&mut sheet, list);
        sheet.send(None);
        noises
    }

    #[cfg(feature = "cuda")]
    pub(super) fn numbers(&self) -> &Numbers {
        &self.numbers
    }
}

impl Deref for Noises {
    type Target = [f64];

    fn deref(&self) -> &[f64] {
        &self.list
    }
}

/// Tokens that are drawn, or will be once a device has done what is queued.
#[derive(Debug)]
pub enum Drawn {
    Done(Vec<(TokenId, LogProb)>),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Picks),
}

impl Drawn {
    /// Waits for them. Where a recording draws, what its last play has drawn.
    #[must_use]
    pub fn read(&self) -> Vec<(TokenId, LogProb)> {
        match self {
            Self::Done(drawn) => drawn.clone(),
            #[cfg(feature = "cuda")]
            Self::Cuda(picks) => picks.read(),
        }
    }
}
