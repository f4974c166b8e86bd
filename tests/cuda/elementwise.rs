//! Operations element by element, rows by number, weights and AdamW on the device against their CPU
//! halves, bit for bit.

mod fingerprints;
mod rows;

use std::f32::consts::LOG2_E;

use gapscope::config::Dtype;
use gapscope::ops::adamw::{self, Step, CHUNK};
use gapscope::ops::rope::{self, Rope};
use gapscope::ops::{round, simd, swiglu, weights};

use crate::sequences::{gpu, on_device, poison, random, Report, DTYPES};

/// One element, a block of threads and its neighbours, several blocks.
const LENGTHS: [usize; 7] = [0, 1, 255, 256, 257, 5_003, 70_000];

/// Numbers that a rounding, a clamp or a comparison can get wrong.
const SPECIALS: [f32; 16] = [
    0.0,
    -0.0,
    1.0,
    f32::MAX,
    f32::MIN,
    f32::MIN_POSITIVE,
    1e-45,
    -1e-40,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    88.9,
    -104.5,
    20.0,
    // Ties of bf16: to even, up and down.
    f32::from_bits(0x3f80_8000),
    f32::from_bits(0x3f81_8000),
];

/// Wide random numbers behind the special ones.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut values = random(len, seed, Dtype::F32);
    for (i, value) in values.iter_mut().enumerate() {
        *value *= [1.0, 0.01, 30.0][i % 3];
    }
    let shift = seed as usize;
    for (i, value) in values.iter_mut().take(3 * SPECIALS.len()).enumerate() {
        *value = SPECIALS[(i * (1 + shift % 5) + shift) % SPECIALS.len()];
    }
    values
}

fn little_endian(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect(),
    }
}

#[test]
fn roundings_and_sums() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (len, dtype) in LENGTHS.into_iter().flat_map(|len| DTYPES.map(|dtype| (len, dtype))) {
        let (x, y) = (numbers(len, 1), numbers(len, 2));
        let what = |name: &'static str| move || format!("{name}, {len} of {dtype:?}");
        let rounded = |values: &[f32]| {
            let mut rounded = values.to_vec();
            round::slice_to_dtype(&mut rounded, dtype);
            rounded
        };
        report.same(what("round"), &on_device(&gpu, &x, dtype).to_host(), &rounded(&x));

        // A stream of one dtype, and what is added to it of either.
        for other in DTYPES {
            let y = on_device(&gpu, &y, other);
            let sum = |(x, y): (&f32, &f32)| round::to_dtype(x + y, dtype);
            let want: Vec<f32> = rounded(&x).iter().zip(&y.to_host()).map(sum).collect();
            let mut got = on_device(&gpu, &x, dtype);
            round::cuda::add_rounded(&mut got, &y);
            report.same(what("add"), &got.to_host(), &want);
        }
    }
    report.finish("roundings and sums");
}

#[test]
fn gated_activation() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (len, dtype) in LENGTHS.into_iter().flat_map(|len| DTYPES.map(|dtype| (len, dtype))) {
        let [gate, up, dy] = [3, 4, 5].map(|seed| {
            let mut values = numbers(len, seed);
            round::slice_to_dtype(&mut values, dtype);
            values
        });
        let mut want = gate.clone();
        swiglu::forward(&mut want, &up, dtype);
        let [mut want_gate, mut want_up] = [(); 2].map(|()| vec![0.0; len]);
        swiglu::backward(&gate, &up, &dy, &mut want_gate, &mut want_up);

        let [narrow_gate, narrow_up] = [&gate, &up].map(|values| on_device(&gpu, values, dtype));
        poison(&gpu, len, dtype);
        let y = swiglu::cuda::forward(&narrow_gate, &narrow_up).to_host();
        report.same(|| format!("y, {len} of {dtype:?}"), &y, &want);
        let [gate, up, dy] = [gate, up, dy].map(|values| gpu.upload(&values));
        let [mut dgate, mut dup] = [(); 2].map(|()| gpu.upload(&vec![f32::NAN; len]));
        let (gate, up) = (gate.as_view(), up.as_view());
        let (dgate_view, dup_view) = (&mut dgate.as_view_mut(), &mut dup.as_view_mut());
        swiglu::cuda::backward(&gpu, (&gate, &up), &dy.as_view(), dgate_view, dup_view);
        for (name, got, want) in [("dgate", dgate, want_gate), ("dup", dup, want_up)] {
            let got = gpu.download(&got.as_view());
            report.same(|| format!("{name}, {len} of {dtype:?}"), &got, &want);
        }
    }
    report.finish("gated activation");
}

#[test]
fn rotary_positions() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let shapes = [(0, 1, 2), (1, 1, 2), (3, 2, 6), (7, 5, 16), (129, 20, 128)];
    for ((rows, heads, width), dtype) in shapes.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let rope = Rope::new(10_000.0, width, None);
        let turns = rope.turns((0..rows).map(|row| 11 * row % 300), dtype);
        let turns_on = rope::cuda::Turns::upload(&gpu, &turns, width);
        let x = random(rows * heads * width, 6, dtype);
        let (mut want, mut want_dx) = (x.clone(), x.clone());
        rope.forward(&turns, &mut want, dtype);
        rope.backward(&turns, &mut want_dx);
        let (mut y, mut dx) = (on_device(&gpu, &x, dtype), gpu.upload(&x));
        rope::cuda::forward(&turns_on, &mut y);
        rope::cuda::backward(&gpu, &turns_on, &mut dx.as_view_mut());
        let what = |name: &'static str| move || format!("{name} [{rows}, {heads}, {width}]");
        report.same(what("x"), &y.to_host(), &want);
        report.same(what("dx"), &gpu.download(&dx.as_view()), &want_dx);
    }
    report.finish("rotary positions");
}

#[test]
fn weights_both_ways() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (len, dtype) in LENGTHS.into_iter().flat_map(|len| DTYPES.map(|dtype| (len, dtype))) {
        let master = numbers(len, 7);
        let bytes = little_endian(&master, dtype);
        let what = |name: &'static str| move || format!("{name}, {len} of {dtype:?}");
        let mut got = gpu.upload(&vec![0_u8; bytes.len()]);
        let master_on = gpu.upload(&master);
        weights::cuda::narrow(&gpu, &master_on.as_view(), dtype, &mut got.as_view_mut());
        report.same_bytes(what("narrow"), &gpu.download(&got.as_view()), &bytes);

        let want = weights::widen(&bytes, dtype);
        let got = weights::cuda::widen(&gpu, &got.as_view(), dtype);
        report.same(what("widen"), &gpu.download(&got.as_view()), &want);

        let got = weights::cuda::decays(&gpu, &master_on.as_view());
        let want: Vec<f32> = master.iter().map(|&x| -simd::exp(x) * LOG2_E).collect();
        report.same(what("decays"), &gpu.download(&got.as_view()), &want);
    }
    for ((rows, columns), dtype) in
        [(1, 1), (5, 4), (4, 5), (5_120, 4)].into_iter().flat_map(|s| DTYPES.map(|d| (s, d)))
    {
        let flat = random(rows * columns, 8, dtype);
        let bytes = gpu.upload(&little_endian(&flat, dtype));
        let got = weights::cuda::widen_transposed(&gpu, &bytes.as_view(), dtype, rows);
        let at = |i: usize| flat[i % rows * columns + i / rows];
        let want: Vec<f32> = (0..flat.len()).map(at).collect();
        report.same(|| format!("[{rows}, {columns}]"), &gpu.download(&got.as_view()), &want);
    }
    report.finish("weights both ways");
}

#[test]
fn updates_and_norms() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for len in LENGTHS.into_iter().chain([CHUNK - 1, CHUNK, CHUNK + 1, 300 * CHUNK + 17]) {
        let mut host = [9, 10, 11].map(|seed| random(len, seed, Dtype::F32));
        // A second moment is a square.
        host[2].iter_mut().for_each(|v| *v *= *v);
        let mut device = host.each_ref().map(|values| gpu.upload(values));
        for turn in 1..=3_u64 {
            let gradient = random(len, 20 + turn, Dtype::F32);
            let step = Step {
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                keep: 0.999,
                stride: 1e-3 / (1.0 - 0.9_f64.powf(turn as f64)),
                correction2: (1.0 - 0.95_f64.powf(turn as f64)).sqrt(),
                scale: 0.7,
            };
            let [master, m, v] = &mut host;
            adamw::update(&step, &gradient, master, m, v);
            let norm = adamw::squared_norm(&gradient);
            let gradient = gpu.upload(&gradient);
            let [master, m, v] = device.each_mut().map(|values| values.as_view_mut());
            let (mut master, mut m, mut v) = (master, m, v);
            adamw::cuda::update(&gpu, &step, &gradient.as_view(), &mut master, (&mut m, &mut v));
            let found = adamw::cuda::squared_norm(&gpu, &gradient.as_view());
            let bytes = |norm: f64| norm.to_bits().to_le_bytes();
            report.same_bytes(|| format!("norm of {len}"), &bytes(found), &bytes(norm));
            for (name, (got, want)) in ["w", "m", "v"].iter().zip(device.iter().zip(&host)) {
                let got = gpu.download(&got.as_view());
                report.same(|| format!("{name} of {len}, step {turn}"), &got, want);
            }
        }
    }
    report.finish("updates and norms");
}
