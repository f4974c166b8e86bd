//! RMSNorm on the device against its CPU twin, bit for bit.

use gapscope::config::Dtype;
use gapscope::ops::rms_norm::{self, cuda};

use crate::sequences::{gpu, random, Report, DTYPES};

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
        let mut got = gpu.upload(&vec![f32::NAN; t * h]);
        let (x, w) = (gpu.upload(&x), gpu.upload(&w));
        let (x, w) = (x.as_view(), w.as_view());
        cuda::forward(&gpu, &x, &w, EPS, dtype, &mut got.as_view_mut());
        report.same(|| format!("[{t}, {h}] {dtype:?}"), &gpu.download(&got.as_view()), &want);
    }
    report.finish("rms_norm forward");
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
