//! Where values stand on the charts' axes, and which of them are labelled.

/// Height of the strip that sets 0 (below) or non-finite values (above) apart from a log axis.
pub(in crate::report) const STRIP: f64 = 20.0;

/// Whole decades over a line for 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::report) struct LogScale {
    low: i32,
    high: i32,
    top: f64,
    bottom: f64,
}

impl LogScale {
    /// Holds every finite positive value; without any, the decades in which f32 gaps usually are.
    pub(in crate::report) fn new(values: impl Iterator<Item = f64>, top: f64, bottom: f64) -> Self {
        let logs = values.filter(|v| *v > 0.0 && v.is_finite()).map(f64::log10);
        let (low, high) = logs.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), log| {
            (low.min(log.floor()), high.max(log.ceil()))
        });
        if low > high {
            return Self { low: -7, high: 1, top, bottom };
        }
        let (low, high) = (low as i32, high as i32);
        Self { low: low.min(high - 2), high, top, bottom }
    }

    /// 0 is at the very bottom, everything else at least a strip above it.
    pub(in crate::report) fn y(&self, value: f64) -> f64 {
        if value == 0.0 {
            return self.bottom;
        }
        let lowest = self.bottom - STRIP;
        lowest - self.share(value) * (lowest - self.top)
    }

    /// Where a positive value stands among the decades, 0 to 1.
    pub(in crate::report) fn share(&self, value: f64) -> f64 {
        (value.log10() - f64::from(self.low)) / f64::from(self.high - self.low)
    }

    /// The whole decades, lowest and highest.
    pub(in crate::report) fn decades(&self) -> (i32, i32) {
        (self.low, self.high)
    }

    /// 0 and at most nine decades.
    pub(in crate::report) fn ticks(&self) -> Vec<(f64, String)> {
        let every = (self.high - self.low).div_euclid(9) + 1;
        let decades = (self.low..=self.high).rev().step_by(every as usize);
        let mut ticks: Vec<_> =
            decades.map(|decade| (self.y(10_f64.powi(decade)), power_of_ten(decade))).collect();
        ticks.push((self.bottom, "0".to_owned()));
        ticks
    }
}

pub(in crate::report) fn power_of_ten(decade: i32) -> String {
    format!("10{}", superscript(decade))
}

fn superscript(number: i32) -> String {
    let digit = |c: char| match c {
        '-' => '\u{207b}',
        '1' => '\u{b9}',
        '2' => '\u{b2}',
        '3' => '\u{b3}',
        c => char::from_u32(0x2070 + c.to_digit(10).expect("a digit")).expect("a superscript"),
    };
    number.to_string().chars().map(digit).collect()
}

/// Three to seven round numbers that enclose [low, high]; 0 to 1 where there is nothing to enclose.
pub(in crate::report) fn linear_ticks(low: f64, high: f64) -> Vec<f64> {
    let (low, high) = match (low, high) {
        (low, high) if low > high => (0.0, 1.0),
        (low, high) if low == high => {
            (low - 0.5 * low.abs().max(1.0), high + 0.5 * high.abs().max(1.0))
        }
        both => both,
    };
    // Halves first, so that the span of the largest floats does not overflow.
    let unit = 10_f64.powf((high / 5.0 - low / 5.0).log10().floor());
    let ratio = (high / 5.0 - low / 5.0) / unit;
    let step = unit * [1.0, 2.0, 5.0].into_iter().find(|&round| ratio <= round).unwrap_or(10.0);
    let (first, last) = ((low / step).floor(), (high / step).ceil());
    (0..=(last - first) as u32).map(|i| (first + f64::from(i)) * step).collect()
}

/// Round step numbers within [first, last].
pub(in crate::report) fn step_ticks(first: u64, last: u64) -> Vec<u64> {
    let span = last - first;
    let mut every = 1_u64;
    for factor in [2, 5, 10].into_iter().cycle().take(60) {
        if span / every <= 12 {
            break;
        }
        let decade = 10_u64.pow(every.ilog10());
        every = if factor == 10 { decade.saturating_mul(10) } else { decade * factor };
    }
    let start = first.div_ceil(every);
    (start..=last / every).map(|i| i * every).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_is_under_the_log_axis_and_every_value_is_on_it() {
        for values in [vec![], vec![0.0], vec![1e-7], vec![1e-300, 1e300], vec![0.0, 3.0, f64::NAN]]
        {
            let scale = LogScale::new(values.iter().copied(), 20.0, 220.0);
            assert_eq!(scale.y(0.0), 220.0);
            for value in values.into_iter().filter(|v| *v > 0.0 && v.is_finite()) {
                let y = scale.y(value);
                assert!((20.0 - 1e-9..=200.0 + 1e-9).contains(&y), "{value} at {y} in {scale:?}");
            }
            let ticks = scale.ticks();
            assert!((3..=11).contains(&ticks.len()), "{ticks:?}");
            assert_eq!(ticks.last(), Some(&(220.0, "0".to_owned())));
        }
        assert_eq!(superscript(-12), "⁻¹²");
    }

    #[test]
    fn ticks_enclose_what_they_measure() {
        for (low, high) in [
            (0.0, 1.0),
            (0.13, 0.87),
            (-3.0, 1e4),
            (0.5, 0.5),
            (0.0, 0.0),
            (f64::MIN / 8.0, f64::MAX / 8.0),
            (1e-9, 2e-9),
            (f64::INFINITY, f64::NEG_INFINITY),
        ] {
            let ticks = linear_ticks(low, high);
            assert!((3..=7).contains(&ticks.len()), "{low} to {high}: {ticks:?}");
            if low <= high {
                assert!(ticks[0] <= low && high <= ticks[ticks.len() - 1], "{ticks:?}");
            }
        }
        assert_eq!(step_ticks(1, 1), [1]);
        assert_eq!(step_ticks(1, 48), [5, 10, 15, 20, 25, 30, 35, 40, 45]);
        assert_eq!(step_ticks(1, 1000), [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000]);
        assert!((1..=13).contains(&step_ticks(1, u64::MAX).len()));
    }
}
