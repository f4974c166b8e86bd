//! `sweep.csv`: a row a point, no time in it.

use super::words::{short_names, steps, value_text, windows};
use super::{Outcome, Sweep, SweepPoint};

/// Quoted as RFC 4180 says. Absent is an empty field. Steps are written as runs, `12 24 28-33`,
/// measured ones as predicted ones, so that equal text means equal steps.
pub(super) fn table(sweep: &Sweep) -> String {
    let mut text = String::new();
    let columns = columns();
    let names = columns.iter().map(|(name, _)| *name);
    row(&mut text, short_names(sweep.axes).into_iter().chain(names));
    for point in sweep.points {
        let knobs = sweep.axes.iter().map(|key| value_text(point.value(key)));
        let fields: Vec<String> = knobs
            .chain(columns.iter().map(|(_, value)| value(point).unwrap_or_default()))
            .collect();
        row(&mut text, fields.iter().map(String::as_str));
    }
    text
}

fn row<'a>(text: &mut String, fields: impl Iterator<Item = &'a str>) {
    for (i, field) in fields.enumerate() {
        if i > 0 {
            text.push(',');
        }
        if field.contains([',', '"', '\n', '\r']) {
            *text += &format!("\"{}\"", field.replace('"', "\"\""));
        } else {
            *text += field;
        }
    }
    text.push('\n');
}

type Column = (&'static str, fn(&SweepPoint) -> Option<String>);

fn columns() -> Vec<Column> {
    let mut all = headlines().to_vec();
    all.extend(by_engine());
    all.extend(accounts());
    all
}

fn headlines() -> [Column; 16] {
    [
        ("outcome", |p| Some(outcome(&p.outcome).to_owned())),
        ("planned_steps", |p| text(p.steps)),
        ("steps_done", |p| text(p.summary()?.steps_done)),
        ("predicted_spike_steps", |p| Some(steps(&p.prediction()?.spike_steps))),
        ("spike_windows", |p| Some(windows(&p.summary()?.spike_windows))),
        ("as_predicted", |p| text(p.as_predicted()?)),
        ("prediction_exact", |p| text(p.prediction()?.exact)),
        ("predicted_first_spike_step", |p| text(p.prediction()?.spike_steps.first()?)),
        ("closed_form_first_spike_step", |p| {
            text(p.prediction()?.closed_form.as_ref()?.first_spike_step)
        }),
        ("first_spike_step", |p| text(p.summary()?.first_spike_step?)),
        ("closed_form_period", |p| text(p.prediction()?.closed_form.as_ref()?.period)),
        ("spike_period", |p| text(p.summary()?.spike_period?)),
        ("gap_max", |p| text(p.summary()?.gap_max?)),
        ("gap_mean", |p| text(p.summary()?.gap_mean?)),
        ("n_tokens", |p| text(p.summary()?.n_tokens)),
        ("nonfinite", |p| text(p.summary()?.nonfinite)),
    ]
}

fn accounts() -> [Column; 14] {
    [
        ("num_blocks", |p| match (p.summary(), p.prediction()) {
            (Some(summary), _) => text(summary.num_blocks?),
            (None, prediction) => text(prediction?.num_blocks),
        }),
        ("first_wrapped_block", |p| match (p.summary(), p.prediction()) {
            (Some(summary), _) => text(summary.first_wrapped_block?),
            (None, prediction) => text(prediction?.first_wrapped_block?),
        }),
        ("blocks_per_step", |p| text(p.summary()?.blocks_per_step?)),
        ("laps", |p| text(p.summary()?.laps?)),
        ("engine_steps", |p| text(p.summary()?.engine_steps?)),
        ("preemptions", |p| text(p.summary()?.preemptions?)),
        ("tokens_per_engine_step", |p| text(p.summary()?.tokens_per_engine_step?)),
        ("decoded_first_chunks", |p| text(p.summary()?.tally.decoded_first_chunks?)),
        ("stale_first_chunks", |p| text(p.summary()?.tally.stale_first_chunks?)),
        ("wrapped_requests", |p| text(p.summary()?.tally.wrapped_requests?)),
        ("bad_requests", |p| text(p.summary()?.tally.bad_requests)),
        ("confident_wrong", |p| text(p.summary()?.tally.confident_wrong)),
        ("findings", |p| Some(findings(p))),
        ("error", |p| {
            let foretold = p.predicted.error.as_deref().filter(|_| p.summary().is_none());
            text(p.error().or(foretold)?)
        }),
    ]
}

/// Empty where there is one engine.
fn by_engine() -> [Column; 2] {
    [
        ("predicted_spike_steps_by_engine", |p| p.prediction()?.spikes_by_engine(" ")),
        ("spike_steps_by_engine", |p| p.summary()?.spikes_by_engine(" ")),
    ]
}

#[allow(clippy::unnecessary_wraps)] // A column's value is one.
fn text(value: impl ToString) -> Option<String> {
    Some(value.to_string())
}

pub(super) fn outcome(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Pending => "pending",
        Outcome::Failed(_) => "failed",
        Outcome::Done { .. } => "done",
    }
}

/// How many steps have a finding of each kind: `address_wrap:4 stale_state:1`.
pub(super) fn findings(point: &SweepPoint) -> String {
    let mut counts = std::collections::BTreeMap::new();
    for finding in point.summary().map_or(&[][..], |summary| &summary.findings) {
        *counts.entry(finding.kind.name()).or_insert(0_u64) += 1;
    }
    counts.iter().map(|(kind, n)| format!("{kind}:{n}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{done, point, row, spikes};
    use super::super::{ClosedForm, Prediction, SavedFinding};
    use super::*;
    use crate::base::Step;
    use crate::gap::{FindingKind, Legs};

    fn fields(points: &[SweepPoint], name: &str) -> Vec<String> {
        let axes = ["gpu.name".to_owned()];
        let text = table(&Sweep { name: "x", axes: &axes, points });
        let mut rows = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let names = rows.next().unwrap();
        let at = names.iter().position(|found| *found == name).expect(name);
        rows.map(|row| {
            assert_eq!(row.len(), names.len());
            row[at].to_owned()
        })
        .collect()
    }

    #[test]
    fn what_ran_and_what_did_not() {
        let gaps: Vec<_> =
            (1..=13).map(|step| row(step, Some(0.5), [11, 12].contains(&step), 0)).collect();
        let closed_form =
            ClosedForm { first_spike_step: 11.5, period: f64::INFINITY, windows: Vec::new() };
        let predicted = Prediction {
            spike_steps: spikes(&[11, 12, 24]),
            closed_form: Some(closed_form),
            num_blocks: 7,
            ..Prediction::default()
        };
        let mut ran = SweepPoint { predicted: predicted.clone(), ..done("a", 48, &gaps) };
        let Outcome::Done { summary, .. } = &mut ran.outcome else { panic!("it ran") };
        let finding = |kind, step| SavedFinding {
            kind,
            leg: Legs::default(),
            step: Step::new(step),
            engine: None,
            requests: Vec::new(),
            blocks: Vec::new(),
            message: String::new(),
        };
        summary.findings = vec![
            finding(FindingKind::StaleState, 11),
            finding(FindingKind::AddressWrap, 11),
            finding(FindingKind::AddressWrap, 12),
        ];
        let points = [
            ran,
            SweepPoint { predicted, ..point("b", 48, Outcome::Pending) },
            SweepPoint {
                predicted: Prediction { error: Some("no".to_owned()), ..Prediction::default() },
                ..point("c", 48, Outcome::Failed("too small".to_owned()))
            },
        ];
        for (name, expect) in [
            ("name", ["a", "b", "c"]),
            ("outcome", ["done", "pending", "failed"]),
            ("planned_steps", ["48", "48", "48"]),
            ("steps_done", ["13", "", ""]),
            ("predicted_spike_steps", ["11-12 24", "11-12 24", ""]),
            ("spike_windows", ["11 12", "", ""]),
            ("as_predicted", ["true", "", ""]),
            ("prediction_exact", ["false", "false", ""]),
            ("closed_form_first_spike_step", ["11.5", "11.5", ""]),
            ("closed_form_period", ["inf", "inf", ""]),
            ("first_spike_step", ["11", "", ""]),
            ("spike_period", ["", "", ""]),
            ("gap_max", ["0", "", ""]),
            ("num_blocks", ["1441", "7", ""]),
            ("findings", ["address_wrap:2 stale_state:1", "", ""]),
            ("error", ["", "", "too small"]),
        ] {
            assert_eq!(fields(&points, name), expect, "{name}");
        }
    }

    #[test]
    fn any_text_is_one_field() {
        let axes = ["a.name".to_owned(), "b.name".to_owned()];
        let mut odd = point("x", 1, Outcome::Failed("one\ntwo\r".to_owned()));
        odd.set = vec![
            ("a.name".to_owned(), json!("say \"hi\", <b>")),
            ("b.name".to_owned(), json!([1, 2])),
        ];
        let text = table(&Sweep { name: "x", axes: &axes, points: &[odd] });
        assert!(text.starts_with("a.name,b.name,outcome,"), "{text}");
        assert!(text.contains("\n\"say \"\"hi\"\", <b>\",\"[1,2]\",failed,1,"), "{text}");
        assert!(text.ends_with(",\"one\ntwo\r\"\n"), "{text}");
        assert_eq!(table(&Sweep { name: "x", axes: &[], points: &[] }).lines().count(), 1);
    }
}
