//! Pages in device memory, and what a kernel must know to find a sequence's state in them.

// A struct that a kernel takes by value is promised to be plain numbers; launches are raw calls.
#![allow(unsafe_code)]

mod tables;

pub(in crate::ops) use tables::KeyValueArgument;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaView, DevicePtr, DeviceRepr};

use super::StateView;
use crate::base::BlockId;
use crate::config::Dtype;
use crate::ops::cuda::{blocks, dtype_code, launch, Gpu, Kernel, OrFail, Spans, THREADS};
use crate::ops::sheet::{Numbers, Sheet};
use crate::ops::state::StateRow;

/// Zeroed in pieces, so that no single command is as long as a pool.
const ZEROED_AT_ONCE: usize = 1 << 30;

/// `buffers` raw byte buffers of `num_blocks` pages each, as the CPU's [`super::Pages`].
pub struct Pages {
    gpu: Arc<Gpu>,
    /// What points into one keeps it alive.
    buffers: Vec<Arc<CudaSlice<u8>>>,
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: Vec<usize> = self.buffers.iter().map(|buffer| buffer.len()).collect();
        f.debug_struct("Pages").field("bytes", &bytes).finish()
    }
}

impl Pages {
    /// Zeros, as `torch.zeros` gives vLLM at start.
    #[must_use]
    pub fn new(gpu: &Arc<Gpu>, buffers: usize, num_blocks: u32, page_bytes: u64) -> Self {
        let bytes = page_bytes * u64::from(num_blocks);
        let zeroed = |_| {
            let mut buffer = gpu.uninit::<u8>(bytes as usize);
            for start in (0..buffer.len()).step_by(ZEROED_AT_ONCE) {
                let end = buffer.len().min(start + ZEROED_AT_ONCE);
                let mut piece = buffer.slice_mut(start..end);
                gpu.stream().memset_zeros(&mut piece).or_fail("zero the pool");
            }
            Arc::new(buffer)
        };
        Self { gpu: Arc::clone(gpu), buffers: (0..buffers).map(zeroed).collect() }
    }

    /// Whether the device has that much memory free.
    #[must_use]
    pub fn fit(gpu: &Gpu, buffers: usize, num_blocks: u32, page_bytes: u64) -> bool {
        gpu.trim();
        let asked = u128::from(page_bytes) * u128::from(num_blocks) * buffers as u128;
        asked <= u128::from(gpu.memory().0)
    }

    #[must_use]
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.gpu
    }

    /// Bytes of all buffers.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.buffer_bytes() * self.buffers.len() as u64
    }

    /// Each buffer's bytes as they are now.
    #[must_use]
    pub fn to_host(&self) -> Vec<Vec<u8>> {
        self.buffers.iter().map(|buffer| self.gpu.download(&buffer.as_view())).collect()
    }

    /// Puts back what [`Self::to_host`] gave: `read` fills each buffer in turn.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn restore<E>(
        &mut self,
        mut read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut bytes = vec![0; self.buffer_bytes() as usize];
        for (i, buffer) in self.buffers.iter_mut().enumerate() {
            read(i, &mut bytes)?;
            let buffer = Arc::get_mut(buffer).expect("no launch is being put together");
            self.gpu.stream().memcpy_htod(&bytes, buffer).or_fail("upload pages");
            // The bytes are the next buffer's.
            self.gpu.stream().synchronize().or_fail("upload pages");
        }
        Ok(())
    }

    /// The memory of one buffer.
    pub(in crate::ops) fn buffer(&self, buffer: usize) -> Arc<CudaSlice<u8>> {
        Arc::clone(&self.buffers[buffer])
    }

    /// Bytes of one buffer.
    #[must_use]
    pub fn buffer_bytes(&self) -> u64 {
        self.buffers.first().map_or(0, |buffer| buffer.len() as u64)
    }

    fn view(&self, buffer: usize, bytes: Range<u64>) -> CudaView<'_, u8> {
        let all = self.buffer_bytes();
        assert!(bytes.end <= all, "bytes {bytes:?} of a {all}-byte buffer");
        self.buffers[buffer].slice(bytes.start as usize..bytes.end as usize)
    }

    /// A buffer's bytes as they are now.
    #[must_use]
    pub fn download(&self, buffer: usize, bytes: Range<u64>) -> Vec<u8> {
        self.gpu.download(&self.view(buffer, bytes))
    }

    /// Puts bytes into a buffer, from `offset`.
    pub fn upload(&mut self, buffer: usize, offset: u64, bytes: &[u8]) {
        let (all, end) = (self.buffer_bytes(), offset + bytes.len() as u64);
        assert!(end <= all, "bytes {offset}..{end} of a {all}-byte buffer");
        let buffer =
            Arc::get_mut(&mut self.buffers[buffer]).expect("no launch is being put together");
        let mut piece = buffer.slice_mut(offset as usize..end as usize);
        self.gpu.stream().memcpy_htod(bytes, &mut piece).or_fail("upload pages");
    }

    fn address(&self, buffer: usize) -> u64 {
        address(&self.gpu, &self.buffers[buffer])
    }
}

fn address<T>(gpu: &Gpu, array: &CudaSlice<T>) -> u64 {
    array.device_ptr(gpu.stream()).0
}

/// Where a launch's states come from and go to. One stream orders what is written and what is read.
#[derive(Debug)]
pub enum States {
    /// Sequences seen whole: zeros, and nothing is stored.
    Fresh { count: usize },
    /// The pages, read and written in place; through copies where the ssm state's address may be
    /// another row's. In place no row stores to a block that another one of its launch loads or
    /// stores to: a prefix that is being filled is found from the next step on. Padding rows alone
    /// do, all of them in the null block, where it does not matter who comes last: no request reads
    /// what is there.
    Paged(Box<Paged>),
}

/// The block that each span's state goes to, the one that it comes from, and whether that is read:
/// by every decode row, and by a prefill row where something is computed already. Elsewhere zeros
/// are taken in its place.
#[derive(Debug)]
pub struct Paged {
    view: StateView,
    /// The layer's.
    buffer: Arc<CudaSlice<u8>>,
    rows: StateRows,
    /// Width of slot x stride for the ssm state; a convolution's is always 64.
    bits: u32,
    copies: Option<Copies>,
}

/// For each row the block that its state is stored to, the one that it comes from, and whether that
/// is read.
#[derive(Clone, Debug)]
pub struct StateRows {
    blocks: Numbers,
    sources: Numbers,
    reads: Numbers,
    count: usize,
    highest: BlockId,
}

impl StateRows {
    #[must_use]
    pub fn on(sheet: &mut Sheet, rows: &[StateRow]) -> Self {
        // Where nothing is read any block of the pool will do.
        let source = |row: &StateRow| row.from.unwrap_or(row.block);
        Self {
            blocks: sheet.list(rows.iter().map(|row| row.block.get())),
            sources: sheet.list(rows.iter().map(|row| source(row).get())),
            reads: sheet.list(rows.iter().map(|row| u32::from(row.from.is_some()))),
            count: rows.len(),
            highest: rows.iter().map(|row| row.block.max(source(row))).max().unwrap_or_default(),
        }
    }
}

/// ssm states of the rows that read one, as they were when the pass began, side by side.
#[derive(Debug)]
struct Copies {
    bytes: CudaSlice<u8>,
    /// Row i's place is i.
    places: CudaSlice<u32>,
}

/// `struct State` of kernels/pages.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::ops) struct StateArgument {
    pages: u64,
    slots: u64,
    sources: u64,
    reads: u64,
    offset: u64,
    stride: u64,
    dtype: u32,
    bits: u32,
}

// SAFETY: plain numbers, laid out as the kernels' struct of the same fields.
unsafe impl DeviceRepr for StateArgument {}

impl StateArgument {
    /// Whether every state begins where a thread can read 16 bytes at once.
    pub(in crate::ops) fn is_even(&self) -> bool {
        let width = if self.dtype == dtype_code(Dtype::Bf16) { 2 } else { 4 };
        [self.pages, self.offset, self.stride * width].iter().all(|at| at.is_multiple_of(16))
    }

    pub(in crate::ops) fn is_paged(&self) -> bool {
        self.pages != 0
    }
}

impl States {
    /// One row a span, in a layer's pages.
    #[must_use]
    pub fn paged(pages: &Pages, view: &StateView, rows: &StateRows, bits: u32) -> Self {
        let buffer = Arc::clone(&pages.buffers[view.buffer]);
        let mut paged = Paged { view: *view, buffer, rows: rows.clone(), bits, copies: None };
        if bits < u64::BITS && rows.count > 0 {
            paged.copies = Some(paged.copy(&pages.gpu));
        }
        Self::Paged(Box::new(paged))
    }

    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Fresh { count } => *count,
            Self::Paged(paged) => paged.rows.count,
        }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// For the convolution's kernels; `elements` of state a span.
    pub(in crate::ops) fn conv(&self, gpu: &Gpu, spans: &Spans, elements: usize) -> StateArgument {
        assert_eq!(self.len(), spans.count as usize, "one state a span");
        let Self::Paged(paged) = self else { return StateArgument::default() };
        let view = &paged.view;
        assert_eq!(view.conv_elements, elements as u64, "a whole convolution state");
        paged.assert_holds(view.conv_bytes(paged.rows.highest));
        StateArgument {
            pages: address(gpu, &paged.buffer),
            slots: paged.rows.blocks.address(gpu),
            sources: paged.rows.sources.address(gpu),
            reads: paged.rows.reads.address(gpu),
            offset: 0,
            stride: view.page_bytes() / view.conv_dtype.bytes(),
            dtype: dtype_code(view.conv_dtype),
            bits: u64::BITS,
        }
    }

    /// For the scan's kernels; `elements` of state a span, kept in `dtype`.
    pub(in crate::ops) fn ssm(
        &self,
        gpu: &Gpu,
        spans: &Spans,
        elements: usize,
        dtype: Dtype,
    ) -> StateArgument {
        assert_eq!(self.len(), spans.count as usize, "one state a span");
        let fresh = StateArgument { dtype: dtype_code(dtype), ..StateArgument::default() };
        let Self::Paged(paged) = self else { return fresh };
        let view = &paged.view;
        assert_eq!(view.ssm_elements, elements as u64, "a whole ssm state");
        assert_eq!(view.ssm_dtype, dtype, "the cache's dtype is the state's");
        match &paged.copies {
            None => paged.in_pages(gpu),
            Some(copies) => StateArgument {
                pages: address(gpu, &copies.bytes),
                slots: address(gpu, &copies.places),
                sources: address(gpu, &copies.places),
                reads: paged.rows.reads.address(gpu),
                stride: view.ssm_elements,
                bits: u64::BITS,
                ..fresh
            },
        }
    }

    /// Where there are copies: each to its address, in the rows' order, so that two rows of one
    /// address have one outcome.
    pub(in crate::ops) fn store_copies(&self, gpu: &Gpu) {
        let Self::Paged(paged) = self else { return };
        let Some(copies) = &paged.copies else { return };
        let (state, len) = (paged.in_pages(gpu), paged.view.ssm_elements);
        for span in 0..paged.rows.count as u32 {
            launch!(gpu, Kernel::scan_store, (blocks(len), 1), THREADS, 0;
                &copies.bytes, &state, &span, &len);
        }
    }

    pub(in crate::ops) fn is_paged(&self) -> bool {
        matches!(self, Self::Paged(_))
    }
}

impl Paged {
    /// The ssm states in the pages.
    fn in_pages(&self, gpu: &Gpu) -> StateArgument {
        let view = &self.view;
        // A narrower product is at most the whole one, of this block and of every lower one.
        self.assert_holds(view.ssm_bytes(self.rows.highest, u64::BITS));
        assert!(u32::try_from(view.ssm_stride).is_ok(), "a stride of {} elements", view.ssm_stride);
        StateArgument {
            pages: address(gpu, &self.buffer),
            slots: self.rows.blocks.address(gpu),
            sources: self.rows.sources.address(gpu),
            reads: self.rows.reads.address(gpu),
            offset: view.ssm_offset,
            stride: view.ssm_stride,
            dtype: dtype_code(view.ssm_dtype),
            bits: self.bits,
        }
    }

    fn copy(&self, gpu: &Gpu) -> Copies {
        let (len, rows) = (self.view.ssm_elements, self.rows.count as u32);
        let bytes = len * self.view.ssm_dtype.bytes() * u64::from(rows);
        let mut bytes = gpu.uninit::<u8>(bytes as usize);
        launch!(gpu, Kernel::scan_load, (blocks(len), rows), THREADS, 0;
            &self.in_pages(gpu), &len, &mut bytes);
        Copies { bytes, places: gpu.upload(&(0..rows).collect::<Vec<_>>()) }
    }

    fn assert_holds(&self, bytes: Range<u64>) {
        assert!(bytes.end <= self.buffer.len() as u64, "block {} is in no page", self.rows.highest);
    }
}
