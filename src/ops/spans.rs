//! Which packed rows belong to which sequence.

use std::ops::{Deref, Range};
#[cfg(feature = "cuda")]
use std::sync::Arc;

use super::array::Device;
#[cfg(feature = "cuda")]
use super::cuda;
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

/// The spans of one chunk, uploaded once a forward where the device is not the host.
#[derive(Clone, Debug)]
pub struct Spans {
    list: Vec<Span>,
    /// The same for kernels.
    #[cfg(feature = "cuda")]
    device: Option<Arc<cuda::Spans>>,
}

impl Spans {
    /// Adjacent spans from row 0, in order.
    #[must_use]
    pub fn new(device: &Device, list: Vec<Span>) -> Self {
        let mut end = 0;
        for span in &list {
            assert_eq!(span.start, end, "spans are packed");
            end += span.len;
        }
        match device {
            Device::Cpu => Self {
                list,
                #[cfg(feature = "cuda")]
                device: None,
            },
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => {
                let rows = list.iter().map(|span| (span.start, span.len, span.position.index()));
                let device = Some(Arc::new(cuda::Spans::upload(gpu, rows)));
                Self { list, device }
            }
        }
    }

    /// As kernels look them up.
    #[cfg(feature = "cuda")]
    pub(super) fn cuda(&self) -> &cuda::Spans {
        self.device.as_ref().expect("spans of two devices in one operation")
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
