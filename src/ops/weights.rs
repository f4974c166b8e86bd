//! A unit's weights as its blocks take them: compute-dtype bytes, cut into tensors.

#[cfg(feature = "cuda")]
pub mod cuda;

use super::array::{Array, Device};
use super::round::slice_to_dtype;
use crate::config::{Arithmetic, Dtype};

/// A unit's weights, ready to be cut into [`Part`]s.
#[derive(Clone, Debug)]
pub enum Weights {
    /// Widened to f32, which loses nothing.
    Cpu(Vec<f32>),
    /// As they are.
    #[cfg(feature = "cuda")]
    Cuda(cuda::Bytes),
}

/// One tensor of a unit, or consecutive rows of one.
#[derive(Clone, Copy, Debug)]
pub enum Part<'a> {
    Cpu(&'a [f32]),
    /// `len` elements from `start` of a unit.
    #[cfg(feature = "cuda")]
    Cuda {
        unit: &'a cuda::Bytes,
        start: usize,
        len: usize,
    },
}

/// What a layer's weights are laid out for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Purpose {
    pub arithmetic: Arithmetic,
    /// Whether a backward will follow.
    pub trains: bool,
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
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Self::Cuda(cuda::Bytes::upload(gpu, bytes, dtype)),
        }
    }

    /// From f32 master weights on their device, rounded to the compute dtype.
    #[must_use]
    pub fn of_master(master: &Array, dtype: Dtype) -> Self {
        match master {
            Array::Cpu(master) => {
                let mut rounded = master.clone();
                slice_to_dtype(&mut rounded, dtype);
                Self::Cpu(rounded)
            }
            #[cfg(feature = "cuda")]
            Array::Cuda(master) => Self::Cuda(cuda::Bytes::narrowed(master, dtype)),
        }
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Cpu(flat) => flat.len(),
            #[cfg(feature = "cuda")]
            Self::Cuda(unit) => unit.len(),
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
            #[cfg(feature = "cuda")]
            Self::Cuda(unit) => Part::Cuda { unit, start: 0, len: unit.len() },
        }
    }
}

impl Part<'_> {
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Cpu(values) => values.len(),
            #[cfg(feature = "cuda")]
            Self::Cuda { len, .. } => *len,
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
            #[cfg(feature = "cuda")]
            Self::Cuda { unit, start, len } => {
                assert!(at <= len, "a tensor of {len} elements cut at {at}");
                let second = Self::Cuda { unit, start: start + at, len: len - at };
                (Self::Cuda { unit, start, len: at }, second)
            }
        }
    }

    /// One part that is all of these, if they lie side by side in a unit on a GPU.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub(super) fn joined<const COUNT: usize>(parts: [Self; COUNT]) -> Option<Self> {
        let mut parts = parts.into_iter();
        let mut whole = parts.next()?;
        for next in parts {
            match (&mut whole, next) {
                (Self::Cuda { start, len, .. }, Self::Cuda { start: after, len: more, .. })
                    if *start + *len == after || more == 0 && *len == 0 =>
                {
                    *len += more;
                }
                _ => return None,
            }
        }
        matches!(whole, Self::Cuda { .. }).then_some(whole)
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
            #[cfg(feature = "cuda")]
            Self::Cuda { .. } => Array::Cuda(self.bytes().widened()),
        }
    }

    /// The elements on their device, sharing the unit's memory.
    #[cfg(feature = "cuda")]
    pub(super) fn bytes(self) -> cuda::Bytes {
        match self {
            Self::Cuda { unit, start, len } => unit.part(start..start + len),
            Self::Cpu(_) => panic!("weights of two devices in one operation"),
        }
    }
}
