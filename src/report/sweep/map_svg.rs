//! The spike map as it is looked at.

use super::super::html::scale::{power_of_ten, step_ticks};
use super::super::html::svg::{Anchor, Svg, RED};
use super::super::html::text::{count, number, optional, shorten};
use super::knobs::Knobs;
use super::map::{Cell, Map, Shown};
use super::words::not_yet;
use super::{Outcome, Sweep, SweepPoint};

const TITLE: &str = "Spike map: largest gap of each step, nats";
const TOP: f64 = 60.0;
const LEGEND: f64 = 68.0;
/// What stands right of the cells: blocks, laps, verdict.
const RIGHT: [f64; 4] = [62.0, 112.0, 124.0, 364.0];

/// Where things stand.
struct Frame<'a> {
    knobs: Knobs<'a>,
    /// Of the cells.
    left: f64,
    cell: f64,
    row: f64,
    right: f64,
    bottom: f64,
}

pub(super) fn draw(sweep: &Sweep) -> Svg {
    let map = Map::of(sweep);
    let frame = Frame::of(sweep, &map);
    let mut svg = Svg::new(frame.right + RIGHT[3], frame.bottom + LEGEND, TITLE);
    headers(&mut svg, &frame);
    steps_axis(&mut svg, &map, &frame);
    for (i, (point, cells)) in std::iter::zip(sweep.points, &map.rows).enumerate() {
        let y = TOP + i as f64 * frame.row;
        labels(&mut svg, point, &frame, y);
        for run in not_run(cells) {
            let [x, width] = [run.start, run.len()].map(|n| n as f64 * frame.cell);
            let rect = [frame.left + x, y + 3.0, width, frame.row - 6.0];
            svg.hatch(rect, &format!("{}: not run", point.name));
        }
        for (x, (cell, steps)) in std::iter::zip(cells, &map.columns).enumerate() {
            let rect = [frame.left + x as f64 * frame.cell, y, frame.cell, frame.row];
            draw_cell(&mut svg, rect, &map, cell, &tooltip(point, cell, *steps));
        }
        verdict(&mut svg, point, &frame, y);
    }
    if sweep.points.is_empty() {
        svg.text(frame.left, TOP + 15.0, Anchor::Start, "", "no points");
    }
    legend(&mut svg, &map, &frame);
    svg
}

impl<'a> Frame<'a> {
    fn of(sweep: &Sweep<'a>, map: &Map) -> Self {
        let rows = sweep.points.len();
        let knobs = Knobs::of(sweep);
        let left = knobs.width();
        let columns = map.columns.len() as f64;
        let cell = f64::min(640.0 / columns, 26.0);
        let row = if rows <= 30 { 24.0 } else { 16.0 };
        let right = f64::max(left + columns * cell + 8.0, 560.0);
        Self { knobs, left, cell, row, right, bottom: TOP + rows.max(1) as f64 * row }
    }

    fn middle(&self, y: f64) -> f64 {
        y + self.row / 2.0 + 4.0
    }
}

fn headers(svg: &mut Svg, frame: &Frame) {
    frame.knobs.header(svg, TOP - 8.0);
    for (x, name) in std::iter::zip(RIGHT, ["blocks", "laps"]) {
        svg.text(frame.right + x - 8.0, TOP - 8.0, Anchor::End, "quiet", name);
    }
    svg.text(frame.right + RIGHT[2], TOP - 8.0, Anchor::Start, "quiet", "against the replay");
}

fn steps_axis(svg: &mut Svg, map: &Map, frame: &Frame) {
    let every = map.steps_per_column();
    let last = map.columns[map.columns.len() - 1].1;
    let ticks = step_ticks(1, last);
    // A map of one column has room for one number.
    for step in if map.columns.len() == 1 { vec![1] } else { [vec![1], ticks].concat() } {
        let x = frame.left + ((step - 1) / every) as f64 * frame.cell + frame.cell / 2.0;
        svg.path(&format!("M{x:.1} {}v4", TOP - 4.0), "stroke=\"#111\"", "");
        svg.text(x, TOP - 8.0, Anchor::Middle, "", &step.to_string());
    }
    let name = match every {
        1 => "step".to_owned(),
        n => format!("step; a column is {} steps and shows the worst", count(n)),
    };
    svg.text(frame.left, TOP - 22.0, Anchor::Start, "quiet", &name);
}

fn labels(svg: &mut Svg, point: &SweepPoint, frame: &Frame, y: f64) {
    let baseline = frame.middle(y);
    frame.knobs.row(svg, baseline, point);
    let summary = point.summary();
    let blocks = summary.map_or(point.prediction().map(|p| p.num_blocks), |s| s.num_blocks);
    let laps = summary.map_or(point.prediction().map(|p| p.laps), |s| s.laps);
    for (x, text) in std::iter::zip(RIGHT, [blocks.map_or("–".to_owned(), count), optional(laps)])
    {
        svg.text(frame.right + x - 8.0, baseline, Anchor::End, "", &text);
    }
}

/// How the point ended and whether it did what the replay says.
fn verdict(svg: &mut Svg, point: &SweepPoint, frame: &Frame, y: f64) {
    let (class, text) = match (&point.outcome, point.as_predicted()) {
        (Outcome::Pending, _) => ("quiet", "to come".to_owned()),
        (Outcome::Failed(error), _) => ("alarm", format!("failed: {}", shorten(error, 24))),
        (_, Some(false)) => ("alarm", "\u{2260} differs".to_owned()),
        (_, Some(true)) => ("", "= as predicted".to_owned()),
        (_, None) => ("quiet", "no prediction".to_owned()),
    };
    let (x, baseline) = (frame.right + RIGHT[2], frame.middle(y));
    svg.text(x, baseline, Anchor::Start, class, &text);
    if not_yet(point).is_some() {
        svg.text(x + 98.0, baseline, Anchor::Start, "alarm", "not cured, only not yet");
    }
}

/// Neighbouring columns that did not run.
fn not_run(cells: &[Cell]) -> Vec<std::ops::Range<usize>> {
    let mut start = 0;
    let runs = cells.chunk_by(|a, b| (a.shown == Shown::NotRun) == (b.shown == Shown::NotRun));
    let runs = runs.map(|run| {
        start += run.len();
        (start - run.len()..start, run[0].shown == Shown::NotRun)
    });
    runs.filter(|(_, not_run)| *not_run).map(|(run, _)| run).collect()
}

fn draw_cell(svg: &mut Svg, [x, y, w, h]: [f64; 4], map: &Map, cell: &Cell, label: &str) {
    // A frame needs room for itself and for white within it.
    let (dx, dy) = if w >= 10.0 { (3.5, 6.0) } else { (0.5, 6.0) };
    let rect = [x + dx, y + dy, w - 2.0 * dx, h - 2.0 * dy];
    let (cx, cy) = (x + w / 2.0, y + h / 2.0);
    let r = f64::min(w * 0.2, 3.0);
    match cell.shown {
        Shown::Beyond => {}
        Shown::NotRun => {}
        Shown::Nothing => {
            svg.path(&format!("M{:.1} {cy:.1}h{r:.1}", cx - r / 2.0), "stroke=\"#111\"", label)
        }
        Shown::Gap(0.0) => svg.circle(cx, cy, f64::min(r, 1.5), "fill=\"#999\"", label),
        Shown::Gap(gap) => {
            let [red, green, blue] = map.colour(gap);
            svg.rect(rect, &format!("fill=\"#{red:02x}{green:02x}{blue:02x}\""), label);
        }
        Shown::NonFinite => {
            svg.rect(rect, "fill=\"#fff\" stroke=\"#111\"", label);
            svg.cross(cx, cy, r, label);
        }
    }
    if cell.spike && cell.shown != Shown::NonFinite {
        svg.diamond(cx, cy, r, "fill=\"#fff\" stroke=\"#111\" stroke-width=\"0.7\"", label);
    }
    if cell.predicted {
        predicted(svg, [x, y, w, h]);
    }
    if cell.differs {
        svg.path(&format!("M{cx:.1} {:.1}l-4 -6h8z", y + 4.0), &format!("fill=\"{RED}\""), label);
    }
}

/// A frame, or where columns are narrow a bar above and one below.
fn predicted(svg: &mut Svg, [x, y, w, h]: [f64; 4]) {
    let style = "fill=\"none\" stroke=\"#111\" stroke-width=\"1.6\" pointer-events=\"none\"";
    if w >= 10.0 {
        svg.rect([x + 1.2, y + 3.0, w - 2.4, h - 6.0], style, "");
    } else {
        let d = format!("M{x:.1} {:.1}h{w:.1}m0 {:.1}h-{w:.1}", y + 3.5, h - 7.0);
        svg.path(&d, style, "");
    }
}

fn tooltip(point: &SweepPoint, cell: &Cell, (first, last): (u64, u64)) -> String {
    let steps =
        if first == last { format!("step {first}") } else { format!("steps {first}-{last}") };
    let gap = match cell.shown {
        Shown::Beyond | Shown::NotRun => "not run".to_owned(),
        Shown::Nothing => "nothing compared".to_owned(),
        Shown::Gap(gap) => format!("{} nats", number(gap)),
        Shown::NonFinite => "not finite".to_owned(),
    };
    let predicted = if cell.predicted { ", predicted" } else { "" };
    format!("{}, {steps}: {gap}{predicted}", point.name)
}

/// Samples of everything above, with its name.
fn legend(svg: &mut Svg, map: &Map, frame: &Frame) {
    let y = frame.bottom + 18.0;
    let (low, high) = map.scale.decades();
    const BAR: f64 = 14.0;
    let width = 200.0;
    for i in 0..40 {
        let gap = 10_f64.powf(f64::from(low) + f64::from(high - low) * f64::from(i) / 39.0);
        let [r, g, b] = map.colour(gap);
        let rect = [BAR + f64::from(i) * width / 40.0, y, width / 40.0 + 0.3, 12.0];
        svg.rect(rect, &format!("fill=\"#{r:02x}{g:02x}{b:02x}\""), "");
    }
    let every = (high - low) / 6 + 1;
    for decade in (low..=high).step_by(every as usize) {
        let x = BAR + f64::from(decade - low) / f64::from(high - low) * width;
        svg.text(x, y + 25.0, Anchor::Middle, "", &power_of_ten(decade));
    }
    svg.text(BAR, y + 41.0, Anchor::Start, "quiet", "largest gap, nats");

    let cell = |shown, spike, predicted, differs| Some(Cell { shown, spike, predicted, differs });
    let gap = Shown::Gap(10_f64.powi(high));
    let samples = [
        (cell(Shown::Gap(0.0), false, false, false), "exactly 0"),
        (cell(gap, true, false, false), "spike"),
        (cell(gap, true, true, false), "predicted by the replay"),
        (cell(gap, true, false, true), "spike, not predicted"),
        (cell(Shown::Gap(0.0), false, true, true), "predicted, no spike"),
        (cell(Shown::NonFinite, true, false, false), "not finite"),
        (None, "not run"),
    ];
    let (start, end) = (BAR + width + 24.0, frame.right + RIGHT[3]);
    let (mut x, mut y) = (start, y);
    for (sample, name) in samples {
        let room = name.chars().count() as f64 * 5.6 + 42.0;
        if x + room > end {
            (x, y) = (start, y + 28.0);
        }
        let rect = [x, y - 6.0, 18.0, 24.0];
        match sample {
            Some(cell) => draw_cell(svg, rect, map, &cell, ""),
            None => svg.hatch([x, y - 3.0, 18.0, 18.0], ""),
        }
        svg.text(x + 23.0, y + 10.0, Anchor::Start, "", name);
        x += room;
    }
}
