//! What makes a step a spike: a token over the floor, or a measure over a limit that others set.

use super::finding::{Finding, FindingKind};
use super::floor::worst;
use super::pair::Pairs;
use super::summary::StepGap;
use super::table::Table;

/// Which steps are spikes. A log-probability that is not finite always makes one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Alarm {
    /// Those with a token over the floor.
    OverFloor,
    /// Those with a measure over its limit.
    OverLimit(&'static [Limit]),
}

/// The largest size of a measure that is no alarm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limit {
    /// The name of a [`super::Metric`]; its absolute value counts.
    pub metric: &'static str,
    pub most: f64,
}

const fn limit(metric: &'static str, most: f64) -> Limit {
    Limit { metric, most }
}

impl Alarm {
    /// NeMo-RL's guide to GRPO and to new models.
    pub const NEMO_RL: Self =
        Self::OverLimit(&[limit("k3_mean", 1e-3), limit("token_mult_prob_error", 1.05)]);
    /// prime-rl's limit for a model that is new to it.
    pub const PRIME_RL: Self = Self::OverLimit(&[limit("k3_mean", 0.015)]);
    /// slime's check of its trainer against its engine.
    pub const SLIME: Self = Self::OverLimit(&[limit("logp_abs_diff_mean", 0.1)]);
    /// miles' check of the two mean log-probabilities.
    pub const MILES: Self = Self::OverLimit(&[limit("logp_diff_mean", 0.03)]);
    /// Any difference at all.
    pub const EXACT: Self = Self::OverLimit(&[limit("logp_abs_diff_max", 0.0)]);

    /// The measures of a step, its `spike` by this alarm.
    #[must_use]
    pub fn judge(&self, mut table: Table) -> Table {
        if let Self::OverLimit(_) = self {
            let nonfinite = table.value("nonfinite") > Some(0.0);
            let spike = nonfinite || self.passed(&table).next().is_some();
            let row = table.metrics.iter_mut().find(|row| row.name == "spike");
            let row = row.expect("a table has every metric");
            row.value = row.value.map(|_| f64::from(u8::from(spike)));
        }
        table
    }

    /// Where a limit is passed though every token is within the floor: what the figures are, and
    /// that they are those of healthy arithmetic.
    #[must_use]
    pub fn within_floor(&self, table: &Table, pairs: &Pairs, gap: &StepGap) -> Option<Finding> {
        let passed = |(limit, value): (Limit, f64)| {
            format!("{} is {value:e}, over {:e}", limit.metric, limit.most)
        };
        let passed: Vec<String> = self.passed(table).map(passed).collect();
        let worst = *worst(pairs, 1).first()?;
        Some(Finding {
            kind: FindingKind::Precision,
            leg: pairs.legs,
            step: gap.step,
            engine: None,
            requests: vec![worst.request],
            requests_total: 1,
            blocks: Vec::new(),
            first_bad_position: None,
            index_bits: None,
            message: format!(
                "{}; the largest gap of {} tokens is {:e} nats and healthy arithmetic explains up \
                 to {:e}",
                passed.join(", "),
                gap.n_tokens,
                worst.gap,
                gap.floor
            ),
        })
    }

    fn passed<'a>(&self, table: &'a Table) -> impl Iterator<Item = (Limit, f64)> + 'a {
        let limits: &'static [Limit] = match self {
            Self::OverFloor => &[],
            Self::OverLimit(limits) => limits,
        };
        limits.iter().filter_map(|&limit| {
            let value = table.value(limit.metric)?;
            (value.abs() > limit.most).then_some((limit, value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Step;
    use crate::gap::measures;
    use crate::gap::pair::{pair, Legs};
    use crate::gap::testing::rollout;

    const ALARMS: [(&str, Alarm); 6] = [
        ("floor", Alarm::OverFloor),
        ("nemo_rl", Alarm::NEMO_RL),
        ("prime_rl", Alarm::PRIME_RL),
        ("slime", Alarm::SLIME),
        ("miles", Alarm::MILES),
        ("exact", Alarm::EXACT),
    ];

    /// One token of each d, the floor at 0.2: the names of the alarms that it sets off.
    fn sounding(d: &[f32]) -> Vec<&'static str> {
        let trainer: Vec<f32> = d.iter().map(|d| -2.0 + d).collect();
        let pairs = pair(&[rollout(0, &vec![-2.0; d.len()], &trainer)], Legs::DecodeTrainer);
        let table = measures(&pairs.unwrap(), 0.2);
        let spike = |(name, alarm): &(&'static str, Alarm)| {
            (alarm.judge(table.clone()).value("spike") == Some(1.0)).then_some(*name)
        };
        ALARMS.iter().filter_map(spike).collect()
    }

    #[test]
    fn each_alarm_has_its_own_limit() {
        for (d, expected) in [
            (&[0.0, 0.0][..], &[][..]),
            (&[1e-3, -1e-3], &["exact"]),
            // k3 is about d^2 / 2; exp 0.045 is 1.046.
            (&[0.04, -0.04], &["exact"]),
            (&[0.046, -0.046], &["nemo_rl", "exact"]),
            (&[0.06, -0.06], &["nemo_rl", "exact"]),
            (&[0.031, 0.031], &["miles", "exact"]),
            (&[-0.031, -0.031], &["miles", "exact"]),
            (&[0.15, -0.15], &["nemo_rl", "slime", "exact"]),
            (&[0.19, -0.19], &["nemo_rl", "prime_rl", "slime", "exact"]),
            (&[0.25, -0.25], &["floor", "nemo_rl", "prime_rl", "slime", "exact"]),
        ] {
            assert_eq!(sounding(d), expected, "{d:?}");
        }
        let all: Vec<&str> = ALARMS.iter().map(|(name, _)| *name).collect();
        assert_eq!(sounding(&[f32::NAN, 0.0]), all);
    }

    #[test]
    fn nothing_compared_is_no_verdict() {
        let pairs = pair(&[], Legs::DecodeTrainer).unwrap();
        for (name, alarm) in ALARMS {
            assert_eq!(alarm.judge(measures(&pairs, 0.0)).value("spike"), None, "{name}");
        }
    }

    #[test]
    fn an_alarm_within_the_floor_says_so() {
        let pairs =
            pair(&[rollout(3, &[-2.0, -2.0], &[-2.0, -2.25])], Legs::DecodeTrainer).unwrap();
        let gap = StepGap::of(Step::new(7), &pairs, 0.5);
        let found = Alarm::SLIME.within_floor(&measures(&pairs, 0.5), &pairs, &gap).unwrap();
        assert_eq!((found.kind, found.step.get()), (FindingKind::Precision, 7));
        assert_eq!(
            found.message,
            "logp_abs_diff_mean is 1.25e-1, over 1e-1; the largest gap of 2 tokens is 2.5e-1 nats \
             and healthy arithmetic explains up to 5e-1"
        );
    }
}
