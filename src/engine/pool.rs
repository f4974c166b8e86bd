//! The block pool: one free list shared by attention KV and recurrent state.
//!
//! The pool knows who holds a block and whose bytes it still carries; it never touches the bytes.
//! Order and contents outlive requests, steps and weight updates, as in vLLM
//! (`v1/core/block_pool.py`): that persistence is what gives a stale state or a high block id a
//! period of several steps.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::{EngineError, StateBlock};
use crate::base::{BlockId, Generation, RequestId};
use crate::config::FreeListOrder;

/// Never handed out: kernels may use it as padding.
pub const NULL_BLOCK: BlockId = BlockId::new(0);

/// Blocks 1 to `num_blocks - 1`, each free or owned by one request.
#[derive(Clone, Debug)]
pub struct BlockPool {
    order: FreeListOrder,
    /// The next block to take is in front.
    free: VecDeque<BlockId>,
    /// By block id, the null block included.
    blocks: Vec<BlockRecord>,
    taken: u64,
}

/// What the pool remembers of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRecord {
    pub owner: Option<RequestId>,
    /// Who last gave it back; `None` on a virgin block.
    pub previous_owner: Option<RequestId>,
    pub generation: Generation,
}

/// A pool as a checkpoint keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolSnapshot {
    /// In the order in which they would be taken.
    pub free: Vec<BlockId>,
    /// By block id, the null block included.
    pub blocks: Vec<BlockRecord>,
    /// Blocks taken over the pool's life.
    pub taken: u64,
}

impl BlockPool {
    /// A virgin pool: blocks 1, 2, 3, … are taken in this order under either policy.
    #[must_use]
    pub fn new(num_blocks: u32, order: FreeListOrder) -> Self {
        assert!(num_blocks > 0, "a pool holds at least the null block");
        Self {
            order,
            free: (1..num_blocks).map(BlockId::new).collect(),
            blocks: vec![BlockRecord::default(); num_blocks as usize],
            taken: 0,
        }
    }

    /// All `n` blocks, in the order in which they left the free list, or none. Bytes are left as
    /// they are.
    #[must_use]
    pub fn take(&mut self, n: usize, owner: RequestId) -> Option<Vec<StateBlock>> {
        if n > self.free.len() {
            return None;
        }
        self.taken += n as u64;
        let blocks = &mut self.blocks;
        let mark = |block: BlockId| {
            let record = &mut blocks[block.index()];
            if let Some(holder) = record.owner {
                panic!(
                    "block {block} is in the free list while {holder} owns it; {owner} wants it"
                );
            }
            record.owner = Some(owner);
            record.generation = Generation::new(record.generation.get() + 1);
            StateBlock {
                block,
                generation: record.generation,
                previous_owner: record.previous_owner,
            }
        };
        Some(self.free.drain(..n).map(mark).collect())
    }

    /// Gives blocks back one after the other. Panics if `owner` does not hold one of them: a block
    /// freed twice or by a stranger would soon have two owners.
    pub fn release(&mut self, blocks: impl IntoIterator<Item = BlockId>, owner: RequestId) {
        for block in blocks {
            let record = &mut self.blocks[block.index()];
            match record.owner {
                Some(holder) if holder == owner => {}
                Some(holder) => panic!("{owner} frees block {block}, which {holder} owns"),
                None => {
                    let last =
                        record.previous_owner.map_or("nobody".to_owned(), |id| id.to_string());
                    panic!("{owner} frees block {block}, which is free; {last} freed it last")
                }
            }
            record.previous_owner = record.owner.take();
            match self.order {
                FreeListOrder::Fifo => self.free.push_back(block),
                FreeListOrder::Lifo => self.free.push_front(block),
            }
        }
    }

    /// The null block included.
    #[must_use]
    pub fn num_blocks(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that requests can hold: all but the null block.
    #[must_use]
    pub fn num_usable(&self) -> usize {
        self.blocks.len() - 1
    }

    /// Free blocks, next to be taken first.
    pub fn free_blocks(&self) -> impl ExactSizeIterator<Item = BlockId> + '_ {
        self.free.iter().copied()
    }

    #[must_use]
    pub fn record(&self, block: BlockId) -> &BlockRecord {
        &self.blocks[block.index()]
    }

    /// Blocks taken over the pool's life; divided by the usable blocks, the laps of the free list.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// Every block but the null block is either owned or in the free list, once.
    ///
    /// # Errors
    /// Names the first block for which this does not hold.
    pub fn check(&self) -> Result<(), EngineError> {
        let last = self.num_blocks() - 1;
        let mut is_free = vec![false; self.blocks.len()];
        for &block in &self.free {
            if block == NULL_BLOCK || block.get() > last {
                return Err(EngineError::BlockUnknown { block, last });
            }
            if let Some(owner) = self.record(block).owner {
                return Err(EngineError::BlockFreeAndOwned { block, owner });
            }
            if std::mem::replace(&mut is_free[block.index()], true) {
                return Err(EngineError::BlockFreeTwice { block });
            }
        }
        let lost = (1..=last)
            .map(BlockId::new)
            .find(|&block| !is_free[block.index()] && self.record(block).owner.is_none());
        lost.map_or(Ok(()), |block| Err(EngineError::BlockLost { block }))
    }

    #[must_use]
    pub fn snapshot(&self) -> PoolSnapshot {
        PoolSnapshot {
            free: self.free.iter().copied().collect(),
            blocks: self.blocks.clone(),
            taken: self.taken,
        }
    }

    /// Puts a snapshot in the place of this pool's own order and records.
    ///
    /// # Errors
    /// A snapshot of another size, or one that [`Self::check`] refuses; the pool is then as it was.
    pub fn restore(&mut self, snapshot: PoolSnapshot) -> Result<(), EngineError> {
        let (found, expected) = (snapshot.blocks.len() as u64, self.blocks.len() as u64);
        if found != expected {
            return Err(EngineError::PoolSize { found, expected });
        }
        let restored = Self {
            order: self.order,
            free: snapshot.free.into(),
            blocks: snapshot.blocks,
            taken: snapshot.taken,
        };
        restored.check()?;
        *self = restored;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: RequestId = RequestId::new(1, 0, 0);
    const B: RequestId = RequestId::new(1, 0, 1);

    fn ids(blocks: &[StateBlock]) -> Vec<u32> {
        blocks.iter().map(|taken| taken.block.get()).collect()
    }

    fn give_back(pool: &mut BlockPool, blocks: &[u32], owner: RequestId) {
        pool.release(blocks.iter().copied().map(BlockId::new), owner);
    }

    #[test]
    fn the_order_of_reuse_is_the_policy() {
        for (order, next) in
            [(FreeListOrder::Fifo, [6, 7, 2, 1]), (FreeListOrder::Lifo, [1, 2, 6, 7])]
        {
            let mut pool = BlockPool::new(8, order);
            assert_eq!(ids(&pool.take(3, A).unwrap()), [1, 2, 3], "{order:?}");
            assert_eq!(ids(&pool.take(2, B).unwrap()), [4, 5], "{order:?}");
            give_back(&mut pool, &[2, 1], A);
            assert_eq!(ids(&pool.take(4, B).unwrap()), next, "{order:?}");
            assert_eq!(pool.taken(), 9);
            pool.check().unwrap();
        }
    }

    #[test]
    fn taking_is_all_or_nothing() {
        let mut pool = BlockPool::new(4, FreeListOrder::Fifo);
        assert_eq!(pool.take(4, A), None);
        assert_eq!((pool.free_blocks().len(), pool.taken()), (3, 0));
        assert_eq!(ids(&pool.take(3, A).unwrap()), [1, 2, 3]);
        assert_eq!(pool.take(1, A), None);
        assert_eq!(pool.take(0, A), Some(vec![]));
    }

    #[test]
    fn a_block_remembers_whose_bytes_it_carries() {
        let mut pool = BlockPool::new(2, FreeListOrder::Fifo);
        let expected = [(A, 1, None), (B, 2, Some(A)), (A, 3, Some(B))];
        for (owner, generation, previous_owner) in expected {
            let taken = pool.take(1, owner).unwrap()[0];
            let generation = Generation::new(generation);
            assert_eq!(taken, StateBlock { block: BlockId::new(1), generation, previous_owner });
            pool.release([taken.block], owner);
        }
    }

    #[test]
    #[should_panic(expected = "s1.p0.r1 frees block 2, which s1.p0.r0 owns")]
    fn freeing_the_block_of_another_is_refused() {
        let mut pool = BlockPool::new(4, FreeListOrder::Fifo);
        pool.take(2, A).unwrap();
        give_back(&mut pool, &[2], B);
    }

    #[test]
    #[should_panic(expected = "s1.p0.r1 frees block 2, which is free; s1.p0.r0 freed it last")]
    fn freeing_twice_is_refused() {
        let mut pool = BlockPool::new(4, FreeListOrder::Fifo);
        pool.take(2, A).unwrap();
        give_back(&mut pool, &[2], A);
        give_back(&mut pool, &[2], B);
    }

    #[test]
    fn a_snapshot_goes_on_where_the_pool_was() {
        let mut pool = BlockPool::new(6, FreeListOrder::Lifo);
        pool.take(3, A).unwrap();
        give_back(&mut pool, &[1, 3], A);
        let text = serde_json::to_string(&pool.snapshot()).unwrap();
        let mut other = BlockPool::new(6, FreeListOrder::Lifo);
        other.restore(serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(other.snapshot(), pool.snapshot());
        assert_eq!(other.take(4, B), pool.take(4, B));
    }

    #[test]
    fn a_damaged_snapshot_is_named() {
        let block = BlockId::new;
        let mut pool = BlockPool::new(4, FreeListOrder::Fifo);
        pool.take(1, A).unwrap();
        let good = pool.snapshot();
        let cases = [
            (vec![2, 3, 2], EngineError::BlockFreeTwice { block: block(2) }),
            (vec![2], EngineError::BlockLost { block: block(3) }),
            (vec![2, 3, 1], EngineError::BlockFreeAndOwned { block: block(1), owner: A }),
            (vec![0, 2, 3], EngineError::BlockUnknown { block: block(0), last: 3 }),
            (vec![2, 3, 4], EngineError::BlockUnknown { block: block(4), last: 3 }),
        ];
        for (free, error) in cases {
            let free = free.into_iter().map(block).collect();
            assert_eq!(pool.restore(PoolSnapshot { free, ..good.clone() }), Err(error));
            assert_eq!(pool.snapshot(), good, "a refused snapshot changes nothing");
        }
        let mut small = BlockPool::new(3, FreeListOrder::Fifo);
        assert_eq!(small.restore(good), Err(EngineError::PoolSize { found: 4, expected: 3 }));
    }
}
