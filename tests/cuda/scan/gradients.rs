//! The scan's backward on the device against its CPU twin, bit for bit.

use std::sync::Arc;

use gapscope::config::{Arithmetic, Dtype};
use gapscope::ops::cuda::Gpu;
use gapscope::ops::scan::{self, cuda};

use super::{Inputs, Layer, SHAPES};
use crate::sequences::{gpu, on_device, random, ranges, whole, Report, DTYPES, LENGTHS};

#[test]
fn gradients() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (shape, lens) in SHAPES.into_iter().flat_map(|s| LENGTHS.map(|l| (s, l))) {
        let layer = Layer::new(shape);
        for (dtype, state_dtype) in DTYPES.into_iter().flat_map(|d| DTYPES.map(|s| (d, s))) {
            compare_gradients(&gpu, &layer, lens, (dtype, state_dtype), &mut report);
        }
        let fast = Layer { arithmetic: Arithmetic::Fast, ..layer };
        compare_gradients(&gpu, &fast, lens, (Dtype::F32, Dtype::Bf16), &mut report);
    }
    // Rows x states x channels past the scratch: the channels go in several turns.
    let wide = Layer::new((328, 16));
    let dtypes = (Dtype::Bf16, Dtype::F32);
    compare_gradients(&gpu, &wide, &[40_000, 3, 20_000], dtypes, &mut report);
    report.finish("scan, gradients");
}

const NAMES: [&str; 8] = ["c", "dt", "B", "C", "z", "A_log", "D", "dt bias"];

fn compare_gradients(
    gpu: &Arc<Gpu>,
    layer: &Layer,
    lens: &[usize],
    (dtype, state_dtype): (Dtype, Dtype),
    report: &mut Report,
) {
    let (d, n, t) = (layer.d, layer.n, lens.iter().sum::<usize>());
    let (x, dy) = (layer.inputs(t, dtype), random(t * d, 30, Dtype::F32));
    let mut seed = 40;
    // Weight gradients are added to.
    let before = [t * d, t * d, t * n, t * n, t * d, d * n, d, d].map(|len| {
        seed += 1;
        random(len, seed, Dtype::F32)
    });
    let mut want = before.clone();
    let [dc, ddt, db, dc_out, dz, a_log_dn, skip_d, dt_bias_d] = &mut want;
    let mut dweights = scan::WeightGradients { a_log_dn, skip_d, dt_bias_d };
    for rows in ranges(lens) {
        let (wide, narrow) = (layer.wide(&rows), rows.start * n..rows.end * n);
        let mut drows = scan::RowGradients {
            c_td: &mut dc[wide.clone()],
            dt_td: &mut ddt[wide.clone()],
            b_tn: &mut db[narrow.clone()],
            c_tn: &mut dc_out[narrow],
            z_td: &mut dz[wide.clone()],
        };
        let part = layer.rows(&x, rows);
        layer.host.backward(
            part,
            layer.rounded_to(state_dtype),
            &dy[wide],
            &mut drows,
            &mut dweights,
        );
    }
    for turn in 0..2 {
        let got = backward_on_device(gpu, layer, (&x, &dy), lens, (dtype, state_dtype), &before);
        for (name, (got, want)) in NAMES.iter().zip(got.iter().zip(&want)) {
            let what =
                || format!("{name} D {d} N {n} {lens:?} {dtype:?} {state_dtype:?}, turn {turn}");
            report.same(what, got, want);
        }
    }
}

fn backward_on_device(
    gpu: &Arc<Gpu>,
    layer: &Layer,
    (x, dy): (&Inputs, &[f32]),
    lens: &[usize],
    (dtype, state_dtype): (Dtype, Dtype),
    before: &[Vec<f32>; 8],
) -> [Vec<f32>; 8] {
    let weights = [&layer.a_dn, &layer.skip_d, &layer.dt_bias_d].map(|values| gpu.upload(values));
    let [a_dn, skip_d, dt_bias_d] = weights.each_ref().map(|values| values.as_view());
    let arithmetic = layer.arithmetic;
    let weights = cuda::Weights { a_dn, skip_d, dt_bias_d, arithmetic };
    let x = x.each_ref().map(|values| on_device(gpu, values, dtype));
    let [c_td, dt_td, b_tn, c_tn, z_td] = x.each_ref();
    let (inputs, dy) = (cuda::Inputs { c_td, dt_td, b_tn, c_tn, z_td }, gpu.upload(dy));
    let mut d = before.each_ref().map(|values| gpu.upload(values));
    let [c_td, dt_td, b_tn, c_tn, z_td, a_log_dn, skip_d, dt_bias_d] =
        d.each_mut().map(|values| values.as_view_mut());
    let mut drows = cuda::RowGradients { c_td, dt_td, b_tn, c_tn, z_td };
    let mut dweights = cuda::WeightGradients { a_log_dn, skip_d, dt_bias_d };
    let (spans, dy, gradients) = (whole(gpu, lens), dy.as_view(), (&mut drows, &mut dweights));
    cuda::backward(&weights, inputs, &spans, state_dtype, &dy, gradients);
    d.map(|values| gpu.download(&values.as_view()))
}
