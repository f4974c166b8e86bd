//! RMSNorm on the device, forward and backward bit for bit the CPU's (kernels/rms_norm.cu).

// A struct that a kernel takes by value is promised to be plain numbers; launches are raw calls.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DeviceRepr};

use super::BLOCK;
use crate::config::Dtype;
use crate::ops::array::cuda::add_partials;
use crate::ops::cuda::{blocks, launch, Floats, Gpu, Kernel, OrFail, RowsArgument};

/// Threads of a block, which works on one row, of the gradient by x; and at most, of the forward.
const THREADS: u32 = 256;
const MOST_THREADS: usize = 512;
/// Threads of a block of the gradient by w, each of which works on one column.
const COLUMNS: u32 = 32;

/// Rows of `width`, and the width as kernels take it.
fn rows(len: usize, width: usize) -> (u32, u64) {
    let rows = len / width;
    assert_eq!(len, rows * width, "x is not [{rows}, {width}]");
    (u32::try_from(rows).expect("rows are counted in 32 bits"), width as u64)
}

/// y[T, H] = round(round(x · inverse rms) · w). Where there is a `delta` of y's dtype, x =
/// round(x + delta) first, to x's dtype.
#[must_use]
pub fn forward(
    x_th: &Floats,
    delta_th: Option<&Floats>,
    w_h: &Floats,
    eps: f32,
    dtype: Dtype,
) -> Floats {
    let (gpu, width) = (Arc::clone(x_th.gpu()), w_h.len());
    let (rows, _) = rows(x_th.len(), width);
    let y_th = Floats::uninit(&gpu, x_th.len(), dtype);
    if rows == 0 {
        return y_th;
    }
    let (x, y) = (x_th.rows(width), y_th.rows(width));
    let delta = delta_th.map(|delta_th| {
        assert_eq!(delta_th.len(), x_th.len(), "a sum of unequal lengths");
        assert_eq!(delta_th.dtype(), dtype, "what is added is of the norm's dtype");
        delta_th.rows(width)
    });
    let mut each = [Some(&x), delta.as_ref(), Some(&y)].into_iter().flatten();
    let even = each.all(|rows| rows.is_even(width));
    let shared = width as u64 * 4;
    assert!(shared <= gpu.dynamic_shared_bytes(), "rows of {width} do not fit in shared memory");
    gpu.allow_shared(Kernel::rms_norm_forward, shared as u32);
    // A thread for every eight elements of the row, or for every one of a narrow row.
    let threads = width.div_ceil(if even { 8 } else { 1 }).next_multiple_of(32);
    let threads = threads.min(MOST_THREADS) as u32;
    launch!(gpu, Kernel::rms_norm_forward, (rows, 1), threads, shared as u32;
        &x, &delta.unwrap_or(RowsArgument::NONE), &w_h.view(), &eps, &(width as u32),
        &u32::from(even), &y);
    y_th
}

/// `struct Part` of kernels/rms_norm.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PartArgument {
    x: RowsArgument,
    y: RowsArgument,
    w: u64,
    width: u64,
}

// SAFETY: plain numbers, laid out as the kernels' struct of the same fields.
unsafe impl DeviceRepr for PartArgument {}

/// Three narrow norms of the same rows, each rounded to its input's dtype; they share memory.
#[must_use]
pub fn forward_three(x: [&Floats; 3], w: [&Floats; 3], eps: f32) -> [Floats; 3] {
    let (gpu, dtype) = (x[0].gpu(), x[0].dtype());
    let widths = w.map(Floats::len);
    let (rows, _) = rows(x[0].len(), widths[0]);
    let all: usize = widths.iter().sum();
    let y = Floats::uninit(gpu, rows as usize * all, dtype);
    let mut end = 0;
    let y = widths.map(|width| {
        end += width;
        y.columns(all, end - width..end)
    });
    if rows > 0 {
        let part = |i: usize| {
            assert_eq!(x[i].len(), rows as usize * widths[i], "x is not [{rows}, {}]", widths[i]);
            assert_eq!(x[i].dtype(), dtype, "norms of two dtypes");
            let w = w[i].view().device_ptr(gpu.stream()).0;
            let (x, y) = (x[i].rows(widths[i]), y[i].rows(widths[i]));
            PartArgument { x, y, w, width: widths[i] as u64 }
        };
        let rows = u64::from(rows);
        let threads = rows * 3 * crate::ops::simd::LANES as u64;
        launch!(gpu, Kernel::rms_norm_three, (blocks(threads), 1), THREADS, 0;
            &part(0), &part(1), &part(2), &rows, &eps);
    }
    y
}

/// `dx[T, H]` += gradient by x; `dw[H]` += gradient by w, block by block of
/// [`BLOCK`] rows.
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
    let (at_once, count) = (BLOCK as u64, (rows as usize).div_ceil(BLOCK));
    let mut partials = gpu.uninit::<f32>(count * width as usize);
    let grid = (width.div_ceil(u64::from(COLUMNS)) as u32, count as u32);
    launch!(gpu, Kernel::rms_norm_backward_w, grid, COLUMNS, 0;
        x_th, dy_th, &scale_t, &u64::from(rows), &at_once, &width, &mut partials);
    add_partials(gpu, &partials, dw_h);
}
