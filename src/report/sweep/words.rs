//! A sweep in words: names of knobs, sentences, notes.

use serde_json::Value;

use super::super::html::text::{count, number};
use super::{Outcome, Sweep, SweepPoint};
use crate::base::Step;
use crate::report::step_ranges;

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
    super::super::steps::windows(windows.iter().copied(), " ")
}

/// Rising steps as [`windows`] shows them.
pub(super) fn steps(steps: &[Step]) -> String {
    step_ranges(steps, " ")
}

/// The sweep in one sentence or three, of facts only.
pub(super) fn outcome(sweep: &Sweep) -> String {
    let of = |holds: fn(&&SweepPoint) -> bool| sweep.points.iter().filter(holds).count();
    let done = of(|point| point.summary().is_some());
    let mut text = format!("{done} of {} ran", points(sweep.points.len()));
    for (n, what) in [
        (of(|point| point.error().is_some()), "failed"),
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
        n if n == done => format!("; each has a spike, first at {}", first_steps(&firsts)),
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

/// Of a point without a spike that would have one if it went on; `None` where nothing of the kind
/// can be said.
pub(super) fn not_yet(point: &SweepPoint) -> Option<String> {
    let (summary, next) = (point.summary()?, point.prediction()?.next_spike?);
    let silent = summary.first_spike_step.is_none() && summary.error.is_none();
    silent.then(|| {
        let laps = summary
            .laps
            .map_or(String::new(), |laps| format!(", {} laps of the pool", number(laps)));
        format!(
            "silent in {} steps{laps}. Not cured here, only not yet: the replay, let go on, spikes \
             in step {}",
            count(summary.steps_done),
            count(next.get()),
        )
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{done, point, row, spikes, summary};
    use super::super::{Prediction, SavedSummary};
    use super::*;

    #[test]
    fn names_are_short_where_that_keeps_them_apart() {
        let axes = ["a.x", "b.x", "c.y", "z"].map(str::to_owned);
        assert_eq!(short_names(&axes), ["a.x", "b.x", "y", "z"]);
        for (value, expect) in [
            (json!("a b"), "a b"),
            (json!(0.9), "0.9"),
            (json!(null), ""),
            (json!(true), "true"),
            (json!(["x"]), "[\"x\"]"),
        ] {
            assert_eq!(value_text(&value), expect);
        }
        assert_eq!(steps(&spikes(&[1, 2, 4, 6, 7, 8])), "1-2 4 6-8");
        assert_eq!(steps(&[]), "");
    }

    #[test]
    fn the_outcome_is_a_sentence() {
        let ran = |spike: u64, predicted: &[u64]| SweepPoint {
            predicted: Prediction { spike_steps: spikes(predicted), ..Prediction::default() },
            ..done("a", 9, &[row(spike, Some(1.0), spike > 0, 0)])
        };
        let as_said = ". Spike steps are exactly those that the replay predicts.";
        for (points, expect) in [
            (vec![], "0 of 0 points ran.".to_owned()),
            (vec![point("a", 9, Outcome::Pending)], "0 of 1 point ran, 1 to come.".to_owned()),
            (
                vec![point("a", 9, Outcome::Failed(String::new())), ran(0, &[])],
                format!("1 of 2 points ran, 1 failed; none has a spike{as_said}"),
            ),
            (
                vec![ran(1, &[1]); 2],
                format!("2 of 2 points ran; each has a spike, first at step 1{as_said}"),
            ),
            (
                vec![ran(1, &[]), ran(0, &[])],
                "2 of 2 points ran; 1 of them with a spike, first at step 1. At 1 of 2 points the \
                 spike steps differ from the replay's."
                    .to_owned(),
            ),
        ] {
            assert_eq!(outcome(&Sweep { name: "x", axes: &[], points: &points }), expect);
        }
        let many: Vec<Step> = spikes(&[3; 13]).into_iter().chain(spikes(&[1])).collect();
        assert_eq!(first_steps(&many), "steps 1 to 3");
        assert_eq!(first_steps(&many[12..]), "steps 3, 1 in the order of the points");
    }

    #[test]
    fn what_is_silent_and_would_not_stay_so_is_said() {
        let silent = || SavedSummary { first_spike_step: None, laps: Some(0.4), ..summary() };
        let of = |summary: SavedSummary, next: Option<u64>| {
            let outcome = Outcome::Done { summary: Box::new(summary), gaps: Vec::new() };
            let mut point = point("a", 48, outcome);
            point.predicted.next_spike = next.map(Step::new);
            not_yet(&point)
        };
        let note = of(silent(), Some(16)).expect("a note");
        assert!(note.contains("0.4 laps of the pool. Not cured here, only not yet"), "{note}");
        assert!(note.ends_with("spikes in step 16"), "{note}");
        assert_eq!(of(silent(), None), None);
        let spiked = SavedSummary { first_spike_step: Some(Step::new(2)), ..silent() };
        assert_eq!(of(spiked, Some(16)), None);
        let failed = SavedSummary { error: Some("no".to_owned()), ..silent() };
        assert_eq!(of(failed, Some(16)), None);
        assert_eq!(not_yet(&point("a", 48, Outcome::Pending)), None);
    }
}
