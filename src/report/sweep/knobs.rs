//! The columns in which charts name their rows: the value of every knob.

use super::super::html::svg::{Anchor, Svg};
use super::super::html::text::shorten;
use super::words::{short_names, value_text};
use super::{Sweep, SweepPoint};

/// Characters of a name or value, and the width of one, pixels.
const CHARS_MAX: usize = 24;
const CHAR: f64 = 6.4;
const GAP: f64 = 14.0;

pub(super) struct Knobs<'a> {
    columns: Vec<Column<'a>>,
}

struct Column<'a> {
    key: &'a str,
    name: &'a str,
    right: f64,
}

impl<'a> Knobs<'a> {
    pub(super) fn of(sweep: &Sweep<'a>) -> Self {
        let mut left = 0.0;
        let mut column = |(key, name): (&'a String, &'a str)| {
            let values = sweep.points.iter().map(|point| value_text(point.value(key)));
            let chars = values.map(|text| text.chars().count()).chain([name.chars().count()]);
            let widest = chars.max().expect("the name is one").min(CHARS_MAX);
            left += widest as f64 * CHAR + GAP;
            Column { key, name, right: left - GAP }
        };
        let named = std::iter::zip(sweep.axes, short_names(sweep.axes));
        Self { columns: named.map(&mut column).collect() }
    }

    /// Pixels, with a gap at the right.
    pub(super) fn width(&self) -> f64 {
        self.columns.last().map_or(40.0, |column| column.right + GAP)
    }

    pub(super) fn header(&self, svg: &mut Svg, y: f64) {
        for column in &self.columns {
            svg.text(column.right, y, Anchor::End, "quiet", &shorten(column.name, CHARS_MAX));
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
