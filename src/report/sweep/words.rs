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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{done, point, row, spikes, summary};
    use super::super::{Prediction, SavedSummary};
    use super::*;
    use crate::gap::Tally;

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
    fn silence_that_will_end_is_called_so() {
        let stale = |decoded_first_chunks, stale_first_chunks| Tally {
            decoded_first_chunks,
            stale_first_chunks,
            ..Tally::default()
        };
        let wrap = |first_wrapped_block, wrapped_requests| SavedSummary {
            first_wrapped_block,
            tally: Tally { wrapped_requests, ..Tally::default() },
            ..summary()
        };
        let lap = |laps, summary: SavedSummary| SavedSummary { laps, ..summary };
        let first = SavedSummary { tally: stale(14, 0), ..summary() };
        for (summary, expect) in [
            (lap(Some(0.4), first.clone()), Some("round once: laps 0.4. 14 requests began")),
            (lap(Some(1.5), first.clone()), None),
            (lap(None, first), None),
            (lap(Some(0.4), SavedSummary { tally: stale(14, 1), ..summary() }), None),
            (lap(Some(0.4), SavedSummary { tally: stale(0, 0), ..summary() }), None),
            (lap(Some(0.4), wrap(Some(1366), 0)), Some("because block 1,366, the first")),
            (lap(Some(0.99), wrap(Some(1366), 0)), None),
            (lap(Some(0.4), wrap(Some(1366), 2)), None),
            (lap(Some(0.4), wrap(None, 0)), None),
        ] {
            let outcome = Outcome::Done { summary: Box::new(summary), gaps: Vec::new() };
            let point = point("a", 48, outcome);
            let found = not_yet(&point);
            match expect {
                None => assert_eq!(found, None),
                Some(expect) => assert!(found.as_ref().unwrap().contains(expect), "{found:?}"),
            }
        }
        assert_eq!(not_yet(&point("a", 48, Outcome::Pending)), None);
    }
}
