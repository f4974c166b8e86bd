//! The selective scan on the device against its CPU twin, bit for bit.

mod gradients;

use std::f32::consts::LOG2_E;
use std::ops::Range;
use std::sync::Arc;

use gapscope::base::BlockId;
use gapscope::config::{Arithmetic, Dtype};
use gapscope::ops::cuda::Gpu;
use gapscope::ops::pages::cuda::{Pages, States};
use gapscope::ops::pages::StateView;
use gapscope::ops::scan::{self, cuda, Scan};
use gapscope::ops::state::StateRow;

use crate::sequences::{
    bytes_of, filled, gpu, on_device, poison, positions, random, ranges, spans, state_rows,
    state_rows_on, Report, DTYPES, LENGTHS,
};

/// Channels and states: one of each, below, at and beyond the lane width, several tiles.
const SHAPES: [(usize, usize); 8] =
    [(1, 1), (3, 4), (65, 16), (128, 16), (256, 16), (2, 20), (67, 33), (5, 64)];

/// One layer on both sides.
struct Layer {
    d: usize,
    n: usize,
    host: Scan,
    a_dn: Vec<f32>,
    skip_d: Vec<f32>,
    dt_bias_d: Vec<f32>,
    /// The device's. The CPU's fast scan has another order: what the device does is its invariant
    /// one, of a state that is rounded where [`Self::rounded_to`] says.
    arithmetic: Arithmetic,
}

/// c, dt, B, C, z of packed rows.
type Inputs = [Vec<f32>; 5];

impl Layer {
    fn new((d, n): (usize, usize)) -> Self {
        let (a_log, skip_d) = (random(d * n, 1, Dtype::F32), random(d, 2, Dtype::F32));
        let dt_bias_d = random(d, 3, Dtype::F32);
        let a_dn = a_log.iter().map(|&a| -gapscope::ops::simd::exp(a) * LOG2_E).collect();
        let (host, arithmetic) = (Scan::new(&a_log, &skip_d, &dt_bias_d), Arithmetic::Invariant);
        Self { d, n, host, a_dn, skip_d, dt_bias_d, arithmetic }
    }

    /// What the state is rounded to between two rows, where it is kept in a dtype.
    fn rounded_to(&self, state_dtype: Dtype) -> Dtype {
        match self.arithmetic {
            Arithmetic::Invariant => state_dtype,
            Arithmetic::Fast => Dtype::F32,
        }
    }

    /// Some Δ above 20, where softplus is the identity.
    fn inputs(&self, rows: usize, dtype: Dtype) -> Inputs {
        let (wide, narrow) = (rows * self.d, rows * self.n);
        let mut seed = 10;
        let mut inputs = [wide, wide, narrow, narrow, wide].map(|len| {
            seed += 1;
            random(len, seed, dtype)
        });
        inputs[1].iter_mut().step_by(97).for_each(|dt| *dt = 24.0);
        inputs
    }

    fn rows<'a>(&self, x: &'a Inputs, rows: Range<usize>) -> scan::Rows<'a> {
        let (wide, narrow) = (self.wide(&rows), rows.start * self.n..rows.end * self.n);
        scan::Rows {
            c_td: &x[0][wide.clone()],
            dt_td: &x[1][wide.clone()],
            b_tn: &x[2][narrow.clone()],
            c_tn: &x[3][narrow],
            z_td: &x[4][wide],
        }
    }

    fn wide(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.d..rows.end * self.d
    }

    /// y of one launch over the packed rows `rows` of `x`.
    fn run(
        &self,
        gpu: &Arc<Gpu>,
        x: &Inputs,
        rows: Range<usize>,
        (lens, positions): (&[usize], &[usize]),
        states: &States,
        (dtype, state_dtype): (Dtype, Dtype),
    ) -> Vec<f32> {
        let weights = [&self.a_dn, &self.skip_d, &self.dt_bias_d].map(|values| gpu.upload(values));
        let [a, skip, dt_bias] = weights.each_ref().map(|values| values.as_view());
        let arithmetic = self.arithmetic;
        let weights = cuda::Weights { a_dn: a, skip_d: skip, dt_bias_d: dt_bias, arithmetic };
        let part = self.rows(x, rows.clone());
        let parts = [part.c_td, part.dt_td, part.b_tn, part.c_tn, part.z_td];
        let parts = parts.map(|values| on_device(gpu, values, dtype));
        let [c_td, dt_td, b_tn, c_tn, z_td] = parts.each_ref();
        let inputs = cuda::Inputs { c_td, dt_td, b_tn, c_tn, z_td };
        let spans = spans(gpu, lens, positions);
        poison(gpu, rows.len() * self.d, dtype);
        cuda::forward(&weights, inputs, &spans, states, state_dtype).to_host()
    }

    /// A view whose page holds this layer's state behind a little of something else.
    fn view(&self, dtype: Dtype) -> StateView {
        let ssm_elements = (self.d * self.n) as u64;
        StateView {
            buffer: 1,
            conv_dtype: dtype,
            conv_elements: 2,
            // Where a whole tile of channels is updated at once its states are 16 bytes apart.
            ssm_offset: if self.d.is_multiple_of(128) { 16 } else { 2 * dtype.bytes() },
            ssm_dtype: dtype,
            ssm_elements,
            ssm_stride: if self.d.is_multiple_of(128) {
                ssm_elements + 16
            } else {
                (ssm_elements + 3).next_multiple_of(2)
            },
        }
    }
}

#[test]
fn whole_sequences() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (shape, dtype) in SHAPES.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let layer = Layer::new(shape);
        for (lens, state_dtype) in LENGTHS.into_iter().flat_map(|l| DTYPES.map(|d| (l, d))) {
            let rows = lens.iter().sum::<usize>();
            let x = layer.inputs(rows, dtype);
            let mut want = vec![0.0; rows * layer.d];
            for rows in ranges(lens) {
                let (out, mut h) = (layer.wide(&rows), vec![0.0; layer.host.state_len()]);
                let part = layer.rows(&x, rows);
                layer.host.forward(&mut h, part, dtype, state_dtype, &mut want[out]);
            }
            let (dtypes, positions) = ((dtype, state_dtype), vec![0; lens.len()]);
            let places = (lens, positions.as_slice());
            let got =
                layer.run(&gpu, &x, 0..rows, places, &States::Fresh { count: lens.len() }, dtypes);
            report.same(|| format!("{shape:?} {dtypes:?} {lens:?}"), &got, &want);
        }
    }
    report.finish("scan, whole sequences");
}

#[test]
fn states_in_pages_at_every_width_of_the_product() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (shape, dtype) in SHAPES.into_iter().flat_map(|s| DTYPES.map(|d| (s, d))) {
        let layer = Layer::new(shape);
        let view = layer.view(dtype);
        for lens in LENGTHS {
            for bits in [64, 32, 14, 9] {
                in_pages(&gpu, &layer, &view, (24, bits), lens, dtype, &mut report);
            }
        }
    }
    report.finish("scan, states in pages");
}

/// f32 while a launch lasts, bf16 in the pages.
#[test]
fn fast_states_are_rounded_where_they_are_stored() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (shape, lens) in SHAPES.into_iter().flat_map(|s| LENGTHS.map(|l| (s, l))) {
        let layer = Layer { arithmetic: Arithmetic::Fast, ..Layer::new(shape) };
        for (bits, dtype) in [64, 14].into_iter().flat_map(|b| DTYPES.map(|d| (b, d))) {
            in_pages(&gpu, &layer, &layer.view(dtype), (24, bits), lens, dtype, &mut report);
        }
    }
    report.finish("scan, fast");
}

/// The tiny Jamba's page, and the width at which its blocks from 1,366 on wrap.
#[test]
fn twenty_two_bits_wrap_where_the_cpu_wraps() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let layer = Layer::new((128, 16));
    let view = StateView {
        buffer: 0,
        conv_dtype: Dtype::F32,
        conv_elements: 384,
        ssm_offset: 1536,
        ssm_dtype: Dtype::F32,
        ssm_elements: 2048,
        ssm_stride: 3072,
    };
    for (bits, wrap) in [(22, true), (64, false)] {
        let pool = (1441, bits);
        let wrapped = in_pages(&gpu, &layer, &view, pool, &[1; 300], Dtype::F32, &mut report);
        assert_eq!(wrapped > 0, wrap, "{wrapped} states wrap at {bits} bits");
    }
    report.finish("scan, 22 bits");
}

/// Jamba-3B's channels and states: a decode batch, and a prefill cut into chunks.
#[test]
fn the_shape_of_jamba_3b() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let layer = Layer::new((5120, 16));
    for (dtype, lens) in
        DTYPES.into_iter().flat_map(|d| [&[1; 200][..], &[130, 1, 64]].map(|l| (d, l)))
    {
        in_pages(&gpu, &layer, &layer.view(dtype), (210, 64), lens, dtype, &mut report);
    }
    report.finish("scan, 5120 channels");
}

/// Spans start from their block, from zero or from a cached one; every byte of the buffer is
/// compared after. Returns how many of the states lay at a wrapped address.
fn in_pages(
    gpu: &Arc<Gpu>,
    layer: &Layer,
    view: &StateView,
    (num_blocks, bits): (u32, u32),
    lens: &[usize],
    dtype: Dtype,
    report: &mut Report,
) -> usize {
    let (mut host, device) = filled(gpu, view.buffer + 1, num_blocks, view.page_bytes(), dtype);
    // Some of them have one address where the product is narrow.
    let places = state_rows(lens.len(), num_blocks, 5);
    let rows = lens.iter().sum::<usize>();
    let x = layer.inputs(rows, dtype);
    let mut want = vec![0.0; rows * layer.d];
    let mut states: Vec<Vec<f32>> = vec![vec![0.0; layer.host.state_len()]; lens.len()];
    for (place, h) in places.iter().zip(&mut states) {
        if let Some(block) = place.from {
            view.load_ssm(&host, block, bits, h);
        }
    }
    for ((rows, h), place) in ranges(lens).into_iter().zip(&mut states).zip(&places) {
        let out = layer.wide(&rows);
        let rounded_to = layer.rounded_to(dtype);
        layer.host.forward(h, layer.rows(&x, rows), dtype, rounded_to, &mut want[out]);
        view.store_ssm(&mut host, place.block, bits, h);
    }
    let states = States::paged(&device, view, &state_rows_on(gpu, &places), bits);
    let got = layer.run(gpu, &x, 0..rows, (lens, &positions(&places)), &states, (dtype, dtype));
    let what = || format!("D {} N {} {dtype:?} {bits} bits {lens:?}", layer.d, layer.n);
    report.same(what, &got, &want);
    let bytes = view.page_bytes() * u64::from(num_blocks);
    let found = device.download(view.buffer, 0..bytes);
    report.same_bytes(
        || format!("{}, pages", what()),
        &found,
        &bytes_of(&host, view.buffer, bytes),
    );
    let wraps = |&block: &BlockId| view.ssm_bytes(block, bits) != view.ssm_bytes(block, 64);
    places.iter().map(|place| place.block).filter(wraps).count()
}

/// A sequence cut anywhere, and one row at a time as decode takes it, gives the bits and the state
/// of one launch, in either state dtype.
#[test]
fn any_cut_gives_the_same_bits_and_state() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let t = 9;
    for ((shape, dtype), bits) in
        [((65, 16), Dtype::F32), ((65, 16), Dtype::Bf16), ((3, 20), Dtype::Bf16)]
            .into_iter()
            .flat_map(|case| [64, 32].map(|bits| (case, bits)))
    {
        let layer = Layer::new(shape);
        let (view, x) = (layer.view(dtype), layer.inputs(t, Dtype::Bf16));
        let in_pieces = |pieces: &[usize]| {
            let pages = Pages::new(&gpu, 2, 4, view.page_bytes());
            let (mut y, mut from) = (Vec::new(), 0);
            for &len in pieces {
                let block = BlockId::new(2);
                let row = StateRow { block, from: (from > 0).then_some(block) };
                // A decode's product is whole.
                let bits = if len == 1 { 64 } else { bits };
                let states = States::paged(&pages, &view, &state_rows_on(&gpu, &[row]), bits);
                let (rows, dtypes) = (from..from + len, (Dtype::Bf16, dtype));
                y.extend(layer.run(&gpu, &x, rows, (&[len], &[from]), &states, dtypes));
                from += len;
            }
            (y, pages.download(1, 0..4 * view.page_bytes()))
        };
        let (y, bytes) = in_pieces(&[t]);
        for pieces in (1..t).map(|cut| vec![cut, t - cut]).chain([vec![1; t]]) {
            let (cut_y, cut_bytes) = in_pieces(&pieces);
            let what = || format!("{shape:?} {dtype:?} {bits} bits {pieces:?}");
            report.same(what, &cut_y, &y);
            report.same_bytes(|| format!("state, {}", what()), &cut_bytes, &bytes);
        }
    }
    report.finish("scan, cuts");
}

/// Jamba-3B's page with an f32 state: block 47,663 is the first whose slot x stride is past 2^32.
/// Needs 17.2 GB of pages; a smaller device says so.
#[test]
fn thirty_two_bits_wrap_at_the_true_two_to_the_thirty_second() {
    let Some(gpu) = gpu() else { return };
    let (layer, num_blocks, wrapped) = (Layer::new((5120, 16)), 47_700, BlockId::new(47_663));
    let view = StateView {
        buffer: 0,
        conv_dtype: Dtype::Bf16,
        conv_elements: 15_360,
        ssm_offset: 30_720,
        ssm_dtype: Dtype::F32,
        ssm_elements: 81_920,
        ssm_stride: 90_112,
    };
    if !Pages::fit(&gpu, 1, num_blocks, view.page_bytes()) {
        return crate::too_small("scan, 2^32: the device has less than 17.2 GB free");
    }
    let mut report = Report::default();
    let mut pages = Pages::new(&gpu, 1, num_blocks, view.page_bytes());
    let x = layer.inputs(3, Dtype::Bf16);
    let (mut h, mut want) = (vec![0.0; layer.host.state_len()], vec![0.0; 3 * layer.d]);
    let rows = layer.rows(&x, 0..3);
    layer.host.forward(&mut h, rows, Dtype::Bf16, Dtype::F32, &mut want);
    let state: Vec<u8> = h.iter().flat_map(|h| h.to_le_bytes()).collect();
    assert_eq!(view.ssm_bytes(wrapped, 32).start, 30_720 + 40_960 * 4);
    for (bits, elsewhere) in [(32, 64), (64, 32)] {
        let zeros = vec![0; state.len()];
        for width in [32, 64] {
            pages.upload(0, view.ssm_bytes(wrapped, width).start, &zeros);
        }
        let row = StateRow { block: wrapped, from: None };
        let states = States::paged(&pages, &view, &state_rows_on(&gpu, &[row]), bits);
        let dtypes = (Dtype::Bf16, Dtype::F32);
        let y = layer.run(&gpu, &x, 0..3, (&[3], &[0]), &states, dtypes);
        report.same(|| format!("y, {bits} bits"), &y, &want);
        let [at, other] =
            [bits, elsewhere].map(|bits| pages.download(0, view.ssm_bytes(wrapped, bits)));
        report.same_bytes(|| format!("stored in {bits} bits"), &at, &state);
        report.same_bytes(|| format!("the other place, {bits} bits"), &other, &zeros);
    }
    report.finish("scan, 2^32");
}
