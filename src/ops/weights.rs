//! A unit's weights as its blocks take them: compute-dtype bytes, cut into tensors.

use super::array::{Array, Device};
use crate::config::Dtype;

/// A unit's weights, ready to be cut into [`Part`]s.
#[derive(Clone, Debug)]
pub enum Weights {
    /// Widened to f32, which loses nothing.
    Cpu(Vec<f32>),
}

/// One tensor of a unit, or consecutive rows of one.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    Cpu(&'a [f32]),
}

/// Little-endian elements, widened to f32.
#[must_use]
pub fn widen(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::F32 => {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().map(|b| f32::from_le_bytes(*b)).collect()
        }
        Dtype::Bf16 => {
            let (halves, _) = bytes.as_chunks::<2>();
            halves.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()
        }
    }
}

impl Weights {
    /// From compute-dtype bytes on the host.
    #[must_use]
    pub fn open(bytes: &[u8], dtype: Dtype, device: &Device) -> Self {
        match device {
            Device::Cpu => Self::Cpu(widen(bytes, dtype)),
        }
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Cpu(flat) => flat.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of it.
    #[must_use]
    pub fn whole(&self) -> Part<'_> {
        match self {
            Self::Cpu(flat) => Part::Cpu(flat),
        }
    }
}

impl Part<'_> {
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Cpu(values) => values.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `at` elements, and the rest.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::Cpu(values) => {
                let (first, second) = values.split_at(at);
                (Self::Cpu(first), Self::Cpu(second))
            }
        }
    }

    /// A part without elements, on the same device.
    #[must_use]
    pub fn none(self) -> Self {
        self.split_at(0).0
    }

    /// The elements as f32, in an array of their own.
    #[must_use]
    pub fn to_array(self) -> Array {
        match self {
            Self::Cpu(values) => Array::Cpu(values.to_vec()),
        }
    }
}
