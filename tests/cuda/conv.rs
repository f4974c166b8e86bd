//! The convolution on the device against its CPU twin, bit for bit.

use std::sync::Arc;

use gapscope::base::BlockId;
use gapscope::config::Dtype;
use gapscope::ops::conv::cuda::{backward, forward, Gradients, Weights};
use gapscope::ops::conv::Conv;
use gapscope::ops::cuda::Gpu;
use gapscope::ops::pages::cuda::{Pages, States};
use gapscope::ops::pages::StateView;
use gapscope::ops::state::StateRow;

use crate::sequences::{
    bytes_of, filled, gpu, on_device, poison, positions, random, ranges, spans, state_rows,
    state_rows_on, whole, Report, DTYPES, LENGTHS,
};

/// Channels and taps: one of each, remainders, more than one tile, no state, Jamba's.
const SHAPES: [(usize, usize); 7] =
    [(1, 1), (1, 4), (5, 2), (16, 3), (130, 1), (129, 4), (5120, 4)];

/// One layer's weights on both sides.
struct Layer {
    channels: usize,
    taps: usize,
    host: Conv,
    taps_kd: Vec<f32>,
    bias_d: Vec<f32>,
}

impl Layer {
    fn new((channels, taps): (usize, usize), dtype: Dtype) -> Self {
        let (w_dk, bias_d) = (random(channels * taps, 2, dtype), random(channels, 3, dtype));
        let tap_major = |i| w_dk[i % channels * taps + i / channels];
        let taps_kd = (0..taps * channels).map(tap_major).collect();
        Self { channels, taps, host: Conv::new(&w_dk, &bias_d), taps_kd, bias_d }
    }

    /// y of one launch over packed rows.
    fn run(
        &self,
        gpu: &Arc<Gpu>,
        x: &[f32],
        (lens, positions): (&[usize], &[usize]),
        states: &States,
        dtype: Dtype,
    ) -> Vec<f32> {
        let (taps, bias) = (gpu.upload(&self.taps_kd), gpu.upload(&self.bias_d));
        let weights = Weights { taps_kd: taps.as_view(), bias_d: bias.as_view() };
        let (x, spans) = (on_device(gpu, x, dtype), spans(gpu, lens, positions));
        poison(gpu, x.len(), dtype);
        forward(&weights, &x, &spans, states).to_host()
    }

    /// A view whose page holds this layer's state and a little more.
    fn view(&self, dtype: Dtype) -> StateView {
        let conv_elements = ((self.taps - 1) * self.channels) as u64;
        let conv_bytes = (conv_elements * dtype.bytes()).next_multiple_of(4);
        StateView {
            buffer: 1,
            conv_dtype: dtype,
            conv_elements,
            ssm_offset: conv_bytes,
            ssm_dtype: Dtype::F32,
            ssm_elements: 2,
            ssm_stride: conv_bytes / 4 + 4,
        }
    }
}

#[test]
fn whole_sequences() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (shape, dtype) in SHAPES.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let layer = Layer::new(shape, dtype);
        for lens in LENGTHS {
            let d = layer.channels;
            let x = random(lens.iter().sum::<usize>() * d, 1, dtype);
            let mut want = vec![0.0; x.len()];
            for rows in ranges(lens) {
                let (floats, mut state) =
                    (rows.start * d..rows.end * d, vec![0.0; layer.host.state_len()]);
                layer.host.forward(&mut state, &x[floats.clone()], dtype, &mut want[floats]);
            }
            let positions = vec![0; lens.len()];
            let got = layer.run(
                &gpu,
                &x,
                (lens, &positions),
                &States::Fresh { count: lens.len() },
                dtype,
            );
            report.same(|| format!("{shape:?} {dtype:?} {lens:?}"), &got, &want);
        }
    }
    report.finish("conv, whole sequences");
}

#[test]
fn states_in_pages() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (shape, dtype) in SHAPES.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let layer = Layer::new(shape, dtype);
        for lens in LENGTHS {
            in_pages(&gpu, &layer, lens, dtype, &mut report);
        }
    }
    report.finish("conv, states in pages");
}

/// Spans start from their block, from zero or from a cached one; every byte of the buffer is
/// compared after.
fn in_pages(gpu: &Arc<Gpu>, layer: &Layer, lens: &[usize], dtype: Dtype, report: &mut Report) {
    let (d, view) = (layer.channels, layer.view(dtype));
    let num_blocks = 2 * lens.len() as u32 + 3;
    let (mut host, device) = filled(gpu, 2, num_blocks, view.page_bytes(), dtype);
    let places = state_rows(lens.len(), num_blocks, 5);
    let x = random(lens.iter().sum::<usize>() * d, 4, dtype);
    let mut want = vec![0.0; x.len()];
    for (place, rows) in places.iter().zip(ranges(lens)) {
        let (floats, mut state) = (rows.start * d..rows.end * d, vec![0.0; layer.host.state_len()]);
        if let Some(block) = place.from {
            view.load_conv(&host, block, &mut state);
        }
        layer.host.forward(&mut state, &x[floats.clone()], dtype, &mut want[floats]);
        view.store_conv(&mut host, place.block, &state);
    }
    let states = States::paged(&device, &view, &state_rows_on(gpu, &places), 14);
    let got = layer.run(gpu, &x, (lens, &positions(&places)), &states, dtype);
    let what = || format!("D {d} K {} {dtype:?} {lens:?}", layer.taps);
    report.same(what, &got, &want);
    let bytes = view.page_bytes() * u64::from(num_blocks);
    for buffer in 0..2 {
        let found = device.download(buffer, 0..bytes);
        let stored = bytes_of(&host, buffer, bytes);
        report.same_bytes(|| format!("{}, buffer {buffer}", what()), &found, &stored);
    }
}

/// A sequence cut anywhere, and one row at a time, gives the bits and the state of one launch.
#[test]
fn any_cut_gives_the_same_bits_and_state() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let (t, dtype) = (9, Dtype::Bf16);
    let layer = Layer::new((129, 4), dtype);
    let (d, view) = (layer.channels, layer.view(dtype));
    let x = random(t * d, 6, dtype);
    let in_pieces = |pieces: &[usize]| {
        let pages = Pages::new(&gpu, 2, 4, view.page_bytes());
        let (mut y, mut from) = (Vec::new(), 0);
        for &len in pieces {
            let block = BlockId::new(2);
            let row = StateRow { block, from: (from > 0).then_some(block) };
            let states = States::paged(&pages, &view, &state_rows_on(&gpu, &[row]), 64);
            let rows = &x[from * d..(from + len) * d];
            y.extend(layer.run(&gpu, rows, (&[len], &[from]), &states, dtype));
            from += len;
        }
        (y, pages.download(1, 0..4 * view.page_bytes()))
    };
    let (y, bytes) = in_pieces(&[t]);
    for pieces in (1..t).map(|cut| vec![cut, t - cut]).chain([vec![1; t]]) {
        let (cut_y, cut_bytes) = in_pieces(&pieces);
        report.same(|| format!("{pieces:?}"), &cut_y, &y);
        report.same_bytes(|| format!("state of {pieces:?}"), &cut_bytes, &bytes);
    }
    report.finish("conv, cuts");
}

#[test]
fn gradients() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (shape, lens) in SHAPES.into_iter().flat_map(|s| LENGTHS.map(|l| (s, l))) {
        let layer = Layer::new(shape, Dtype::F32);
        let d = layer.channels;
        let len = lens.iter().sum::<usize>() * d;
        let (x, dy) = (random(len, 7, Dtype::F32), random(len, 8, Dtype::F32));
        // Weight gradients are added to.
        let mut want =
            [vec![0.0; len], random(d * layer.taps, 9, Dtype::F32), random(d, 10, Dtype::F32)];
        let before = want.clone();
        let [dx, dw, dbias] = &mut want;
        for rows in ranges(lens) {
            let at = rows.start * d..rows.end * d;
            layer.host.backward(&x[at.clone()], &dy[at.clone()], &mut dx[at], dw, dbias);
        }
        for turn in 0..2 {
            let got = backward_on_device(&gpu, &layer, (&x, &dy), lens, &before);
            for (name, (got, want)) in ["dx", "dw", "dbias"].iter().zip(got.iter().zip(&want)) {
                report.same(|| format!("{name} {shape:?} {lens:?}, turn {turn}"), got, want);
            }
        }
    }
    report.finish("conv, gradients");
}

fn backward_on_device(
    gpu: &Arc<Gpu>,
    layer: &Layer,
    (x, dy): (&[f32], &[f32]),
    lens: &[usize],
    before: &[Vec<f32>; 3],
) -> [Vec<f32>; 3] {
    let (taps, bias) = (gpu.upload(&layer.taps_kd), gpu.upload(&layer.bias_d));
    let weights = Weights { taps_kd: taps.as_view(), bias_d: bias.as_view() };
    let (x, dy) = (gpu.upload(x), gpu.upload(dy));
    let [mut dx, mut dw, mut dbias] = before.each_ref().map(|values| gpu.upload(values));
    let mut gradients =
        Gradients { x_td: dx.as_view_mut(), w_dk: dw.as_view_mut(), bias_d: dbias.as_view_mut() };
    let spans = whole(gpu, lens);
    backward(gpu, &weights, &x.as_view(), &spans, &dy.as_view(), &mut gradients);
    [dx, dw, dbias].map(|values| gpu.download(&values.as_view()))
}
