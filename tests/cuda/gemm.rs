//! Matrix products on the device.
//!
//! f32 is held to the CPU's bits. bf16 sums on tensor cores in an order that the CPU has not, and
//! is held to three things: exact results where every partial sum is an integer that f32 holds,
//! which any wrong element breaks; an error bound on normal numbers; and one set of bits for a
//! row, from our kernel, from the library, and in a batch of any size.

use std::sync::Arc;

use gapscope::base::Stream;
use gapscope::config::{Arithmetic, Dtype};
use gapscope::ops::cuda::Gpu;
use gapscope::ops::gemm::cuda::{self, Weight};
use gapscope::ops::gemm::{self, Into, Linear};
use gapscope::ops::round::slice_to_dtype;

use crate::sequences::{gpu, on_device, poison, random, Report, DTYPES};

/// M, N, K: every remainder of the tiles, odd K, one of each, more than one tile each way, a tall
/// and a wide one, and Jamba's narrow projections.
const SHAPES: [(usize, usize, usize); 14] = [
    (1, 1, 1),
    (1, 16, 64),
    (2, 17, 3),
    (3, 36, 128),
    (7, 128, 4),
    (13, 31, 33),
    (33, 5, 7),
    (63, 65, 17),
    (64, 64, 16),
    (65, 63, 47),
    (130, 129, 40),
    (300, 8, 24),
    (1, 5120, 160),
    (20, 192, 5120),
];

/// N, K of the 3B shape's other products.
const LARGE: [(usize, usize); 4] = [(10_240, 2560), (2560, 5120), (8192, 2560), (2560, 8192)];

/// A weight `[N, K]` on both sides.
struct Case {
    outputs: usize,
    inner: usize,
    dtype: Dtype,
    host: Vec<f32>,
}

impl Case {
    fn normal(outputs: usize, inner: usize, dtype: Dtype) -> Self {
        Self { outputs, inner, dtype, host: random(outputs * inner, 2, dtype) }
    }

    fn bytes(&self) -> Vec<u8> {
        match self.dtype {
            Dtype::F32 => self.host.iter().flat_map(|w| w.to_le_bytes()).collect(),
            Dtype::Bf16 => {
                self.host.iter().flat_map(|w| ((w.to_bits() >> 16) as u16).to_le_bytes()).collect()
            }
        }
    }

    fn on<R>(&self, gpu: &Arc<Gpu>, body: impl FnOnce(&Weight<'_>) -> R) -> R {
        let bytes = gpu.upload(&self.bytes());
        let (outputs, inner, dtype) = (self.outputs, self.inner, self.dtype);
        body(&Weight { bytes_nk: bytes.as_view(), dtype, outputs, inner })
    }
}

/// One forward product; what it does not write is NaN.
fn forward(
    gpu: &Arc<Gpu>,
    weight: &Weight<'_>,
    x: &[f32],
    bias: Option<&[f32]>,
    arithmetic: Arithmetic,
    dtype: Dtype,
) -> Vec<f32> {
    let rows = x.len() / weight.inner;
    let (x, bias) = (on_device(gpu, x, weight.dtype), bias.map(|bias| gpu.upload(bias)));
    let bias = bias.as_ref().map(|bias| bias.as_view());
    poison(gpu, rows * weight.outputs, dtype);
    cuda::forward(&x, weight, bias.as_ref(), arithmetic, dtype).to_host()
}

/// The bare product by our own kernel.
fn defined(gpu: &Arc<Gpu>, weight: &Weight<'_>, x: &[f32]) -> Vec<f32> {
    let x = on_device(gpu, x, Dtype::Bf16);
    poison(gpu, x.len() / weight.inner * weight.outputs, Dtype::F32);
    cuda::forward_defined(&x, weight, Dtype::F32).to_host()
}

#[test]
fn f32_products_are_the_cpus_bits() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (m, n, k) in SHAPES {
        let case = Case::normal(n, k, Dtype::F32);
        let (x, bias) = (random(m * k, 1, Dtype::F32), random(n, 3, Dtype::F32));
        for bias in [None, Some(&bias[..])] {
            let linear = Linear::new(&case.host, bias.unwrap_or_default(), k, false);
            let (want, dtype) = (linear.forward(&x, Dtype::F32), Dtype::F32);
            let invariant = Arithmetic::Invariant;
            let got = case.on(&gpu, |w| forward(&gpu, w, &x, bias, invariant, dtype));
            report.same(
                || format!("[{m}, {k}] x [{n}, {k}], bias {}", bias.is_some()),
                &got,
                &want,
            );
        }
    }
    report.finish("gemm forward f32");
}

/// f32 has the CPU's order; of bf16 integers no order rounds anything.
#[test]
fn gradients_are_the_cpus_bits() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let values = |len, seed, dtype| match dtype {
        Dtype::F32 => random(len, seed, dtype),
        Dtype::Bf16 => integers(len, seed),
    };
    let large = LARGE.map(|(n, k)| (40, n, k));
    for ((m, n, k), dtype) in
        SHAPES.into_iter().chain(large).flat_map(|shape| DTYPES.map(|dtype| (shape, dtype)))
    {
        let (x, dy) = (values(m * k, 1, dtype), values(m * n, 4, dtype));
        let (before_x, before_w) = (values(m * k, 5, dtype), values(n * k, 6, dtype));
        let case = Case { outputs: n, inner: k, dtype, host: values(n * k, 7, dtype) };
        let (x_there, dy_there) = (on_device(&gpu, &x, dtype), on_device(&gpu, &dy, dtype));
        for into in [Into::Add, Into::Overwrite] {
            let mut want = before_x.clone();
            Linear::new(&case.host, &[], k, true).input_gradient(&dy, into, &mut want);
            let mut got = on_device(&gpu, &before_x, Dtype::F32);
            case.on(&gpu, |w| cuda::input_gradient(&dy_there, w, into, &mut got));
            let what = || format!("dx of [{m}, {n}, {k}], {dtype:?}, {into:?}");
            report.same(what, &got.to_host(), &want);
        }
        let mut want = before_w.clone();
        gemm::weight_gradient(&dy, &x, n, &mut want);
        let mut got = gpu.upload(&before_w);
        cuda::weight_gradient(&dy_there, &x_there, n, &mut got.as_view_mut());
        let what = || format!("dw of [{m}, {n}, {k}], {dtype:?}");
        report.same(what, &gpu.download(&got.as_view()), &want);
        if dtype == Dtype::F32 {
            let mut want = before_w[..n].to_vec();
            gemm::bias_gradient(&dy, &mut want);
            let mut got = gpu.upload(&before_w[..n]);
            cuda::bias_gradient(&gpu, &dy_there.view(), &mut got.as_view_mut());
            report.same(|| format!("dbias of [{m}, {n}]"), &gpu.download(&got.as_view()), &want);
        }
    }
    report.finish("gemm gradients");
}

/// Integers up to 8: every partial sum is below 64 K < 2^24, so no order rounds anything.
fn integers(len: usize, seed: u64) -> Vec<f32> {
    let mut stream = Stream::new(seed, "cuda test integers", len as u64);
    (0..len).map(|_| stream.integer(0, 16) as f32 - 8.0).collect()
}

#[test]
fn bf16_products_of_integers_are_exact() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let large = LARGE.map(|(n, k)| (5, n, k));
    for (m, n, k) in SHAPES.into_iter().chain(large) {
        let case = Case { outputs: n, inner: k, dtype: Dtype::Bf16, host: integers(n * k, 1) };
        let (x, bias) = (integers(m * k, 2), integers(n, 3));
        let want = Linear::new(&case.host, &[], k, false).forward(&x, Dtype::F32);
        let rounded = Linear::new(&case.host, &bias, k, false).forward(&x, Dtype::Bf16);
        case.on(&gpu, |w| {
            let what = |which| move || format!("{which} [{m}, {k}] x [{n}, {k}]");
            report.same(what("ours"), &defined(&gpu, w, &x), &want);
            for arithmetic in [Arithmetic::Invariant, Arithmetic::Fast] {
                let got = forward(&gpu, w, &x, None, arithmetic, Dtype::F32);
                report.same(what("either"), &got, &want);
                let got = forward(&gpu, w, &x, Some(&bias), arithmetic, Dtype::Bf16);
                report.same(what("bias, rounded"), &got, &rounded);
            }
        });
    }
    report.finish("gemm forward bf16, integers");
}

/// A step of mma.m16n8k16 aligns 16 exact products and the accumulator to the largest of them and
/// keeps at least 24 bits: each of 17 terms loses less than 2^-23 of the largest, and so does the
/// result's own rounding. The largest of a step is at most S = sum |x w|.
fn bound(steps: usize, size: f64) -> f64 {
    18.0 * steps as f64 * 2_f64.powi(-23) * size
}

#[test]
fn bf16_products_of_normal_numbers_are_within_their_rounding() {
    let Some(gpu) = gpu() else { return };
    let (mut values, mut worst, mut failures) = (0, 0.0_f64, Vec::new());
    let large = LARGE.map(|(n, k)| (3, n, k));
    for (m, n, k) in SHAPES.into_iter().chain(large) {
        let case = Case::normal(n, k, Dtype::Bf16);
        let x = random(m * k, 1, Dtype::Bf16);
        let both = case.on(&gpu, |w| {
            [Arithmetic::Invariant, Arithmetic::Fast]
                .map(|arithmetic| forward(&gpu, w, &x, None, arithmetic, Dtype::F32))
        });
        for (at, y) in both.iter().flat_map(|y| y.iter().enumerate()).step_by(7) {
            let (row, column) = (&x[at / n * k..][..k], &case.host[at % n * k..][..k]);
            let terms = || row.iter().zip(column).map(|(a, b)| f64::from(*a) * f64::from(*b));
            let (exact, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
            let error = (f64::from(*y) - exact).abs();
            (values, worst) = (values + 1, worst.max(error / size.max(1e-30)));
            if error.is_nan() || error > bound(k.div_ceil(16), size) {
                failures.push(format!("[{m}, {n}, {k}] at {at}: {y} for {exact}"));
            }
        }
    }
    eprintln!("gemm forward bf16: {values} values, largest error {worst:e} of sum |x w|");
    assert!(failures.is_empty(), "{} failures, first {:?}", failures.len(), failures.first());
}

/// M in turn: every one where the product is small, and a few where it is not.
fn batches(outputs: usize) -> Vec<usize> {
    if outputs <= 192 {
        return (1..=1024).collect();
    }
    let few = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 255, 256, 257];
    few.into_iter().chain([384, 500, 512, 640, 777, 1000, 1023, 1024]).collect()
}

#[test]
fn a_row_has_one_set_of_bits_in_every_batch_and_from_both_kernels() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let (mut by_library, mut products) = (0, 0);
    // The vocabulary's rows are cut: a part of N changes no output.
    let narrow = [(192, 5120), (5120, 160), (4096, 2560), (36, 128), (17, 24), (31, 33)];
    for (n, k) in narrow.into_iter().chain(LARGE) {
        let case = Case::normal(n, k, Dtype::Bf16);
        let x = random(1024 * k, 1, Dtype::Bf16);
        case.on(&gpu, |w| {
            let want = defined(&gpu, w, &x);
            for m in batches(n) {
                // The last rows, so that a row is not always at the same place.
                let (x, want) = (&x[(1024 - m) * k..], &want[(1024 - m) * n..]);
                let got = forward(&gpu, w, x, None, Arithmetic::Invariant, Dtype::F32);
                report.same(|| format!("[{m}, {k}] x [{n}, {k}]"), &got, want);
                let got = forward(&gpu, w, x, None, Arithmetic::Invariant, Dtype::Bf16);
                let mut rounded = want.to_vec();
                slice_to_dtype(&mut rounded, Dtype::Bf16);
                report.same(|| format!("[{m}, {k}] x [{n}, {k}], bf16"), &got, &rounded);
                let planned = gpu.library().plans_to_use(Arithmetic::Invariant, m, n, k);
                (products, by_library) =
                    (products + 1, by_library + i32::from(planned == Some(true)));
            }
        });
    }
    let (version, distrust) = (gpu.library().version(), gpu.library().distrust());
    eprintln!("cuBLASLt {version}: {by_library} of {products} products, distrust {distrust:?}");
    report.finish("gemm forward bf16, batches");
    let hopper = gpu.stream().context().compute_capability().is_ok_and(|(major, _)| major == 9);
    assert!(!hopper || by_library > 0, "the library was never compared: {distrust:?}");
}
