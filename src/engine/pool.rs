//! The block pool: one free list shared by attention KV and recurrent state.
//!
//! The pool knows who holds a block and whose bytes it still carries; it never touches the bytes.
//! Order and contents outlive requests, steps and weight updates, as in vLLM
//! (`v1/core/block_pool.py`): that persistence is what gives a stale state or a high block id a
//! period of several steps.

mod free_list;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use self::free_list::FreeList;
use super::{EngineError, Filled, PrefixCache, StateBlock};
use crate::base::{BlockId, Generation, RequestId};
use crate::config::FreeListOrder;

/// Never handed out: kernels may use it as padding.
pub const NULL_BLOCK: BlockId = BlockId::new(0);

/// Blocks 1 to `num_blocks - 1`, each free or held: by the request that took it, and by those that
/// found it in the prefix cache.
#[derive(Clone, Debug)]
pub struct BlockPool {
    order: FreeListOrder,
    /// The next block to take is in front.
    free: FreeList,
    /// By block id, the null block included.
    blocks: Vec<BlockRecord>,
    /// Who holds a block beside its owner, an entry a hold; no list is empty.
    sharers: BTreeMap<BlockId, Vec<RequestId>>,
    /// Which blocks can be found by what they hold, whether somebody holds them or not.
    cache: PrefixCache,
    taken: u64,
}

/// What the pool remembers of one block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRecord {
    /// Who holds it; of several the one that has held it longest.
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
    /// What the prefix cache finds, by block id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cache: Vec<Filled>,
}

impl BlockPool {
    /// A virgin pool: blocks 1, 2, 3, … are taken in this order under either policy.
    #[must_use]
    pub fn new(num_blocks: u32, order: FreeListOrder) -> Self {
        assert!(num_blocks > 0, "a pool holds at least the null block");
        let mut free = FreeList::empty(num_blocks as usize);
        (1..num_blocks).map(BlockId::new).for_each(|block| free.push_back(block));
        Self {
            order,
            free,
            blocks: vec![BlockRecord::default(); num_blocks as usize],
            sharers: BTreeMap::new(),
            cache: PrefixCache::default(),
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
        let mut take = || {
            let block = self.free.pop_front().expect("they were just counted");
            let record = &mut self.blocks[block.index()];
            if let Some(holder) = record.owner {
                panic!(
                    "block {block} is in the free list while {holder} owns it; {owner} wants it"
                );
            }
            self.cache.forget(block);
            record.owner = Some(owner);
            record.generation = Generation::new(record.generation.get() + 1);
            StateBlock {
                block,
                generation: record.generation,
                previous_owner: record.previous_owner,
            }
        };
        Some((0..n).map(|_| take()).collect())
    }

    /// One more holds these blocks, for what is in them: a free one leaves the free list.
    pub fn share(&mut self, blocks: impl IntoIterator<Item = BlockId>, holder: RequestId) {
        for block in blocks {
            let record = &mut self.blocks[block.index()];
            match record.owner {
                Some(_) => self.sharers.entry(block).or_default().push(holder),
                None => {
                    record.owner = Some(holder);
                    self.free.remove(block);
                }
            }
        }
    }

    /// Gives blocks back one after the other; each is free once nobody holds it any more.
    ///
    /// # Errors
    /// `holder` does not hold one of them: a block freed twice or by a stranger would soon have two
    /// owners. The blocks before it are given back.
    pub fn release(
        &mut self,
        blocks: impl IntoIterator<Item = BlockId>,
        holder: RequestId,
    ) -> Result<(), EngineError> {
        blocks.into_iter().try_for_each(|block| self.release_one(block, holder))
    }

    fn release_one(&mut self, block: BlockId, holder: RequestId) -> Result<(), EngineError> {
        let record = &mut self.blocks[block.index()];
        let sharers = self.sharers.get_mut(&block);
        if record.owner != Some(holder) {
            let place = sharers.as_ref().and_then(|all| all.iter().position(|&one| one == holder));
            let (Some(sharers), Some(place)) = (sharers, place) else {
                return Err(match record.owner {
                    Some(owner) => EngineError::BlockOfAnother { block, holder, owner },
                    None => {
                        EngineError::BlockFreedTwice { block, holder, last: record.previous_owner }
                    }
                });
            };
            sharers.remove(place);
        } else if let Some(sharers) = sharers {
            record.owner = Some(sharers.remove(0));
        } else {
            record.previous_owner = record.owner.take();
            match self.order {
                FreeListOrder::Fifo => self.free.push_back(block),
                FreeListOrder::Lifo => self.free.push_front(block),
            }
        }
        if self.sharers.get(&block).is_some_and(Vec::is_empty) {
            self.sharers.remove(&block);
        }
        Ok(())
    }

    #[must_use]
    pub fn cache(&self) -> &PrefixCache {
        &self.cache
    }

    /// From here on a block is found by what it holds, until it is taken again.
    pub fn remember(&mut self, filled: Filled) {
        self.cache.enter(filled);
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
        self.free.iter()
    }

    /// Who holds a block beside its owner.
    #[must_use]
    pub fn sharers(&self, block: BlockId) -> &[RequestId] {
        self.sharers.get(&block).map_or(&[], Vec::as_slice)
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

    /// A virgin pool in place of this one, of which nobody holds a block. It goes on counting.
    pub fn renew(&mut self) {
        let held = self.blocks.iter().filter_map(|record| record.owner).next();
        assert_eq!(held, None, "a request holds blocks of a pool that is dropped");
        *self = Self { taken: self.taken, ..Self::new(self.num_blocks(), self.order) };
    }

    /// Every block but the null block is either held or in the free list, once, and no block is
    /// shared that nobody owns.
    ///
    /// # Errors
    /// Names the first block for which this does not hold.
    pub fn check(&self) -> Result<(), EngineError> {
        check(self.free.iter(), &self.blocks)?;
        let without_owner = |block: &&BlockId| self.record(**block).owner.is_none();
        match self.sharers.keys().find(without_owner) {
            Some(&block) => Err(EngineError::BlockLost { block }),
            None => Ok(()),
        }
    }

    /// Only when no block is shared.
    #[must_use]
    pub fn snapshot(&self) -> PoolSnapshot {
        assert!(self.sharers.is_empty(), "blocks are shared: {:?}", self.sharers);
        PoolSnapshot {
            free: self.free.iter().collect(),
            blocks: self.blocks.clone(),
            taken: self.taken,
            cache: self.cache.entries(),
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
        check(snapshot.free.iter().copied(), &snapshot.blocks)?;
        let last = self.num_blocks() - 1;
        let is_unknown = |block: &BlockId| block.get() > last;
        if let Some(block) = snapshot.cache.iter().map(|one| one.cached.block).find(is_unknown) {
            return Err(EngineError::BlockUnknown { block, last });
        }
        let mut free = FreeList::empty(snapshot.blocks.len());
        snapshot.free.into_iter().for_each(|block| free.push_back(block));
        let mut cache = PrefixCache::default();
        snapshot.cache.into_iter().for_each(|filled| cache.enter(filled));
        let (order, sharers, taken) = (self.order, BTreeMap::new(), snapshot.taken);
        *self = Self { order, free, blocks: snapshot.blocks, sharers, cache, taken };
        Ok(())
    }
}

/// Every block but the null block is either owned or in the free list, once.
fn check(free: impl Iterator<Item = BlockId>, blocks: &[BlockRecord]) -> Result<(), EngineError> {
    let last = blocks.len() as u32 - 1;
    let mut is_free = vec![false; blocks.len()];
    for block in free {
        if block == NULL_BLOCK || block.get() > last {
            return Err(EngineError::BlockUnknown { block, last });
        }
        if let Some(owner) = blocks[block.index()].owner {
            return Err(EngineError::BlockFreeAndOwned { block, owner });
        }
        if std::mem::replace(&mut is_free[block.index()], true) {
            return Err(EngineError::BlockFreeTwice { block });
        }
    }
    let lost = (1..=last)
        .map(BlockId::new)
        .find(|&block| !is_free[block.index()] && blocks[block.index()].owner.is_none());
    lost.map_or(Ok(()), |block| Err(EngineError::BlockLost { block }))
}

#[cfg(test)]
mod tests;
