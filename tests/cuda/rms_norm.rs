//! RMSNorm on the device against its CPU twin, bit for bit.

use gapscope::config::Dtype;
use gapscope::ops::cuda::Floats;
use gapscope::ops::rms_norm::{self, cuda};
use gapscope::ops::round;

use crate::sequences::{gpu, on_device, poison, random, Report, DTYPES};

const EPS: f32 = 1e-6;
/// T, H: below, at and beside the lanes and what is staged at once, many rows, Jamba's width.
const SHAPES: [(usize, usize); 11] = [
    (1, 1),
    (2, 4),
    (3, 16),
    (4, 64),
    (2, 37),
    (300, 128),
    (1, 2047),
    (2, 2049),
    (5, 5120),
    (64, 2560),
    (1, 2560),
];

#[test]
fn forward() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for ((t, h), dtype) in SHAPES.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let (x, w) = (random(t * h, 1, dtype), random(h, 2, dtype));
        let mut want = vec![0.0; t * h];
        rms_norm::forward(&x, &w, EPS, dtype, &mut want);
        let (x, w) = (on_device(&gpu, &x, dtype), Floats::upload(&gpu, &w));
        poison(&gpu, t * h, dtype);
        let got = cuda::forward(&x, None, &w, EPS, dtype).to_host();
        report.same(|| format!("[{t}, {h}] {dtype:?}"), &got, &want);
    }
    report.finish("rms_norm forward");
}

/// The residual sum in the same pass, on a stream that is as wide as what is computed, or wider.
#[test]
fn sum_and_norm() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let dtypes = [(Dtype::F32, Dtype::F32), (Dtype::Bf16, Dtype::Bf16), (Dtype::F32, Dtype::Bf16)];
    for ((t, h), (stream, dtype)) in SHAPES.into_iter().flat_map(|s| dtypes.map(|d| (s, d))) {
        let (x, w) = (random(t * h, 1, stream), random(h, 2, dtype));
        let delta = random(t * h, 3, dtype);
        let mut want_x = x.clone();
        let add = |(x, y): (&mut f32, &f32)| *x = round::to_dtype(*x + y, stream);
        want_x.iter_mut().zip(&delta).for_each(add);
        let mut want = vec![0.0; t * h];
        rms_norm::forward(&want_x, &w, EPS, dtype, &mut want);
        let (x, w) = (on_device(&gpu, &x, stream), Floats::upload(&gpu, &w));
        let delta = on_device(&gpu, &delta, dtype);
        poison(&gpu, t * h, dtype);
        let got = cuda::forward(&x, Some(&delta), &w, EPS, dtype).to_host();
        report.same(|| format!("x of [{t}, {h}] {stream:?}"), &x.to_host(), &want_x);
        report.same(|| format!("[{t}, {h}] {stream:?} {dtype:?}"), &got, &want);
    }
    report.finish("rms_norm of a sum");
}

/// Three narrow norms of columns of one array.
#[test]
fn three_at_once() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let shapes = [(1, [1, 1, 1]), (7, [8, 16, 16]), (33, [160, 16, 16]), (300, [5, 37, 16])];
    for ((t, widths), dtype) in shapes.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let all: usize = widths.iter().sum();
        let x = random(t * all, 1, dtype);
        let on = on_device(&gpu, &x, dtype);
        let w = widths.map(|width| random(width, 2 + width as u64, dtype));
        let starts = [0, widths[0], widths[0] + widths[1]];
        let columns = [0, 1, 2].map(|i| on.columns(all, starts[i]..starts[i] + widths[i]));
        let weights = w.each_ref().map(|w| Floats::upload(&gpu, w));
        poison(&gpu, t * all, dtype);
        let got = cuda::forward_three(columns.each_ref(), weights.each_ref(), EPS);
        for i in 0..3 {
            let row = |t: usize| &x[t * all + starts[i]..][..widths[i]];
            let own: Vec<f32> = (0..t).flat_map(row).copied().collect();
            let mut want = vec![0.0; own.len()];
            rms_norm::forward(&own, &w[i], EPS, dtype, &mut want);
            report.same(|| format!("{i} of [{t}, {widths:?}] {dtype:?}"), &got[i].to_host(), &want);
        }
    }
    report.finish("rms_norm, three at once");
}

#[test]
fn backward() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (t, h) in SHAPES {
        let of = |len, seed| random(len, seed, Dtype::F32);
        let (x, w, dy) = (of(t * h, 3), of(h, 4), of(t * h, 5));
        let (mut dx, mut dw) = (of(t * h, 6), of(h, 7));
        let (mut got_dx, mut got_dw) = (gpu.upload(&dx), gpu.upload(&dw));
        rms_norm::backward(&x, &w, EPS, &dy, &mut dx, &mut dw);
        let (x, w, dy) = (gpu.upload(&x), gpu.upload(&w), gpu.upload(&dy));
        let (x, w, dy) = (x.as_view(), w.as_view(), dy.as_view());
        let (mut to_x, mut to_w) = (got_dx.as_view_mut(), got_dw.as_view_mut());
        cuda::backward(&gpu, &x, &w, EPS, &dy, &mut to_x, &mut to_w);
        report.same(|| format!("dx [{t}, {h}]"), &gpu.download(&got_dx.as_view()), &dx);
        report.same(|| format!("dw [{t}, {h}]"), &gpu.download(&got_dw.as_view()), &dw);
    }
    report.finish("rms_norm backward");
}
