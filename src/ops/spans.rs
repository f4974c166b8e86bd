//! Which packed rows belong to which sequence.

use std::ops::{Deref, Range};

use super::array::Device;
#[cfg(feature = "cuda")]
use super::cuda;
use super::sheet::Sheet;
use crate::base::Position;

/// The rows of one sequence in a chunk of packed rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub start: usize,
    pub len: usize,
    /// Of the first row, in its sequence.
    pub position: Position,
}

impl Span {
    /// The span's floats in an array of rows `width` floats wide.
    #[must_use]
    pub fn floats(self, width: usize) -> Range<usize> {
        self.start * width..(self.start + self.len) * width
    }

    /// The rows' places in their sequence.
    #[must_use]
    pub fn positions(self) -> Range<usize> {
        self.position.index()..self.position.index() + self.len
    }
}

/// The spans of one chunk.
#[derive(Clone, Debug)]
pub struct Spans {
    list: Vec<Span>,
    /// The same for kernels.
    #[cfg(feature = "cuda")]
    device: cuda::Spans,
}

impl Spans {
    /// Adjacent spans from row 0, in order.
    #[must_use]
    pub fn on(sheet: &mut Sheet, list: Vec<Span>) -> Self {
        #[cfg(not(feature = "cuda"))]
        let _ = sheet;
        let mut end = 0;
        for span in &list {
            assert_eq!(span.start, end, "spans are packed");
            end += span.len;
        }
        Self {
            #[cfg(feature = "cuda")]
            device: {
                let rows = list.iter().map(|span| (span.start, span.len, span.position.index()));
                cuda::Spans::on(sheet, rows)
            },
            list,
        }
    }

    /// The same on a sheet of their own.
    #[must_use]
    pub fn new(device: &Device, list: Vec<Span>) -> Self {
        let mut sheet = Sheet::new(device);
        let spans = Self::on(&mut sheet, list);
        sheet.send(None);
        spans
    }

    /// As kernels look them up.
    #[cfg(feature = "cuda")]
    pub(super) fn cuda(&self) -> &cuda::Spans {
        &self.device
    }

    /// Packed rows.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.list.last().map_or(0, |span| span.start + span.len)
    }
}

impl Deref for Spans {
    type Target = [Span];

    fn deref(&self) -> &[Span] {
        &self.list
    }
}
