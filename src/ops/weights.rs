//! A unit's weights as its blocks take them: compute-dtype bytes, cut into tensors.

#[cfg(feature = "cuda")]
pub mod cuda;

use std::sync::Arc;

use rayon::prelude::*;

use super::array::{Array, Device};
use super::round::slice_to_dtype;
use crate::config::{Arithmetic, Dtype};

/// A unit's weights, ready to be cut into [`Part`]s. Clones share the memory.
#[derive(Clone, Debug)]
pub enum Weights {
    /// Widened to f32, which loses nothing.
    Cpu { values: Arc<Vec<f32>>, dtype: Dtype },
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

/// Elements that one thread rounds at a time.
const PIECE: usize = 1 << 16;

/// f32 values rounded to `dtype`, little-endian.
#[must_use]
pub fn narrow(values: &[f32], dtype: Dtype) -> Vec<u8> {
    let width = dtype.bytes() as usize;
    let mut bytes = vec![0; values.len() * width];
    let pieces = bytes.par_chunks_mut(PIECE * width).zip(values.par_chunks(PIECE));
    pieces.for_each(|(bytes, values)| {
        let elements = bytes.chunks_exact_mut(width).zip(values);
        match dtype {
            Dtype::F32 => elements.for_each(|(b, w)| b.copy_from_slice(&w.to_le_bytes())),
            Dtype::Bf16 => elements.for_each(|(b, w)| {
                b.copy_from_slice(&half::bf16::from_f32(*w).to_le_bytes());
            }),
        }
    });
    bytes
}

impl Weights {
    /// From compute-dtype bytes on the host.
    #[must_use]
    pub fn open(bytes: &[u8], dtype: Dtype, device: &Device) -> Self {
        match device {
            Device::Cpu => Self::Cpu { values: Arc::new(widen(bytes, dtype)), dtype },
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
                Self::Cpu { values: Arc::new(rounded), dtype }
            }
            #[cfg(feature = "cuda")]
            Array::Cuda(master) => Self::Cuda(cuda::Bytes::narrowed(master, dtype)),
        }
    }

    #[must_use]
    pub fn device(&self) -> Device {
        match self {
            Self::Cpu { .. } => Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(unit) => Device::Cuda(Arc::clone(unit.gpu())),
        }
    }

    /// The same elements where `device` finds them: these, or a copy.
    #[must_use]
    pub fn on(&self, device: &Device) -> Self {
        match (self, device) {
            (Self::Cpu { .. }, Device::Cpu) => self.clone(),
            #[cfg(feature = "cuda")]
            (Self::Cuda(unit), Device::Cuda(gpu)) if Arc::ptr_eq(unit.gpu(), gpu) => self.clone(),
            #[cfg(feature = "cuda")]
            (Self::Cuda(unit), Device::Cuda(gpu)) => Self::Cuda(unit.copied_to(gpu)),
            #[cfg(feature = "cuda")]
            _ => Self::open(&self.to_bytes(), self.dtype(), device),
        }
    }

    #[must_use]
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::Cpu { dtype, .. } => *dtype,
            #[cfg(feature = "cuda")]
            Self::Cuda(unit) => unit.dtype(),
        }
    }

    /// The elements in the compute dtype, little-endian, on the host.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Cpu { values, dtype } => narrow(values, *dtype),
            #[cfg(feature = "cuda")]
            Self::Cuda(unit) => unit.to_host(),
        }
    }

    /// The same weights but for what `edit` does to their bytes, which go over the host.
    #[must_use]
    pub fn edited(&self, edit: impl FnOnce(&mut Vec<u8>)) -> Self {
        let mut bytes = self.to_bytes();
        edit(&mut bytes);
        Self::open(&bytes, self.dtype(), &self.device())
    }

    /// With one element moved to a neighbouring value of its dtype: the smallest difference that
    /// two sides can have.
    #[must_use]
    pub fn with_ulp(&self, element: usize) -> Self {
        self.edited(|bytes| {
            let low = &mut bytes[element * self.dtype().bytes() as usize];
            *low = if *low == u8::MAX { *low - 1 } else { *low + 1 };
        })
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Cpu { values, .. } => values.len(),
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
            Self::Cpu { values, .. } => Part::Cpu(values),
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
