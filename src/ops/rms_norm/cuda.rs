//! RMSNorm on the device, forward and backward bit for bit the CPU's (kernels/rms_norm.cu).

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::{CudaView, CudaViewMut};

use crate::config::Dtype;
use crate::ops::cuda::{dtype_code, launch, Gpu, Kernel, OrFail};

/// Threads of a block, which works on one row.
const THREADS: u32 = 256;
/// Threads of a block of the gradient by w, each of which works on one column.
const COLUMNS: u32 = 32;

/// Rows of `width`, and the width as kernels take it.
fn rows(len: usize, width: usize) -> (u32, u64) {
    let rows = len / width;
    assert_eq!(len, rows * width, "x is not [{rows}, {width}]");
    (u32::try_from(rows).expect("rows are counted in 32 bits"), width as u64)
}

/// y[T, H] = round(round(x · inverse rms) · w).
pub fn forward(
    gpu: &Gpu,
    x_th: &CudaView<'_, f32>,
    w_h: &CudaView<'_, f32>,
    eps: f32,
    dtype: Dtype,
    y_th: &mut CudaViewMut<'_, f32>,
) {
    assert_eq!(x_th.len(), y_th.len(), "x and y differ");
    let (rows, width) = rows(x_th.len(), w_h.len());
    if rows > 0 {
        launch!(gpu, Kernel::rms_norm_forward, (rows, 1), THREADS, 0;
            x_th, w_h, &eps, &dtype_code(dtype), &width, y_th);
    }
}

/// `dx[T, H]` += gradient by x; `dw[H]` += gradient by w, rows ascending.
pub fn backward(
    gpu: &Gpu,
    x_th: &CudaView<'_, f32>,
    w_h: &CudaView<'_, f32>,
    eps: f32,
    dy_th: &CudaView<'_, f32>,
    dx_th: &mut CudaViewMut<'_, f32>,
    dw_h: &mut CudaViewMut<'_, f32>,
) {
    assert!(x_th.len() == dy_th.len() && x_th.len() == dx_th.len(), "x, dy and dx differ");
    assert_eq!(w_h.len(), dw_h.len(), "w and dw differ");
    let (rows, width) = rows(x_th.len(), w_h.len());
    if rows == 0 {
        return;
    }
    let mut scale_t = gpu.uninit::<f32>(rows as usize);
    launch!(gpu, Kernel::rms_norm_backward_x, (rows, 1), THREADS, 0;
        x_th, w_h, &eps, dy_th, &width, dx_th, &mut scale_t);
    let blocks = (width.div_ceil(u64::from(COLUMNS)) as u32, 1);
    launch!(gpu, Kernel::rms_norm_backward_w, blocks, COLUMNS, 0;
        x_th, dy_th, &scale_t, &u64::from(rows), &width, dw_h);
}
