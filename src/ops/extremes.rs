//! The range of many values at a glance. What is not finite is counted and stays out of the range.

use super::simd::{vectorized, LANES};

/// Of no values, until some are added.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Extremes {
    /// Smallest and largest finite value; `None` where there was none.
    pub range: Option<(f32, f32)>,
    /// NaNs and infinities.
    pub non_finite: u64,
}

impl Extremes {
    pub fn add(&mut self, values: &[f32]) {
        let mut lanes = Lanes {
            low: [f32::INFINITY; LANES],
            high: [f32::NEG_INFINITY; LANES],
            non_finite: [0; LANES],
        };
        vectorized(
            #[inline(always)]
            || {
                let (whole, rest) = values.as_chunks::<LANES>();
                whole.iter().for_each(|values| lanes.look(values));
                lanes.look(rest);
            },
        );
        let (low, high) = self.range.unwrap_or((f32::INFINITY, f32::NEG_INFINITY));
        let low = lanes.low.into_iter().fold(low, f32::min);
        let high = lanes.high.into_iter().fold(high, f32::max);
        self.range = (low <= high).then_some((low, high));
        self.non_finite += lanes.non_finite.iter().map(|&count| u64::from(count)).sum::<u64>();
    }

    pub fn merge(&mut self, other: &Self) {
        if let Some((low, high)) = other.range {
            self.add(&[low, high]);
        }
        self.non_finite += other.non_finite;
    }
}

/// A column each, folded at the end: neither minimum nor maximum depends on the order.
struct Lanes {
    low: [f32; LANES],
    high: [f32; LANES],
    non_finite: [u32; LANES],
}

impl Lanes {
    #[inline(always)]
    fn look(&mut self, values: &[f32]) {
        for (i, &value) in values.iter().enumerate() {
            let finite = value.is_finite();
            self.non_finite[i] += u32::from(!finite);
            self.low[i] = if finite && value < self.low[i] { value } else { self.low[i] };
            self.high[i] = if finite && value > self.high[i] { value } else { self.high[i] };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_finite_is_counted_and_nothing_else() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for (values, range, non_finite) in [
            (&[][..], None, 0),
            (&[nan, inf, -inf], None, 3),
            (&[2.0, nan, -1.0, 0.5], Some((-1.0, 2.0)), 1),
            (&[0.0], Some((0.0, 0.0)), 0),
            (&[[nan; 20], [3.0; 20]].concat(), Some((3.0, 3.0)), 20),
        ] {
            let mut found = Extremes::default();
            found.add(values);
            assert_eq!(found, Extremes { range, non_finite }, "{values:?}");
            let mut both = Extremes { range: Some((0.5, 9.0)), non_finite: 1 };
            both.merge(&found);
            let low = range.map_or(0.5, |(low, _)| low.min(0.5));
            assert_eq!(both.range, Some((low, 9.0)), "{values:?}");
            assert_eq!(both.non_finite, non_finite + 1, "{values:?}");
        }
    }
}
