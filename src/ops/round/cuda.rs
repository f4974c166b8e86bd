//! Rounding and rounded sums on the device, bit for bit the CPU's (kernels/round.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut};

use crate::config::Dtype;
use crate::ops::cuda::{blocks, dtype_code, launch, Gpu, Kernel, OrFail, THREADS};

/// Rounds every element in place.
pub fn round_to(gpu: &Gpu, xs: &mut CudaViewMut<'_, f32>, dtype: Dtype) {
    if xs.is_empty() || dtype == Dtype::F32 {
        return;
    }
    let len = xs.len() as u64;
    launch!(gpu, Kernel::round_to, (blocks(len), 1), THREADS, 0; xs, &len, &dtype_code(dtype));
}

/// x = round(x + y).
pub fn add_rounded(gpu: &Gpu, xs: &mut CudaViewMut<'_, f32>, ys: &CudaView<'_, f32>, dtype: Dtype) {
    assert_eq!(xs.len(), ys.len(), "a sum of unequal lengths");
    if xs.is_empty() {
        return;
    }
    let len = xs.len() as u64;
    launch!(gpu, Kernel::add_rounded, (blocks(len), 1), THREADS, 0;
        xs, ys, &len, &dtype_code(dtype));
}

/// x += y.
pub fn add_assign(gpu: &Gpu, xs: &mut CudaViewMut<'_, f32>, ys: &CudaView<'_, f32>) {
    add_rounded(gpu, xs, ys, Dtype::F32);
}
