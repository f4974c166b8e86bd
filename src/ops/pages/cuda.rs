//! Pages in device memory, and what a kernel must know to find a sequence's state or keys in them.

// A struct that a kernel takes by value is promised to be plain numbers; launches are raw calls.
#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;

use cudarc::driver::{CudaSlice, CudaView, DevicePtr, DeviceRepr};

use super::{KeyValueView, StateView};
use crate::base::BlockId;
use crate::config::Dtype;
use crate::ops::cuda::{dtype_code, DeviceError, Gpu, OrFail, Spans};

/// Zeroed in pieces, so that no single command is as long as a pool.
const ZEROED_AT_ONCE: usize = 1 << 30;

/// `buffers` raw byte buffers of `num_blocks` pages each, as the CPU's [`super::Pages`].
pub struct Pages {
    buffers: Vec<CudaSlice<u8>>,
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: Vec<usize> = self.buffers.iter().map(CudaSlice::len).collect();
        f.debug_struct("Pages").field("bytes", &bytes).finish()
    }
}

impl Pages {
    /// Zeros, as `torch.zeros` gives vLLM at start.
    ///
    /// # Errors
    /// More bytes than the device has free.
    pub fn new(
        gpu: &Gpu,
        buffers: usize,
        num_blocks: u32,
        page_bytes: u64,
    ) -> Result<Self, DeviceError> {
        assert_eq!(page_bytes % 4, 0, "a page of {page_bytes} bytes is not whole words");
        Self::fit(gpu, buffers, num_blocks, page_bytes)?;
        let bytes = page_bytes * u64::from(num_blocks);
        let zeroed = |_| {
            let mut buffer = gpu.uninit::<u8>(bytes as usize);
            for start in (0..buffer.len()).step_by(ZEROED_AT_ONCE) {
                let end = buffer.len().min(start + ZEROED_AT_ONCE);
                let mut piece = buffer.slice_mut(start..end);
                gpu.stream().memset_zeros(&mut piece).or_fail("zero the pool");
            }
            buffer
        };
        Ok(Self { buffers: (0..buffers).map(zeroed).collect() })
    }

    /// Whether the device has that much memory free, without taking it.
    ///
    /// # Errors
    /// The bytes asked for and the bytes free, where they are too few.
    pub fn fit(
        gpu: &Gpu,
        buffers: usize,
        num_blocks: u32,
        page_bytes: u64,
    ) -> Result<(), DeviceError> {
        let asked = u128::from(page_bytes) * u128::from(num_blocks) * buffers as u128;
        let (free, _) = gpu.memory();
        let asked = u64::try_from(asked).unwrap_or(u64::MAX);
        if asked <= free {
            Ok(())
        } else {
            Err(DeviceError::OutOfMemory { asked, free })
        }
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
    pub fn download(&self, gpu: &Gpu, buffer: usize, bytes: Range<u64>) -> Vec<u8> {
        gpu.download(&self.view(buffer, bytes))
    }

    /// Puts bytes into a buffer, from `offset`.
    pub fn upload(&mut self, gpu: &Gpu, buffer: usize, offset: u64, bytes: &[u8]) {
        let (all, end) = (self.buffer_bytes(), offset + bytes.len() as u64);
        assert!(end <= all, "bytes {offset}..{end} of a {all}-byte buffer");
        let mut piece = self.buffers[buffer].slice_mut(offset as usize..end as usize);
        gpu.stream().memcpy_htod(bytes, &mut piece).or_fail("upload pages");
    }

    fn address(&self, gpu: &Gpu, buffer: usize) -> u64 {
        address(gpu, &self.buffers[buffer])
    }
}

fn address<T>(gpu: &Gpu, array: &CudaSlice<T>) -> u64 {
    array.device_ptr(gpu.stream()).0
}

/// The block that holds each span's state, and whether that state is read: by every decode row, and
/// by a prefill row where something is computed already. Elsewhere zeros are taken in its place.
#[derive(Debug)]
pub struct Slots {
    blocks: CudaSlice<u32>,
    reads: CudaSlice<u32>,
    count: usize,
    highest: BlockId,
}

impl Slots {
    /// One `(block, reads)` a span.
    pub fn upload(gpu: &Gpu, rows: impl IntoIterator<Item = (BlockId, bool)>) -> Self {
        let (blocks, reads): (Vec<BlockId>, Vec<u32>) =
            rows.into_iter().map(|(block, reads)| (block, u32::from(reads))).unzip();
        Self {
            count: blocks.len(),
            highest: blocks.iter().copied().max().unwrap_or_default(),
            blocks: gpu.upload(&blocks.iter().map(|block| block.get()).collect::<Vec<_>>()),
            reads: gpu.upload(&reads),
        }
    }
}

/// Where a launch's states come from and go to.
#[derive(Debug)]
pub enum States<'a> {
    /// Sequences seen whole: zeros, and nothing is stored.
    Fresh,
    /// The pages, read and written in place.
    Paged {
        pages: &'a mut Pages,
        view: &'a StateView,
        slots: &'a Slots,
        /// Width of slot x stride for the ssm state; a convolution's is always 64.
        bits: u32,
    },
}

/// `struct State` of kernels/pages.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::ops) struct StateArgument {
    pages: u64,
    slots: u64,
    reads: u64,
    offset: u64,
    stride: u64,
    dtype: u32,
    bits: u32,
}

// SAFETY: plain numbers, laid out as the kernels' struct of the same fields.
unsafe impl DeviceRepr for StateArgument {}

impl States<'_> {
    /// For the convolution's kernels; `elements` of state a span.
    pub(in crate::ops) fn conv(&self, gpu: &Gpu, spans: &Spans, elements: usize) -> StateArgument {
        let Self::Paged { pages, view, slots, .. } = self else { return StateArgument::default() };
        assert_eq!(view.conv_elements, elements as u64, "a whole convolution state");
        assert_eq!(slots.count, spans.count as usize, "one slot a span");
        let end = view.conv_bytes(slots.highest).end;
        assert!(end <= pages.buffer_bytes(), "block {} is in no page", slots.highest);
        StateArgument {
            pages: pages.address(gpu, view.buffer),
            slots: address(gpu, &slots.blocks),
            reads: address(gpu, &slots.reads),
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
        let fresh = StateArgument { dtype: dtype_code(dtype), ..StateArgument::default() };
        let Self::Paged { pages, view, slots, bits } = self else { return fresh };
        assert_eq!(view.ssm_elements, elements as u64, "a whole ssm state");
        assert_eq!(view.ssm_dtype, dtype, "the cache's dtype is the state's");
        assert_eq!(slots.count, spans.count as usize, "one slot a span");
        // A narrower product is at most the whole one, of this block and of every lower one.
        let end = view.ssm_bytes(slots.highest, u64::BITS).end;
        assert!(end <= pages.buffer_bytes(), "block {} is in no page", slots.highest);
        assert!(u32::try_from(view.ssm_stride).is_ok(), "a stride of {} elements", view.ssm_stride);
        StateArgument {
            pages: pages.address(gpu, view.buffer),
            slots: address(gpu, &slots.blocks),
            reads: address(gpu, &slots.reads),
            offset: view.ssm_offset,
            stride: view.ssm_stride,
            bits: *bits,
            ..fresh
        }
    }

    pub(in crate::ops) fn is_paged(&self) -> bool {
        matches!(self, Self::Paged { .. })
    }
}

/// The block tables of an attention launch, a table a span.
#[derive(Debug)]
pub struct BlockTables {
    blocks: CudaSlice<u32>,
    starts: CudaSlice<u32>,
    count: usize,
    /// Tokens that the longest context has, this launch's own included.
    longest: u32,
    highest: BlockId,
    block_tokens: u32,
}

impl BlockTables {
    /// One `(table, tokens)` a span: its blocks, and the tokens of its context once this launch's
    /// own are stored.
    pub fn upload<'a>(
        gpu: &Gpu,
        block_tokens: u32,
        rows: impl IntoIterator<Item = (&'a [BlockId], u32)>,
    ) -> Self {
        let (mut blocks, mut starts, mut longest) = (Vec::new(), Vec::new(), 0);
        for (table, tokens) in rows {
            let held = table.len() as u64 * u64::from(block_tokens);
            assert!(u64::from(tokens) <= held, "{tokens} tokens in {} blocks", table.len());
            starts.push(u32::try_from(blocks.len()).expect("a batch's tables fit in 32 bits"));
            blocks.extend(table.iter().map(|block| block.get()));
            longest = longest.max(tokens);
        }
        Self {
            count: starts.len(),
            highest: BlockId::new(blocks.iter().copied().max().unwrap_or_default()),
            blocks: gpu.upload(&blocks),
            starts: gpu.upload(&starts),
            longest,
            block_tokens,
        }
    }

    /// Tokens that the longest context has.
    #[must_use]
    pub fn longest(&self) -> u32 {
        self.longest
    }
}

/// `struct KeyValuePages` of kernels/attention.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct KeyValueArgument {
    pages: u64,
    blocks: u64,
    starts: u64,
    block_tokens: u32,
    row: u32,
}

// SAFETY: plain numbers, laid out as the kernels' struct of the same fields.
unsafe impl DeviceRepr for KeyValueArgument {}

impl KeyValueView {
    /// For the attention's kernels.
    pub(in crate::ops) fn argument(
        &self,
        gpu: &Gpu,
        pages: &Pages,
        tables: &BlockTables,
        spans: &Spans,
    ) -> KeyValueArgument {
        assert_eq!(tables.count, spans.count as usize, "one block table a span");
        assert_eq!(tables.block_tokens, self.block_tokens, "tables of this layer's blocks");
        let [_, values] = self.token_bytes(tables.highest, 0..self.block_tokens);
        assert!(values.end <= pages.buffer_bytes(), "block {} is in no page", tables.highest);
        KeyValueArgument {
            pages: pages.address(gpu, self.buffer),
            blocks: address(gpu, &tables.blocks),
            starts: address(gpu, &tables.starts),
            block_tokens: self.block_tokens,
            row: u32::try_from(self.row).expect("a key fits in a page"),
        }
    }
}
