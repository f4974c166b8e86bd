//! What the tests of sequence operations share: packed rows, seeded inputs, states in pages on both
//! sides, and a comparison that counts before it fails.

use std::sync::Arc;

use gapscope::base::{BlockId, Position, Stream};
use gapscope::config::Dtype;
use gapscope::ops::array::Device;
use gapscope::ops::cuda::{Floats, Gpu, Spans};
use gapscope::ops::pages::{cuda, Pages};
use gapscope::ops::round::slice_to_dtype;
use gapscope::ops::sheet::Sheet;
use gapscope::ops::spans::Span;
use gapscope::ops::state::StateRow;

pub const DTYPES: [Dtype; 2] = [Dtype::F32, Dtype::Bf16];

/// Lengths of packed sequences: one row, a decode batch, one long one, a mixture with remainders.
pub const LENGTHS: [&[usize]; 5] =
    [&[1], &[1, 1, 1, 1, 1, 1, 1], &[37], &[5, 1, 17, 2, 1], &[3, 16, 33, 64]];

/// `len` standard normal numbers, rounded to `dtype`.
pub fn random(len: usize, seed: u64, dtype: Dtype) -> Vec<f32> {
    let mut stream = Stream::new(seed, "cuda test", len as u64);
    let mut values: Vec<f32> = (0..len).map(|_| stream.normal() as f32).collect();
    slice_to_dtype(&mut values, dtype);
    values
}

/// Rows of each sequence, packed.
pub fn ranges(lens: &[usize]) -> Vec<std::ops::Range<usize>> {
    let mut start = 0;
    let next = |&len: &usize| {
        start += len;
        start - len..start
    };
    lens.iter().map(next).collect()
}

/// The rows of each sequence from its position on.
pub fn host_spans(lens: &[usize], positions: &[usize]) -> Vec<Span> {
    let rows = ranges(lens).into_iter().zip(positions);
    let span = |(rows, &position): (std::ops::Range<usize>, &usize)| Span {
        start: rows.start,
        len: rows.len(),
        position: Position::new(position as u32),
    };
    rows.map(span).collect()
}

/// The same on the device.
pub fn spans(gpu: &Arc<Gpu>, lens: &[usize], positions: &[usize]) -> Spans {
    let list = host_spans(lens, positions);
    let mut sheet = Sheet::new(&Device::Cuda(Arc::clone(gpu)));
    let rows = list.iter().map(|span| (span.start, span.len, span.position.index()));
    let spans = Spans::on(&mut sheet, rows);
    sheet.send(None);
    spans
}

/// Numbers on the device, in `dtype`, which they are rounded to already.
pub fn on_device(gpu: &Arc<Gpu>, values: &[f32], dtype: Dtype) -> Floats {
    Floats::upload(gpu, values).rounded_to(dtype)
}

/// Leaves memory of as many NaN behind as the next array of `len` elements needs: what an
/// operation does not write is none of its numbers.
pub fn poison(gpu: &Arc<Gpu>, len: usize, dtype: Dtype) {
    drop(on_device(gpu, &vec![f32::NAN; len], dtype));
}

/// Where the states of a batch lie, on the device.
pub fn state_rows_on(gpu: &Arc<Gpu>, rows: &[StateRow]) -> cuda::StateRows {
    let mut sheet = Sheet::new(&Device::Cuda(Arc::clone(gpu)));
    let rows = cuda::StateRows::on(&mut sheet, rows);
    sheet.send(None);
    rows
}

/// On the device, whole sequences.
pub fn whole(gpu: &Arc<Gpu>, lens: &[usize]) -> Spans {
    spans(gpu, lens, &vec![0; lens.len()])
}

/// `count` different blocks of a pool in no order, none of them the null block.
pub fn blocks(count: usize, num_blocks: u32, seed: u64) -> Vec<BlockId> {
    let mut ids: Vec<BlockId> = (1..num_blocks).map(BlockId::new).collect();
    assert!(count <= ids.len(), "{count} of {num_blocks} blocks");
    let mut stream = Stream::new(seed, "cuda test blocks", u64::from(num_blocks));
    stream.shuffle(&mut ids);
    ids.truncate(count);
    ids
}

/// Where the states of `count` rows lie in a pool. Of every three rows the first one starts from
/// the block that it stores to, the second from zero, and the third from a block that nobody stores
/// to, which is some other rows' too: a cached prefix.
pub fn state_rows(count: usize, num_blocks: u32, seed: u64) -> Vec<StateRow> {
    let all = blocks(num_blocks as usize - 1, num_blocks, seed);
    let (own, cached) = all.split_at(count);
    let cached = &cached[..cached.len().min(2)];
    let row = |(i, &block)| {
        let from = [Some(block), None, Some(cached[i % cached.len()])][i % 3];
        StateRow { block, from }
    };
    own.iter().enumerate().map(row).collect()
}

/// As many tokens as each row's state has seen: some, or none.
pub fn positions(rows: &[StateRow]) -> Vec<usize> {
    rows.iter().map(|row| 9 * usize::from(row.from.is_some())).collect()
}

/// The same bytes on both sides: numbers of `dtype` everywhere.
pub fn filled(
    gpu: &Arc<Gpu>,
    buffers: usize,
    num_blocks: u32,
    page_bytes: u64,
    dtype: Dtype,
) -> (Pages, cuda::Pages) {
    let mut host = Pages::new(&Device::Cpu, buffers, num_blocks, page_bytes);
    let mut device = cuda::Pages::new(gpu, buffers, num_blocks, page_bytes);
    let bytes = page_bytes * u64::from(num_blocks);
    for buffer in 0..buffers {
        let values = random((bytes / dtype.bytes()) as usize, 90 + buffer as u64, dtype);
        host.store(buffer, 0, dtype, &values);
        device.upload(buffer, 0, &bytes_of(&host, buffer, bytes));
    }
    (host, device)
}

/// A buffer's first bytes on the host. Loading f32 keeps every bit.
pub fn bytes_of(pages: &Pages, buffer: usize, bytes: u64) -> Vec<u8> {
    let mut words = vec![0.0_f32; (bytes / 4) as usize];
    pages.load(buffer, 0, Dtype::F32, &mut words);
    words.iter().flat_map(|word| word.to_bits().to_le_bytes()).collect()
}

/// Cases compared, and what differed: everything is counted before anything fails.
#[derive(Default)]
pub struct Report {
    cases: usize,
    values: usize,
    unequal: usize,
    largest: f64,
    failures: Vec<String>,
}

impl Report {
    /// Equal bit for bit, any NaN being any other.
    pub fn same(&mut self, what: impl Fn() -> String, got: &[f32], want: &[f32]) {
        self.cases += 1;
        self.values += want.len();
        if got.len() != want.len() {
            let failure = format!("{}: {} values for {}", what(), got.len(), want.len());
            return self.failures.push(failure);
        }
        let differs = |(got, want): (&f32, &f32)| {
            got.to_bits() != want.to_bits() && !(got.is_nan() && want.is_nan())
        };
        let wrong: Vec<usize> = (0..want.len()).filter(|&i| differs((&got[i], &want[i]))).collect();
        let Some(&first) = wrong.first() else { return };
        self.unequal += wrong.len();
        let distance = |&i: &usize| f64::from(got[i] - want[i]).abs();
        self.largest = wrong.iter().map(distance).fold(self.largest, f64::max);
        let (count, len) = (wrong.len(), want.len());
        let (got, want) = (got[first], want[first]);
        self.failures.push(format!("{}[{first}]: {got:e} for {want:e}, {count} of {len}", what()));
    }

    /// Equal bytes.
    pub fn same_bytes(&mut self, what: impl Fn() -> String, got: &[u8], want: &[u8]) {
        self.cases += 1;
        self.values += want.len();
        assert_eq!(got.len(), want.len(), "{}: lengths", what());
        let wrong = || (0..want.len()).filter(|&i| got[i] != want[i]);
        let Some(first) = wrong().next() else { return };
        self.unequal += wrong().count();
        self.failures.push(format!("{}: byte {first} of {} differs first", what(), want.len()));
    }

    /// One line of evidence; panics with the first failures, if any.
    pub fn finish(self, group: &str) {
        let Self { cases, values, unequal, largest, failures } = self;
        eprintln!("{group}: {cases} cases, {values} values, {unequal} differ, by {largest:e}");
        assert!(cases > 0, "{group} compared nothing");
        let shown: Vec<&String> = failures.iter().take(10).collect();
        assert!(failures.is_empty(), "{group}: {} failures, first {shown:#?}", failures.len());
    }
}

/// The device, or the reason why a test has none.
pub fn gpu() -> Option<Arc<Gpu>> {
    crate::gpu()
}
