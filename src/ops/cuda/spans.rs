//! Packed rows of sequences, as kernels look them up.

use cudarc::driver::CudaSlice;

use super::Gpu;

/// Which rows belong to which sequence, and where in it. Rows are fewer than 2^32, as the batches
/// that they come from.
#[derive(Debug)]
pub struct Spans {
    pub count: u32,
    pub tokens: u32,
    /// Rows of the longest span.
    pub longest: u32,
    /// A span's first row.
    pub starts: CudaSlice<u32>,
    pub lens: CudaSlice<u32>,
    /// A row's place in its sequence.
    pub positions: CudaSlice<u32>,
    /// A row's span.
    pub span_of_token: CudaSlice<u32>,
}

impl Spans {
    /// From each span's first row, rows, and the position of its first row, packed and in order.
    #[must_use]
    pub fn upload(gpu: &Gpu, spans: impl Iterator<Item = (usize, usize, usize)>) -> Self {
        let number = |n: usize| u32::try_from(n).expect("a batch has fewer than 2^32 rows");
        let (mut starts, mut lens) = (Vec::new(), Vec::new());
        let (mut positions, mut span_of_token) = (Vec::new(), Vec::new());
        for (span, (start, len, position)) in spans.enumerate() {
            assert_eq!(start, positions.len(), "spans are packed");
            starts.push(number(start));
            lens.push(number(len));
            positions.extend((position..position + len).map(number));
            span_of_token.extend(std::iter::repeat_n(number(span), len));
        }
        Self {
            count: number(starts.len()),
            tokens: number(positions.len()),
            longest: lens.iter().copied().max().unwrap_or(0),
            starts: gpu.upload(&starts),
            lens: gpu.upload(&lens),
            positions: gpu.upload(&positions),
            span_of_token: gpu.upload(&span_of_token),
        }
    }
}
