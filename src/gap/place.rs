//! Where a gap sits: by state block, by position, by shift.

use std::cmp::Ordering;

use super::floor::{self, WorstToken};
use super::pair::Sequence;
use super::stats;
use super::table::Values;
use crate::base::{BlockId, CompletionIndex};

/// Tokens of the largest gap that a step keeps.
pub const WORST_KEPT: usize = 3;

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

/// The shift that explains the gap of these sequences, if one does: it leaves at most the floor or
/// a tenth of the gap.
pub fn shift<'a>(sequences: impl Iterator<Item = &'a Sequence>, floor: f64) -> Option<LagScore> {
    let mut lags = Lags::default();
    sequences.for_each(|sequence| lags.add(sequence));
    lags.shift(floor)
}

/// Sums over the sequences' finite tokens, one a lag from -2 to 2.
#[derive(Clone, Debug, Default)]
pub(super) struct Lags([LagSums; LAGS.len()]);

#[derive(Clone, Copy, Debug, Default)]
struct LagSums {
    pairs: u64,
    shifted: f64,
    by_infer: f64,
    by_train: f64,
}

impl Lags {
    pub(super) fn add(&mut self, sequence: &Sequence) {
        for (sums, lag) in self.0.iter_mut().zip(LAGS) {
            sums.add(sequence, lag);
        }
    }

    /// Lags without a pair are left out.
    fn scores(&self) -> impl Iterator<Item = LagScore> + Clone + '_ {
        std::iter::zip(&self.0, LAGS).filter(|(sums, _)| sums.pairs > 0).map(|(sums, lag)| {
            let n = sums.pairs as f64;
            LagScore {
                lag,
                pairs: sums.pairs,
                abs_diff_mean: sums.shifted / n,
                unshifted_abs_diff_mean: sums.by_infer.min(sums.by_train) / n,
            }
        })
    }

    pub(super) fn shift(&self, floor: f64) -> Option<LagScore> {
        let explains = |score: &LagScore| {
            let before = score.unshifted_abs_diff_mean;
            score.lag != 0
                && score.pairs >= SHIFT_PAIRS_MIN
                && before > floor
                && score.abs_diff_mean <= (SHIFT_LEAVES * before).max(floor)
        };
        self.scores().filter(explains).min_by(closer)
    }
}

impl LagSums {
    fn add(&mut self, sequence: &Sequence, lag: i64) {
        let mut later = sequence.finite().peekable();
        for train in sequence.finite() {
            let wanted = i64::from(train.index.get()) + lag;
            while later.next_if(|token| i64::from(token.index.get()) < wanted).is_some() {}
            let reached = later.peek().filter(|token| i64::from(token.index.get()) == wanted);
            let Some(infer) = reached else { continue };
            let difference = f64::from(train.train.get()) - f64::from(infer.infer.get());
            self.pairs += 1;
            self.shifted += difference.abs();
            self.by_infer += infer.d().abs();
            self.by_train += train.d().abs();
        }
    }
}

/// The smaller difference first, then the shorter shift.
fn closer(a: &LagScore, b: &LagScore) -> Ordering {
    a.abs_diff_mean.total_cmp(&b.abs_diff_mean).then(a.lag.abs().cmp(&b.lag.abs()))
}

/// The block id at which the gap changes most.
#[derive(Clone, Copy, Debug, PartialEq)]
struct SlotSplit {
    /// The lowest id of the upper part.
    slot: BlockId,
    /// Share of the sequences at or above it that are over the floor.
    frac_bad_above: f64,
}

/// Splits sequences by their first state block so that the ranks of their largest gaps differ
/// most between the two parts (least squares). `None` if nothing differs, or all sit in one block.
fn split_by_slot(slots_and_gaps: &[(BlockId, f64)], floor: f64) -> Option<SlotSplit> {
    let mut by_slot = slots_and_gaps.to_vec();
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
    let frac_bad_above = stats::fraction(gaps[at..].iter().copied(), |gap| gap > floor)?;
    Some(SlotSplit { slot: by_slot[at].0, frac_bad_above })
}

/// Where the gaps of a step sit.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    /// Of the sequences that hold state and have a compared token, those of several engines
    /// together: what becomes of an address depends on the block's number alone.
    slots_and_gaps: Vec<(BlockId, f64)>,
    first_bad: Option<CompletionIndex>,
    pub(super) lags: Lags,
    /// Of the sequences over the floor alone.
    pub(super) lags_of_bad: Lags,
    /// At most [`WORST_KEPT`], worst first.
    pub(super) worst: Vec<WorstToken>,
}

impl Places {
    pub(super) fn add(&mut self, sequence: &Sequence, floor: f64) {
        self.slots_and_gaps.extend(sequence.slot.zip(sequence.gap()));
        self.first_bad = self.first_bad.into_iter().chain(sequence.first_bad(floor)).min();
        self.lags.add(sequence);
        if sequence.is_bad(floor) {
            self.lags_of_bad.add(sequence);
        }
        floor::take_worst(&mut self.worst, WORST_KEPT, sequence);
    }

    pub(super) fn values(&self, floor: f64) -> Values {
        let first = self.first_bad.map(|at| f64::from(at.get()));
        let first = vec![("first_divergent_pos", first)];
        [self.by_slot(floor), first, self.by_lag(), self.worst_token()].concat()
    }

    fn by_slot(&self, floor: f64) -> Values {
        let row = |&(slot, gap): &(BlockId, f64)| (f64::from(slot.get()), gap);
        let (slots, gaps): (Vec<f64>, Vec<f64>) = self.slots_and_gaps.iter().map(row).unzip();
        let split = split_by_slot(&self.slots_and_gaps, floor);
        vec![
            ("slot_corr", stats::spearman(&slots, &gaps)),
            ("slot_change_point", split.map(|split| f64::from(split.slot.get()))),
            ("slot_frac_bad_above", split.map(|split| split.frac_bad_above)),
        ]
    }

    fn by_lag(&self) -> Values {
        let mean_at = |lag: i64| {
            self.lags.scores().find(|score| score.lag == lag).map(|score| score.abs_diff_mean)
        };
        let improves = |score: &LagScore| {
            score.lag == 0 || score.abs_diff_mean < score.unshifted_abs_diff_mean
        };
        let best = self.lags.scores().filter(improves).min_by(closer);
        vec![
            ("shift_-2_abs_diff_mean", mean_at(-2)),
            ("shift_-1_abs_diff_mean", mean_at(-1)),
            ("shift_0_abs_diff_mean", mean_at(0)),
            ("shift_1_abs_diff_mean", mean_at(1)),
            ("shift_2_abs_diff_mean", mean_at(2)),
            ("shift_best", best.map(|score| score.lag as f64)),
        ]
    }

    fn worst_token(&self) -> Values {
        // A step without a difference has no worst token.
        let worst = self.worst.first().filter(|token| token.gap > 0.0);
        let slot = worst.and_then(|token| token.slot);
        let of = |value: fn(&WorstToken) -> u32| worst.map(|token| f64::from(value(token)));
        vec![
            ("worst_prompt_id", of(|token| token.request.prompt_id.get())),
            ("worst_rollout_idx", of(|token| token.request.rollout_idx)),
            ("worst_slot", slot.map(|slot| f64::from(slot.get()))),
            ("worst_pos", of(|token| token.paired.index.get())),
            ("worst_token_id", of(|token| token.paired.token.get())),
        ]
    }
}
