//! The first spike step of every point beside its two predictions.

use super::super::html::scale::step_ticks;
use super::super::html::svg::{Anchor, Svg, RED};
use super::super::html::text::{number, shorten};
use super::knobs::Knobs;
use super::words::{not_yet, short_names, value_text};
use super::{Outcome, Sweep, SweepPoint};

/// Over the knob where one number was swept, else a row a point.
pub(super) fn draw(sweep: &Sweep) -> Svg {
    let knob = |point: &SweepPoint| point.value(&sweep.axes[0]).as_f64();
    let numbers: Option<Vec<f64>> = match sweep.axes.len() {
        1 => sweep.points.iter().map(|point| knob(point).filter(|x| x.is_finite())).collect(),
        _ => None,
    };
    match numbers {
        Some(xs) if xs.iter().any(|x| *x != xs[0]) => over_knob(sweep, &xs),
        _ => row_a_point(sweep),
    }
}

const TITLE: &str = "First spike, step";
const WIDTH: f64 = 760.0;
const LEGEND: &str = "\u{25c6} measured   \u{25cb} replay of scheduler and pool   ";

fn last_step(sweep: &Sweep) -> u64 {
    sweep.points.iter().map(|point| point.steps).max().unwrap_or(1).max(2)
}

/// A number line from `from` to `to` in pixels.
#[derive(Clone, Copy)]
struct Axis {
    low: f64,
    high: f64,
    log: bool,
    from: f64,
    to: f64,
}

impl Axis {
    fn at(&self, value: f64) -> f64 {
        let [value, low, high] =
            [value, self.low, self.high].map(|v| if self.log { v.ln() } else { v });
        self.from + (value - low) / (high - low) * (self.to - self.from)
    }
}

/// Both axes are logarithms where the values span a factor: blocks a step times first step is the
/// threshold, so that the closed form is then a straight line.
fn over_knob(sweep: &Sweep, xs: &[f64]) -> Svg {
    const HEIGHT: f64 = 330.0;
    const LEFT: f64 = 64.0;
    const TOP: f64 = 62.0;
    let bottom = HEIGHT - 44.0;
    let fold = |pick: fn(f64, f64) -> f64| xs.iter().copied().reduce(pick).expect("not empty");
    let (low, high) = (fold(f64::min), fold(f64::max));
    let log = low > 0.0 && high / low >= 4.0;
    let x = Axis { low, high, log, from: LEFT + 30.0, to: WIDTH - 40.0 };
    let last = last_step(sweep);
    let y = Axis { low: 1.0, high: last as f64, log: true, from: bottom - 12.0, to: TOP };
    let never = TOP - 22.0;

    let mut svg = Svg::new(WIDTH, HEIGHT, TITLE);
    svg.text(WIDTH, 12.0, Anchor::End, "quiet", &format!("{LEGEND}\u{2014} closed form"));
    for step in log_ticks(last) {
        let at = y.at(step as f64);
        svg.path(&format!("M{LEFT} {at:.1}H{WIDTH}"), "stroke=\"#ddd\"", "");
        svg.text(LEFT - 8.0, at + 4.0, Anchor::End, "", &step.to_string());
    }
    svg.path(
        &format!("M{LEFT} {never:.1}H{WIDTH}"),
        "stroke=\"#bbb\" stroke-dasharray=\"2 3\"",
        "",
    );
    svg.text(LEFT - 8.0, never + 4.0, Anchor::End, "", "no spike");
    svg.path(&format!("M{LEFT} {bottom}H{WIDTH}"), "stroke=\"#111\"", "");
    knob_axis(&mut svg, sweep, xs, x, bottom);
    let name = short_names(sweep.axes)[0];
    svg.text((LEFT + WIDTH) / 2.0, HEIGHT - 6.0, Anchor::Middle, "quiet", &shorten(name, 60));

    closed_form(&mut svg, sweep, xs, x, y);
    for (point, &at) in std::iter::zip(sweep.points, xs) {
        let place = |step: Option<u64>| {
            (x.at(at), step.map_or(never, |step| y.at((step as f64).clamp(1.0, last as f64))))
        };
        marks(&mut svg, point, place);
        if let Some((class, text)) = silent(point) {
            svg.text(x.at(at), never - 11.0, Anchor::Middle, class, &text);
        }
    }
    svg
}

/// The swept values themselves, as many as have room.
fn knob_axis(svg: &mut Svg, sweep: &Sweep, xs: &[f64], x: Axis, bottom: f64) {
    let mut order: Vec<usize> = (0..xs.len()).collect();
    order.sort_by(|&a, &b| xs[a].total_cmp(&xs[b]));
    let mut free = 0.0;
    for i in order {
        let at = x.at(xs[i]);
        svg.path(&format!("M{at:.1} {bottom}v4"), "stroke=\"#111\"", "");
        let text = shorten(&value_text(sweep.points[i].value(&sweep.axes[0])), 12);
        let half = text.chars().count() as f64 * 3.2 + 3.0;
        if at - half >= free {
            svg.text(at, bottom + 16.0, Anchor::Middle, "", &text);
            free = at + half;
        }
    }
}

/// A line through the closed form's steps, which are not rounded up to whole ones; it ends where it
/// leaves the chart.
fn closed_form(svg: &mut Svg, sweep: &Sweep, xs: &[f64], x: Axis, y: Axis) {
    let mut points: Vec<(f64, f64)> = std::iter::zip(sweep.points, xs)
        .filter_map(|(point, &at)| Some((x.at(at), y.at(closed_step(point)?))))
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut d = String::new();
    for pair in points.windows(2) {
        let Some([(x0, y0), (x1, y1)]) = clip([pair[0], pair[1]], y.to, y.from) else { continue };
        d += &format!("M{x0:.1} {y0:.1}L{x1:.1} {y1:.1}");
    }
    if !d.is_empty() {
        svg.path(&d, "fill=\"none\" stroke=\"#111\" stroke-width=\"1.2\"", "");
    }
}

fn closed_step(point: &SweepPoint) -> Option<f64> {
    let step = point.prediction()?.closed_form.as_ref()?.first_spike_step;
    (step > 0.0 && step.is_finite()).then_some(step)
}

/// The part of a segment with y from `top` to `bottom`.
fn clip([a, b]: [(f64, f64); 2], top: f64, bottom: f64) -> Option<[(f64, f64); 2]> {
    let inside = |y: f64| (top..=bottom).contains(&y);
    let cut = |y: f64| (a.0 + (b.0 - a.0) * (y - a.1) / (b.1 - a.1), y);
    let end = |p: (f64, f64)| if inside(p.1) { p } else { cut(p.1.clamp(top, bottom)) };
    let outside = (a.1 < top && b.1 < top) || (a.1 > bottom && b.1 > bottom);
    (!outside).then(|| [end(a), end(b)])
}

/// 1, 2, 5, 10, ... or whole decades where those are too many; and the last step.
fn log_ticks(last: u64) -> Vec<u64> {
    let decades = || (0..=last.ilog10()).map(|decade| 10_u64.pow(decade));
    let ticks: Vec<u64> = match last {
        10_000.. => decades().collect(),
        _ => decades().flat_map(|ten| [ten, 2 * ten, 5 * ten]).collect(),
    };
    // The last one has a line of its own, if the one before leaves room for its number.
    ticks.into_iter().filter(|step| step + step / 4 < last).chain([last]).collect()
}

/// A row a point, its steps to the right: any knobs, however many.
fn row_a_point(sweep: &Sweep) -> Svg {
    const ROW: f64 = 22.0;
    const TOP: f64 = 54.0;
    let knobs = Knobs::of(sweep);
    let left = knobs.width();
    let width = left + 570.0;
    let bottom = TOP + sweep.points.len().max(1) as f64 * ROW;
    let last = last_step(sweep);
    let never = width - 150.0;
    let x = Axis { low: 1.0, high: last as f64, log: false, from: left + 12.0, to: never - 50.0 };

    let mut svg = Svg::new(width, bottom + 34.0, TITLE);
    svg.text(width, 12.0, Anchor::End, "quiet", &format!("{LEGEND}| closed form"));
    for step in step_ticks(1, last) {
        let at = x.at(step as f64);
        svg.path(&format!("M{at:.1} {TOP}V{bottom}"), "stroke=\"#ddd\"", "");
        svg.text(at, bottom + 15.0, Anchor::Middle, "", &step.to_string());
    }
    svg.text(left, bottom + 30.0, Anchor::Start, "quiet", "step");
    svg.path(&format!("M{never} {TOP}V{bottom}"), "stroke=\"#bbb\" stroke-dasharray=\"2 3\"", "");
    svg.text(never, bottom + 15.0, Anchor::Middle, "", "no spike");
    knobs.header(&mut svg, TOP - 6.0);
    for (i, point) in sweep.points.iter().enumerate() {
        let y = TOP + (i as f64 + 0.5) * ROW;
        knobs.row(&mut svg, y + 4.0, point);
        svg.path(&format!("M{left:.1} {y:.1}H{width}"), "stroke=\"#eee\"", "");
        if let Some(step) = closed_step(point).filter(|step| (1.0..=last as f64).contains(step)) {
            let d = format!("M{:.1} {:.1}v16", x.at(step), y - 8.0);
            svg.path(&d, "stroke=\"#111\" stroke-width=\"1.5\"", &label(point));
        }
        let place = |step: Option<u64>| {
            (step.map_or(never, |step| x.at((step as f64).clamp(1.0, last as f64))), y)
        };
        marks(&mut svg, point, place);
        if let Some((class, text)) = silent(point) {
            svg.text(never + 14.0, y + 4.0, Anchor::Start, class, &text);
        }
    }
    svg
}

/// How many steps ran without a spike, and whether that says little.
fn silent(point: &SweepPoint) -> Option<(&'static str, String)> {
    let summary = point.summary().filter(|summary| summary.first_spike_step.is_none())?;
    let steps = format!("in {} steps", summary.steps_done);
    Some(match not_yet(point) {
        Some(_) => ("alarm", format!("{steps}: not yet")),
        None => ("quiet", steps),
    })
}

/// The measured diamond within the ring of the replay, where they agree.
fn marks(svg: &mut Svg, point: &SweepPoint, place: impl Fn(Option<u64>) -> (f64, f64)) {
    let label = label(point);
    if let Some(prediction) = point.prediction() {
        let (x, y) = place(prediction.spike_steps.first().map(|step| step.get()));
        let dashes = if prediction.exact { "" } else { " stroke-dasharray=\"3 2\"" };
        let style = format!("fill=\"#fff\" stroke=\"#111\" stroke-width=\"1.4\"{dashes}");
        svg.circle(x, y, 8.5, &style, &label);
    }
    match &point.outcome {
        Outcome::Pending => {}
        Outcome::Failed(_) => {
            let (x, y) = place(None);
            svg.cross(x, y, 5.0, &label);
        }
        Outcome::Done { summary, .. } => {
            let (x, y) = place(summary.first_spike_step.map(|step| step.get()));
            let fill = if summary.first_spike_step.is_some() { RED } else { "#fff" };
            svg.diamond(x, y, 5.0, &format!("fill=\"{fill}\" stroke=\"#111\""), &label);
        }
    }
}

fn label(point: &SweepPoint) -> String {
    let step = |step: Option<u64>| step.map_or("none".to_owned(), |step| format!("step {step}"));
    let mut text = format!("{}:", point.name);
    match &point.outcome {
        Outcome::Pending => text += " to come",
        Outcome::Failed(error) => text += &format!(" failed, {error}"),
        Outcome::Done { summary, .. } => {
            text += &format!(" measured {}", step(summary.first_spike_step.map(|s| s.get())));
        }
    }
    if let Some(prediction) = point.prediction() {
        let first = prediction.spike_steps.first().map(|s| s.get());
        text += &format!(", replay {}", step(first));
    }
    if let Some(at) = closed_step(point) {
        text += &format!(", closed form {}", number(at));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{done, point, row, spikes};
    use super::super::{ClosedForm, Prediction};
    use super::*;

    #[test]
    fn a_segment_ends_at_the_edges() {
        for (segment, expect) in [
            ([(0.0, 5.0), (1.0, 7.0)], Some([(0.0, 5.0), (1.0, 7.0)])),
            ([(0.0, -10.0), (10.0, 10.0)], Some([(5.0, 0.0), (10.0, 10.0)])),
            ([(0.0, 20.0), (10.0, 0.0)], Some([(5.0, 10.0), (10.0, 0.0)])),
            ([(0.0, -1.0), (10.0, -2.0)], None),
            ([(0.0, 11.0), (10.0, 12.0)], None),
        ] {
            assert_eq!(clip(segment, 0.0, 10.0), expect, "{segment:?}");
        }
    }

    #[test]
    fn ticks_are_few() {
        assert_eq!(log_ticks(2), [1, 2]);
        assert_eq!(log_ticks(48), [1, 2, 5, 10, 20, 48]);
        assert_eq!(log_ticks(11), [1, 2, 5, 11]);
        assert_eq!(log_ticks(u64::MAX).len(), 21);
    }

    #[test]
    fn the_knob_decides_the_chart() {
        let closed_form = ClosedForm { first_spike_step: 11.4, period: 12.0, windows: Vec::new() };
        let predicted = Prediction {
            spike_steps: spikes(&[12]),
            closed_form: Some(closed_form),
            ..Prediction::default()
        };
        let ran = |value| SweepPoint {
            set: vec![("a.r".to_owned(), value)],
            predicted: predicted.clone(),
            ..done("p", 48, &[row(12, Some(1.0), true, 0)])
        };
        let quiet = |value| SweepPoint {
            set: vec![("a.r".to_owned(), value)],
            ..done("q", 48, &[row(1, Some(0.0), false, 0)])
        };
        let drawn = |axes: &[&str], points: &[SweepPoint]| {
            let axes: Vec<String> = axes.iter().map(|&axis| axis.to_owned()).collect();
            draw(&Sweep { name: "x", axes: &axes, points }).into_element()
        };
        let numbers = drawn(&["a.r"], &[ran(json!(8)), quiet(json!(128))]);
        assert!(numbers.contains("\u{2014} closed form"), "{numbers}");
        assert!(numbers.contains("in 1 steps"));
        assert!(numbers.contains("p: measured step 12, replay step 12, closed form 11.4"));
        let dots = "| closed form";
        for (axes, points) in [
            (&["a.r"][..], vec![ran(json!("x")), ran(json!(8))]),
            (&["a.r"], vec![ran(json!(8)), ran(json!(8))]),
            (&["a.r", "b.s"], vec![ran(json!(8)), ran(json!(9))]),
            (&["a.r"], vec![]),
            (&[], vec![point("only, \"one\"\n", 1, Outcome::Failed("<no>".to_owned()))]),
        ] {
            let svg = drawn(axes, &points);
            assert!(svg.contains(dots) && !svg.contains("NaN"), "{axes:?} {svg}");
        }
    }
}
