//! Rows by number on the device, bit for bit the CPU's (kernels/rows.cu). Which rows is known on
//! the host, where it is checked.

// Launches are raw calls: each wrapper asserts the lengths that its kernels index.
#![allow(unsafe_code)]

use cudarc::driver::{CudaSlice, CudaView, CudaViewMut};

use crate::ops::cuda::{blocks, launch, Floats, Gpu, Kernel, OrFail, THREADS};

/// The given rows of x, `width` elements each, side by side.
#[must_use]
pub fn gather_rows(x: &Floats, width: usize, rows: &[usize]) -> Floats {
    let gpu = x.gpu();
    let out = Floats::uninit(gpu, rows.len() * width, x.dtype());
    if out.is_empty() {
        return out;
    }
    let rows = upload_rows(gpu, rows, x.len() / width);
    let (len, from, to) = (out.len() as u64, x.rows(width), out.rows(width));
    launch!(gpu, Kernel::gather_rows, (blocks(len), 1), THREADS, 0;
        &from, &rows, &len, &(width as u64), &to);
    out
}

/// The inverse of [`gather_rows`] for f32: row i of x becomes row `rows[i]` of `count` rows; the
/// others are zero. No row is named twice.
#[must_use]
pub fn scatter_rows(x: &Floats, width: usize, rows: &[usize], count: usize) -> Floats {
    let gpu = x.gpu();
    assert_eq!(x.len(), rows.len() * width, "x is not one row a number");
    let mut out = Floats::zeros(gpu, count * width);
    if x.is_empty() {
        return out;
    }
    let rows = upload_rows(gpu, rows, count);
    let (len, width) = (x.len() as u64, width as u64);
    launch!(gpu, Kernel::scatter_rows, (blocks(len), 1), THREADS, 0;
        &x.view(), &rows, &len, &width, &mut out.view_mut());
    out
}

/// Row `rows[i]` of `sums` += `weights[i]` · row i of x. No row is named twice.
pub fn add_weighted_rows(
    gpu: &Gpu,
    sums: &mut CudaViewMut<'_, f32>,
    width: usize,
    (rows, weights): (&[usize], &[f32]),
    x: &Floats,
) {
    assert!(rows.len() == weights.len() && x.len() == rows.len() * width, "rows differ");
    if x.is_empty() {
        return;
    }
    let (rows, weights) = (upload_rows(gpu, rows, sums.len() / width), gpu.upload(weights));
    let (from, len, width) = (x.rows(width), x.len() as u64, width as u64);
    launch!(gpu, Kernel::add_weighted_rows, (blocks(len), 1), THREADS, 0;
        &from, &rows, &weights, &len, &width, sums);
}

/// Row i of x times `weights[i]`.
#[must_use]
pub fn scale_rows(
    gpu: &Gpu,
    x: &CudaView<'_, f32>,
    width: usize,
    weights: &[f32],
) -> CudaSlice<f32> {
    assert_eq!(x.len(), weights.len() * width, "one weight a row");
    let mut out = gpu.uninit(x.len());
    if x.is_empty() {
        return out;
    }
    let weights = gpu.upload(weights);
    let (len, width) = (x.len() as u64, width as u64);
    launch!(gpu, Kernel::scale_rows, (blocks(len), 1), THREADS, 0;
        x, &weights, &len, &width, &mut out);
    out
}

/// Each row's scalar product with the same row of `other`, on the host.
#[must_use]
pub fn row_dots(
    gpu: &Gpu,
    x: &CudaView<'_, f32>,
    width: usize,
    other: &CudaView<'_, f32>,
) -> Vec<f32> {
    assert_eq!(x.len(), other.len(), "products of unequal rows");
    assert_eq!(x.len() % width, 0, "rows are not {width} wide");
    let (rows, width) = ((x.len() / width) as u64, width as u64);
    if rows == 0 {
        return Vec::new();
    }
    let mut dots = gpu.uninit(rows as usize);
    let threads = rows * crate::ops::simd::LANES as u64;
    launch!(gpu, Kernel::row_dots, (blocks(threads), 1), THREADS, 0;
        x, other, &rows, &width, &mut dots);
    gpu.download(&dots.as_view())
}

/// Numbers of rows, each below `count`.
fn upload_rows(gpu: &Gpu, rows: &[usize], count: usize) -> CudaSlice<u32> {
    let number = |&row: &usize| {
        assert!(row < count, "row {row} of {count}");
        u32::try_from(row).expect("a batch has fewer than 2^32 rows")
    };
    gpu.upload(&rows.iter().map(number).collect::<Vec<_>>())
}

/// `out += partials[0]`, then `partials[1]` and so on, each as long as `out`.
pub fn add_partials(gpu: &Gpu, partials: &CudaSlice<f32>, out: &mut CudaViewMut<'_, f32>) {
    let (len, count) = (out.len(), partials.len() / out.len().max(1));
    assert_eq!(partials.len(), count * len, "partial sums are as long as the sum");
    if len > 0 {
        launch!(gpu, Kernel::add_partials, (blocks(len as u64), 1), THREADS, 0;
            partials, &(count as u64), &(len as u64), out);
    }
}
