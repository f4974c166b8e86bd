//! The range of many values at a glance. What is not finite is counted and stays out of the range.

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
        let (mut low, mut high) = self.range.unwrap_or((f32::INFINITY, f32::NEG_INFINITY));
        let mut non_finite = 0_u64;
        for &value in values {
            let finite = value.is_finite();
            non_finite += u64::from(!finite);
            low = if finite && value < low { value } else { low };
            high = if finite && value > high { value } else { high };
        }
        self.range = (low <= high).then_some((low, high));
        self.non_finite += non_finite;
    }

    pub fn merge(&mut self, other: &Self) {
        if let Some((low, high)) = other.range {
            self.add(&[low, high]);
        }
        self.non_finite += other.non_finite;
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
