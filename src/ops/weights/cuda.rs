//! Weights on the device between f32 and compute-dtype bytes, bit for bit the CPU's
//! (kernels/weights.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut, DevicePtr};

use crate::config::Dtype;
use crate::ops::cuda::{blocks, dtype_code, launch, Floats, Gpu, Kernel, OrFail, THREADS};
use crate::ops::gemm::cuda::ALIGNMENT;

/// Consecutive elements in the compute dtype, as a unit holds them. Clones share the memory.
#[derive(Clone, Debug)]
pub struct Bytes {
    gpu: Arc<Gpu>,
    whole: Arc<CudaSlice<u8>>,
    dtype: Dtype,
    /// In elements.
    range: Range<usize>,
}

impl Bytes {
    #[must_use]
    pub fn upload(gpu: &Arc<Gpu>, bytes: &[u8], dtype: Dtype) -> Self {
        Self::new(gpu, gpu.upload(bytes), dtype)
    }

    /// f32 weights, rounded to the dtype.
    #[must_use]
    pub fn narrowed(master: &Floats, dtype: Dtype) -> Self {
        let gpu = master.gpu();
        let mut bytes = gpu.uninit::<u8>(master.len() * dtype.bytes() as usize);
        narrow(gpu, &master.view(), dtype, &mut bytes.as_view_mut());
        Self::new(gpu, bytes, dtype)
    }

    /// All of what a kernel or a copy has made.
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>, bytes: CudaSlice<u8>, dtype: Dtype) -> Self {
        let range = 0..elements(&bytes.as_view(), dtype);
        Self { gpu: Arc::clone(gpu), whole: Arc::new(bytes), dtype, range }
    }

    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.range.is_empty()
    }

    #[must_use]
    pub fn view(&self) -> CudaView<'_, u8> {
        let width = self.dtype.bytes() as usize;
        self.whole.slice(self.range.start * width..self.range.end * width)
    }

    /// Some of the elements.
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(range.end <= self.len(), "elements {range:?} of {}", self.len());
        let start = self.range.start;
        Self { range: start + range.start..start + range.end, ..self.clone() }
    }

    /// The same elements where cuBLASLt can read them: a copy if their place in the unit is odd.
    #[must_use]
    pub fn aligned(self) -> Self {
        let start = self.view().device_ptr(self.gpu.stream()).0;
        if self.is_empty() || start.is_multiple_of(ALIGNMENT) {
            return self;
        }
        let mut copy = self.gpu.uninit::<u8>(self.view().len());
        self.gpu.stream().memcpy_dtod(&self.view(), &mut copy).or_fail("a copy on the device");
        Self::new(&self.gpu, copy, self.dtype)
    }

    /// A copy in another GPU's memory.
    #[must_use]
    pub fn copied_to(&self, gpu: &Arc<Gpu>) -> Self {
        let mut copy = gpu.uninit::<u8>(self.view().len());
        self.gpu.open_to(gpu);
        // The copy is the other GPU's to make. It waits for what is written here, and what is freed
        // here waits for it.
        gpu.stream().join(self.gpu.stream()).or_fail("waiting for weights on another GPU");
        gpu.stream().memcpy_dtod(&self.view(), &mut copy).or_fail("a copy to another GPU");
        self.gpu.stream().join(gpu.stream()).or_fail("waiting for a copy to another GPU");
        Self::new(gpu, copy, self.dtype)
    }

    /// The elements as f32, in an array of their own.
    #[must_use]
    pub fn widened(&self) -> Floats {
        Floats::new(&self.gpu, widen(&self.gpu, &self.view(), self.dtype))
    }

    /// The bytes, on the host.
    #[must_use]
    pub fn to_host(&self) -> Vec<u8> {
        self.gpu.download(&self.view())
    }
}

/// Elements widened to f32.
#[must_use]
pub fn widen(gpu: &Gpu, bytes: &CudaView<'_, u8>, dtype: Dtype) -> CudaSlice<f32> {
    let mut out = gpu.uninit(elements(bytes, dtype));
    if out.is_empty() {
        return out;
    }
    let len = out.len() as u64;
    launch!(gpu, Kernel::weights_widen, (blocks(len), 1), THREADS, 0;
        bytes, &len, &dtype_code(dtype), &mut out);
    out
}

/// `[R, C]` widened and transposed to `[C, R]`: a convolution's taps, tap-major.
#[must_use]
pub fn widen_transposed(
    gpu: &Gpu,
    bytes_rc: &CudaView<'_, u8>,
    dtype: Dtype,
    rows: usize,
) -> CudaSlice<f32> {
    let len = elements(bytes_rc, dtype);
    let mut out_cr = gpu.uninit(len);
    if len == 0 {
        return out_cr;
    }
    assert_eq!(len % rows, 0, "weights are not [{rows}, C]");
    let (rows, columns) = (rows as u64, (len / rows) as u64);
    launch!(gpu, Kernel::weights_widen_transposed, (blocks(len as u64), 1), THREADS, 0;
        bytes_rc, &rows, &columns, &dtype_code(dtype), &mut out_cr);
    out_cr
}

/// Rounds f32 weights into compute-dtype bytes.
pub fn narrow(
    gpu: &Gpu,
    weights: &CudaView<'_, f32>,
    dtype: Dtype,
    bytes: &mut CudaViewMut<'_, u8>,
) {
    assert_eq!(bytes.len(), weights.len() * dtype.bytes() as usize, "bytes and weights differ");
    if weights.is_empty() {
        return;
    }
    let len = weights.len() as u64;
    launch!(gpu, Kernel::weights_narrow, (blocks(len), 1), THREADS, 0;
        weights, &len, &dtype_code(dtype), bytes);
}

/// -log2(e)·exp(x): log2(e)·A of A_log.
#[must_use]
pub fn decays(gpu: &Gpu, logarithms: &CudaView<'_, f32>) -> CudaSlice<f32> {
    let mut out = gpu.uninit(logarithms.len());
    if out.is_empty() {
        return out;
    }
    let len = out.len() as u64;
    launch!(gpu, Kernel::weights_decays, (blocks(len), 1), THREADS, 0;
        logarithms, &len, &mut out);
    out
}

fn elements(bytes: &CudaView<'_, u8>, dtype: Dtype) -> usize {
    let size = dtype.bytes() as usize;
    assert_eq!(bytes.len() % size, 0, "{} bytes are no elements of {dtype:?}", bytes.len());
    bytes.len() / size
}
