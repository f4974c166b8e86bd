//! Arrays of f32 on a device: what every operation takes and gives.
//!
//! An operation is one function that matches on where its first array lies: the CPU's plain loops,
//! or a launch. Arrays of two devices in one call are a programmer's error.

/// Where arrays live and operations run.
#[derive(Clone, Debug, Default)]
pub enum Device {
    #[default]
    Cpu,
}

/// Consecutive f32 values on one device, row-major.
#[derive(Clone, Debug, PartialEq)]
pub enum Array {
    Cpu(Vec<f32>),
}

/// A part of an [`Array`] to write to: one tensor's gradient in its unit's flat array.
#[derive(Debug)]
pub enum SliceMut<'a> {
    Cpu(&'a mut [f32]),
}

impl Device {
    /// Chunks of rows that are worth having at once: one a thread, or all rows in one launch.
    #[must_use]
    pub fn parallelism(&self) -> usize {
        match self {
            Self::Cpu => rayon::current_num_threads(),
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
        }
    }

    #[must_use]
    pub fn zeros(&self, len: usize) -> Array {
        match self {
            Self::Cpu => Array::Cpu(vec![0.0; len]),
        }
    }

    /// The host's values on this device.
    #[must_use]
    pub fn upload(&self, values: Vec<f32>) -> Array {
        match self {
            Self::Cpu => Array::Cpu(values),
        }
    }
}

impl Array {
    #[must_use]
    pub fn device(&self) -> Device {
        match self {
            Self::Cpu(_) => Device::Cpu,
        }
    }

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

    /// Zeros of the same length on the same device.
    #[must_use]
    pub fn zeros_like(&self) -> Self {
        self.device().zeros(self.len())
    }

    /// The values, on the host.
    #[must_use]
    pub fn to_host(&self) -> Vec<f32> {
        match self {
            Self::Cpu(values) => values.clone(),
        }
    }

    /// The same where the array is not needed any more.
    #[must_use]
    pub fn into_host(self) -> Vec<f32> {
        match self {
            Self::Cpu(values) => values,
        }
    }

    /// The CPU's values, in the CPU's half of an operation.
    #[must_use]
    pub(super) fn cpu(&self) -> &[f32] {
        match self {
            Self::Cpu(values) => values,
        }
    }

    pub(super) fn cpu_mut(&mut self) -> &mut Vec<f32> {
        match self {
            Self::Cpu(values) => values,
        }
    }

    /// All of it, to write to.
    pub fn slice_mut(&mut self) -> SliceMut<'_> {
        match self {
            Self::Cpu(values) => SliceMut::Cpu(values),
        }
    }

    /// Adds `other` element by element.
    pub fn add_assign(&mut self, other: &Self) {
        assert_eq!(self.len(), other.len(), "a sum of unequal lengths");
        match self {
            Self::Cpu(values) => values.iter_mut().zip(other.cpu()).for_each(|(x, y)| *x += y),
        }
    }

    /// Rows of `width` floats from `first`, as an array of their own.
    #[must_use]
    pub fn row_range(&self, width: usize, rows: std::ops::Range<usize>) -> Self {
        match self {
            Self::Cpu(values) => Self::Cpu(values[rows.start * width..rows.end * width].to_vec()),
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
        }
    }
}

impl SliceMut<'_> {
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

    /// The same part, for a shorter time.
    pub fn reborrow(&mut self) -> SliceMut<'_> {
        match self {
            Self::Cpu(values) => SliceMut::Cpu(values),
        }
    }

    pub(super) fn cpu(&mut self) -> &mut [f32] {
        match self {
            Self::Cpu(values) => values,
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
        }
    }

    /// No elements, on the same device: the gradient of a tensor that is not there.
    #[must_use]
    pub fn none(device: &Device) -> Self {
        match device {
            Device::Cpu => Self::Cpu(&mut []),
        }
    }
}
