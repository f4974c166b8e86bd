//! Block tables: in which blocks a batch's keys and values lie.

use crate::base::BlockId;
use crate::ops::sheet::{Numbers, Sheet};
use crate::ops::spans::Span;

/// The block tables of a batch in one group of attention layers, a table a row.
#[derive(Clone, Debug)]
pub struct Tables {
    /// Table after table, and where each begins; the end is last.
    blocks: Vec<BlockId>,
    starts: Vec<usize>,
    /// The same for kernels.
    numbers: (Numbers, Numbers),
    block_tokens: u32,
    /// Tokens that the longest context may have, this pass's own included.
    longest: u32,
}

impl Tables {
    /// One table a span, each with room for the span's last position; on a sheet where every
    /// context may have up to `longest` tokens, 0 for as many as they have.
    #[must_use]
    pub fn on<'a>(
        sheet: &mut Sheet,
        block_tokens: u32,
        spans: &[Span],
        tables: impl Iterator<Item = &'a [BlockId]>,
        longest: u32,
    ) -> Self {
        let (mut blocks, mut starts) = (Vec::new(), vec![0]);
        for table in tables {
            blocks.extend_from_slice(table);
            starts.push(blocks.len());
        }
        assert_eq!(starts.len(), spans.len() + 1, "one block table a span");
        let mut needed = 0;
        for (span, ends) in spans.iter().zip(starts.windows(2)) {
            let tokens = u32::try_from(span.positions().end).expect("positions of 32 bits");
            let held = (ends[1] - ends[0]) as u64 * u64::from(block_tokens);
            assert!(u64::from(tokens) <= held, "{tokens} tokens in {held} tokens' blocks");
            needed = needed.max(tokens);
        }
        assert!(longest == 0 || needed <= longest, "a context of {needed} tokens, not {longest}");
        let room = spans.len() * longest.div_ceil(block_tokens.max(1)) as usize;
        let numbers = (
            sheet.list_within(room.max(blocks.len()), blocks.iter().map(|block| block.get())),
            sheet.list(starts[..spans.len()].iter().map(|&start| start as u32)),
        );
        Self { blocks, starts, numbers, block_tokens, longest: longest.max(needed) }
    }

    /// A row's table.
    #[must_use]
    pub fn table(&self, row: usize) -> &[BlockId] {
        &self.blocks[self.starts[row]..self.starts[row + 1]]
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.starts.len() - 1
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    #[must_use]
    pub fn longest(&self) -> u32 {
        self.longest
    }

    #[must_use]
    pub fn highest(&self) -> BlockId {
        self.blocks.iter().copied().max().unwrap_or_default()
    }

    /// All blocks, and where each table begins.
    #[must_use]
    pub fn numbers(&self) -> (&Numbers, &Numbers) {
        (&self.numbers.0, &self.numbers.1)
    }
}
