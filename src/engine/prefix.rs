//! Which blocks hold the caches of which first tokens, so that a request that begins alike need not
//! compute them again. vLLM's rules (`v1/core/kv_cache_utils.py`, `v1/core/block_pool.py`).
//!
//! Only full blocks are found. A block is known by a hash over its own tokens and all before them,
//! which begins at the version of the weights: after an update no block of the old weights is found
//! any more, and what is left of them goes as the free list comes round. Blocks of an attention
//! group hold keys and values of their tokens; one of a Mamba group holds the state after its last
//! token, so that of all blocks of a prefix only the last one is needed.
//!
//! A block that nobody holds stays in the free list with its hash until it is taken for something
//! else: the free list's order is the order of eviction.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use super::{CachedBlock, Layout};
use crate::base::{BlockId, EngineStep, GroupId, RequestId, TokenId, WeightVersion};

/// Of all tokens from the first one to the end of a block, and of what they were computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PrefixHash([u64; 2]);

impl PrefixHash {
    /// Of no tokens yet, under weights of a version.
    #[must_use]
    pub fn root(salt: WeightVersion) -> Self {
        Self([salt.get(), 0])
    }

    /// With one more block of tokens.
    #[must_use]
    pub fn then(self, tokens: impl Iterator<Item = TokenId>) -> Self {
        let mut bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        tokens.for_each(|token| bytes.extend(token.get().to_le_bytes()));
        let hash = xxh3_128(&bytes);
        Self([hash as u64, (hash >> 64) as u64])
    }
}

/// A full block of which it is known what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filled {
    pub hash: PrefixHash,
    pub group: GroupId,
    pub cached: CachedBlock,
    /// In which its last token was computed.
    pub engine_step: EngineStep,
}

/// Of a pool: which of its blocks can be found.
#[derive(Clone, Debug, Default)]
pub struct PrefixCache {
    by_hash: HashMap<(PrefixHash, GroupId), BlockId>,
    by_block: HashMap<BlockId, Filled>,
}

impl PrefixCache {
    #[must_use]
    pub fn find(&self, hash: PrefixHash, group: GroupId) -> Option<&Filled> {
        let block = self.by_hash.get(&(hash, group))?;
        Some(&self.by_block[block])
    }

    /// A second block of the same tokens is not entered: the first one is found as long as it
    /// lasts.
    pub fn enter(&mut self, filled: Filled) {
        let block = filled.cached.block;
        let entry = self.by_hash.entry((filled.hash, filled.group)).or_insert(block);
        if *entry == block {
            self.by_block.insert(block, filled);
        }
    }

    /// The block will hold something else.
    pub fn forget(&mut self, block: BlockId) {
        if let Some(Filled { hash, group, .. }) = self.by_block.remove(&block) {
            self.by_hash.remove(&(hash, group));
        }
    }

    /// In the order of their ids.
    #[must_use]
    pub fn entries(&self) -> Vec<Filled> {
        let mut entries: Vec<Filled> = self.by_block.values().copied().collect();
        entries.sort_unstable_by_key(|filled| filled.cached.block);
        entries
    }
}

/// The first tokens of a request that are computed already.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hit {
    pub tokens: u32,
    /// By group, in the order of their tokens; of a Mamba group the last one alone.
    pub blocks: Vec<Vec<CachedBlock>>,
    /// Whether one of them is still to be computed by a row of this very step.
    pub is_pending: bool,
}

impl Hit {
    /// The longest one: of attention every block from the first on, of a Mamba group the state at
    /// the end. `hashes` are those of the request's full blocks, but never of its last token, which
    /// must be computed to sample after it.
    #[must_use]
    pub fn longest(
        cache: &PrefixCache,
        hashes: &[PrefixHash],
        layout: &Layout,
        now: EngineStep,
    ) -> Self {
        let num_groups = layout.groups.len() as u16;
        let (mamba, attention) = (0..num_groups)
            .partition::<Vec<u16>, _>(|&group| usize::from(group) < layout.num_mamba_groups);
        let held = |groups: &[u16], hash: &PrefixHash| {
            groups.iter().all(|&group| cache.find(*hash, GroupId::new(group)).is_some())
        };
        let keys = hashes.iter().take_while(|hash| held(&attention, hash)).count();
        let states = hashes[..keys].iter().rposition(|hash| held(&mamba, hash));
        let Some(last) = states else { return Self::default() };
        let find = |hash: &PrefixHash, group: u16| -> Filled {
            *cache.find(*hash, GroupId::new(group)).expect("it was just found")
        };
        let filled: Vec<Vec<Filled>> = (0..num_groups)
            .map(|group| {
                let first = if usize::from(group) < layout.num_mamba_groups { last } else { 0 };
                hashes[first..=last].iter().map(|hash| find(hash, group)).collect()
            })
            .collect();
        // A row reads its state before any row of the step has stored one; keys and values are
        // stored before they are read.
        let is_pending = |filled: &Filled| filled.engine_step == now;
        Self {
            tokens: filled[0].last().expect("one block at least").cached.tokens,
            is_pending: !mamba.is_empty() && filled.iter().flatten().any(is_pending),
            blocks: filled
                .iter()
                .map(|group| group.iter().map(|filled| filled.cached).collect())
                .collect(),
        }
    }

    pub fn ids(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.blocks.iter().flatten().map(|cached| cached.block)
    }
}

/// What is entered of a request's newly full blocks.
#[derive(Clone, Copy, Debug)]
pub struct Origin {
    pub filled_by: RequestId,
    pub weight_version: WeightVersion,
    pub engine_step: EngineStep,
}
