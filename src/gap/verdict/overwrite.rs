//! Stores that land in another block's page.

use std::cmp::Reverse;
use std::fmt;
use std::ops::Range;

use super::lived::Lived;
use crate::base::{BlockId, EngineStep, RequestId};
use crate::ops::pages::StateView;

/// Every state that a step's prefill rows stored at a cut address.
pub(super) struct Stores {
    state: StateView,
    /// By where they begin; all are of one length.
    stores: Vec<Store>,
}

struct Store {
    request: RequestId,
    block: BlockId,
    /// Of each raw buffer: a group's layers lie in one buffer each, all at the same place, and
    /// every group has a layer in the first one.
    bytes: Range<u64>,
    steps: (EngineStep, EngineStep),
}

/// What overwrote a block that a live request held.
#[derive(Clone, Copy)]
pub(super) struct Hit {
    pub(super) block: BlockId,
    held_by: RequestId,
    by: BlockId,
    of: RequestId,
    steps: (EngineStep, EngineStep),
}

impl fmt::Display for Hit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { block, held_by, by, of, steps: (first, last) } = self;
        write!(f, "block {block} of {held_by} was overwritten by block {by} of {of} in engine ")?;
        if first == last {
            write!(f, "step {first}")
        } else {
            write!(f, "steps {first} to {last}")
        }
    }
}

impl Stores {
    /// Of the blocks from `first` on, whose addresses `bits` cut.
    pub(super) fn new<'a>(
        lives: impl Iterator<Item = (RequestId, &'a Lived<'a>)>,
        state: &StateView,
        first: BlockId,
        bits: u32,
    ) -> Self {
        let mut stores: Vec<Store> = Vec::new();
        for (request, lived) in lives {
            let steps = lived.prefill_steps();
            let high = lived.life.state_blocks.iter().map(|held| held.block);
            stores.extend(high.filter(|&block| block >= first).map(|block| {
                let bytes = state.ssm_bytes(block, bits);
                Store { request, block, bytes, steps }
            }));
        }
        stores.sort_by_key(|store| store.bytes.start);
        Self { state: *state, stores }
    }

    /// Another's store into a page that this life held, the last one before its first bad token.
    pub(super) fn hit(&self, request: RequestId, lived: &Lived, bad: EngineStep) -> Option<Hit> {
        let began = lived.life.engine_step;
        let in_time = |store: &&Store| store.steps.1 >= began && store.steps.0 <= bad;
        let hits = self.held(lived).flat_map(|(block, bytes)| {
            let others = self.within(bytes).filter(|store| store.request != request);
            others.filter(in_time).map(move |store| Hit {
                block,
                held_by: request,
                by: store.block,
                of: store.request,
                steps: store.steps,
            })
        });
        hits.max_by_key(|hit| (hit.steps.0, Reverse((hit.block, hit.of, hit.by))))
    }

    /// The blocks of a life, with the bytes that it keeps there.
    fn held<'a>(&'a self, lived: &'a Lived) -> impl Iterator<Item = (BlockId, Range<u64>)> + 'a {
        let Lived { life, .. } = lived;
        let state = life.state_blocks.iter().map(|held| {
            let whole = self.state.ssm_bytes(held.block, u64::BITS);
            (held.block, self.state.conv_bytes(held.block).start..whole.end)
        });
        // Keys and values fill their page.
        let page = self.state.page_bytes();
        let attention = life.attn_blocks.iter().map(move |&block| {
            let start = u64::from(block.get()) * page;
            (block, start..start + page)
        });
        state.chain(attention)
    }

    /// The stores that touch some bytes.
    fn within(&self, bytes: Range<u64>) -> impl Iterator<Item = &Store> {
        let from = self.stores.partition_point(|store| store.bytes.end <= bytes.start);
        self.stores[from..].iter().take_while(move |store| store.bytes.start < bytes.end)
    }
}
