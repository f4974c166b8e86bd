//! What healthy arithmetic explains, and what is over it.

use serde::{Deserialize, Serialize};

use super::pair::{PairedToken, Pairs, Sequence};
use crate::base::{float, BlockId, EngineIndex, RequestId};

/// Whether the largest |d| is over the floor or a log-probability is not finite.
///
/// `floor` is in nats: exactly 0 in invariant numerics, a measured figure otherwise.
#[must_use]
pub fn is_spike(pairs: &Pairs, floor: f64) -> bool {
    assert!(floor >= 0.0 && floor.is_finite(), "a floor of {floor} nats is no floor");
    pairs.sequences.iter().any(|sequence| sequence.is_bad(floor))
}

/// One token of [`worst`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorstToken {
    pub request: RequestId,
    /// That sampled it.
    pub engine: EngineIndex,
    /// The first state block the request held.
    pub slot: Option<BlockId>,
    pub paired: PairedToken,
    /// |d|, infinite where a log-probability is not finite.
    #[serde(with = "float")]
    pub gap: f64,
}

/// The `n` tokens of the largest gap, worst first; tokens with a non-finite log-probability come
/// before all others, equal ones stay in record order.
#[must_use]
pub fn worst(pairs: &Pairs, n: usize) -> Vec<WorstToken> {
    let mut worst = Vec::new();
    pairs.sequences.iter().for_each(|sequence| take_worst(&mut worst, n, sequence));
    worst
}

/// Adds the next sequence's tokens to the `n` worst of those before it.
pub(super) fn take_worst(worst: &mut Vec<WorstToken>, n: usize, sequence: &Sequence) {
    for &paired in &sequence.tokens {
        let gap = paired.gap();
        let at = worst.partition_point(|token| token.gap.total_cmp(&gap).is_ge());
        if at < n {
            let &Sequence { request, engine, slot, .. } = sequence;
            worst.insert(at, WorstToken { request, engine, slot, paired, gap });
            worst.truncate(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gap::pair::{pair, Legs};
    use crate::gap::testing::rollout;

    #[test]
    fn a_spike_is_over_the_floor_or_not_finite() {
        for (trainer, floor, expected) in [
            (-1.0, 0.0, false),
            (-1.25, 0.0, true),
            (-1.25, 0.25, false),
            (-1.25, 0.2, true),
            (f32::NAN, 100.0, true),
            (f32::NEG_INFINITY, 100.0, true),
        ] {
            let pairs = pair(&[rollout(0, &[-1.0], &[trainer])], Legs::DecodeTrainer).unwrap();
            assert_eq!(is_spike(&pairs, floor), expected, "{trainer} {floor}");
        }
        assert!(!is_spike(&pair(&[], Legs::DecodeTrainer).unwrap(), 0.0));
    }

    #[test]
    fn the_worst_tokens_come_worst_first() {
        let records = [
            rollout(0, &[-1.0, -1.0, -1.0], &[-1.0, -1.5, -1.25]),
            rollout(1, &[-1.0, -1.0], &[-0.5, f32::NAN]),
        ];
        let pairs = pair(&records, Legs::DecodeTrainer).unwrap();
        let found: Vec<_> = worst(&pairs, 4)
            .iter()
            .map(|token| (token.request.rollout_idx, token.paired.index.get(), token.gap))
            .collect();
        assert_eq!(found, [(1, 1, f64::INFINITY), (0, 1, 0.5), (1, 0, 0.5), (0, 2, 0.25)]);
        assert_eq!(worst(&pairs, 1)[0].slot, Some(BlockId::new(2)));
        assert_eq!(worst(&pairs, 99).len(), 5);
    }
}
