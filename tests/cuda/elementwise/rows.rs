//! Rows by number and by token.

use std::sync::Arc;

use gapscope::base::TokenId;
use gapscope::config::Dtype;
use gapscope::ops::array::{cuda, Device, SliceMut};
use gapscope::ops::cuda::Floats;
use gapscope::ops::embedding::{self, Embedding, Tokens};
use gapscope::ops::weights::Weights;

use super::little_endian;
use crate::sequences::{blocks, gpu, on_device, poison, random, Report, DTYPES};

/// Rows of the array, listed rows, width.
const SHAPES: [(usize, usize, usize); 6] =
    [(1, 0, 3), (1, 1, 1), (5, 3, 15), (40, 17, 16), (33, 33, 37), (700, 512, 2_560)];

/// Different rows of `count`, in no order.
fn listed(count: usize, rows: usize) -> Vec<usize> {
    let found = blocks(rows, count as u32 + 1, 1);
    found.iter().map(|block| block.get() as usize - 1).collect()
}

#[test]
fn rows_by_number() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (count, listed_rows, width) in SHAPES {
        let what = |name: &'static str| move || format!("{name} {listed_rows} of {count}x{width}");
        let rows = listed(count, listed_rows);
        let all = random(count * width, 1, Dtype::F32);
        let (few, other) =
            (random(rows.len() * width, 2, Dtype::F32), random(rows.len() * width, 3, Dtype::F32));
        let weights = random(rows.len(), 4, Dtype::F32);
        let on_host = |values: &[f32]| Device::Cpu.upload(values.to_vec());
        let [few_on, other_on] = [&few, &other].map(|values| Floats::upload(&gpu, values));
        for dtype in DTYPES {
            let all_on = on_device(&gpu, &all, dtype);
            let got = cuda::gather_rows(&all_on, width, &rows);
            let want = on_host(&all_on.to_host()).gather_rows(width, &rows).into_host();
            report.same(what("gather"), &got.to_host(), &want);

            let (mut got, few_on) = (gpu.upload(&all), on_device(&gpu, &few, dtype));
            let places = (&rows[..], &weights[..]);
            cuda::add_weighted_rows(&gpu, &mut got.as_view_mut(), width, places, &few_on);
            let mut want = on_host(&all);
            want.add_weighted_rows(width, &rows, &weights, &on_host(&few_on.to_host()));
            report.same(what("add"), &gpu.download(&got.as_view()), &want.into_host());
        }

        let got = cuda::scatter_rows(&few_on, width, &rows, count);
        let want = on_host(&few).scatter_rows(width, &rows, count).into_host();
        report.same(what("scatter"), &got.to_host(), &want);
        let (few_on, other_on) = (few_on.view(), other_on.view());

        let got = cuda::scale_rows(&gpu, &few_on, width, &weights);
        let want = on_host(&few).scale_rows(width, &weights).into_host();
        report.same(what("scale"), &gpu.download(&got.as_view()), &want);

        let got = cuda::row_dots(&gpu, &few_on, width, &other_on);
        let want = on_host(&few).row_dots(width, &on_host(&other));
        report.same(what("dots"), &got, &want);
    }
    report.finish("rows by number");
}

#[test]
fn rows_by_token() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let shapes = [(1, 0, 4), (1, 3, 1), (7, 40, 15), (100, 33, 257), (3_000, 1_024, 2_560)];
    for ((vocabulary, rows, width), dtype) in
        shapes.into_iter().flat_map(|s| DTYPES.map(|d| (s, d)))
    {
        let what = |name: &'static str| move || format!("{name} {rows} of {vocabulary}x{width}");
        // Some tokens often, some never.
        let token = |row: usize| TokenId::new((row * row % 23 * row % vocabulary) as u32);
        let tokens: Vec<TokenId> = (0..rows).map(token).collect();
        let bytes = little_endian(&random(vocabulary * width, 5, dtype), dtype);
        let weights = Weights::open(&bytes, dtype, &Device::Cpu);
        let host = Embedding::new(weights.whole());
        let device = Device::Cuda(Arc::clone(&gpu));
        let table = Embedding::new(Weights::open(&bytes, dtype, &device).whole());
        let list = Tokens::new(&device, tokens.clone());
        let want = host.forward(width, &list, dtype).into_host();
        for wider in [dtype, Dtype::F32] {
            poison(&gpu, want.len(), wider);
            report.same(what("x"), &table.forward(width, &list, wider).into_host(), &want);
        }

        let dx = random(rows * width, 6, Dtype::F32);
        let mut want = random(vocabulary * width, 7, Dtype::F32);
        let (mut got, dx_on) = (gpu.upload(&want), gpu.upload(&dx));
        let dx_th = Device::Cpu.upload(dx);
        host.backward(width, &tokens, &dx_th, SliceMut::Cpu(&mut want));
        let view = &mut got.as_view_mut();
        embedding::cuda::backward(&gpu, width, &tokens, &dx_on.as_view(), view);
        report.same(what("dtable"), &gpu.download(&got.as_view()), &want);
    }
    report.finish("rows by token");
}
