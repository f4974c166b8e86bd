//! What the attention's kernels must know to find a sequence's keys and values in the pages.

// A struct that a kernel takes by value is promised to be plain numbers.
#![allow(unsafe_code)]

use cudarc::driver::DeviceRepr;

use super::super::KeyValueView;
use super::Pages;
use crate::ops::pages::Tables;

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
    pub(in crate::ops) fn argument(&self, pages: &Pages, tables: &Tables) -> KeyValueArgument {
        assert_eq!(tables.block_tokens(), self.block_tokens, "tables of this layer's blocks");
        let highest = tables.highest();
        let [_, values] = self.token_bytes(highest, 0..self.block_tokens);
        assert!(values.end <= pages.buffer_bytes(), "block {highest} is in no page");
        let (blocks, starts) = tables.numbers();
        KeyValueArgument {
            pages: pages.address(self.buffer),
            blocks: blocks.address(&pages.gpu),
            starts: starts.address(&pages.gpu),
            block_tokens: self.block_tokens,
            row: u32::try_from(self.row).expect("a key fits in a page"),
        }
    }
}

impl KeyValueArgument {
    /// Of keys and values that are in no page.
    pub(in crate::ops) const NONE: Self =
        Self { pages: 0, blocks: 0, starts: 0, block_tokens: 0, row: 0 };

    /// Whether every key begins where a thread can read 16 bytes at once.
    pub(in crate::ops) fn is_even(&self) -> bool {
        self.pages.is_multiple_of(16) && self.row.is_multiple_of(8)
    }
}
