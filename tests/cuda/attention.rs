//! Attention on the device against its CPU twin, bit for bit.

use std::sync::Arc;

use gapscope::base::BlockId;
use gapscope::config::Dtype;
use gapscope::ops::array::Device;
use gapscope::ops::attention::{self, cuda, Heads};
use gapscope::ops::cuda::Gpu;
use gapscope::ops::pages::cuda::Pages;
use gapscope::ops::pages::{KeyValueView, Tables};
use gapscope::ops::sheet::Sheet;

use crate::sequences::{
    blocks, bytes_of, filled, gpu, host_spans, on_device, poison, random, ranges, spans, whole,
    Report, DTYPES, LENGTHS,
};

/// Query heads, key/value heads, width: plain, grouped, one key head, remainders, Jamba-3B's.
const HEADS: [(usize, usize, usize); 8] = [
    (1, 1, 1),
    (4, 4, 16),
    (4, 2, 16),
    (6, 1, 8),
    (2, 1, 20),
    (3, 3, 33),
    (2, 1, 200),
    (20, 1, 128),
];

fn heads((query, key_value, width): (usize, usize, usize)) -> Heads {
    Heads { query, key_value, width }
}

/// q, k, v and a gradient by the output, of packed rows.
fn inputs(heads: Heads, rows: usize, dtype: Dtype) -> [Vec<f32>; 4] {
    let (wide, narrow) = (rows * heads.query_row(), rows * heads.key_value_row());
    let mut seed = 0;
    [wide, narrow, narrow, wide].map(|len| {
        seed += 1;
        random(len, seed, dtype)
    })
}

#[test]
fn whole_sequences() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (h, dtype) in HEADS.into_iter().flat_map(|h| DTYPES.map(|d| (heads(h), d))) {
        for lens in LENGTHS {
            let [q, k, v, _] = inputs(h, lens.iter().sum(), dtype);
            let mut want = vec![0.0; q.len()];
            for rows in ranges(lens) {
                let wide = rows.start * h.query_row()..rows.end * h.query_row();
                let narrow = rows.start * h.key_value_row()..rows.end * h.key_value_row();
                let (q, k, v) = (&q[wide.clone()], &k[narrow.clone()], &v[narrow]);
                attention::forward(h, q, k, v, dtype, &mut want[wide]);
            }
            let got = own_rows(&gpu, h, [&q, &k, &v], lens, dtype);
            report.same(|| format!("{h:?} {dtype:?} {lens:?}"), &got, &want);
        }
    }
    report.finish("attention, whole sequences");
}

fn own_rows(
    gpu: &Arc<Gpu>,
    heads: Heads,
    qkv: [&[f32]; 3],
    lens: &[usize],
    dtype: Dtype,
) -> Vec<f32> {
    // Columns of one array, as projections leave them.
    let [wide, narrow] = [heads.query_row(), heads.key_value_row()];
    let row = |t: usize| {
        let [q, k, v] = [(qkv[0], wide), (qkv[1], narrow), (qkv[2], narrow)]
            .map(|(values, width)| &values[t * width..(t + 1) * width]);
        [q, k, v].concat()
    };
    let rows: Vec<f32> = (0..qkv[0].len() / wide).flat_map(row).collect();
    let (all, width) = (on_device(gpu, &rows, dtype), wide + 2 * narrow);
    let [q, k, v] =
        [0..wide, wide..wide + narrow, wide + narrow..width].map(|range| all.columns(width, range));
    poison(gpu, qkv[0].len(), dtype);
    let seen = cuda::Seen::Own { k: &k, v: &v };
    cuda::forward(heads, &q, seen, &whole(gpu, lens)).to_host()
}

/// A batch over pages on both sides: some sequences have a past, some begin here.
struct Batch<'a> {
    heads: Heads,
    view: KeyValueView,
    num_blocks: u32,
    lens: &'a [usize],
    positions: Vec<usize>,
    tables: Vec<Vec<BlockId>>,
}

impl<'a> Batch<'a> {
    /// Pasts of several lengths, blocks in no order.
    fn new(heads: Heads, block_tokens: u32, lens: &'a [usize], dtype: Dtype) -> Self {
        let view = KeyValueView { buffer: 1, dtype, block_tokens, row: heads.key_value_row() };
        let pasts = [0, 1, 15, 16, 17, 50];
        let positions: Vec<usize> = (0..lens.len()).map(|span| pasts[(span + 3) % 6]).collect();
        let needs = |(&len, &past): (&usize, &usize)| (len + past).div_ceil(block_tokens as usize);
        let needs: Vec<usize> = lens.iter().zip(&positions).map(needs).collect();
        let num_blocks = needs.iter().sum::<usize>() as u32 + 4;
        let mut free = blocks(num_blocks as usize - 1, num_blocks, 6).into_iter();
        let tables = needs.iter().map(|&count| free.by_ref().take(count).collect()).collect();
        Self { heads, view, num_blocks, lens, positions, tables }
    }

    fn page_bytes(&self) -> u64 {
        2 * u64::from(self.view.block_tokens) * self.view.row as u64 * self.view.dtype.bytes()
    }

    /// Stores the rows' keys and values, then attends; returns the output.
    fn run(&self, gpu: &Arc<Gpu>, pages: &Pages, qkv: [&[f32]; 3], dtype: Dtype) -> Vec<f32> {
        let [q, k, v] = qkv.map(|values| on_device(gpu, values, dtype));
        let (list, spans) =
            (host_spans(self.lens, &self.positions), spans(gpu, self.lens, &self.positions));
        let tables = self.tables.iter().map(Vec::as_slice);
        let mut sheet = Sheet::new(&Device::Cuda(Arc::clone(gpu)));
        let tables = Tables::on(&mut sheet, self.view.block_tokens, &list, tables, 0);
        sheet.send(None);
        let places = cuda::Paged::new(pages, &self.view, &tables);
        cuda::store(&places, &spans, &k, &v);
        poison(gpu, q.len(), dtype);
        cuda::forward(self.heads, &q, cuda::Seen::Paged(&places), &spans).to_host()
    }
}

#[test]
fn contexts_in_pages() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (h, dtype) in HEADS.into_iter().flat_map(|h| DTYPES.map(|d| (heads(h), d))) {
        for (lens, block_tokens) in LENGTHS.into_iter().flat_map(|l| [16, 48].map(|b| (l, b))) {
            in_pages(&gpu, &Batch::new(h, block_tokens, lens, dtype), dtype, &mut report);
        }
    }
    report.finish("attention, contexts in pages");
}

/// Every byte of the buffer is compared after. What lies past each context is NaN on both sides: a
/// key read there would show.
fn in_pages(gpu: &Arc<Gpu>, batch: &Batch<'_>, dtype: Dtype, report: &mut Report) {
    let (h, view) = (batch.heads, &batch.view);
    let (mut host, mut device) = filled(gpu, 2, batch.num_blocks, batch.page_bytes(), dtype);
    let spoil = vec![f32::NAN; view.row * view.block_tokens as usize];
    let rows = || ranges(batch.lens).into_iter().zip(batch.positions.iter().zip(&batch.tables));
    for (rows, (&past, table)) in rows() {
        let used = ((past + rows.len() - 1) % view.block_tokens as usize + 1) as u32;
        let last = *table.last().expect("a sequence has a block");
        for bytes in view.token_bytes(last, used..view.block_tokens) {
            let floats = ((bytes.end - bytes.start) / dtype.bytes()) as usize;
            host.store(view.buffer, bytes.start, dtype, &spoil[..floats]);
        }
    }
    let bytes = batch.page_bytes() * u64::from(batch.num_blocks);
    device.upload(view.buffer, 0, &bytes_of(&host, view.buffer, bytes));

    let [q, k, v, _] = inputs(h, batch.lens.iter().sum(), dtype);
    let mut want = vec![0.0; q.len()];
    for (rows, (&past, table)) in rows() {
        let wide = rows.start * h.query_row()..rows.end * h.query_row();
        let narrow = rows.start * view.row..rows.end * view.row;
        view.store(&mut host, table, past, &k[narrow.clone()], &v[narrow]);
        let seen = (past + rows.len()) * view.row;
        let (mut keys, mut values) = (vec![0.0; seen], vec![0.0; seen]);
        view.gather(&host, table, &mut keys, &mut values);
        attention::forward(h, &q[wide.clone()], &keys, &values, dtype, &mut want[wide]);
    }
    let got = batch.run(gpu, &device, [&q, &k, &v], dtype);
    let what = || format!("{h:?} {dtype:?} {:?}, blocks of {}", batch.lens, view.block_tokens);
    report.same(what, &got, &want);
    let finite = want.iter().all(|v| v.is_finite());
    assert!(finite, "{}: the case itself reads past a context", what());
    for buffer in 0..2 {
        let found = device.download(buffer, 0..bytes);
        let stored = bytes_of(&host, buffer, bytes);
        report.same_bytes(|| format!("{}, buffer {buffer}", what()), &found, &stored);
    }
}

/// A sequence in pages, cut anywhere or one row at a time, is the sequence seen whole.
#[test]
fn any_cut_in_pages_is_the_sequence_seen_whole() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let t = 21;
    for (h, dtype) in [(4, 2, 16), (20, 1, 128)].into_iter().flat_map(|h| DTYPES.map(|d| (h, d))) {
        let h = heads(h);
        let [q, k, v, _] = inputs(h, t, dtype);
        let want = own_rows(&gpu, h, [&q, &k, &v], &[t], dtype);
        for pieces in (1..t).map(|cut| vec![cut, t - cut]).chain([vec![1; t]]) {
            let view = KeyValueView { buffer: 0, dtype, block_tokens: 16, row: h.key_value_row() };
            let table = vec![BlockId::new(2), BlockId::new(1)];
            let page = 32 * view.row as u64 * dtype.bytes();
            let pages = Pages::new(&gpu, 1, 3, page);
            let (mut out, mut from) = (Vec::new(), 0);
            for &len in &pieces {
                let (wide, narrow) = (h.query_row(), h.key_value_row());
                let of = |x: &[f32], row: usize| x[from * row..(from + len) * row].to_vec();
                let (q, k, v) = (of(&q, wide), of(&k, narrow), of(&v, narrow));
                let batch = Batch {
                    heads: h,
                    view,
                    num_blocks: 3,
                    lens: &[len],
                    positions: vec![from],
                    tables: vec![table.clone()],
                };
                out.extend(batch.run(&gpu, &pages, [&q, &k, &v], dtype));
                from += len;
            }
            report.same(|| format!("{h:?} {dtype:?} {pieces:?}"), &out, &want);
        }
    }
    report.finish("attention, cuts");
}

/// A context past what shared memory holds keeps its probabilities in device memory.
#[test]
fn a_context_longer_than_shared_memory() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let (h, dtype, past, len) = (heads((3, 1, 17)), Dtype::Bf16, 69_990, 5);
    assert!(past as u64 * 4 > gpu.dynamic_shared_bytes(), "a device with more shared memory");
    let lens = [len];
    let batch = Batch {
        heads: h,
        view: KeyValueView { buffer: 1, dtype, block_tokens: 16, row: h.key_value_row() },
        num_blocks: 4376,
        lens: &lens,
        positions: vec![past],
        tables: vec![blocks(4375, 4376, 7)],
    };
    in_pages(&gpu, &batch, dtype, &mut report);
    report.finish("attention, a long context");
}

#[test]
fn gradients() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    for (h, lens) in HEADS.into_iter().flat_map(|h| LENGTHS.map(|l| (heads(h), l))) {
        compare_gradients(&gpu, h, lens, &mut report);
    }
    // Rows x heads x keys past the scratch: the rows go in several turns.
    compare_gradients(&gpu, heads((40, 1, 2)), &[700, 1900, 2], &mut report);
    report.finish("attention, gradients");
}

fn compare_gradients(gpu: &Arc<Gpu>, h: Heads, lens: &[usize], report: &mut Report) {
    let [q, k, v, dout] = inputs(h, lens.iter().sum(), Dtype::F32);
    let mut want = [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]];
    let [dq, dk, dv] = &mut want;
    for rows in ranges(lens) {
        let wide = rows.start * h.query_row()..rows.end * h.query_row();
        let narrow = rows.start * h.key_value_row()..rows.end * h.key_value_row();
        let mut gradients = attention::Gradients {
            q: &mut dq[wide.clone()],
            k: &mut dk[narrow.clone()],
            v: &mut dv[narrow.clone()],
        };
        let (q, k, v) = (&q[wide.clone()], &k[narrow.clone()], &v[narrow]);
        attention::backward(h, q, k, v, &dout[wide], &mut gradients);
    }
    for turn in 0..2 {
        let [q, k, v, dout] = [&q, &k, &v, &dout].map(|values| gpu.upload(values));
        let rows = cuda::Rows { q: q.as_view(), k: k.as_view(), v: v.as_view() };
        let [mut dq, mut dk, mut dv] =
            want.each_ref().map(|values| gpu.upload(&vec![f32::NAN; values.len()]));
        let mut gradients =
            cuda::Gradients { q: dq.as_view_mut(), k: dk.as_view_mut(), v: dv.as_view_mut() };
        let (spans, dout) = (whole(gpu, lens), dout.as_view());
        cuda::backward(gpu, h, &rows, &spans, &dout, &mut gradients);
        let got = [dq, dk, dv].map(|values| gpu.download(&values.as_view()));
        for (name, (got, want)) in ["dq", "dk", "dv"].iter().zip(got.iter().zip(&want)) {
            report.same(|| format!("{name} {h:?} {lens:?}, turn {turn}"), got, want);
        }
    }
}
