//! What stands in a log-probability's place, told apart and counted.

use serde::Serialize;

use crate::base::LogProb;

/// SkyRL and servers that know no infinity write this, or less, for a value they do not have.
const SENTINEL: f64 = -9999.0;

/// Of one side, under the loss mask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SideChecks {
    pub null: u64,
    pub nan: u64,
    pub positive_infinity: u64,
    pub negative_infinity: u64,
    /// Values of -9999 and below.
    pub sentinel: u64,
    /// Above 0, which no log-probability is. They stay in the means.
    pub positive: u64,
    /// Records that end in two or more values of exactly 0.0, and the tokens of those ends.
    pub zero_tails: u64,
    pub zero_tail_tokens: u64,
}

impl SideChecks {
    /// The value as a record holds it; `counted` values are counted by kind.
    pub fn take(&mut self, cell: Option<f64>, counted: bool) -> LogProb {
        let (value, kind) = match cell {
            None => (f32::NAN, Some(&mut self.null)),
            Some(value) if value.is_nan() => (f32::NAN, Some(&mut self.nan)),
            Some(f64::NEG_INFINITY) => (f32::NEG_INFINITY, Some(&mut self.negative_infinity)),
            Some(value) if value <= SENTINEL => (f32::NAN, Some(&mut self.sentinel)),
            Some(value) if value > f64::from(f32::MAX) => {
                (f32::INFINITY, Some(&mut self.positive_infinity))
            }
            Some(value) if value > 0.0 => (value as f32, Some(&mut self.positive)),
            Some(value) => (value as f32, None),
        };
        if let Some(count) = kind.filter(|_| counted) {
            *count += 1;
        }
        LogProb::new(value)
    }

    /// Looks at the end of one record's values under the mask, last first. One 0.0 is a token that
    /// was certain; a run of them is what padding leaves.
    pub fn look_at_tail(&mut self, last_first: impl Iterator<Item = LogProb>) {
        let zeros = last_first.take_while(|value| value.get() == 0.0).count() as u64;
        if zeros >= 2 {
            self.zero_tails += 1;
            self.zero_tail_tokens += zeros;
        }
    }

    /// Values that are none.
    #[must_use]
    pub fn excluded(&self) -> u64 {
        self.kinds().iter().map(|(_, count)| count).sum()
    }

    /// Each kind of value that is none, by name.
    #[must_use]
    pub fn kinds(&self) -> [(&'static str, u64); 5] {
        [
            ("null", self.null),
            ("NaN", self.nan),
            ("inf", self.positive_infinity),
            ("-inf", self.negative_infinity),
            ("sentinel", self.sentinel),
        ]
    }

    fn add(&mut self, other: &Self) {
        self.null += other.null;
        self.nan += other.nan;
        self.positive_infinity += other.positive_infinity;
        self.negative_infinity += other.negative_infinity;
        self.sentinel += other.sentinel;
        self.positive += other.positive;
        self.zero_tails += other.zero_tails;
        self.zero_tail_tokens += other.zero_tail_tokens;
    }
}

/// What was found before any number; of one record, and summed over more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Checks {
    pub records: u64,
    /// Records that their sample mask leaves out whole.
    pub masked_records: u64,
    /// Records that stand behind one with a higher id.
    pub out_of_order: u64,
    /// First tokens of a text that the mask counts: nothing stands before them, so they have no
    /// log-probability and are left out.
    pub first_tokens: u64,
    /// Records that do not say of what both sides' log-probabilities are.
    pub unknown_contracts: u64,
    /// Records that say that it is not the same; read because that was asked for.
    pub unlike_contracts: u64,
    pub infer: SideChecks,
    pub train: SideChecks,
}

impl Checks {
    pub fn add(&mut self, other: &Self) {
        self.records += other.records;
        self.masked_records += other.masked_records;
        self.out_of_order += other.out_of_order;
        self.first_tokens += other.first_tokens;
        self.unknown_contracts += other.unknown_contracts;
        self.unlike_contracts += other.unlike_contracts;
        self.infer.add(&other.infer);
        self.train.add(&other.train);
    }
}
