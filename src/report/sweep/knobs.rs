//! The columns in which charts name their rows: the value of every knob.

use super::super::html::svg::{Anchor, Svg};
use super::super::html::text::shorten;
use super::words::{short_names, value_text};
use super::{Sweep, SweepPoint};

/// Characters of a name or value, and the width of one, pixels.
const CHARS_MAX: usize = 24;
const CHAR: f64 = 7.0;
const GAP: f64 = 10.0;

pub(super) struct Knobs<'a> {
    columns: Vec<Column<'a>>,
}

struct Column<'a> {
    key: &'a str,
    name: [&'a str; 2],
    right: f64,
}

impl<'a> Knobs<'a> {
    pub(super) fn of(sweep: &Sweep<'a>) -> Self {
        let mut left = 0.0;
        let mut column = |(key, name): (&'a String, &'a str)| {
            let values = sweep.points.iter().map(|point| value_text(point.value(key)));
            let name = two_lines(name);
            let texts = values.chain(name.map(str::to_owned));
            let widest = texts.map(|text| text.chars().count().min(CHARS_MAX)).max();
            left += widest.expect("the name is one") as f64 * CHAR + GAP;
            Column { key, name, right: left - GAP }
        };
        let named = std::iter::zip(sweep.axes, short_names(sweep.axes));
        Self { columns: named.map(&mut column).collect() }
    }

    /// Pixels, with a gap at the right.
    pub(super) fn width(&self) -> f64 {
        self.columns.last().map_or(40.0, |column| column.right + GAP)
    }

    /// `y` is the lower line's.
    pub(super) fn header(&self, svg: &mut Svg, y: f64) {
        for column in &self.columns {
            for (line, up) in std::iter::zip(column.name, [12.0, 0.0]) {
                let text = shorten(line, CHARS_MAX);
                svg.text(column.right, y - up, Anchor::End, "quiet", &text);
            }
        }
    }

    /// A knob that the point leaves alone has no value.
    pub(super) fn row(&self, svg: &mut Svg, y: f64, point: &SweepPoint) {
        for column in &self.columns {
            let text = shorten(&value_text(point.value(column.key)), CHARS_MAX);
            svg.text(column.right, y, Anchor::End, "", &text);
        }
    }
}

/// A long name broken at the underscore nearest to its middle.
fn two_lines(name: &str) -> [&str; 2] {
    const SHORT: usize = 12;
    let from_middle = |at: &usize| (2 * (at + 1)).abs_diff(name.len());
    let breaks = name.match_indices('_').map(|(at, _)| at);
    match breaks.min_by_key(from_middle).filter(|_| name.len() > SHORT) {
        Some(at) => [&name[..=at], &name[at + 1..]],
        None => ["", name],
    }
}

#[cfg(test)]
mod tests {
    use super::two_lines;

    #[test]
    fn long_names_take_two_lines() {
        for (name, expect) in [
            ("", ["", ""]),
            ("batch_split", ["", "batch_split"]),
            ("gpu_memory_utilization", ["gpu_memory_", "utilization"]),
            ("max_num_batched_tokens", ["max_num_", "batched_tokens"]),
            ("_________________", ["________", "_________"]),
            ("withoutanunderscore", ["", "withoutanunderscore"]),
        ] {
            assert_eq!(two_lines(name), expect);
        }
    }
}
