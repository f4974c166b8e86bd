//! Packed rows of sequences, as kernels look them up.

use crate::ops::sheet::{Numbers, Sheet};

/// Which rows belong to which sequence, and where in it. Rows are fewer than 2^32, as the batches
/// that they come from.
#[derive(Clone, Debug)]
pub struct Spans {
    pub count: u32,
    pub tokens: u32,
    /// Rows of the longest span.
    pub longest: u32,
    /// A span's first row.
    pub starts: Numbers,
    pub lens: Numbers,
    /// A row's place in its sequence.
    pub positions: Numbers,
    /// A row's span.
    pub span_of_token: Numbers,
}

impl Spans {
    /// From each span's first row, rows, and the position of its first row, packed and in order.
    #[must_use]
    pub fn on(sheet: &mut Sheet, spans: impl Iterator<Item = (usize, usize, usize)>) -> Self {
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
            starts: sheet.list(starts.into_iter()),
            lens: sheet.list(lens.into_iter()),
            positions: sheet.list(positions.into_iter()),
            span_of_token: sheet.list(span_of_token.into_iter()),
        }
    }
}
