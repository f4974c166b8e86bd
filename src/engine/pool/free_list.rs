//! Free blocks in the order in which they will be taken. Any of them can be pulled out, as vLLM's
//! `FreeKVCacheBlockQueue` has it.

use crate::base::BlockId;
use crate::engine::NULL_BLOCK;

/// A ring of block ids that begins and ends at the null block, which is never free.
#[derive(Clone, Debug)]
pub struct FreeList {
    /// By block id: who stands in front and who behind; [`ABSENT`] where the block is not free.
    before: Vec<u32>,
    after: Vec<u32>,
    len: usize,
}

const ABSENT: u32 = u32::MAX;

impl FreeList {
    /// Of a pool of `num_blocks`, nothing free.
    pub fn empty(num_blocks: usize) -> Self {
        let mut list =
            Self { before: vec![ABSENT; num_blocks], after: vec![ABSENT; num_blocks], len: 0 };
        list.link(NULL_BLOCK.get(), NULL_BLOCK.get());
        list
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn pop_front(&mut self) -> Option<BlockId> {
        let first = BlockId::new(self.after[NULL_BLOCK.index()]);
        (first != NULL_BLOCK).then(|| {
            self.remove(first);
            first
        })
    }

    pub fn push_back(&mut self, block: BlockId) {
        let last = self.before[NULL_BLOCK.index()];
        self.insert(last, block, NULL_BLOCK.get());
    }

    pub fn push_front(&mut self, block: BlockId) {
        let first = self.after[NULL_BLOCK.index()];
        self.insert(NULL_BLOCK.get(), block, first);
    }

    /// Wherever it stands.
    pub fn remove(&mut self, block: BlockId) {
        let (before, after) = (self.before[block.index()], self.after[block.index()]);
        assert!(block != NULL_BLOCK && after != ABSENT, "block {block} is not in the free list");
        self.link(before, after);
        (self.before[block.index()], self.after[block.index()]) = (ABSENT, ABSENT);
        self.len -= 1;
    }

    /// Next to be taken first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        let mut at = NULL_BLOCK;
        (0..self.len).map(move |_| {
            at = BlockId::new(self.after[at.index()]);
            at
        })
    }

    fn insert(&mut self, before: u32, block: BlockId, after: u32) {
        assert_eq!(self.after[block.index()], ABSENT, "block {block} is in the free list already");
        self.link(before, block.get());
        self.link(block.get(), after);
        self.len += 1;
    }

    fn link(&mut self, before: u32, after: u32) {
        self.after[before as usize] = after;
        self.before[after as usize] = before;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::base::Stream;

    /// Against a deque, which finds a block by looking at all of them.
    #[test]
    fn a_ring_does_what_a_deque_does() {
        const BLOCKS: u32 = 12;
        let mut dice = Stream::new(7, "free-list", 0);
        let (mut list, mut deque) = (FreeList::empty(BLOCKS as usize), VecDeque::new());
        for _ in 0..20_000 {
            let block = BlockId::new(dice.integer(1, u64::from(BLOCKS) - 1) as u32);
            let place = deque.iter().position(|&one| one == block);
            match (place, dice.integer(0, 2)) {
                (None, 0) => {
                    list.push_front(block);
                    deque.push_front(block);
                }
                (None, _) => {
                    list.push_back(block);
                    deque.push_back(block);
                }
                (Some(_), 0) => assert_eq!(list.pop_front(), deque.pop_front()),
                (Some(place), _) => {
                    list.remove(block);
                    deque.remove(place);
                }
            }
            assert!(list.iter().eq(deque.iter().copied()), "{list:?} {deque:?}");
            assert_eq!(list.len(), deque.len());
        }
        while !deque.is_empty() {
            assert_eq!(list.pop_front(), deque.pop_front());
        }
        assert_eq!(list.pop_front(), None);
    }

    #[test]
    #[should_panic(expected = "block 2 is not in the free list")]
    fn what_is_not_free_is_not_pulled_out() {
        FreeList::empty(4).remove(BlockId::new(2));
    }
}
