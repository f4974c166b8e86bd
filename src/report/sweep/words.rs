//! A sweep in words: names of knobs, sentences, notes.

use serde_json::Value;

use super::super::html::text::{count, number};
use super::{Outcome, Sweep, SweepPoint};
use crate::base::Step;

/// The axes without their sections, where that keeps them apart.
pub(super) fn short_names(axes: &[String]) -> Vec<&str> {
    let last = |key: &'_ String| key.rsplit('.').next().unwrap_or_default().to_owned();
    let alike = |key: &String| axes.iter().filter(|other| last(other) == last(key)).count() > 1;
    let short = |key: &'_ String| key.len() - last(key).len();
    axes.iter().map(|key| if alike(key) { key } else { &key[short(key)..] }).collect()
}

/// A knob's value as one writes it.
pub(super) fn value_text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// Runs of steps: `12 24 28-33`.
pub(super) fn windows(windows: &[(Step, Step)]) -> String {
    let text = |(first, last): &(Step, Step)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    windows.iter().map(text).collect::<Vec<_>>().join(" ")
}

/// Rising steps as [`windows`] shows them.
pub(super) fn steps(steps: &[Step]) -> String {
    let runs = steps.chunk_by(|a, b| a.get() + 1 == b.get());
    windows(&runs.map(|run| (run[0], run[run.len() - 1])).collect::<Vec<_>>())
}

/// The sweep in one sentence or three, of facts only.
pub(super) fn outcome(sweep: &Sweep) -> String {
    let of = |holds: fn(&&SweepPoint) -> bool| sweep.points.iter().filter(holds).count();
    let done = of(|point| point.summary().is_some());
    let mut text = format!("{done} of {} ran", points(sweep.points.len()));
    for (n, what) in [
        (of(|point| matches!(point.outcome, Outcome::Failed(_))), "failed"),
        (of(|point| matches!(point.outcome, Outcome::Pending)), "to come"),
    ] {
        if n > 0 {
            text += &format!(", {n} {what}");
        }
    }
    if done == 0 {
        return text + ".";
    }
    let summaries = sweep.points.iter().filter_map(SweepPoint::summary);
    let firsts: Vec<Step> = summaries.filter_map(|summary| summary.first_spike_step).collect();
    text += &match firsts.len() {
        0 => "; none has a spike".to_owned(),
        n if n == done => format!("; every one has a spike, first at {}", first_steps(&firsts)),
        n => format!("; {n} of them with a spike, first at {}", first_steps(&firsts)),
    };
    text + &replay(sweep) + "."
}

/// In the order of the points, where they are few.
fn first_steps(steps: &[Step]) -> String {
    const LISTED_MAX: usize = 12;
    let (low, high) = (steps.iter().min(), steps.iter().max());
    let (low, high) = (low.expect("there is one"), high.expect("there is one"));
    if low == high {
        format!("step {low}")
    } else if steps.len() <= LISTED_MAX {
        let listed: Vec<String> = steps.iter().map(Step::to_string).collect();
        format!("steps {} in the order of the points", listed.join(", "))
    } else {
        format!("steps {low} to {high}")
    }
}

fn replay(sweep: &Sweep) -> String {
    let judged = || sweep.points.iter().filter_map(SweepPoint::as_predicted);
    match (judged().count(), judged().filter(|same| !same).count()) {
        (0, _) => String::new(),
        (_, 0) => ". Spike steps are exactly those that the replay predicts".to_owned(),
        (all, wrong) => {
            format!(". At {wrong} of {} the spike steps differ from the replay's", points(all))
        }
    }
}

fn points(n: usize) -> String {
    format!("{} point{}", count(n as u64), if n == 1 { "" } else { "s" })
}

/// Why a point that shows less than its neighbours is not cured; `None` where nothing of the kind
/// can be said.
pub(super) fn not_yet(point: &SweepPoint) -> Option<String> {
    let summary = point.summary()?;
    let laps = summary.laps.filter(|laps| *laps > 0.0)?;
    let began = summary.tally.decoded_first_chunks;
    if laps < 1.0 && began > 0 && summary.tally.stale_first_chunks == 0 {
        let steps = (summary.steps_done as f64 / laps).ceil();
        return Some(format!(
            "silent only because the pool has not been gone round once: laps {}. {} began with a \
             decode row, which reads its state blocks whatever they hold, and so far nobody had \
             used them. Not cured here, only not yet: used blocks come round after step {}",
            number(laps),
            requests(began),
            count(steps as u64),
        ));
    }
    let first = summary.first_wrapped_block?;
    let taken = laps * (summary.num_blocks.saturating_sub(1)) as f64;
    (summary.tally.wrapped_requests == 0 && taken < first as f64).then(|| {
        format!(
            "silent only because block {}, the first whose state address wraps, has not been \
             handed out: laps {}. Not cured here, only not yet",
            count(first),
            number(laps),
        )
    })
}

fn requests(n: u64) -> String {
    format!("{} request{}", count(n), if n == 1 { "" } else { "s" })
}
