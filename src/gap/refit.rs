//! Which distribution a record's log-probabilities are of, found by search where a model's logits
//! are at hand. From the chosen tokens' log-probabilities alone it cannot be told.

use rayon::prelude::*;

use crate::base::{Contract, LogProb, LogprobsMode, TokenId};
use crate::ops::sampling::Sampler;

/// Fewer tokens than this are explained by chance.
const ROWS_MIN: usize = 3;
/// A mean |d| up to this, nats, is not worth an explanation (NeMo-RL calls 1e-3 acceptable).
const WORTH: f64 = 1e-3;
/// A fit explains the gap if it leaves at most this share of it.
pub const REFIT_LEAVES: f64 = 0.1;
/// Temperatures that are tried.
const TEMPERATURES: (f64, f64) = (0.05, 20.0);
const GRID: u32 = 48;
const GOLDEN_STEPS: u32 = 40;
/// What a removed token counts, nats, so that a sum stays a number.
const REMOVED: f64 = 100.0;

/// A model's logits for one position, the token that was sampled there, and the log-probability
/// that a record gives it.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    pub logits: &'a [f32],
    pub token: TokenId,
    pub logp: LogProb,
}

/// Another contract than the stated one, under which the model's log-probabilities are those of
/// the record.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Refit {
    pub contract: Contract,
    /// Tokens it was found from.
    pub tokens: usize,
    /// Mean |d| of those under the stated contract and under this one, nats.
    pub before: f64,
    pub after: f64,
    /// Where filters are found: the mean probability of what they keep.
    pub kept_mass: Option<f64>,
}

/// The simplest contract that leaves a tenth of the mean |d| or less: raw logits, else one
/// temperature, else one top-k or top-p at the stated temperature. `None` where nothing is to be
/// explained or none of these explains it.
#[must_use]
pub fn refit(rows: &[Row<'_>], stated: &Contract) -> Option<Refit> {
    let rows: Vec<Row<'_>> = rows.iter().filter(|row| row.logp.is_finite()).copied().collect();
    if rows.len() < ROWS_MIN {
        return None;
    }
    let before = mean_gap(&rows, stated);
    if before <= WORTH {
        return None;
    }
    let explains = |contract: Contract, kept_mass| {
        let after = mean_gap(&rows, &contract);
        let found = Refit { contract, tokens: rows.len(), before, after, kept_mass };
        (after <= REFIT_LEAVES * before).then_some(found)
    };
    let temperature = || {
        let fit = fit_temperature(&rows, stated);
        explains(fit, kept_mass(&rows, &fit))
    };
    explains(Contract::PLAIN, None)
        .or_else(temperature)
        .or_else(|| fit_filter(&rows, stated).and_then(|(fit, mass)| explains(fit, Some(mass))))
}

/// Mean |d|, in row order whatever the number of threads.
fn mean_gap(rows: &[Row<'_>], contract: &Contract) -> f64 {
    let gap = |row: &Row<'_>| {
        let ours = Sampler::default().log_prob(row.logits, row.token, contract);
        match ours.is_finite() {
            true => (f64::from(ours.get()) - f64::from(row.logp.get())).abs(),
            false => REMOVED,
        }
    };
    let gaps: Vec<f64> = rows.par_iter().map(gap).collect();
    gaps.iter().sum::<f64>() / rows.len() as f64
}

/// The temperature of the smallest mean |d|: a grid, then golden sections, both of its logarithm.
fn fit_temperature(rows: &[Row<'_>], stated: &Contract) -> Contract {
    let at = |log: f64| Contract {
        logprobs_mode: LogprobsMode::ProcessedLogprobs,
        temperature: log.exp() as f32,
        ..*stated
    };
    let cost = |log: f64| mean_gap(rows, &at(log));
    let (from, to) = (TEMPERATURES.0.ln(), TEMPERATURES.1.ln());
    let step = (to - from) / f64::from(GRID);
    let grid = (0..=GRID).map(|i| from + f64::from(i) * step);
    let best = grid.map(|log| (cost(log), log)).min_by(|a, b| a.0.total_cmp(&b.0));
    let best = best.expect("the grid has points").1;
    let ratio = (5.0_f64.sqrt() - 1.0) / 2.0;
    let (mut low, mut high) = (best - step, best + step);
    for _ in 0..GOLDEN_STEPS {
        let width = ratio * (high - low);
        if cost(high - width) <= cost(low + width) {
            high = low + width;
        } else {
            low = high - width;
        }
    }
    at((low + high) / 2.0)
}

/// The mean probability of what a contract's filters keep; `None` of one without filters.
fn kept_mass(rows: &[Row<'_>], contract: &Contract) -> Option<f64> {
    let open = Contract { top_p: 1.0, top_k: 0, min_p: 0.0, ..*contract };
    let mass = |row: &Row<'_>| {
        let under = |contract: &Contract| {
            f64::from(Sampler::default().log_prob(row.logits, row.token, contract).get())
        };
        let kept = under(contract);
        // A token that is not kept says nothing of how much is.
        kept.is_finite().then(|| (under(&open) - kept).exp())
    };
    let masses: Vec<f64> = rows.iter().filter_map(mass).collect();
    let mean = || masses.iter().sum::<f64>() / masses.len() as f64;
    (contract.has_filters() && !masses.is_empty()).then(mean)
}

/// The top-p or top-k of the smallest mean |d|, and the mean mass it keeps; of equals, top-p.
fn fit_filter(rows: &[Row<'_>], stated: &Contract) -> Option<(Contract, f64)> {
    let temperature = if stated.is_greedy() { 1.0 } else { stated.temperature };
    let open =
        Contract { logprobs_mode: LogprobsMode::ProcessedLogprobs, temperature, ..Contract::PLAIN };
    let kept: Vec<Kept> = rows.par_iter().map(|row| Kept::of(row, &open)).collect();
    let by_k = kept.iter().map(|one| Contract { top_k: one.count, ..open });
    // The smallest set whose mass reaches top-p ends where a row's mass does.
    let by_p = kept.iter().map(|one| Contract { top_p: one.mass as f32, ..open });
    let mut candidates: Vec<Contract> = by_k.chain(by_p).collect();
    candidates.sort_by(|a, b| a.top_k.cmp(&b.top_k).then(a.top_p.total_cmp(&b.top_p)));
    candidates.dedup();
    let cost = |contract: &Contract| {
        let gaps = kept.iter().map(|one| one.gap(contract));
        gaps.sum::<f64>() / kept.len() as f64
    };
    let best = candidates.into_iter().min_by(|a, b| cost(a).total_cmp(&cost(b)))?;
    let mass = kept.iter().map(|one| one.mass_under(&best)).sum::<f64>() / kept.len() as f64;
    Some((best, mass))
}

/// A row's probabilities, and what its record says was kept of them.
struct Kept {
    /// The mass of the likeliest, of the two likeliest, and so on.
    masses: Vec<f64>,
    /// How many are likelier than the sampled token.
    rank: usize,
    /// log p of the sampled token under the record less that without filters.
    excess: f64,
    /// The number of likeliest tokens whose mass is nearest to what the record says, and that mass.
    count: u32,
    mass: f64,
}

impl Kept {
    fn of(row: &Row<'_>, open: &Contract) -> Self {
        let ours = f64::from(Sampler::default().log_prob(row.logits, row.token, open).get());
        let chosen = row.logits[row.token.index()];
        let p = |logit: f32| {
            let above = f64::from(logit) - f64::from(chosen);
            (ours + above / f64::from(open.temperature)).exp()
        };
        let mut sorted: Vec<f32> = row.logits.to_vec();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let rank = sorted.partition_point(|&logit| logit > chosen);
        let mut sum = 0.0;
        let masses = sorted.iter().map(|&logit| {
            sum += p(logit);
            sum
        });
        let masses: Vec<f64> = masses.collect();
        let excess = f64::from(row.logp.get()) - ours;
        let wanted = (-excess).exp();
        let last = masses.len() - 1;
        let after = masses.partition_point(|&mass| mass < wanted).clamp(rank.min(last), last);
        let far = |at: usize| (masses[at] - wanted).abs();
        let at = if after > rank && far(after - 1) <= far(after) { after - 1 } else { after };
        let (count, mass) = (at as u32 + 1, masses[at].min(1.0));
        Self { masses, rank, excess, count, mass }
    }

    /// How many tokens a top-k or top-p keeps.
    fn count_under(&self, contract: &Contract) -> usize {
        if contract.top_k > 0 {
            return (contract.top_k as usize).min(self.masses.len());
        }
        // An f32 of a mass may be just over it.
        let enough = f64::from(contract.top_p) - 1e-6;
        let below = self.masses.partition_point(|&mass| mass < enough);
        (below + 1).min(self.masses.len())
    }

    fn mass_under(&self, contract: &Contract) -> f64 {
        self.masses[self.count_under(contract) - 1].min(1.0)
    }

    fn gap(&self, contract: &Contract) -> f64 {
        match self.rank < self.count_under(contract) {
            true => (self.excess + self.mass_under(contract).ln()).abs(),
            false => REMOVED,
        }
    }
}

#[cfg(test)]
#[path = "refit_tests.rs"]
mod tests;
