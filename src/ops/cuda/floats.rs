//! f32 values on a device, with the device that they are on.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};

use super::{Gpu, OrFail};

/// Consecutive f32 values in device memory: the device's half of `ops::array::Array`.
#[derive(Debug)]
pub struct Floats {
    gpu: Arc<Gpu>,
    values: CudaSlice<f32>,
}

/// A part of a [`Floats`] to write to.
#[derive(Debug)]
pub struct FloatsMut<'a> {
    pub gpu: Arc<Gpu>,
    pub view: CudaViewMut<'a, f32>,
}

impl Clone for Floats {
    fn clone(&self) -> Self {
        let mut values = self.gpu.uninit(self.len());
        if !self.is_empty() {
            let stream = self.gpu.stream();
            stream.memcpy_dtod(&self.values, &mut values).or_fail("a copy on the device");
        }
        Self::new(&self.gpu, values)
    }
}

impl Floats {
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>, values: CudaSlice<f32>) -> Self {
        Self { gpu: Arc::clone(gpu), values }
    }

    #[must_use]
    pub fn zeros(gpu: &Arc<Gpu>, len: usize) -> Self {
        Self::new(gpu, gpu.zeros(len))
    }

    /// Room whose contents are whatever was there, for a kernel that writes all of it.
    #[must_use]
    pub fn uninit(gpu: &Arc<Gpu>, len: usize) -> Self {
        Self::new(gpu, gpu.uninit(len))
    }

    #[must_use]
    pub fn upload(gpu: &Arc<Gpu>, values: &[f32]) -> Self {
        Self::new(gpu, gpu.upload(values))
    }

    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.values.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.values.len() == 0
    }

    #[must_use]
    pub fn view(&self) -> CudaView<'_, f32> {
        self.values.as_view()
    }

    pub fn view_mut(&mut self) -> CudaViewMut<'_, f32> {
        self.values.as_view_mut()
    }

    #[must_use]
    pub fn to_host(&self) -> Vec<f32> {
        self.gpu.download(&self.view())
    }

    /// All of it, to write to.
    pub fn slice_mut(&mut self) -> FloatsMut<'_> {
        FloatsMut { gpu: Arc::clone(&self.gpu), view: self.values.as_view_mut() }
    }

    /// Consecutive values in an array of their own.
    #[must_use]
    pub fn range(&self, range: std::ops::Range<usize>) -> Self {
        let mut part = self.gpu.uninit(range.len());
        if !range.is_empty() {
            let from = self.values.slice(range);
            self.gpu.stream().memcpy_dtod(&from, &mut part).or_fail("a copy on the device");
        }
        Self::new(&self.gpu, part)
    }

    /// Arrays one after another.
    #[must_use]
    pub fn concat<'a>(gpu: &Arc<Gpu>, parts: impl Iterator<Item = &'a Self> + Clone) -> Self {
        let mut whole = gpu.uninit(parts.clone().map(Self::len).sum());
        let mut start = 0;
        for part in parts.filter(|part| !part.is_empty()) {
            let mut to = whole.slice_mut(start..start + part.len());
            gpu.stream().memcpy_dtod(&part.values, &mut to).or_fail("a copy on the device");
            start += part.len();
        }
        Self::new(gpu, whole)
    }
}

impl<'a> FloatsMut<'a> {
    /// Two disjoint parts.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        let Self { gpu, mut view } = self;
        let (first, second) = view.split_at_mut(at);
        // SAFETY: `view`, which they borrow from, ends here and lends to nobody else, so the halves
        // may live as long as it would have.
        let [first, second] = [first, second].map(|half| unsafe {
            std::mem::transmute::<CudaViewMut<'_, f32>, CudaViewMut<'a, f32>>(half)
        });
        (Self { gpu: Arc::clone(&gpu), view: first }, Self { gpu, view: second })
    }

    /// The same part, for a shorter time.
    pub fn reborrow(&mut self) -> FloatsMut<'_> {
        FloatsMut { gpu: Arc::clone(&self.gpu), view: self.view.slice_mut(..) }
    }
}
