//! AdamW on the device, bit for bit the CPU's (kernels/adamw.cu).

// A struct that a kernel takes by value is promised to be plain numbers; launches are raw calls.
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut, DeviceRepr};

use super::{Step, CHUNK};
use crate::ops::cuda::{blocks, launch, Gpu, Kernel, OrFail, THREADS};

// SAFETY: plain numbers, laid out as the kernel's struct of the same fields.
unsafe impl DeviceRepr for Step {}

/// Weights and the two moments in place, all as long as the gradient.
pub fn update(
    gpu: &Gpu,
    step: &Step,
    gradient: &CudaView<'_, f32>,
    master: &mut CudaViewMut<'_, f32>,
    (m, v): (&mut CudaViewMut<'_, f32>, &mut CudaViewMut<'_, f32>),
) {
    assert!(
        [master.len(), m.len(), v.len()] == [gradient.len(); 3],
        "weights, moments and gradient must have one length"
    );
    if gradient.is_empty() {
        return;
    }
    let len = gradient.len() as u64;
    launch!(gpu, Kernel::adamw_update, (blocks(len), 1), THREADS, 0;
        step, gradient, &len, master, m, v);
}

/// A gradient's squared L2 norm: the device sums the chunks, the host adds them up.
#[must_use]
pub fn squared_norm(gpu: &Gpu, gradient: &CudaView<'_, f32>) -> f64 {
    if gradient.is_empty() {
        return 0.0;
    }
    let chunks = gradient.len().div_ceil(CHUNK);
    let mut sums = gpu.uninit::<f64>(chunks);
    let (len, chunk, chunks) = (gradient.len() as u64, CHUNK as u64, chunks as u64);
    launch!(gpu, Kernel::adamw_squared_norms, (blocks(chunks), 1), THREADS, 0;
        gradient, &len, &chunk, &chunks, &mut sums);
    gpu.download(&sums.as_view()).iter().fold(0.0, |total, sum| total + sum)
}
