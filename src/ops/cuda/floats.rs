//! Numbers on a device, with the device that they are on.

// Memory is untyped bytes, and a struct that a kernel takes by value is promised to be plain
// numbers.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr, DeviceRepr};

use super::{blocks, dtype_code, launch, Gpu, Kernel, Memory, OrFail, THREADS};
use crate::config::Dtype;

/// Numbers in device memory, in the dtype that they were last rounded to: the device's half of
/// `ops::array::Array`. They lie densely, or are the same columns of each row of a wider array,
/// whose memory they share.
#[derive(Debug)]
pub struct Floats {
    gpu: Arc<Gpu>,
    memory: Arc<Memory>,
    dtype: Dtype,
    /// Elements before the first one.
    first: usize,
    len: usize,
    columns: Option<Columns>,
}

#[derive(Clone, Copy, Debug)]
struct Columns {
    width: usize,
    /// Elements from one row to the next.
    pitch: usize,
}

/// A part of an f32 array to write to.
#[derive(Debug)]
pub struct FloatsMut<'a> {
    pub gpu: Arc<Gpu>,
    pub view: CudaViewMut<'a, f32>,
}

/// `struct Rows` of kernels/arrays.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct RowsArgument {
    at: u64,
    pitch: u64,
    dtype: u32,
}

// SAFETY: plain numbers, laid out as the kernels' struct of the same fields.
unsafe impl DeviceRepr for RowsArgument {}

impl RowsArgument {
    /// No rows at all.
    pub(in crate::ops) const NONE: Self = Self { at: 0, pitch: 0, dtype: 0 };

    /// Whether every row begins where a thread can read 16 bytes at once, and is made of such.
    pub(in crate::ops) fn is_even(&self, width: usize) -> bool {
        let eight = |n: u64| n.is_multiple_of(8);
        self.at.is_multiple_of(16) && eight(self.pitch) && eight(width as u64)
    }

    pub(in crate::ops) fn address(&self) -> u64 {
        self.at
    }

    pub(in crate::ops) fn pitch(&self) -> u64 {
        self.pitch
    }
}

/// A copy in memory of its own.
impl Clone for Floats {
    fn clone(&self) -> Self {
        self.range(0..self.len)
    }
}

impl Floats {
    /// Room whose contents are whatever was there, for a kernel that writes all of it.
    #[must_use]
    pub fn uninit(gpu: &Arc<Gpu>, len: usize, dtype: Dtype) -> Self {
        let memory = Arc::new(gpu.memory_for(len as u64 * dtype.bytes()));
        Self { gpu: Arc::clone(gpu), memory, dtype, first: 0, len, columns: None }
    }

    /// f32 values that a kernel has made.
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>, values: CudaSlice<f32>) -> Self {
        let len = values.len();
        // SAFETY: an allocation of f32 is one of four times as many bytes.
        let bytes = unsafe { gpu.stream().upgrade_device_ptr(values.leak(), 4 * len) };
        let memory = Arc::new(Memory::of(bytes));
        Self { gpu: Arc::clone(gpu), memory, dtype: Dtype::F32, first: 0, len, columns: None }
    }

    /// f32 zeros.
    #[must_use]
    pub fn zeros(gpu: &Arc<Gpu>, len: usize) -> Self {
        let mut zeros = Self::uninit(gpu, len, Dtype::F32);
        if len > 0 {
            gpu.stream().memset_zeros(&mut zeros.view_mut()).or_fail("zeroing an array");
        }
        zeros
    }

    #[must_use]
    pub fn upload(gpu: &Arc<Gpu>, values: &[f32]) -> Self {
        let mut array = Self::uninit(gpu, values.len(), Dtype::F32);
        if !values.is_empty() {
            gpu.stream().memcpy_htod(values, &mut array.view_mut()).or_fail("a copy to the device");
        }
        array
    }

    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn bytes(&self, elements: Range<usize>) -> Range<usize> {
        assert!(self.columns.is_none(), "the columns of a wider array lie apart");
        let width = self.dtype.bytes() as usize;
        (self.first + elements.start) * width..(self.first + elements.end) * width
    }

    /// f32 values that lie densely; others are [`Self::widened`] first.
    #[must_use]
    pub fn view(&self) -> CudaView<'_, f32> {
        assert_eq!(self.dtype, Dtype::F32, "an f32 operation on another dtype");
        let bytes = self.memory.slice().slice(self.bytes(0..self.len));
        // SAFETY: any bits are an f32, and memory begins at a multiple of four.
        unsafe { bytes.transmute(self.len) }.expect("as many bytes as the values have")
    }

    /// The same, to write to. Nobody else may hold a part of this memory.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, f32> {
        assert_eq!(self.dtype, Dtype::F32, "an f32 operation on another dtype");
        let (bytes, len) = (self.bytes(0..self.len), self.len);
        let memory = Arc::get_mut(&mut self.memory).expect("an array that is written is nobody's");
        // SAFETY: as above.
        let view = unsafe { memory.slice_mut().transmute_mut::<f32>(bytes.end / 4) };
        let view = view.expect("as many bytes as the values have");
        let (_, view) = split(view, bytes.start / 4);
        split(view, len).0
    }

    /// Where a kernel finds rows of `width`. The launch asserts what else it needs.
    pub(in crate::ops) fn rows(&self, width: usize) -> RowsArgument {
        let pitch = match self.columns {
            None => width,
            Some(columns) => {
                assert_eq!(columns.width, width, "rows of another width");
                columns.pitch
            }
        };
        assert_eq!(self.len % width.max(1), 0, "{} elements are no rows of {width}", self.len);
        let start = self.memory.slice().device_ptr(self.gpu.stream()).0;
        RowsArgument {
            at: start + self.first as u64 * self.dtype.bytes(),
            pitch: pitch as u64,
            dtype: dtype_code(self.dtype),
        }
    }

    /// The columns `range` of rows of `width`, sharing this array's memory.
    #[must_use]
    pub fn columns(&self, width: usize, range: Range<usize>) -> Self {
        assert!(range.end <= width, "columns {range:?} of {width}");
        assert!(self.columns.is_none(), "the columns of columns");
        assert_eq!(self.len % width, 0, "{} elements are no rows of {width}", self.len);
        Self {
            gpu: Arc::clone(&self.gpu),
            memory: Arc::clone(&self.memory),
            dtype: self.dtype,
            first: self.first + range.start,
            len: self.len / width * range.len(),
            columns: Some(Columns { width: range.len(), pitch: width }),
        }
    }

    /// Elements that lie side by side, over and over.
    #[must_use]
    pub fn width(&self) -> usize {
        self.columns.map_or(self.len, |columns| columns.width)
    }

    /// The values as dense f32: these, or a copy.
    #[must_use]
    pub fn widened(&self) -> Cow<'_, Self> {
        if self.dtype == Dtype::F32 && self.columns.is_none() {
            return Cow::Borrowed(self);
        }
        Cow::Owned(self.rounded_to(Dtype::F32))
    }

    /// The values in rows of `width`: these, or a dense copy where they lie in other rows.
    #[must_use]
    pub fn in_rows(&self, width: usize) -> Cow<'_, Self> {
        match self.columns {
            Some(columns) if columns.width != width => Cow::Owned(self.rounded_to(self.dtype)),
            _ => Cow::Borrowed(self),
        }
    }

    /// A dense copy, rounded to `dtype`.
    #[must_use]
    pub fn rounded_to(&self, dtype: Dtype) -> Self {
        let out = Self::uninit(&self.gpu, self.len, dtype);
        if self.is_empty() {
            return out;
        }
        let (len, width) = (self.len as u64, self.width());
        launch!(self.gpu, Kernel::copy_rounded, (blocks(len), 1), THREADS, 0;
            &self.rows(width), &len, &(width as u64), &out.rows(width));
        out
    }

    #[must_use]
    pub fn to_host(&self) -> Vec<f32> {
        self.gpu.download(&self.widened().view())
    }

    /// All of an f32 array, to write to.
    pub fn slice_mut(&mut self) -> FloatsMut<'_> {
        FloatsMut { gpu: Arc::clone(&self.gpu), view: self.view_mut() }
    }

    /// Consecutive values in an array of their own.
    #[must_use]
    pub fn range(&self, range: Range<usize>) -> Self {
        if self.columns.is_some() {
            return self.rounded_to(self.dtype).range(range);
        }
        Self::concat_ranges(&self.gpu, self.dtype, &[(self, range)])
    }

    /// Arrays of one dtype, one after another.
    #[must_use]
    pub fn concat<'a>(gpu: &Arc<Gpu>, parts: impl Iterator<Item = &'a Self>) -> Self {
        let parts: Vec<_> = parts.map(|part| (part, 0..part.len)).collect();
        let dtype = parts.first().map_or(Dtype::F32, |(part, _)| part.dtype);
        Self::concat_ranges(gpu, dtype, &parts)
    }

    fn concat_ranges(gpu: &Arc<Gpu>, dtype: Dtype, parts: &[(&Self, Range<usize>)]) -> Self {
        let len = parts.iter().map(|(_, range)| range.len()).sum();
        let mut whole = Self::uninit(gpu, len, dtype);
        let memory = Arc::get_mut(&mut whole.memory).expect("it was just made");
        let mut start = 0;
        for (part, range) in parts.iter().filter(|(_, range)| !range.is_empty()) {
            assert_eq!(part.dtype, dtype, "arrays of two dtypes side by side");
            let from = part.memory.slice().slice(part.bytes(range.clone()));
            let mut to = memory.slice_mut().slice_mut(start..start + from.len());
            gpu.stream().memcpy_dtod(&from, &mut to).or_fail("a copy on the device");
            start += from.len();
        }
        whole
    }
}

impl<'a> FloatsMut<'a> {
    /// Two disjoint parts.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        let Self { gpu, view } = self;
        let (first, second) = split(view, at);
        (Self { gpu: Arc::clone(&gpu), view: first }, Self { gpu, view: second })
    }

    /// The same part, for a shorter time.
    pub fn reborrow(&mut self) -> FloatsMut<'_> {
        FloatsMut { gpu: Arc::clone(&self.gpu), view: self.view.slice_mut(..) }
    }
}

fn split(
    mut view: CudaViewMut<'_, f32>,
    at: usize,
) -> (CudaViewMut<'_, f32>, CudaViewMut<'_, f32>) {
    let (first, second) = view.split_at_mut(at);
    // SAFETY: `view`, which they borrow from, ends here and lends to nobody else, so the halves may
    // live as long as it would have.
    let [first, second] = [first, second].map(|half| unsafe {
        std::mem::transmute::<CudaViewMut<'_, f32>, CudaViewMut<'_, f32>>(half)
    });
    (first, second)
}
