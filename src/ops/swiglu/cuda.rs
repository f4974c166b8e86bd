//! The gated activation on the device, bit for bit the CPU's (kernels/swiglu.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut};

use crate::config::Dtype;
use crate::ops::cuda::{blocks, dtype_code, launch, Gpu, Kernel, OrFail, THREADS};

/// y = round(silu(gate) · up).
pub fn forward(
    gpu: &Gpu,
    gate: &CudaView<'_, f32>,
    up: &CudaView<'_, f32>,
    dtype: Dtype,
    y: &mut CudaViewMut<'_, f32>,
) {
    assert!(gate.len() == up.len() && gate.len() == y.len(), "gate, up and y differ");
    if gate.is_empty() {
        return;
    }
    let len = gate.len() as u64;
    launch!(gpu, Kernel::swiglu_forward, (blocks(len), 1), THREADS, 0;
        gate, up, &len, &dtype_code(dtype), y);
}

/// From dy: dgate and dup, overwritten.
pub fn backward(
    gpu: &Gpu,
    (gate, up): (&CudaView<'_, f32>, &CudaView<'_, f32>),
    dy: &CudaView<'_, f32>,
    dgate: &mut CudaViewMut<'_, f32>,
    dup: &mut CudaViewMut<'_, f32>,
) {
    assert!(gate.len() == up.len() && gate.len() == dy.len(), "gate, up and dy differ");
    assert!(gate.len() == dgate.len() && gate.len() == dup.len(), "gradients differ");
    if gate.is_empty() {
        return;
    }
    let len = gate.len() as u64;
    launch!(gpu, Kernel::swiglu_backward, (blocks(len), 1), THREADS, 0;
        gate, up, dy, &len, dgate, dup);
}
