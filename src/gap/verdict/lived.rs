//! What one life of a request shows: what it sampled, and which of it is bad.

use super::Case;
use crate::base::{BlockId, EngineStep};
use crate::engine::{Life, Phase, SampledToken};
use crate::gap::pair::PairedToken;

/// A good token that both sides are surer of than this says nothing, nats. So close to 0 there are
/// so few f32 log-probabilities that two different states often give the same one.
const TELLING_NATS: f32 = 0.01;

/// One life of a request, with the tokens it sampled.
#[derive(Clone, Copy)]
pub(super) struct Lived<'a> {
    pub(super) life: &'a Life,
    /// Whether the request had been preempted before.
    pub(super) resumed: bool,
    tokens: &'a [SampledToken],
    /// The same tokens, as far as they were compared.
    paired: &'a [PairedToken],
    /// When the request's next life began.
    next: Option<EngineStep>,
    floor: f64,
}

impl<'a> Lived<'a> {
    /// The lives of a request, in order; none where its engine keeps no record of them.
    pub(super) fn of(case: &Case<'a>, floor: f64) -> Vec<Self> {
        let (lives, tokens) = (&case.rollout.completion.lives, &case.rollout.completion.tokens);
        let paired = &case.sequence.tokens;
        let start = |number: usize| {
            let all = tokens.len();
            lives.get(number).map_or(all, |life| all.min(life.sampled_before as usize))
        };
        let place = |index: usize| paired.partition_point(|token| token.index.index() < index);
        let one = |(number, life): (usize, &'a Life)| {
            let (from, to) = (start(number), start(number + 1).max(start(number)));
            Self {
                life,
                resumed: number > 0,
                tokens: &tokens[from..to],
                paired: &paired[place(from)..place(to)],
                next: lives.get(number + 1).map(|next| next.engine_step),
                floor,
            }
        };
        lives.iter().enumerate().map(one).collect()
    }

    /// The first token over the floor, as it was sampled. From there on a damaged life stays so.
    pub(super) fn first_bad(&self) -> Option<&'a SampledToken> {
        let bad = self.paired.iter().find(|token| token.gap() > self.floor)?;
        Some(&self.tokens[bad.index.index() - self.life.sampled_before as usize])
    }

    /// The first engine step in which it stood in the first row of a batch with padding rows.
    pub(super) fn first_before_padding(&self) -> Option<EngineStep> {
        let hit = |token: &&SampledToken| token.padding_rows > 0 && token.batch_row == 0;
        self.tokens.iter().find(hit).map(|token| token.engine_step)
    }

    /// Whether it sampled a token after the one step and before the other whose good value would
    /// say something.
    pub(super) fn tells_between(&self, after: EngineStep, before: EngineStep) -> bool {
        let from = self.tokens.partition_point(|token| token.engine_step <= after);
        let to = self.tokens.partition_point(|token| token.engine_step < before);
        let place = |number: usize| {
            let index = self.life.sampled_before as usize + number;
            self.paired.partition_point(|token| token.index.index() < index)
        };
        from < to && self.paired[place(from)..place(to)].iter().any(|token| !sure(token))
    }

    /// The first token that it sampled and whose good value would say something; `None` where it
    /// sampled none.
    pub(super) fn first_telling(&self) -> Option<&'a SampledToken> {
        let telling = |token: &&PairedToken| token.gap() > self.floor || !sure(token);
        let told = self.paired.iter().find(telling)?;
        Some(&self.tokens[told.index.index() - self.life.sampled_before as usize])
    }

    /// The engine steps in which it certainly held the blocks it began with, first and last.
    pub(super) fn certain_steps(&self) -> (EngineStep, EngineStep) {
        let first = self.life.engine_step;
        (first, self.tokens.last().map_or(first, |token| token.engine_step))
    }

    pub(super) fn highest_state_block(&self) -> Option<BlockId> {
        self.life.state_blocks.iter().map(|held| held.block).max()
    }

    /// Whether one of its state blocks is `first` or above.
    pub(super) fn holds(&self, first: BlockId) -> bool {
        self.highest_state_block().is_some_and(|highest| highest >= first)
    }

    /// Whether its first row read what another request had left: a decode row reads its state
    /// blocks unconditionally, and without a cached prefix nothing of its own is in them yet.
    pub(super) fn began_stale(&self) -> bool {
        let used = self.life.state_blocks.iter().any(|held| held.previous_owner.is_some());
        self.life.phase == Phase::Decode && self.life.cached.is_empty() && used
    }

    /// The engine step of the first token whose row read back a state that was stored earlier in
    /// this life. What one prefill row samples never left its kernel.
    pub(super) fn first_read_back(&self) -> Option<EngineStep> {
        let began = self.life.engine_step;
        let reads =
            |token: &&SampledToken| token.phase == Phase::Decode || token.engine_step > began;
        self.tokens.iter().find(reads).map(|token| token.engine_step)
    }

    /// Whether the tokens that a decode row sampled over a prefill row's state are bad; `None`
    /// where there are none, or none that could show it.
    pub(super) fn handed_over_bad(&self) -> Option<bool> {
        let prefilled = |token: &SampledToken| token.phase == Phase::Prefill;
        let first = match self.life.phase {
            Phase::Prefill => 0,
            Phase::Decode => self.tokens.iter().position(prefilled)?,
        };
        let decoded = self.tokens[first..].iter().position(|token| !prefilled(token))?;
        let index = self.life.sampled_before as usize + first + decoded;
        let at = self.paired.partition_point(|token| token.index.index() < index);
        let after = &self.paired[at..];
        let bad = after.iter().any(|token| token.gap() > self.floor);
        (bad || after.iter().any(|token| !sure(token))).then_some(bad)
    }

    /// The engine steps in which its prefill may have stored state, first and last.
    pub(super) fn prefill_steps(&self) -> (EngineStep, EngineStep) {
        let first = self.life.engine_step;
        let prefilled = self.tokens.iter().rfind(|token| token.phase == Phase::Prefill);
        let sampled = prefilled.or(self.tokens.first()).map(|token| token.engine_step);
        let preempted = || self.next.map(|next| EngineStep::new(next.get() - 1));
        (first, sampled.or_else(preempted).unwrap_or(first))
    }
}

/// Whether a good token says nothing.
fn sure(token: &PairedToken) -> bool {
    token.infer.get() > -TELLING_NATS && token.train.get() > -TELLING_NATS
}
