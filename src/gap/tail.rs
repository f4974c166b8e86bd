//! The floor: how large a |d| healthy arithmetic reaches among so many tokens.
//!
//! A maximum grows with the number of tokens that it is taken over, so a floor is stated for a
//! number of tokens. Healthy gaps are measured, and what is over a high quantile of them is taken
//! to fall off as a generalised Pareto tail does (peaks over threshold: Pickands 1975), a little
//! slower than exponentially: rounding errors are sums of many small terms, but of another size
//! from token to token. The largest of n gaps is over
//!
//! u + b/s·((n·p·m)^s - 1)
//!
//! in one step of m, where u is the quantile, p the share of gaps over it, b their mean excess and
//! s the tail's shape.

use serde::{Deserialize, Serialize};

use super::stats;

/// Beyond which quantile the tail begins.
const TAIL_FROM: f64 = 0.9;
/// s. Some 2,000 gaps are too few to measure it. Of 98,304 gaps of a tiny bf16 Jamba those over the
/// 0.99 quantile had 0.08, those over the 0.999 quantile 0.12; 0 is the exponential.
const SHAPE: f64 = 0.1;
/// m: one healthy step in so many goes over its floor.
const STEPS: f64 = 1e4;
/// The mean excess is raised by so many of its own standard errors.
const STANDARD_ERRORS: f64 = 2.0;
/// The least mean excess: one step of f32 for log-probabilities of 8 to 16 nats. What was measured
/// by accident as equal may differ by that another time.
const GRID: f64 = 9.5367431640625e-7;

/// The largest |d| that healthy arithmetic explains, for any number of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Floor(Option<Tail>);

/// Of measured gaps.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Tail {
    /// u, nats.
    from: f64,
    /// p.
    share: f64,
    /// b, nats, raised.
    mean_excess: f64,
    /// Nats; what no healthy arithmetic goes over, whatever was measured.
    #[serde(default)]
    most: Option<f64>,
}

impl Floor {
    /// Invariant arithmetic has no gap.
    pub const EXACT: Self = Self(None);

    /// From healthy |d|, nats, one a token; those that are not finite tell nothing.
    #[must_use]
    pub fn measured(gaps: &[f64]) -> Self {
        let mut sorted: Vec<f64> = gaps.iter().copied().filter(|gap| gap.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let from = stats::quantile(&sorted, TAIL_FROM).unwrap_or(0.0);
        let excess = &sorted[sorted.partition_point(|gap| *gap <= from)..];
        let (over, all) = (excess.len() as f64, sorted.len() as f64);
        let mean = excess.iter().map(|gap| gap - from).sum::<f64>() / over.max(1.0);
        let mean_excess = (mean * (1.0 + STANDARD_ERRORS / over.max(1.0).sqrt())).max(GRID);
        // A tail of equal gaps is not over its quantile, and is there all the same.
        let share = (over / all.max(1.0)).max(1.0 - TAIL_FROM);
        Self(Some(Tail { from, share, mean_excess, most: None }))
    }

    /// The same, and at most so many nats.
    #[must_use]
    pub fn at_most(self, nats: f64) -> Self {
        Self(self.0.map(|tail| Tail { most: Some(nats), ..tail }))
    }

    /// For a step of so many tokens, nats; exactly 0 where arithmetic is invariant.
    #[must_use]
    pub fn of(&self, n_tokens: u64) -> f64 {
        let Some(Tail { from, share, mean_excess, most }) = self.0 else { return 0.0 };
        let floor = from + mean_excess * excesses(n_tokens as f64 * share);
        most.map_or(floor, |most| floor.min(most))
    }
}

/// What the largest of so many gaps in the tail reaches in `STEPS` steps, in mean excesses. Less
/// than one gap is held to what one reaches.
fn excesses(in_tail: f64) -> f64 {
    ((in_tail.max(1.0) * STEPS).powf(SHAPE) - 1.0) / SHAPE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Stream;

    #[test]
    fn a_floor_is_for_a_number_of_tokens() {
        let floor = Floor::measured(&(1..=1000).map(|i| f64::from(i) * 1e-3).collect::<Vec<_>>());
        // u = 0.9001, 100 gaps over it of mean excess 0.0504, raised by 2/10.
        let mean_excess = 0.0504 * 1.2;
        for (n, in_tail) in [(0, 1.0), (1, 1.0), (10, 1.0), (100, 10.0), (1600, 160.0_f64)] {
            // (10^4)^0.1 = 2.5119.
            let want = 0.9001 + mean_excess * 10.0 * (2.511_886_431_5 * in_tail.powf(0.1) - 1.0);
            assert!((floor.of(n) - want).abs() < 1e-9, "{n}: {} {want}", floor.of(n));
        }
        assert!(floor.of(1600) > floor.of(100) + mean_excess * 16_f64.ln());
        assert_eq!((Floor::EXACT.of(1), Floor::EXACT.of(u64::MAX)), (0.0, 0.0));
        let held = floor.at_most(2.0);
        assert_eq!((held.of(1), held.of(1600)), (floor.of(1), 2.0));
        assert_eq!(Floor::EXACT.at_most(1.5), Floor::EXACT);
    }

    #[test]
    fn what_tells_little_still_leaves_a_grid_of_room() {
        for (what, gaps) in [
            ("nothing measured", vec![]),
            ("nothing finite", vec![f64::NAN, f64::INFINITY]),
            ("all equal", vec![0.0; 50]),
        ] {
            let floor = Floor::measured(&gaps);
            assert!((floor.of(1) - GRID * excesses(1.0)).abs() < 1e-18, "{what}: {}", floor.of(1));
        }
        let one = Floor::measured(&[0.5, f64::NAN]);
        assert!((one.of(1) - 0.5 - GRID * excesses(1.0)).abs() < 1e-15, "{}", one.of(1));
    }

    /// 200 healthy steps of 4,096 normal errors whose scale differs from token to token, against
    /// the floor of 2,048 such tokens: none is over it, and it is not out of reach.
    #[test]
    fn healthy_steps_stay_under_the_floor_of_other_tokens() {
        for seed in 0..4 {
            let mut stream = Stream::new(seed, "healthy", 0);
            let mut gap = || (stream.normal() * (0.5 * stream.normal()).exp()).abs() * 1e-3;
            let floor = Floor::measured(&(0..2048).map(|_| gap()).collect::<Vec<_>>()).of(4096);
            let most = (0..200 * 4096).map(|_| gap()).fold(0.0, f64::max);
            assert!(most <= floor && floor < 5.0 * most, "{seed}: {most} of {floor}");
        }
    }
}
