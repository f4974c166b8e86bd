//! Arrays on a device: what every operation takes and gives. On the CPU they are f32, whatever they
//! were rounded to; on a GPU they are of the dtype that they were rounded to.
//!
//! An operation is one function that matches on where its first array lies: the CPU's plain loops,
//! or a launch. Arrays of two devices in one call are a programmer's error.

#[cfg(feature = "cuda")]
pub mod cuda;
mod slice;

pub use slice::SliceMut;

use std::borrow::Cow;
#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use super::cuda::{Floats, Gpu};
#[cfg(feature = "cuda")]
use crate::config::Dtype;

/// Rows whose logits exist at once, a thread: 64 x 65,536 x 4 bytes are 16 MiB.
pub const CPU_LOGIT_ROWS: usize = 64;
/// A GPU has room for more, and reads the head's weights less often.
pub const GPU_LOGIT_ROWS: usize = 1024;

/// Where arrays live and operations run.
#[derive(Clone, Debug, Default)]
pub enum Device {
    #[default]
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(Arc<Gpu>),
}

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    pub total: u64,
    /// Taken at the fullest moment, over what was taken before by anybody.
    pub added: u64,
}

/// Values on one device, row-major.
#[derive(Clone, Debug)]
pub enum Array {
    Cpu(Vec<f32>),
    #[cfg(feature = "cuda")]
    Cuda(Floats),
}

impl Device {
    /// Whether its arrays are this process's own memory.
    #[must_use]
    pub fn is_host(&self) -> bool {
        matches!(self, Self::Cpu)
    }

    /// Chunks of rows that are worth having at once: one a thread, or all rows in one launch.
    #[must_use]
    pub fn parallelism(&self) -> usize {
        match self {
            Self::Cpu => rayon::current_num_threads(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => 1,
        }
    }

    /// Whole sequences that are worth a forward together.
    #[must_use]
    pub fn sequences_at_once(&self) -> usize {
        match self {
            Self::Cpu => rayon::current_num_threads(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => 32,
        }
    }

    /// Rows whose logits exist at once, a thread.
    #[must_use]
    pub fn logit_rows(&self) -> usize {
        match self {
            Self::Cpu => CPU_LOGIT_ROWS,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => GPU_LOGIT_ROWS,
        }
    }

    /// Bytes that nobody has taken; `None` on the host, whose memory is nobody's alone.
    #[must_use]
    pub fn free_memory(&self) -> Option<u64> {
        match self {
            Self::Cpu => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => {
                gpu.trim();
                Some(gpu.memory().0)
            }
        }
    }

    /// The most memory that is added while `work` runs; `None`, without running it, on the host,
    /// whose memory is nobody's alone.
    #[must_use]
    pub fn fullest(&self, work: impl FnOnce()) -> Option<MemoryUse> {
        match self {
            Self::Cpu => {
                drop(work);
                None
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => {
                let before = gpu.watch_memory();
                work();
                Some(gpu.memory_use(before))
            }
        }
    }

    /// Runs `body` on every item and gives the results in order: on every core of a CPU, one after
    /// another where a device's stream orders the work.
    pub fn map<T: Send, R: Send>(
        &self,
        items: &mut [T],
        body: impl Fn(usize, &mut T) -> R + Sync,
    ) -> Vec<R> {
        use rayon::prelude::*;
        match self {
            Self::Cpu => items.par_iter_mut().enumerate().map(|(i, item)| body(i, item)).collect(),
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => items.iter_mut().enumerate().map(|(i, item)| body(i, item)).collect(),
        }
    }

    #[must_use]
    pub fn zeros(&self, len: usize) -> Array {
        match self {
            Self::Cpu => Array::Cpu(vec![0.0; len]),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => Array::Cuda(Floats::zeros(gpu, len)),
        }
    }

    /// The host's values on this device.
    #[must_use]
    pub fn upload(&self, values: Vec<f32>) -> Array {
        match self {
            Self::Cpu => Array::Cpu(values),
            #[cfg(feature = "cuda")]
            Self::Cuda(gpu) => Array::Cuda(Floats::upload(gpu, &values)),
        }
    }
}

impl Array {
    #[must_use]
    pub fn device(&self) -> Device {
        match self {
            Self::Cpu(_) => Device::Cpu,
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => Device::Cuda(Arc::clone(values.gpu())),
        }
    }

    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Cpu(values) => values.len(),
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => values.len(),
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// f32 zeros of the same length on the same device.
    #[must_use]
    pub fn zeros_like(&self) -> Self {
        self.device().zeros(self.len())
    }

    /// The values, on the host.
    #[must_use]
    pub fn to_host(&self) -> Vec<f32> {
        match self {
            Self::Cpu(values) => values.clone(),
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => values.to_host(),
        }
    }

    /// The same where the array is not needed any more.
    #[must_use]
    pub fn into_host(self) -> Vec<f32> {
        match self {
            Self::Cpu(values) => values,
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => values.to_host(),
        }
    }

    /// The values on the host, without a copy where they are there.
    #[must_use]
    pub fn on_host(&self) -> Cow<'_, [f32]> {
        match self {
            Self::Cpu(values) => Cow::Borrowed(values),
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => Cow::Owned(values.to_host()),
        }
    }

    /// Their bytes, little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> Cow<'_, [u8]> {
        match self.on_host() {
            Cow::Borrowed(values) => Cow::Borrowed(bytemuck::cast_slice(values)),
            Cow::Owned(values) => Cow::Owned(bytemuck::cast_slice(&values).to_vec()),
        }
    }

    /// Puts back what [`Self::to_bytes`] gave, which `read` fills.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn restore<E>(&mut self, read: impl FnOnce(&mut [u8]) -> Result<(), E>) -> Result<(), E> {
        match self {
            Self::Cpu(values) => read(bytemuck::cast_slice_mut(values)),
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => {
                let mut host = vec![0.0_f32; values.len()];
                read(bytemuck::cast_slice_mut(&mut host))?;
                *values = Floats::upload(values.gpu(), &host);
                Ok(())
            }
        }
    }

    /// The CPU's values, in the CPU's half of an operation.
    #[must_use]
    pub(super) fn cpu(&self) -> &[f32] {
        match self {
            Self::Cpu(values) => values,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => panic!("{TWO_DEVICES}"),
        }
    }

    pub(super) fn cpu_mut(&mut self) -> &mut Vec<f32> {
        match self {
            Self::Cpu(values) => values,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => panic!("{TWO_DEVICES}"),
        }
    }

    /// The device's values, in the device's half of an operation.
    #[cfg(feature = "cuda")]
    #[must_use]
    pub(super) fn cuda(&self) -> &Floats {
        match self {
            Self::Cuda(values) => values,
            Self::Cpu(_) => panic!("{TWO_DEVICES}"),
        }
    }

    #[cfg(feature = "cuda")]
    pub(super) fn cuda_mut(&mut self) -> &mut Floats {
        match self {
            Self::Cuda(values) => values,
            Self::Cpu(_) => panic!("{TWO_DEVICES}"),
        }
    }

    /// All of it, to write to.
    pub fn slice_mut(&mut self) -> SliceMut<'_> {
        match self {
            Self::Cpu(values) => SliceMut::Cpu(values),
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => SliceMut::Cuda(values.slice_mut()),
        }
    }

    /// Adds `other` element by element.
    pub fn add_assign(&mut self, other: &Self) {
        assert_eq!(self.len(), other.len(), "a sum of unequal lengths");
        match self {
            Self::Cpu(values) => values.iter_mut().zip(other.cpu()).for_each(|(x, y)| *x += y),
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => {
                assert_eq!(values.dtype(), Dtype::F32, "sums are f32");
                super::round::cuda::add_rounded(values, other.cuda());
            }
        }
    }

    /// Rows of `width` floats from `first`, as an array of their own.
    #[must_use]
    pub fn row_range(&self, width: usize, rows: std::ops::Range<usize>) -> Self {
        match self {
            Self::Cpu(values) => Self::Cpu(values[rows.start * width..rows.end * width].to_vec()),
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => Self::Cuda(values.range(rows.start * width..rows.end * width)),
        }
    }

    /// The given rows of `width` floats, side by side.
    #[must_use]
    pub fn gather_rows(&self, width: usize, rows: &[usize]) -> Self {
        match self {
            Self::Cpu(values) => {
                let row = |&row: &usize| &values[row * width..][..width];
                Self::Cpu(rows.iter().flat_map(row).copied().collect())
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => Self::Cuda(cuda::gather_rows(values, width, rows)),
        }
    }

    /// The inverse of [`Self::gather_rows`]: row i of this array becomes row `rows[i]` of one of
    /// `count` rows; the others are zero. No row is named twice.
    #[must_use]
    pub fn scatter_rows(&self, width: usize, rows: &[usize], count: usize) -> Self {
        match self {
            Self::Cpu(values) => {
                let mut out = vec![0.0; count * width];
                for (&row, from) in rows.iter().zip(values.chunks_exact(width)) {
                    out[row * width..][..width].copy_from_slice(from);
                }
                Self::Cpu(out)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => Self::Cuda(cuda::scatter_rows(values, width, rows, count)),
        }
    }

    /// Arrays one after another.
    #[must_use]
    pub fn concat(device: &Device, parts: Vec<Self>) -> Self {
        match device {
            Device::Cpu => {
                let mut parts = parts.into_iter().map(Self::into_host);
                let mut whole = parts.next().unwrap_or_default();
                parts.for_each(|part| whole.extend_from_slice(&part));
                Self::Cpu(whole)
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(_) if parts.len() == 1 => parts.into_iter().next().expect("one part"),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Self::Cuda(Floats::concat(gpu, parts.iter().map(Self::cuda))),
        }
    }
}

/// Arrays come from one device: callers never mix them.
#[cfg(feature = "cuda")]
const TWO_DEVICES: &str = "arrays of two devices in one operation";
