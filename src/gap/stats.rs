//! Statistics over f64 values, some of which go through them more than once and keep no copy. Empty
//! input and undefined results are `None`, never 0 and never NaN.

/// Values that can be gone through again.
pub trait Values: ExactSizeIterator<Item = f64> + Clone {}

impl<I: ExactSizeIterator<Item = f64> + Clone> Values for I {}

/// Sum in order, over n.
pub fn mean(values: &[f64]) -> Option<f64> {
    mean_of(values.iter().copied())
}

/// As [`mean`], of values that are not kept.
pub fn mean_of(values: impl Values) -> Option<f64> {
    let n = values.len();
    (n > 0).then(|| values.sum::<f64>() / n as f64)
}

/// Population standard deviation (divisor n); 0 for one value.
pub fn std(values: &[f64]) -> Option<f64> {
    let [_, deviation, _] = spread_of(values.iter().copied());
    deviation
}

/// Mean, population standard deviation (divisor n) and largest, in two passes.
pub fn spread_of(values: impl Values) -> [Option<f64>; 3] {
    let n = values.len();
    let add = |(sum, most): (f64, f64), value: f64| (sum + value, most.max(value));
    let (sum, most) = values.clone().fold((0.0, f64::NEG_INFINITY), add);
    let mean = sum / n as f64;
    let deviation = mean_of(values.map(|value| (value - mean).powi(2))).map(f64::sqrt);
    [(n > 0).then_some(mean), deviation, (n > 0).then_some(most)]
}

/// The largest value.
pub fn max(values: &[f64]) -> Option<f64> {
    values.iter().copied().reduce(f64::max)
}

/// The smallest value.
pub fn min(values: &[f64]) -> Option<f64> {
    values.iter().copied().reduce(f64::min)
}

/// The share of values for which the predicate holds.
pub fn fraction(values: impl Values, holds: impl Fn(f64) -> bool) -> Option<f64> {
    let n = values.len();
    let count = values.filter(|&value| holds(value)).count();
    (n > 0).then(|| count as f64 / n as f64)
}

/// The exact quantile, linear between order statistics at (n - 1) q, as numpy's default; `sorted`
/// is ascending.
pub fn quantile(sorted: &[f64], q: f64) -> Option<f64> {
    let (low, high, part) = between(sorted.len(), q)?;
    Some(sorted[low] + (sorted[high] - sorted[low]) * part)
}

/// As [`quantile`], of values from 0 on in any order, of which no copy is made.
pub fn quantiles_of<const N: usize>(values: impl Values, qs: [f64; N]) -> [Option<f64>; N] {
    let n = values.len();
    let ranks = qs.iter().flat_map(|&q| between(n, q)).flat_map(|(low, high, _)| [low, high]);
    let found = order_statistics(values, &ranks.collect::<Vec<_>>());
    let mut found = found.chunks_exact(2);
    qs.map(|q| {
        let (_, _, part) = between(n, q)?;
        let pair = found.next().expect("two order statistics a quantile");
        Some(pair[0] + (pair[1] - pair[0]) * part)
    })
}

/// The two order statistics between which a quantile of `n` values lies, and how far from the
/// first.
fn between(n: usize, q: f64) -> Option<(usize, usize, f64)> {
    assert!((0.0..=1.0).contains(&q), "quantile {q} is not in 0..=1");
    let last = n.checked_sub(1)?;
    let at = q * last as f64;
    let below = at.floor();
    Some((below as usize, (below as usize + 1).min(last), at - below))
}

/// The values that so many others come before in ascending order. All are from 0 on, so that their
/// bits rise as they do; each pass over them fixes eleven bits of every result.
fn order_statistics(values: impl Values, ranks: &[usize]) -> Vec<f64> {
    const DIGIT: u32 = 11;
    // The bits fixed so far, and how many values with the same ones come before.
    let mut found: Vec<(u64, usize)> = ranks.iter().map(|&rank| (0, rank)).collect();
    for shift in (0..6).rev().map(|digit| digit * DIGIT) {
        // Ranks that lie close together share their prefix and its counts.
        let mut prefixes: Vec<u64> = found.iter().map(|&(prefix, _)| prefix).collect();
        prefixes.sort_unstable();
        prefixes.dedup();
        let mut counts = vec![[0_usize; 1 << DIGIT]; prefixes.len()];
        for bits in values.clone().map(f64::to_bits) {
            let (prefix, digit) = (bits.checked_shr(shift + DIGIT).unwrap_or(0), bits >> shift);
            if let Some(at) = prefixes.iter().position(|&one| one == prefix) {
                counts[at][digit as usize % (1 << DIGIT)] += 1;
            }
        }
        for (prefix, rank) in &mut found {
            let at = prefixes.partition_point(|one| one < prefix);
            let (counts, mut digit) = (&counts[at], 0);
            while *rank >= counts[digit] {
                *rank -= counts[digit];
                digit += 1;
            }
            *prefix = *prefix << DIGIT | digit as u64;
        }
    }
    found.into_iter().map(|(bits, _)| f64::from_bits(bits)).collect()
}

/// ln(mean(exp(values))), exact where all values are equal and without overflow.
pub fn log_mean_exp(values: impl Values) -> Option<f64> {
    let largest = values.clone().reduce(f64::max)?;
    let scaled = values.map(|value| (value - largest).exp_m1());
    mean_of(scaled).map(|mean| largest + mean.ln_1p())
}

/// The effective sample size of the weights exp(`log_weights`) as a share of n: (sum w)^2 / (n sum
/// w^2).
pub fn effective_share(log_weights: impl Values) -> Option<f64> {
    let doubled = log_weights.clone().map(|value| 2.0 * value);
    Some((2.0 * log_mean_exp(log_weights)? - log_mean_exp(doubled)?).exp())
}

/// Pearson's correlation; `None` where a side is constant, because it is then undefined.
pub fn pearson(x: impl Values, y: impl Values) -> Option<f64> {
    assert_eq!(x.len(), y.len(), "correlated samples have one length");
    if is_constant(x.clone()) || is_constant(y.clone()) {
        return None;
    }
    let (x_mean, y_mean) = (mean_of(x.clone())?, mean_of(y.clone())?);
    let (mut xy, mut xx, mut yy) = (0.0, 0.0, 0.0);
    for (x, y) in x.zip(y) {
        let (x, y) = (x - x_mean, y - y_mean);
        xy += x * y;
        xx += x * x;
        yy += y * y;
    }
    let value = xy / (xx.sqrt() * yy.sqrt());
    // Deviations too small or too large to square leave a quotient without meaning.
    value.is_finite().then_some(value.clamp(-1.0, 1.0))
}

/// Spearman's correlation: Pearson's over average ranks. Infinite values rank last.
pub fn spearman(x: &[f64], y: &[f64]) -> Option<f64> {
    pearson(ranks(x).into_iter(), ranks(y).into_iter())
}

/// Ranks from 1; equal values share the mean of their ranks.
pub fn ranks(values: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| values[a].total_cmp(&values[b]));
    let mut ranks = vec![0.0; values.len()];
    for run in order.chunk_by(|&a, &b| values[a] == values[b]) {
        let below = order.partition_point(|&at| values[at] < values[run[0]]);
        let shared = below as f64 + (run.len() as f64 + 1.0) / 2.0;
        run.iter().for_each(|&at| ranks[at] = shared);
    }
    ranks
}

/// How many f32 values lie from `a` to `b`; both zeros are one value. Both must be finite.
pub fn ulp_distance(a: f32, b: f32) -> u32 {
    assert!(a.is_finite() && b.is_finite(), "{a} or {b} has no place on the line of f32");
    // Sign and magnitude become a place on one line, on which neighbours differ by 1.
    let place = |value: f32| {
        let magnitude = i64::from(value.to_bits() & 0x7fff_ffff);
        if value.is_sign_negative() {
            -magnitude
        } else {
            magnitude
        }
    };
    u32::try_from((place(a) - place(b)).unsigned_abs()).expect("two finite f32 are < 2^32 apart")
}

fn is_constant(mut values: impl Values) -> bool {
    let first = values.next();
    values.all(|value| Some(value) == first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Stream;

    fn list<const N: usize>(values: [f64; N]) -> impl Values {
        values.into_iter()
    }

    #[test]
    fn quantiles_are_linear_between_order_statistics() {
        let sorted = [0.0, 1.0, 2.0, 10.0];
        for (q, expected) in [(0.0, 0.0), (0.5, 1.5), (0.75, 4.0), (1.0, 10.0)] {
            assert_eq!(quantile(&sorted, q), Some(expected), "{q}");
        }
        assert_eq!(quantile(&[3.0], 0.999), Some(3.0));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn quantiles_of_unsorted_values_are_those_of_the_sorted_ones() {
        let mut stream = Stream::new(3, "quantiles", 0);
        let mut values: Vec<f64> = (0..999).map(|_| stream.normal().abs().powi(9)).collect();
        values.extend([0.0, 0.0, 5e-324, f64::MAX, f64::INFINITY, values[7], values[7]]);
        for n in [0, 1, 2, 3, values.len()] {
            let mut sorted = values[..n].to_vec();
            sorted.sort_by(f64::total_cmp);
            let qs = [0.0, 0.001, 0.5, 0.95, 0.99, 0.9983, 1.0];
            let found = quantiles_of(values[..n].iter().copied(), qs);
            let expected = qs.map(|q| quantile(&sorted, q));
            let bits = |value: Option<f64>| value.map(f64::to_bits);
            assert_eq!(found.map(bits), expected.map(bits), "{n}: {found:?} {expected:?}");
        }
    }

    #[test]
    fn the_spread_is_mean_deviation_and_largest() {
        for (values, expected) in [
            (&[][..], [None; 3]),
            (&[-3.0], [Some(-3.0), Some(0.0), Some(-3.0)]),
            (&[1.0, 5.0, 5.0, 1.0], [Some(3.0), Some(2.0), Some(5.0)]),
        ] {
            assert_eq!(spread_of(values.iter().copied()), expected, "{values:?}");
        }
    }

    #[test]
    fn log_mean_exp_neither_overflows_nor_drifts() {
        assert_eq!(log_mean_exp(list([0.0; 7])), Some(0.0));
        assert_eq!(log_mean_exp(list([])), None);
        let huge = log_mean_exp(list([800.0, -800.0])).unwrap();
        assert!((huge - (800.0 - 2.0_f64.ln())).abs() < 1e-12, "{huge}");
        assert_eq!(effective_share(list([0.0; 3])), Some(1.0));
        // One weight of four rules: the share is 1/4.
        let share = effective_share(list([900.0, 0.0, 0.0, 0.0])).unwrap();
        assert!((share - 0.25).abs() < 1e-12, "{share}");
    }

    #[test]
    fn correlations_of_constants_are_undefined() {
        assert_eq!(pearson(list([1.0, 2.0, 3.0]), list([0.1, 0.1, 0.1])), None);
        assert_eq!(pearson(list([1.0]), list([2.0])), None);
        assert_eq!(pearson(list([]), list([])), None);
        assert_eq!(pearson(list([1e-300, 2e-300]), list([1.0, 2.0])), None);
        // Monotone and far from linear: ranks agree fully.
        let spearman = spearman(&[1.0, 2.0, 3.0, 4.0], &[0.0, 1.0, 50.0, f64::INFINITY]).unwrap();
        assert!((spearman - 1.0).abs() < 1e-15, "{spearman}");
    }

    #[test]
    fn equal_values_share_a_rank() {
        assert_eq!(ranks(&[5.0, 0.0, 0.0, 7.0, 5.0, 5.0]), [4.0, 1.5, 1.5, 6.0, 4.0, 4.0]);
        assert_eq!(ranks(&[0.0, -0.0]), [1.5, 1.5]);
    }

    #[test]
    fn ulps_count_across_zero() {
        let next = f32::from_bits((-1.0_f32).to_bits() + 1);
        for (a, b, expected) in [
            (-1.0, -1.0, 0),
            (-1.0, next, 1),
            (0.0, -0.0, 0),
            (f32::from_bits(1), -f32::from_bits(1), 2),
            (f32::MIN, f32::MAX, 2 * f32::MAX.to_bits()),
        ] {
            assert_eq!(ulp_distance(a, b), expected, "{a} {b}");
            assert_eq!(ulp_distance(b, a), expected, "{b} {a}");
        }
    }
}
