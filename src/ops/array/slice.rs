//! Parts of arrays that are written to.

#[cfg(feature = "cuda")]
use cudarc::driver::CudaViewMut;

#[cfg(feature = "cuda")]
use super::TWO_DEVICES;
#[cfg(feature = "cuda")]
use crate::ops::cuda::FloatsMut;

/// A part of an [`Array`](super::Array) to write to: one tensor's gradient in its unit's.
#[derive(Debug)]
pub enum SliceMut<'a> {
    Cpu(&'a mut [f32]),
    #[cfg(feature = "cuda")]
    Cuda(FloatsMut<'a>),
}

impl SliceMut<'_> {
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Cpu(values) => values.len(),
            #[cfg(feature = "cuda")]
            Self::Cuda(part) => part.view.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same part, for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        match self {
            Self::Cpu(values) => SliceMut::Cpu(values),
            #[cfg(feature = "cuda")]
            Self::Cuda(part) => SliceMut::Cuda(part.reborrow()),
        }
    }

    pub(in crate::ops) fn cpu(&mut self) -> &mut [f32] {
        match self {
            Self::Cpu(values) => values,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => panic!("{TWO_DEVICES}"),
        }
    }
}

impl<'a> SliceMut<'a> {
    /// Two disjoint parts.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::Cpu(values) => {
                let (first, second) = values.split_at_mut(at);
                (Self::Cpu(first), Self::Cpu(second))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(part) => {
                let (first, second) = part.split_at(at);
                (Self::Cuda(first), Self::Cuda(second))
            }
        }
    }

    /// No elements, on any device: the gradient of a tensor that is not there.
    #[must_use]
    pub fn none() -> Self {
        Self::Cpu(&mut [])
    }

    #[cfg(feature = "cuda")]
    pub(in crate::ops) fn cuda(&mut self) -> &mut CudaViewMut<'a, f32> {
        match self {
            Self::Cuda(part) => &mut part.view,
            Self::Cpu(_) => panic!("{TWO_DEVICES}"),
        }
    }
}
