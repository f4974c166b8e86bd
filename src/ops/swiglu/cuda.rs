//! The gated activation on the device, bit for bit the CPU's (kernels/swiglu.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut};

use crate::ops::cuda::{blocks, launch, Floats, Gpu, Kernel, OrFail, THREADS};

/// y = round(silu(gate) · up), in the inputs' dtype.
#[must_use]
pub fn forward(gate: &Floats, up: &Floats) -> Floats {
    assert_eq!(gate.len(), up.len(), "gate and up differ");
    assert_eq!(gate.dtype(), up.dtype(), "gate and up differ");
    let (gpu, len, width) = (gate.gpu(), gate.len() as u64, gate.width().min(up.width()));
    let y = Floats::uninit(gpu, gate.len(), gate.dtype());
    if gate.is_empty() {
        return y;
    }
    let [gate, up, out] = [gate, up, &y].map(|rows| rows.rows(width));
    let even = [gate, up, out].iter().all(|rows| rows.is_even(width));
    let threads = if even { len / 8 } else { len };
    launch!(gpu, Kernel::swiglu_forward, (blocks(threads), 1), THREADS, 0;
        &gate, &up, &len, &(width as u32), &u32::from(even), &out);
    y
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
