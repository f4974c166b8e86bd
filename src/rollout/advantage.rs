//! How much better a rollout did than its siblings.

/// verl's constant; TRL has 1e-4. For rewards of 0 and 1 the two differ in the fourth digit.
const STD_EPSILON: f64 = 1e-6;

/// Group-normalised advantages of one prompt's rollouts, one a reward.
///
/// `scale`: (r - mean) / (std + 1e-6) with the sample standard deviation (divisor n - 1), as in
/// verl's `compute_grpo_outcome_advantage`, after DeepSeekMath (arXiv:2402.03300). Otherwise
/// r - mean, as in Dr. GRPO (arXiv:2503.20783). Equal rewards, and a single one, give exactly 0.0.
#[must_use]
pub fn advantages(rewards: &[f64], scale: bool) -> Vec<f64> {
    assert!(rewards.iter().all(|r| r.is_finite()), "rewards are finite: {rewards:?}");
    // The mean of equal numbers need not round to that number.
    if rewards.windows(2).all(|pair| pair[0] == pair[1]) {
        return vec![0.0; rewards.len()];
    }
    let n = rewards.len() as f64;
    let mean = rewards.iter().sum::<f64>() / n;
    let deviations = rewards.iter().map(|r| r - mean);
    if !scale {
        return deviations.collect();
    }
    let variance = deviations.clone().map(|d| d * d).sum::<f64>() / (n - 1.0);
    deviations.map(|d| d / (variance.sqrt() + STD_EPSILON)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rewards: &[f64], scale: bool, expected: &[f64]) {
        let found = advantages(rewards, scale);
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            // A few roundings of numbers near 1.
            assert!((found - expected).abs() < 1e-12, "{rewards:?}: {found} is not {expected}");
        }
    }

    #[test]
    fn values() {
        // mean 1/2, sample variance 4 * 0.25 / 3.
        let a = 0.5 / ((1.0_f64 / 3.0).sqrt() + 1e-6);
        check(&[1.0, 0.0, 0.0, 1.0], true, &[a, -a, -a, a]);
        check(&[1.0, 0.0, 0.0, 1.0], false, &[0.5, -0.5, -0.5, 0.5]);
        // mean 1/4, sample variance (9 + 3) / 16 / 3 = 1/4.
        let (high, low) = (0.75 / 0.500_001, -0.25 / 0.500_001);
        check(&[1.0, 0.0, 0.0, 0.0], true, &[high, low, low, low]);
        // mean 2, sample variance 1.
        check(&[1.0, 2.0, 3.0], true, &[-1.0 / 1.000_001, 0.0, 1.0 / 1.000_001]);
        check(&[-1.0, 3.0], false, &[-2.0, 2.0]);
        check(&[], true, &[]);
    }

    #[test]
    fn equal_rewards_give_exactly_zero() {
        for rewards in [&[0.1; 3][..], &[0.1; 7], &[1.0; 8], &[0.7], &[0.0, -0.0]] {
            for scale in [true, false] {
                assert!(advantages(rewards, scale).iter().all(|&a| a == 0.0), "{rewards:?}");
            }
        }
        // What the shortcut is for.
        assert_ne!((0.1_f64 + 0.1 + 0.1) / 3.0, 0.1);
    }
}
