//! What the attention's kernels must know to find a sequence's keys and values in the pages.

// A struct that a kernel takes by value is promised to be plain numbers.
#![allow(unsafe_code)]

use cudarc::driver::{CudaSlice, DeviceRepr};

use super::super::KeyValueView;
use super::{address, Pages};
use crate::base::BlockId;
use crate::ops::cuda::Gpu;

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

    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
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
    pub(in crate::ops) fn argument(&self, pages: &Pages, tables: &BlockTables) -> KeyValueArgument {
        assert_eq!(tables.block_tokens, self.block_tokens, "tables of this layer's blocks");
        let [_, values] = self.token_bytes(tables.highest, 0..self.block_tokens);
        assert!(values.end <= pages.buffer_bytes(), "block {} is in no page", tables.highest);
        KeyValueArgument {
            pages: pages.address(self.buffer),
            blocks: address(&pages.gpu, &tables.blocks),
            starts: address(&pages.gpu, &tables.starts),
            block_tokens: self.block_tokens,
            row: u32::try_from(self.row).expect("a key fits in a page"),
        }
    }
}
