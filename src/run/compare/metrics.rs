//! `steps.jsonl` beside `steps.jsonl`, a step at a time.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::Result;

use super::{and_more, range, SHOWN};
use crate::base::Step;
use crate::report::{read_rows, ReportError, RunFolder, StepRow};

/// What the metrics of two runs differ in.
#[derive(Clone, Debug, Default)]
pub(super) struct MetricDifferences {
    /// Steps that both runs have.
    pub common: Vec<Step>,
    /// Steps that only the left, only the right has.
    only: [Vec<Step>; 2],
    /// By tag, of all that differ anywhere.
    by_tag: BTreeMap<String, OfTag>,
    /// Tags seen.
    tags: BTreeSet<String>,
}

/// Where a metric first differs, and how often.
#[derive(Clone, Debug, PartialEq)]
struct OfTag {
    first: Step,
    values: [Option<f64>; 2],
    steps: u64,
}

impl MetricDifferences {
    pub(super) fn of(folders: &[RunFolder; 2]) -> Result<Self> {
        let mut found = Self::default();
        let (left, right) = (read_rows(&folders[0].steps())?, read_rows(&folders[1].steps())?);
        let (mut left, mut right) = (Ahead::new(left)?, Ahead::new(right)?);
        loop {
            let order = match (&left.row, &right.row) {
                (None, None) => return Ok(found),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(left), Some(right)) => left.step.cmp(&right.step),
            };
            match order {
                Ordering::Less => found.only[0].extend(left.take()?.map(|row| row.step)),
                Ordering::Greater => found.only[1].extend(right.take()?.map(|row| row.step)),
                Ordering::Equal => {
                    if let (Some(left), Some(right)) = (left.take()?, right.take()?) {
                        found.add(left, right);
                    }
                }
            }
        }
    }

    /// Two rows of one step.
    fn add(&mut self, left: StepRow, right: StepRow) {
        self.common.push(left.step);
        let tags: BTreeSet<&String> = left.metrics.keys().chain(right.metrics.keys()).collect();
        for tag in tags {
            if !self.tags.contains(tag) {
                self.tags.insert(tag.clone());
            }
            let values = [left.metrics.get(tag), right.metrics.get(tag)];
            // A tag that is not there and one without a value are both "no data".
            let values = values.map(|value| value.copied().flatten());
            let [left_bits, right_bits] = values.map(|value| value.map(f64::to_bits));
            if left_bits != right_bits {
                let of_tag = OfTag { first: left.step, values, steps: 0 };
                self.by_tag.entry(tag.clone()).or_insert(of_tag).steps += 1;
            }
        }
    }

    pub(super) fn differ(&self) -> bool {
        !self.by_tag.is_empty() || self.only.iter().any(|steps| !steps.is_empty())
    }
}

impl fmt::Display for MetricDifferences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "steps    {} in both", self.common.len())?;
        for (side, steps) in ["left", "right"].iter().zip(&self.only) {
            if !steps.is_empty() {
                write!(f, "; only {side}: {}", range(steps))?;
            }
        }
        let Some(first) = self.by_tag.values().map(|of_tag| of_tag.first).min() else {
            return writeln!(f, "\nmetrics  {} equal", self.tags.len());
        };
        let (differ, all) = (self.by_tag.len(), self.tags.len());
        writeln!(f, "\nmetrics  {differ} of {all} differ, first at step {first}: left | right")?;
        let mut rows: Vec<_> = self.by_tag.iter().collect();
        rows.sort_by_key(|(_, of_tag)| of_tag.first);
        for (tag, OfTag { first, values, steps }) in rows.into_iter().take(SHOWN) {
            let [left, right] = values.map(|v| v.map_or("-".to_owned(), |v| format!("{v:?}")));
            writeln!(f, "  {tag}  step {first}: {left} | {right}  ({steps} step(s))")?;
        }
        and_more(f, differ)
    }
}

/// Rows with the next one at hand.
struct Ahead<I> {
    rows: I,
    row: Option<StepRow>,
}

impl<I: Iterator<Item = Result<StepRow, ReportError>>> Ahead<I> {
    fn new(mut rows: I) -> Result<Self> {
        let row = rows.next().transpose()?;
        Ok(Self { rows, row })
    }

    fn take(&mut self) -> Result<Option<StepRow>> {
        let next = self.rows.next().transpose()?;
        Ok(std::mem::replace(&mut self.row, next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(step: u64, values: &[(&str, Option<f64>)]) -> StepRow {
        let metrics = values.iter().map(|(tag, value)| ((*tag).to_owned(), *value)).collect();
        StepRow { step: Step::new(step), metrics }
    }

    #[test]
    fn values_are_compared_by_their_bits() {
        let none = None;
        for (left, right, differs) in [
            (Some(0.5), Some(0.5), false),
            (Some(0.0), Some(-0.0), true),
            (Some(f64::NAN), Some(f64::NAN), false),
            (Some(0.1), Some(0.1 + f64::EPSILON), true),
            (none, none, false),
            (none, Some(0.0), true),
        ] {
            let mut found = MetricDifferences::default();
            found.add(row(1, &[("a", left)]), row(1, &[("a", right)]));
            assert_eq!(found.differ(), differs, "{left:?} {right:?}");
        }
    }

    #[test]
    fn the_first_step_and_the_number_of_steps_are_kept() {
        let mut found = MetricDifferences::default();
        for (step, left, right) in [(1, 1.0, 1.0), (2, 1.0, 2.0), (3, 1.0, 3.0)] {
            let same = ("same", Some(0.0));
            found
                .add(row(step, &[("a", Some(left)), same]), row(step, &[("a", Some(right)), same]));
        }
        found.only[1] = vec![Step::new(4), Step::new(5)];
        assert_eq!(
            found.to_string(),
            "steps    3 in both; only right: 2 from 4 to 5\n\
             metrics  1 of 2 differ, first at step 2: left | right\n  \
             a  step 2: 1.0 | 2.0  (2 step(s))\n"
        );
    }
}
