//! What the records of a step count, so that a cause can be read from counts.

use serde::{Deserialize, Serialize};

use super::measures::is_confident_wrong;
use super::pair::{PairedToken, Pairs};
use crate::base::BlockId;
use crate::engine::{Completion, Life, Phase};
use crate::rollout::Rollout;

/// Counts over requests; steps add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Lives whose first row ran as a decode row, which reads its state blocks unconditionally.
    /// This and the next two are absent where the engine does not say.
    pub decoded_first_chunks: Option<u64>,
    /// Of those, the ones with a state block that another request had held.
    pub stale_first_chunks: Option<u64>,
    /// Requests that held a state block whose index leaves `state_index_bits`.
    pub wrapped_requests: Option<u64>,
    /// Requests with a gap over the floor.
    pub bad_requests: u64,
    /// Tokens that the engine was sure of and the trainer would hardly ever sample.
    pub confident_wrong: u64,
}

impl Tally {
    /// Of one step. `first_wrapped` is the lowest block whose state address wraps, if there is one.
    #[must_use]
    pub fn of(
        rollouts: &[Rollout],
        pairs: &Pairs,
        floor: f64,
        first_wrapped: Option<BlockId>,
    ) -> Self {
        let lives = || rollouts.iter().flat_map(|rollout| &rollout.completion.lives);
        // Behind a cached prefix a decode row reads a state that is its own.
        let decoded = |life: &&Life| life.phase == Phase::Decode && life.cached.is_empty();
        let used =
            |life: &&Life| life.state_blocks.iter().any(|held| held.previous_owner.is_some());
        let wrapped = |done: &&Completion| {
            let mut blocks = done.lives.iter().flat_map(|life| &life.state_blocks);
            first_wrapped.is_some_and(|first| blocks.any(|held| held.block >= first))
        };
        let is_known = lives().next().is_some();
        let said = |count: usize| is_known.then_some(count as u64);
        let completions = rollouts.iter().map(|rollout| &rollout.completion);
        let of = |token: &&PairedToken| {
            is_confident_wrong(f64::from(token.infer.get()), f64::from(token.train.get()))
        };
        Self {
            decoded_first_chunks: said(lives().filter(decoded).count()),
            stale_first_chunks: said(lives().filter(decoded).filter(used).count()),
            wrapped_requests: said(completions.filter(wrapped).count()),
            bad_requests: pairs.sequences.iter().filter(|one| one.is_bad(floor)).count() as u64,
            confident_wrong: pairs.finite().filter(of).count() as u64,
        }
    }

    /// Adds another step's counts.
    pub fn add(&mut self, other: &Self) {
        for (ours, theirs) in [
            (&mut self.decoded_first_chunks, other.decoded_first_chunks),
            (&mut self.stale_first_chunks, other.stale_first_chunks),
            (&mut self.wrapped_requests, other.wrapped_requests),
        ] {
            *ours = match (*ours, theirs) {
                (Some(ours), Some(theirs)) => Some(ours + theirs),
                (ours, theirs) => ours.or(theirs),
            };
        }
        self.bad_requests += other.bad_requests;
        self.confident_wrong += other.confident_wrong;
    }
}
