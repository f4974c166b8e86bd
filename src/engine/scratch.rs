//! A private pool for observers: the same layout, pages and kernels, none of the engine's blocks.
//!
//! Sequences are fed rows of their own choosing: a whole prefill for the `prefill` leg, forced
//! tokens one at a time for a replayed decode. The engine's own pool keeps its order and its bytes.

use super::{Layout, Observer, Phase, Runner, StepBatch};
use crate::base::{BlockId, RequestId, TokenId};
use crate::ops::array::{Array, Device};
use crate::ops::pages::Pages;

/// Sequences being fed, each with blocks of its own.
#[derive(Debug)]
pub struct Scratch {
    layout: Layout,
    pages: Pages,
    /// Tokens computed, a sequence.
    computed: Vec<u32>,
}

/// One sequence's next rows.
#[derive(Clone, Copy, Debug)]
pub struct Feed<'a> {
    pub sequence: usize,
    pub phase: Phase,
    pub tokens: &'a [TokenId],
}

impl Scratch {
    /// Room for `sequences` sequences of up to the layout's `max_model_len` tokens, from zeros.
    #[must_use]
    pub fn new(device: &Device, layout: &Layout, sequences: usize) -> Self {
        // Nobody looks for a prefix here.
        let layout = Layout { prefix_block_tokens: None, ..layout.clone() };
        let blocks = 1 + layout.blocks_for(layout.max_model_len) * sequences as u64;
        let blocks = u32::try_from(blocks).expect("a scratch pool is a few sequences");
        let pages = Pages::new(device, layout.num_buffers, blocks, layout.page_bytes);
        Self { layout, pages, computed: vec![0; sequences] }
    }

    /// Bytes of its pages.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.pages.len_bytes()
    }

    /// Runs one batch; decode feeds come first. Returns what left the last layer, `[T, H]`, the
    /// feeds' rows one after another. `observe` sees what there is to see of the pass:
    /// [`super::Seen`].
    pub fn feed(
        &mut self,
        runner: &Runner,
        feeds: &[Feed<'_>],
        observe: Option<Observer<'_>>,
    ) -> Array {
        let row = |feed: &Feed<'_>| {
            let computed = self.computed[feed.sequence];
            let request = RequestId::new(0, 0, feed.sequence as u32);
            (request, feed.phase, computed, self.tables(feed.sequence))
        };
        let rows: Vec<_> = feeds.iter().map(row).collect();
        let rows = rows.into_iter().zip(feeds).map(|((request, phase, computed, tables), feed)| {
            (request, phase, feed.tokens, computed, tables)
        });
        let batch = StepBatch::of_rows(self.layout.groups.len(), rows);
        for feed in feeds {
            self.computed[feed.sequence] += feed.tokens.len() as u32;
            let (fed, room) = (self.computed[feed.sequence], self.layout.max_model_len);
            assert!(fed <= room, "{fed} tokens in a scratch of {room}");
        }
        runner.forward(&mut self.pages, &batch, observe)
    }

    /// The sequence's fixed blocks, a table a group.
    fn tables(&self, sequence: usize) -> Vec<Vec<BlockId>> {
        let each = self.layout.blocks_for(self.layout.max_model_len) as u32;
        let mut next = 1 + sequence as u32 * each;
        let long = self.layout.attention_blocks(self.layout.max_model_len);
        let mut table = |len: u32| -> Vec<BlockId> {
            next += len;
            (next - len..next).map(BlockId::new).collect()
        };
        let of_group = |group| if group < self.layout.num_mamba_groups { 1 } else { long };
        (0..self.layout.groups.len()).map(|group| table(of_group(group))).collect()
    }
}
