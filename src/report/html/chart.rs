//! The page's two charts, as SVG. Marks differ in shape and not only in colour, so that they read
//! in black and white; every axis has its unit.

use std::fmt::Write;

use super::scale::{linear_ticks, LogScale, STRIP};
use super::svg::{Plot, BOTTOM, TOP, WIDE};
use super::text::number;
use super::StepPoint;

/// More steps than this share marks.
const MARKS_MAX: usize = 400;

/// The largest gap of each step: 0 stands on its own line under a log axis.
pub(super) fn gap(points: &[StepPoint], floor: Option<f64>) -> String {
    let marks = thin(points);
    let nonfinite = marks.iter().any(|mark| mark.gap.is_some_and(|gap| !gap.is_finite()));
    let values = marks.iter().filter_map(|mark| mark.gap).chain(floor);
    let scale = LogScale::new(values, TOP + if nonfinite { STRIP } else { 0.0 }, 250.0 - BOTTOM);
    let mut plot = start(250.0, "Largest gap of each step, nats", &marks);
    plot.note(&format!("{}\u{25c6} spike   \u{25cb} other   - - floor", shared(&marks)));
    for (y, label) in scale.ticks() {
        plot.grid(y, &label);
    }
    if nonfinite {
        plot.label_left(TOP + 6.0, "NaN, inf");
    }
    if let Some(floor) = floor.filter(|floor| floor.is_finite() && *floor >= 0.0) {
        plot.dashed(scale.y(floor));
    }
    if !marks.is_empty() && marks.iter().all(|mark| mark.gap == Some(0.0)) {
        plot.centered(scale.y(0.0) - 10.0, "exactly 0 at every step");
    }
    let base = scale.y(0.0);
    for mark in &marks {
        let Some(gap) = mark.gap else { continue };
        let y = if gap.is_finite() { scale.y(gap) } else { TOP + 6.0 };
        let x = plot.x(mark.step);
        plot.stem(x, base, y);
        let label = format!("step {}: {} nats", mark.step, number(gap));
        plot.mark(x, y, mark.spike, &label);
    }
    plot.finish()
}

/// The mean reward of each step.
pub(super) fn reward(points: &[StepPoint]) -> String {
    let marks = thin(points);
    let finite = || marks.iter().filter_map(|mark| mark.reward).filter(|r| r.is_finite());
    let ticks = linear_ticks(
        finite().fold(f64::INFINITY, f64::min),
        finite().fold(f64::NEG_INFINITY, f64::max),
    );
    let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
    let (top, bottom) = (TOP + 4.0, 190.0 - BOTTOM);
    let y = |reward: f64| bottom - (reward - low) / (high - low) * (bottom - top);
    let mut plot = start(190.0, "Mean reward of each step", &marks);
    plot.note(&shared(&marks));
    for &tick in &ticks {
        plot.grid(y(tick), &number(tick));
    }
    let mut path = String::new();
    let mut pen_down = false;
    for mark in &marks {
        let Some(reward) = mark.reward.filter(|reward| reward.is_finite()) else {
            pen_down = false;
            continue;
        };
        let verb = if pen_down { 'L' } else { 'M' };
        write!(path, "{verb}{:.1} {:.1}", plot.x(mark.step), y(reward)).expect("a string grows");
        pen_down = true;
    }
    plot.line(&path);
    for mark in &marks {
        let Some(reward) = mark.reward else { continue };
        let (x, label) = (plot.x(mark.step), format!("step {}: {}", mark.step, number(reward)));
        if !reward.is_finite() {
            plot.cross(x, top, &label);
        } else if marks.len() <= 100 {
            plot.dot(x, y(reward), &label);
        }
    }
    plot.finish()
}

fn start(height: f64, title: &str, marks: &[Mark]) -> Plot {
    let first = marks.first().map_or(1, |mark| mark.step);
    let last = marks.last().map_or(1, |mark| mark.step);
    Plot::new([WIDE, height], title, "step", [first, last])
}

/// How many steps share a mark, if any do.
fn shared(marks: &[Mark]) -> String {
    match marks.iter().map(|mark| mark.steps).max() {
        Some(steps) if steps > 1 => format!("a mark for {steps} steps   "),
        _ => String::new(),
    }
}

/// One mark: a step, or the worst of several neighbours.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Mark {
    step: u64,
    gap: Option<f64>,
    spike: bool,
    reward: Option<f64>,
    /// How many steps it stands for.
    steps: usize,
}

/// At most [`MARKS_MAX`] marks. No spike and no extreme is lost: a mark has its largest gap, at its
/// step, and is a spike if any of its steps is; rewards are averaged.
fn thin(points: &[StepPoint]) -> Vec<Mark> {
    let size = points.len().div_ceil(MARKS_MAX).max(1);
    points
        .chunks(size)
        .map(|chunk| {
            let worst = chunk
                .iter()
                .max_by(|a, b| rank(a).total_cmp(&rank(b)))
                .expect("chunks are not empty");
            let rewards: Vec<f64> = chunk.iter().filter_map(|point| point.reward_mean).collect();
            let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
            Mark {
                step: worst.gap.step.get(),
                gap: shown_gap(worst),
                spike: chunk.iter().any(|point| point.gap.spike),
                reward: (!rewards.is_empty()).then_some(mean),
                steps: chunk.len(),
            }
        })
        .collect()
}

/// A step with a non-finite logprob is drawn as one, whatever its finite tokens say.
fn shown_gap(point: &StepPoint) -> Option<f64> {
    if point.gap.nonfinite > 0 {
        Some(f64::NAN)
    } else {
        point.gap.gap_max
    }
}

/// Absent, then by size, then non-finite.
fn rank(point: &StepPoint) -> f64 {
    match shown_gap(point) {
        None => -1.0,
        Some(gap) if gap.is_nan() => f64::INFINITY,
        Some(gap) => gap,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Step;
    use crate::gap::StepGap;

    fn point(step: u64, gap_max: Option<f64>) -> StepPoint {
        let gap = StepGap {
            step: Step::new(step),
            n_tokens: 1,
            nonfinite: 0,
            bitwise_equal: 0,
            abs_diff_sum: 0.0,
            gap_max,
            floor: 0.0,
            spike: false,
        };
        StepPoint { gap, reward_mean: Some(0.5) }
    }

    #[test]
    fn thinning_loses_no_spike_and_no_extreme() {
        let mut points: Vec<_> = (1..=10_000).map(|step| point(step, Some(0.0))).collect();
        points[776].gap.gap_max = Some(4.0);
        points[778].gap.spike = true;
        points[5000].gap.nonfinite = 1;
        points[9999].gap.gap_max = None;
        let marks = thin(&points);
        assert!(marks.len() <= MARKS_MAX);
        assert_eq!(marks.iter().map(|mark| mark.steps).sum::<usize>(), 10_000);
        let spikes: Vec<_> = marks.iter().filter(|mark| mark.spike).collect();
        assert_eq!(spikes.len(), 1);
        assert_eq!((spikes[0].step, spikes[0].gap), (777, Some(4.0)));
        assert!(marks.iter().any(|mark| mark.step == 5001 && mark.gap.unwrap().is_nan()));
        assert_eq!(thin(&[point(3, None)])[0].gap, None);
    }

    #[test]
    fn absent_steps_draw_nothing() {
        assert!(!gap(&[point(1, None)], None).contains("<circle"));
        assert!(gap(&[point(1, Some(0.0))], None).contains("step 1: 0 nats"));
        assert!(gap(&[], Some(0.0)).contains("</svg>"));
        assert!(reward(&[]).contains("</svg>"));
    }
}
