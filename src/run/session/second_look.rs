//! A second look at a few requests of a spike, each leg once more in a place of its own: scratch
//! pools for the engine, passes of their own for the trainer. Nothing that the run goes on with is
//! touched.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::{leg, sequence, Session};
use crate::base::{Contract, EngineIndex, LogProb, RequestId, TokenId};
use crate::engine::Forced;
use crate::gap::{self, Pairs, Probe, Probes, Refit, Row, UnlikeMode, WeightsOf, REFIT_LEAVES};
use crate::ops::sampling::Sampler;
use crate::rollout::{LegLogProbs, Rollout};
use crate::trainer::Sequence;

/// So many of the worst requests are looked at again, and as many good ones.
const LOOKED_AT: usize = 4;
/// Rows of logits from which another contract is sought.
const ROWS: usize = 64;
/// A token whose |d| is over this, nats, tells of a contract; from so many on one is believed.
const TELLS: f64 = 1e-3;
const TELLING_MIN: usize = 8;

/// What was looked at.
#[derive(Clone, Debug, Default)]
pub(in crate::run) struct Looks {
    pub probes: Option<Probes>,
    pub mode: Option<UnlikeMode>,
}

/// `good` in the order in which they are looked at beside `worst`: of the engines that those are of
/// in turn, so that none of them is alone, and then the others.
fn company(
    good: impl Iterator<Item = usize>,
    worst: &[usize],
    engine: impl Fn(usize) -> EngineIndex,
) -> Vec<usize> {
    let theirs: BTreeSet<EngineIndex> = worst.iter().map(|&index| engine(index)).collect();
    let mut of_each: BTreeMap<EngineIndex, usize> = BTreeMap::new();
    let mut order: Vec<_> = good
        .map(|index| {
            let nth = of_each.entry(engine(index)).or_default();
            *nth += 1;
            (!theirs.contains(&engine(index)), *nth, index)
        })
        .collect();
    order.sort_unstable();
    order.into_iter().map(|(.., index)| index).collect()
}

impl Session {
    /// Of a spike; of a step without suspects nothing.
    pub(super) fn second_look(
        &self,
        rollouts: &[Rollout],
        pairs: &Pairs,
        suspects: &[usize],
    ) -> Result<Looks> {
        if suspects.is_empty() {
            return Ok(Looks::default());
        }
        let mut worst = suspects.to_vec();
        let gap = |&index: &usize| pairs.sequences[index].gap().unwrap_or(0.0);
        worst.sort_by(|a, b| gap(b).total_cmp(&gap(a)));
        worst.truncate(LOOKED_AT);
        let good = (0..rollouts.len()).filter(|index| suspects.binary_search(index).is_err());
        let good = company(good, &worst, |index| rollouts[index].completion.engine);
        let chosen: Vec<usize> =
            worst.iter().copied().chain(good.into_iter().take(LOOKED_AT)).collect();
        let mut probes = self.probe(rollouts, &chosen)?;
        self.look_inside(rollouts, &worst, &mut probes.requests)?;
        let probes = Some(probes);
        Ok(Looks { probes, mode: self.unlike_mode(rollouts, &worst, suspects)? })
    }

    fn probe(&self, rollouts: &[Rollout], chosen: &[usize]) -> Result<Probes> {
        let all: Vec<Sequence> = rollouts.iter().map(sequence).collect();
        let packs = self.trainer.packs(&all);
        let together = self.decode_together(rollouts, &all, chosen);
        let mut requests = Vec::with_capacity(chosen.len());
        for (&index, together) in chosen.iter().zip(together) {
            let alone = std::slice::from_ref(&all[index]);
            let done = &rollouts[index].completion;
            let decoded = self.decode_again(done.engine, &[&all[index]]);
            requests.push(Probe {
                request: done.id,
                decode_again: decoded.map(|mut one| leg(one.remove(0))),
                decode_together: together.map(leg),
                trainer_again: None,
                trainer_alone: Some(self.trainer_scores(alone)?.remove(0)),
                prefill_trainer: None,
                decode_prefill: None,
                routes: None,
            });
        }
        for pack in &packs {
            let again = chosen.iter().enumerate().filter_map(|(at, index)| {
                Some((at, pack.iter().position(|member| member == index)?))
            });
            let again: Vec<(usize, usize)> = again.collect();
            if again.is_empty() {
                continue;
            }
            let members: Vec<Sequence> = pack.iter().map(|&index| all[index].clone()).collect();
            let scores = self.trainer_scores(&members)?;
            for (at, place) in again {
                requests[at].trainer_again = Some(scores[place].clone());
            }
        }
        let id = |&index: &usize| rollouts[index].completion.id;
        let packs = packs.iter().map(|pack| pack.iter().map(id).collect()).collect();
        Ok(Probes { requests, packs })
    }

    /// The chosen ones side by side, those of each engine in a scratch pool of its own; `None` of
    /// one that would be alone there.
    fn decode_together(
        &self,
        rollouts: &[Rollout],
        all: &[Sequence],
        chosen: &[usize],
    ) -> Vec<Option<Vec<LogProb>>> {
        let engine = |at: &usize| rollouts[chosen[*at]].completion.engine;
        let mut together = vec![None; chosen.len()];
        for index in (0..chosen.len()).map(|at| engine(&at)).collect::<BTreeSet<_>>() {
            let own: Vec<usize> = (0..chosen.len()).filter(|at| engine(at) == index).collect();
            let looked: Vec<&Sequence> = own.iter().map(|&at| &all[chosen[at]]).collect();
            if looked.len() > 1 {
                let scores = self.decode_again(index, &looked).into_iter().flatten();
                own.iter().zip(scores).for_each(|(&at, scores)| together[at] = Some(scores));
            }
        }
        together
    }

    /// Side by side in one scratch pool; `None` where the engine cannot be made to.
    fn decode_again(
        &self,
        engine: EngineIndex,
        sequences: &[&Sequence],
    ) -> Option<Vec<Vec<LogProb>>> {
        let engine = self.source.engine(engine)?;
        let forced: Vec<Forced<'_>> = sequences
            .iter()
            .map(|one| Forced { tokens: &one.tokens, prompt_len: one.prompt_len })
            .collect();
        let scratch = engine.scratch(sequences.len());
        Some(engine.runner().decode_forced(&self.contract, scratch, &forced))
    }

    fn trainer_scores(&self, sequences: &[Sequence]) -> Result<Vec<LegLogProbs>> {
        let scores = self.trainer.score(sequences, &self.contract)?;
        Ok(scores.into_iter().map(|one| leg(one.contract)).collect())
    }

    /// Whether the engine's log-probabilities are of another contract than its records state, by
    /// the trainer's logits: sought from the worst requests, then held against every suspect.
    fn unlike_mode(
        &self,
        rollouts: &[Rollout],
        worst: &[usize],
        suspects: &[usize],
    ) -> Result<Option<UnlikeMode>> {
        let Some(found) = self.refit(rollouts, worst)? else { return Ok(None) };
        let sequences: Vec<Sequence> = suspects.iter().map(|&at| sequence(&rollouts[at])).collect();
        let (stated, fits) = (self.contract, found.contract);
        let sampled = sampled(rollouts, suspects);
        let gaps = self.trainer.map_logits(&sequences, move |seen| {
            let logp = sampled[seen.sequence][seen.index];
            [stated, fits].map(|contract| distance(seen.logits, seen.token, logp, &contract))
        })?;
        let mut requests = BTreeSet::<RequestId>::new();
        for (&index, gaps) in suspects.iter().zip(&gaps) {
            let sum = |at: usize| gaps.iter().map(|pair| pair[at]).sum::<f64>();
            if sum(1) <= REFIT_LEAVES * sum(0) {
                requests.insert(rollouts[index].completion.id);
            }
        }
        let message = told(&found, &stated);
        Ok((!requests.is_empty()).then_some(UnlikeMode { message, requests }))
    }

    fn refit(&self, rollouts: &[Rollout], worst: &[usize]) -> Result<Option<Refit>> {
        let sequences: Vec<Sequence> = worst.iter().map(|&at| sequence(&rollouts[at])).collect();
        let tokens: usize = sequences.iter().map(|one| one.tokens.len() - one.prompt_len).sum();
        let apart = tokens.div_ceil(ROWS).max(1);
        let stated = self.contract;
        let sampled = sampled(rollouts, worst);
        let seen = self.trainer.map_logits(&sequences, move |seen| {
            let logp = sampled[seen.sequence][seen.index];
            let tells = distance(seen.logits, seen.token, logp, &stated) > TELLS;
            let chosen = seen.index % apart == 0;
            (tells, chosen.then(|| (seen.token, logp, seen.logits.to_vec())))
        })?;
        let telling = seen.iter().flatten().filter(|(tells, _)| *tells).count();
        if telling < TELLING_MIN {
            return Ok(None);
        }
        let rows = seen.iter().flatten().filter_map(|(_, row)| row.as_ref());
        let rows = rows.map(|&(token, logp, ref logits)| Row { logits, token, logp });
        Ok(gap::refit(&rows.collect::<Vec<_>>(), &stated))
    }

    /// Once a version.
    pub(super) fn note_weights(&mut self, weights: WeightsOf) {
        if self.weights.last() != Some(&weights) {
            self.weights.push(weights);
        }
    }
}

/// The decode side's log-probabilities of some rollouts.
fn sampled(rollouts: &[Rollout], which: &[usize]) -> Vec<Vec<LogProb>> {
    let of_rollout =
        |&at: &usize| rollouts[at].completion.tokens.iter().map(|sampled| sampled.logp).collect();
    which.iter().map(of_rollout).collect()
}

/// |d| in nats; infinite where the contract removes the token.
fn distance(logits: &[f32], token: TokenId, logp: LogProb, contract: &Contract) -> f64 {
    let ours = Sampler::default().log_prob(logits, token, contract);
    (f64::from(ours.get()) - f64::from(logp.get())).abs()
}

fn told(found: &Refit, stated: &Contract) -> String {
    let mass = found.kept_mass.map_or(String::new(), |mass| format!(", kept mass {mass:.3}"));
    format!(
        "by the trainer's logits the decode side's log-probabilities are {:.3} (found{mass}), \
         while its records say {stated:.3}: the mean |d| of {} tokens falls from {:e} to {:e}",
        found.contract, found.tokens, found.before, found.after,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_requests_are_looked_at_beside_bad_ones_of_their_engine() {
        // Three prompts of two rollouts go round; request 5 of engine 2 is bad, then 0 and 5.
        let engine =
            |engines: u32| move |index: usize| EngineIndex::new(index as u32 / 2 % engines);
        let check = |engines, worst: &[usize], expected: [usize; 3]| {
            let good = (0..8).filter(|index| !worst.contains(index));
            assert_eq!(company(good, worst, engine(engines))[..3], expected, "{worst:?}");
        };
        check(1, &[5], [0, 1, 2]);
        check(3, &[5], [4, 0, 2]);
        check(3, &[0, 5], [1, 4, 6]);
    }
}
