//! The legs beside decode and trainer, for those sequences that are to have them.

use anyhow::Result;

use super::{leg, sequence, Session};
use crate::base::{EngineIndex, LogProb};
use crate::config::Leg;
use crate::rollout::Rollout;
use crate::run::parts;
use crate::trainer::reference::Reference;
use crate::trainer::Sequence;

/// Multiplications of the reference leg that a spike makes unasked: some ten seconds of a CPU.
const UNASKED_PRODUCTS_MAX: u64 = 1_000_000_000_000;
const OPENING_TOKENS: usize = 512;

impl Session {
    pub(super) fn score_prefill(&self, rollouts: &mut [Rollout], which: &[usize]) -> Result<()> {
        let Some(engines) = self.source.embedded() else {
            return self.score_prefill_by_servers(rollouts, which);
        };
        for (engine, index) in engines.iter().zip(0..) {
            let own = |at: &&usize| rollouts[**at].completion.engine == EngineIndex::new(index);
            let which: Vec<usize> = which.iter().filter(own).copied().collect();
            let sequences: Vec<Sequence> = which.iter().map(|&i| sequence(&rollouts[i])).collect();
            let forced: Vec<_> =
                sequences.iter().map(|one| (one.tokens.as_slice(), one.prompt_len)).collect();
            for (index, scores) in which.into_iter().zip(engine.score_prefill(&forced)) {
                rollouts[index].prefill = Some(leg(scores));
            }
        }
        Ok(())
    }

    /// The reference knows temperature and no filters; a contract with filters has no such leg.
    pub(super) fn score_reference(&self, rollouts: &mut [Rollout], which: &[usize]) -> Result<()> {
        if which.is_empty() || (!self.contract.scores_raw_logits() && self.contract.has_filters()) {
            return Ok(());
        }
        let raw = self.contract.scores_raw_logits();
        let temperature = if raw { 1.0 } else { self.contract.temperature };
        // Nobody waits an hour for a third opinion of a large model: unasked, the first suspects
        // have one, or none. To open a model takes about as long as so many tokens.
        let params = self.plan.num_parameters();
        let asked = self.config.check.legs.contains(&Leg::Reference);
        let mut left = if asked { u64::MAX } else { UNASKED_PRODUCTS_MAX };
        let mut afford = |tokens: usize| {
            left = left.checked_sub(params * tokens as u64)?;
            Some(())
        };
        let Some(()) = afford(OPENING_TOKENS) else { return Ok(()) };
        let reference = self.reference()?;
        for &index in which {
            let Sequence { tokens, prompt_len } = sequence(&rollouts[index]);
            let Some(()) = afford(tokens.len()) else { break };
            let all = reference.target_logprobs(&tokens, temperature)?;
            let scores = all[prompt_len - 1..].iter().map(|&nats| LogProb::new(nats));
            rollouts[index].reference = Some(leg(scores));
        }
        Ok(())
    }

    /// candle's model of the weights that scoring uses.
    fn reference(&self) -> Result<Reference> {
        parts::reference(&self.plan, &self.trainer.hand_over()?.units)
    }
}
