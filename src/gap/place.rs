//! Where a gap sits: by state block, by position, by shift.

use std::cmp::Ordering;

use super::pair::{Pairs, Sequence};
use super::table::Values;
use super::{floor, stats};
use crate::base::BlockId;

/// Shifts that are tried; wider ones have not been reported by anyone.
const LAGS: [i64; 5] = [-2, -1, 0, 1, 2];
/// A shift is believed from this many token pairs on ...
const SHIFT_PAIRS_MIN: u64 = 3;
/// ... and if it leaves at most this share of the gap.
const SHIFT_LEAVES: f64 = 0.1;

/// How well the legs agree if one is moved against the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LagScore {
    /// infer\[i + lag\] is set beside train\[i\].
    pub lag: i64,
    pub pairs: u64,
    /// Mean |infer\[i + lag\] - train\[i\]|, nats.
    pub abs_diff_mean: f64,
    /// Mean |d| of the same tokens without a shift: the lower of that over the infer side's and
    /// over the train side's.
    ///
    /// A shift drops tokens at an edge, so that it looks good where only those were bad; this does
    /// not.
    pub unshifted_abs_diff_mean: f64,
}

/// One score a lag from -2 to 2, over finite tokens; lags without a pair are left out.
pub fn lag_scores<'a>(sequences: impl Iterator<Item = &'a Sequence> + Clone) -> Vec<LagScore> {
    LAGS.iter().filter_map(|&lag| lag_score(sequences.clone(), lag)).collect()
}

fn lag_score<'a>(sequences: impl Iterator<Item = &'a Sequence>, lag: i64) -> Option<LagScore> {
    let (mut pairs, mut shifted, mut by_infer, mut by_train) = (0, 0.0, 0.0, 0.0);
    for sequence in sequences {
        let tokens: Vec<_> = sequence.finite().collect();
        let mut later = tokens.iter().peekable();
        for train in &tokens {
            let wanted = i64::from(train.index.get()) + lag;
            while later.next_if(|token| i64::from(token.index.get()) < wanted).is_some() {}
            let reached = later.peek().filter(|token| i64::from(token.index.get()) == wanted);
            let Some(infer) = reached else { continue };
            let difference = f64::from(train.train.get()) - f64::from(infer.infer.get());
            pairs += 1;
            shifted += difference.abs();
            by_infer += infer.d().abs();
            by_train += train.d().abs();
        }
    }
    (pairs > 0).then(|| LagScore {
        lag,
        pairs,
        abs_diff_mean: shifted / pairs as f64,
        unshifted_abs_diff_mean: by_infer.min(by_train) / pairs as f64,
    })
}

/// The shift that explains the gap of these sequences, if one does: it leaves at most the floor or
/// a tenth of the gap.
pub fn shift<'a>(
    sequences: impl Iterator<Item = &'a Sequence> + Clone,
    floor: f64,
) -> Option<LagScore> {
    lag_scores(sequences)
        .into_iter()
        .filter(|score| {
            let before = score.unshifted_abs_diff_mean;
            score.lag != 0
                && score.pairs >= SHIFT_PAIRS_MIN
                && before > floor
                && score.abs_diff_mean <= (SHIFT_LEAVES * before).max(floor)
        })
        .min_by(closer)
}

/// The smaller difference first, then the shorter shift.
fn closer(a: &LagScore, b: &LagScore) -> Ordering {
    a.abs_diff_mean.total_cmp(&b.abs_diff_mean).then(a.lag.abs().cmp(&b.lag.abs()))
}

/// The block id at which the gap changes most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlotSplit {
    /// The lowest id of the upper part.
    pub slot: BlockId,
    /// Share of the sequences at or above it that are over the floor.
    pub frac_bad_above: f64,
}

/// Splits the sequences by their first state block so that the ranks of their largest gaps differ
/// most between the two parts (least squares). `None` if nothing differs, or all sit in one block.
#[must_use]
pub fn split_by_slot(pairs: &Pairs, floor: f64) -> Option<SlotSplit> {
    let mut by_slot = slots_and_gaps(pairs);
    by_slot.sort_by_key(|&(slot, _)| slot);
    let gaps: Vec<f64> = by_slot.iter().map(|&(_, gap)| gap).collect();
    let ranks = stats::ranks(&gaps);
    let n = ranks.len() as f64;
    let total: f64 = ranks.iter().sum();
    let (mut below, mut best, mut best_score) = (0.0, None, 0.0);
    for at in 1..by_slot.len() {
        below += ranks[at - 1];
        if by_slot[at - 1].0 == by_slot[at].0 {
            continue;
        }
        let (n_below, n_above) = (at as f64, n - at as f64);
        let difference = (total - below) / n_above - below / n_below;
        let score = n_below * n_above * difference * difference;
        if score > best_score {
            (best, best_score) = (Some(at), score);
        }
    }
    let at = best?;
    let frac_bad_above = stats::fraction(&gaps[at..], |gap| gap > floor)?;
    Some(SlotSplit { slot: by_slot[at].0, frac_bad_above })
}

/// Of the sequences that hold state and have a compared token.
fn slots_and_gaps(pairs: &Pairs) -> Vec<(BlockId, f64)> {
    pairs.sequences.iter().filter_map(|sequence| Some((sequence.slot?, sequence.gap()?))).collect()
}

pub(super) fn values(pairs: &Pairs, floor: f64) -> Values {
    let first = pairs.sequences.iter().filter_map(|sequence| sequence.first_bad(floor)).min();
    let first = vec![("first_divergent_pos", first.map(|at| f64::from(at.get())))];
    [by_slot(pairs, floor), first, by_lag(pairs), worst_token(pairs)].concat()
}

fn by_slot(pairs: &Pairs, floor: f64) -> Values {
    let (slots, gaps): (Vec<f64>, Vec<f64>) =
        slots_and_gaps(pairs).into_iter().map(|(slot, gap)| (f64::from(slot.get()), gap)).unzip();
    let split = split_by_slot(pairs, floor);
    vec![
        ("slot_corr", stats::spearman(&slots, &gaps)),
        ("slot_change_point", split.map(|split| f64::from(split.slot.get()))),
        ("slot_frac_bad_above", split.map(|split| split.frac_bad_above)),
    ]
}

fn by_lag(pairs: &Pairs) -> Values {
    let scores = lag_scores(pairs.sequences.iter());
    let mean_at =
        |lag: i64| scores.iter().find(|score| score.lag == lag).map(|score| score.abs_diff_mean);
    let improves =
        |score: &&LagScore| score.lag == 0 || score.abs_diff_mean < score.unshifted_abs_diff_mean;
    let best = scores.iter().filter(improves).min_by(|a, b| closer(a, b));
    vec![
        ("shift_-2_abs_diff_mean", mean_at(-2)),
        ("shift_-1_abs_diff_mean", mean_at(-1)),
        ("shift_0_abs_diff_mean", mean_at(0)),
        ("shift_1_abs_diff_mean", mean_at(1)),
        ("shift_2_abs_diff_mean", mean_at(2)),
        ("shift_best", best.map(|score| score.lag as f64)),
    ]
}

fn worst_token(pairs: &Pairs) -> Values {
    // A step without a difference has no worst token.
    let worst = floor::worst(pairs, 1).pop().filter(|token| token.gap > 0.0);
    let slot = worst.as_ref().and_then(|token| token.slot);
    let of =
        |value: fn(&floor::WorstToken) -> u32| worst.as_ref().map(|token| f64::from(value(token)));
    vec![
        ("worst_prompt_id", of(|token| token.request.prompt_id.get())),
        ("worst_rollout_idx", of(|token| token.request.rollout_idx)),
        ("worst_slot", slot.map(|slot| f64::from(slot.get()))),
        ("worst_pos", of(|token| token.paired.index.get())),
        ("worst_token_id", of(|token| token.paired.token.get())),
    ]
}
