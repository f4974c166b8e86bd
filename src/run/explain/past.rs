//! Who had a block before, and as what.

use std::collections::{HashMap, HashSet};

use super::super::session::Session;
use crate::base::{BlockId, EngineStep, GroupId, RequestId};
use crate::engine::{Completion, Engine, Life};
use crate::rollout::Rollout;

/// Finished requests whose bytes some block still holds.
#[derive(Default)]
pub(super) struct Past {
    owners: HashMap<RequestId, Vec<Span>>,
}

/// One life of a request, and when it ended.
#[derive(Clone)]
struct Span {
    life: Life,
    last: EngineStep,
}

/// What a request used a block for.
pub(super) struct Use {
    /// Its state in a Mamba group; `None` for keys and values.
    pub(super) state_of: Option<GroupId>,
    pub(super) first: EngineStep,
    pub(super) last: EngineStep,
}

impl Past {
    /// Remembers a step's requests as long as the pools do.
    pub(super) fn keep(&mut self, session: &Session, rollouts: &[Rollout]) {
        let done = rollouts.iter().map(|rollout| &rollout.completion);
        self.owners.extend(done.map(|done| (done.id, spans(done))));
        let pools = session.engines().iter().map(Engine::pool);
        let owners: HashSet<RequestId> = pools
            .flat_map(|pool| {
                let blocks = (0..pool.num_blocks()).map(BlockId::new);
                blocks.filter_map(|block| pool.record(block).previous_owner)
            })
            .collect();
        self.owners.retain(|id, _| owners.contains(id));
    }

    /// The last use before `before` that `owner` made of a block; `rollouts` are of the same step.
    pub(super) fn of(
        &self,
        rollouts: &[Rollout],
        owner: RequestId,
        block: BlockId,
        before: EngineStep,
    ) -> Option<Use> {
        let own = || {
            let done = rollouts.iter().find(|rollout| rollout.completion.id == owner)?;
            Some(spans(&done.completion))
        };
        let spans = self.owners.get(&owner).cloned().or_else(own)?;
        let of_span = |Span { life, last }: &Span| {
            let state = life.state_blocks.iter().position(|held| held.block == block);
            let held = state.is_some() || life.attn_blocks.contains(&block);
            held.then(|| Use {
                state_of: state.map(|group| GroupId::new(group as u16)),
                first: life.engine_step,
                last: *last,
            })
        };
        spans.iter().filter(|span| span.life.engine_step < before).filter_map(of_span).next_back()
    }
}

/// A life ends with its last sampled token, or where the next one begins.
fn spans(done: &Completion) -> Vec<Span> {
    let last = |number: usize, life: &Life| {
        let until = done.lives.get(number + 1).map(|next| next.sampled_before as usize);
        let sampled =
            &done.tokens[life.sampled_before as usize..until.unwrap_or(done.tokens.len())];
        sampled.last().map_or(life.engine_step, |token| token.engine_step)
    };
    let lives = done.lives.iter().enumerate();
    lives.map(|(number, life)| Span { life: life.clone(), last: last(number, life) }).collect()
}
