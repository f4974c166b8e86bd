//! The spike map before it is drawn: points by steps, each cell the worst of the steps it holds.

use super::super::html::scale::LogScale;
use super::{StepGapRow, Sweep, SweepPoint};
use crate::base::Step;

/// More steps than this share columns.
pub(super) const COLUMNS_MAX: u64 = 120;

pub(super) struct Map {
    /// First and last step of each column.
    pub columns: Vec<(u64, u64)>,
    /// One a point, in order.
    pub rows: Vec<Vec<Cell>>,
    /// Over the finite gaps of all cells.
    pub scale: LogScale,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Cell {
    pub shown: Shown,
    pub spike: bool,
    pub predicted: bool,
    /// A step that ran spiked without being predicted, or the other way round.
    pub differs: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Shown {
    /// The point has no such step.
    Beyond,
    NotRun,
    /// It ran, and no token was compared.
    Nothing,
    /// Largest |d|, nats; 0 is exactly 0.
    Gap(f64),
    /// A log-probability is not finite.
    NonFinite,
}

impl Map {
    pub(super) fn of(sweep: &Sweep) -> Self {
        let last = sweep.points.iter().map(|point| point.steps).max().unwrap_or(1).max(1);
        let every = last.div_ceil(COLUMNS_MAX);
        let count = last.div_ceil(every);
        let columns: Vec<_> = (0..count)
            .map(|i| (i * every + 1, (i * every).saturating_add(every).min(last)))
            .collect();
        let rows: Vec<Vec<Cell>> = sweep
            .points
            .iter()
            .map(|point| columns.iter().map(|&steps| Cell::of(point, steps)).collect())
            .collect();
        let gaps = rows.iter().flatten().filter_map(|cell| match cell.shown {
            Shown::Gap(gap) => Some(gap),
            _ => None,
        });
        let scale = LogScale::new(gaps, 0.0, 1.0);
        Self { columns, rows, scale }
    }

    /// How many steps share a column.
    pub(super) fn steps_per_column(&self) -> u64 {
        let (first, last) = self.columns[0];
        last - first + 1
    }

    /// Dark where the gap is large, so that the order survives without colour.
    pub(super) fn colour(&self, gap: f64) -> [u8; 3] {
        shade(self.scale.share(gap))
    }
}

impl Cell {
    fn of(point: &SweepPoint, (first, last): (u64, u64)) -> Self {
        let ran = within(point.gaps(), |row| row.step, first, last);
        let prediction = point.prediction();
        let predicted = prediction.map(|one| within(&one.spike_steps, |step| *step, first, last));
        let differs = predicted.is_some_and(|predicted| {
            ran.iter().any(|row| row.spike != predicted.binary_search(&row.step).is_ok())
        });
        Self {
            shown: if first > point.steps { Shown::Beyond } else { Shown::of(ran) },
            spike: ran.iter().any(|row| row.spike),
            predicted: predicted.is_some_and(|steps| !steps.is_empty()),
            differs,
        }
    }
}

impl Shown {
    fn of(ran: &[StepGapRow]) -> Self {
        let gaps = ran.iter().filter_map(|row| row.gap_max);
        if ran.is_empty() {
            Self::NotRun
        } else if ran.iter().any(|row| row.nonfinite > 0) || gaps.clone().any(|g| !g.is_finite()) {
            Self::NonFinite
        } else {
            gaps.reduce(f64::max).map_or(Self::Nothing, Self::Gap)
        }
    }
}

/// The part of `items`, which rise, from `first` to `last`.
fn within<T>(items: &[T], step: impl Fn(&T) -> Step, first: u64, last: u64) -> &[T] {
    let start = items.partition_point(|item| step(item).get() < first);
    let end = items.partition_point(|item| step(item).get() <= last);
    &items[start..end]
}

/// From light to dark, evenly in lightness: sand, orange, red, near black.
pub(super) fn shade(share: f64) -> [u8; 3] {
    const STOPS: [[u8; 3]; 4] = [[250, 226, 196], [232, 138, 66], [163, 20, 11], [38, 6, 12]];
    let at = share.clamp(0.0, 1.0) * (STOPS.len() - 1) as f64;
    let low = (at as usize).min(STOPS.len() - 2);
    let mix = |i: usize| {
        let (from, to) = (f64::from(STOPS[low][i]), f64::from(STOPS[low + 1][i]));
        (from + (to - from) * (at - low as f64)).round() as u8
    };
    [mix(0), mix(1), mix(2)]
}

#[cfg(test)]
mod tests {
    use super::super::testing::{done, point, row, spikes};
    use super::super::{Outcome, Prediction};
    use super::*;

    fn cells(point: SweepPoint) -> Vec<Cell> {
        let map = Map::of(&Sweep { name: "x", axes: &[], points: &[point] });
        map.rows.into_iter().next().expect("one point")
    }

    #[test]
    fn every_kind_of_step_has_its_look() {
        let gaps = [
            row(1, Some(0.0), false, 0),
            row(2, Some(0.25), true, 0),
            row(3, None, false, 0),
            row(4, Some(0.5), true, 1),
            row(5, Some(f64::INFINITY), true, 0),
            row(6, Some(0.0), false, 0),
        ];
        let predicted = Prediction { spike_steps: spikes(&[2, 5, 6, 7]), ..Prediction::default() };
        let found = cells(SweepPoint { predicted, ..done("a", 8, &gaps) });
        let cell = |shown, spike, predicted, differs| Cell { shown, spike, predicted, differs };
        assert_eq!(
            found,
            [
                cell(Shown::Gap(0.0), false, false, false),
                cell(Shown::Gap(0.25), true, true, false),
                cell(Shown::Nothing, false, false, false),
                cell(Shown::NonFinite, true, false, true),
                cell(Shown::NonFinite, true, true, false),
                cell(Shown::Gap(0.0), false, true, true),
                cell(Shown::NotRun, false, true, false),
                cell(Shown::NotRun, false, false, false),
            ]
        );
    }

    #[test]
    fn a_point_without_a_prediction_differs_from_nothing() {
        let error = Some("the layout does not fit".to_owned());
        let predicted = Prediction { spike_steps: spikes(&[1]), error, ..Prediction::default() };
        let found = cells(SweepPoint { predicted, ..done("a", 1, &[row(1, Some(1.0), true, 0)]) });
        assert_eq!((found[0].predicted, found[0].differs), (false, false));
    }

    #[test]
    fn many_steps_share_columns_and_nothing_is_lost() {
        let mut gaps: Vec<_> = (1..=9_000).map(|step| row(step, Some(0.0), false, 0)).collect();
        gaps[776] = row(777, Some(4.0), true, 0);
        let found = cells(done("a", 10_000, &gaps));
        assert_eq!(found.len(), 120);
        assert_eq!(found.iter().filter(|cell| cell.spike).count(), 1);
        assert_eq!(found[9].shown, Shown::Gap(4.0));
        assert_eq!(found[119].shown, Shown::NotRun);
        for (steps, columns, every) in
            [(0, 1, 1), (1, 1, 1), (120, 120, 1), (121, 61, 2), (u64::MAX, 120, u64::MAX / 120 + 1)]
        {
            let points = [point("a", steps, Outcome::Pending)];
            let map = Map::of(&Sweep { name: "x", axes: &[], points: &points });
            assert_eq!((map.columns.len(), map.steps_per_column()), (columns, every), "{steps}");
            assert_eq!(map.columns[columns - 1].1, steps.max(1));
        }
        assert!(Map::of(&Sweep { name: "x", axes: &[], points: &[] }).rows.is_empty());
    }

    #[test]
    fn shorter_points_have_no_further_steps() {
        let points = [point("a", 2, Outcome::Pending), point("b", 3, Outcome::Pending)];
        let map = Map::of(&Sweep { name: "x", axes: &[], points: &points });
        let shown: Vec<_> = map.rows.iter().map(|row| row[2].shown).collect();
        assert_eq!(shown, [Shown::Beyond, Shown::NotRun]);
    }

    #[test]
    fn shades_darken() {
        let lightness = |i: i32| {
            let [r, g, b] = shade(f64::from(i) / 20.0).map(f64::from);
            0.3 * r + 0.59 * g + 0.11 * b
        };
        let all: Vec<f64> = (-1..=21).map(lightness).collect();
        assert!(all.windows(2).skip(1).take(20).all(|pair| pair[0] > pair[1] + 4.0), "{all:?}");
        assert_eq!((all[0], all[22]), (all[1], all[21]));
    }
}
