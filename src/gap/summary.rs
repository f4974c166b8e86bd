//! What remains of the gap over many steps.

use serde::{Deserialize, Serialize};

use super::floor;
use super::pair::{PairedToken, Pairs};
use crate::base::Step;

/// One step's share of the totals. Sums and counts, so that steps add up exactly as their tokens
/// do.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepGap {
    pub step: Step,
    /// Tokens compared, both sides finite.
    pub n_tokens: u64,
    /// Tokens with a non-finite log-probability on either side.
    pub nonfinite: u64,
    /// Of the compared tokens, those with the same f32 bits on both sides.
    pub bitwise_equal: u64,
    /// Sum of |d| over the compared tokens, nats.
    pub abs_diff_sum: f64,
    /// Largest |d| of the compared tokens, nats.
    pub gap_max: Option<f64>,
    /// The largest |d| that healthy arithmetic explains among the step's tokens, nats.
    pub floor: f64,
    pub spike: bool,
}

impl StepGap {
    #[must_use]
    pub fn of(step: Step, pairs: &Pairs, floor: f64) -> Self {
        let abs = pairs.finite().map(PairedToken::gap);
        let count = |holds: fn(&&PairedToken) -> bool| pairs.tokens().filter(holds).count() as u64;
        Self {
            step,
            n_tokens: count(|token| token.is_finite()),
            nonfinite: count(|token| !token.is_finite()),
            bitwise_equal: count(|token| token.is_finite() && token.is_bitwise_equal()),
            abs_diff_sum: abs.clone().sum(),
            gap_max: abs.reduce(f64::max),
            floor,
            spike: floor::is_spike(pairs, floor),
        }
    }
}

/// Running totals over the steps of a run. Kept in a checkpoint, they go on after a resume as if
/// nothing had happened.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    pub steps_done: u64,
    pub n_tokens: u64,
    pub nonfinite: u64,
    pub bitwise_equal: u64,
    pub abs_diff_sum: f64,
    pub gap_max: Option<f64>,
    pub spike_steps: Vec<Step>,
}

impl Totals {
    /// Adds a step; steps come in order.
    pub fn add(&mut self, step: &StepGap) {
        self.steps_done += 1;
        self.n_tokens += step.n_tokens;
        self.nonfinite += step.nonfinite;
        self.bitwise_equal += step.bitwise_equal;
        self.abs_diff_sum += step.abs_diff_sum;
        self.gap_max = self.gap_max.into_iter().chain(step.gap_max).reduce(f64::max);
        if step.spike {
            let in_order = self.spike_steps.last().is_none_or(|&last| last < step.step);
            assert!(in_order, "step {} comes after {:?}", step.step, self.spike_steps.last());
            self.spike_steps.push(step.step);
        }
    }

    /// Mean |d| over all compared tokens, nats.
    #[must_use]
    pub fn gap_mean(&self) -> Option<f64> {
        (self.n_tokens > 0).then(|| self.abs_diff_sum / self.n_tokens as f64)
    }

    #[must_use]
    pub fn frac_bitwise_equal(&self) -> Option<f64> {
        (self.n_tokens > 0).then(|| self.bitwise_equal as f64 / self.n_tokens as f64)
    }

    #[must_use]
    pub fn first_spike_step(&self) -> Option<Step> {
        self.spike_steps.first().copied()
    }

    /// Runs of consecutive spike steps, each as its first and last step.
    #[must_use]
    pub fn spike_windows(&self) -> Vec<(Step, Step)> {
        let runs = self.spike_steps.chunk_by(|a, b| a.get() + 1 == b.get());
        runs.map(|run| (run[0], run[run.len() - 1])).collect()
    }

    /// The median distance from one window's start to the next one's, in steps. Two windows show no
    /// period.
    #[must_use]
    pub fn spike_period(&self) -> Option<f64> {
        let windows = self.spike_windows();
        if windows.len() < 3 {
            return None;
        }
        let mut distances: Vec<f64> =
            windows.windows(2).map(|pair| (pair[1].0.get() - pair[0].0.get()) as f64).collect();
        distances.sort_by(f64::total_cmp);
        super::stats::quantile(&distances, 0.5)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gap::pair::{pair, Legs};
    use crate::gap::testing::rollout;

    fn totals_of(spikes: &[u64]) -> Totals {
        Totals {
            spike_steps: spikes.iter().map(|&step| Step::new(step)).collect(),
            ..Totals::default()
        }
    }

    #[test]
    fn windows_and_periods() {
        for (spikes, windows, period) in [
            (&[][..], &[][..], None),
            (&[4], &[(4, 4)], None),
            (&[4, 5, 9], &[(4, 5), (9, 9)], None),
            (&[4, 5, 14, 24, 25, 26], &[(4, 5), (14, 14), (24, 26)], Some(10.0)),
            (&[1, 4, 8], &[(1, 1), (4, 4), (8, 8)], Some(3.5)),
        ] {
            let totals = totals_of(spikes);
            let found: Vec<(u64, u64)> =
                totals.spike_windows().iter().map(|(a, b)| (a.get(), b.get())).collect();
            assert_eq!(found, windows, "{spikes:?}");
            assert_eq!(totals.spike_period(), period, "{spikes:?}");
            assert_eq!(totals.first_spike_step().map(Step::get), spikes.first().copied());
        }
    }

    #[test]
    fn steps_weigh_by_their_tokens_and_survive_a_resume() {
        let steps = [
            vec![rollout(0, &[-1.0, -1.0, -1.0], &[-1.0, -1.0, -1.0])],
            vec![rollout(0, &[-1.0, f32::NAN], &[-3.0, -1.0])],
            vec![],
        ];
        let mut totals = Totals::default();
        for (records, step) in steps.iter().zip(1..) {
            let pairs = pair(records, Legs::DecodeTrainer).unwrap();
            totals.add(&StepGap::of(Step::new(step), &pairs, 0.0));
            let text = serde_json::to_string(&totals).unwrap();
            totals = serde_json::from_str(&text).unwrap();
        }
        assert_eq!((totals.steps_done, totals.n_tokens, totals.nonfinite), (3, 4, 1));
        assert_eq!(totals.gap_max, Some(2.0));
        assert_eq!(totals.gap_mean(), Some(0.5));
        assert_eq!(totals.frac_bitwise_equal(), Some(0.75));
        assert_eq!(totals.spike_steps, [Step::new(2)]);
    }

    #[test]
    fn nothing_compared_is_no_data() {
        let mut totals = Totals::default();
        let pairs = pair(&[rollout(0, &[f32::NAN], &[-1.0])], Legs::DecodeTrainer).unwrap();
        totals.add(&StepGap::of(Step::new(1), &pairs, 0.0));
        assert_eq!(
            (totals.gap_max, totals.gap_mean(), totals.frac_bitwise_equal()),
            (None, None, None)
        );
        assert_eq!((totals.n_tokens, totals.nonfinite, totals.spike_steps.len()), (0, 1, 1));
    }
}
