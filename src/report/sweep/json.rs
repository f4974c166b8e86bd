//! `sweep.json`: what the table has and the whole of every point's summary, no time in it.

use serde::ser::{SerializeMap, Serializer};
use serde::Serialize;
use serde_json::Value;

use super::{csv, Prediction, SavedSummary, Sweep, SweepPoint};
use crate::base::Step;

#[derive(Serialize)]
pub(super) struct Document<'a> {
    name: &'a str,
    axes: &'a [String],
    points: Vec<Point<'a>>,
}

#[derive(Serialize)]
struct Point<'a> {
    name: &'a str,
    #[serde(serialize_with = "as_map")]
    set: &'a [(String, Value)],
    steps: u64,
    outcome: &'static str,
    /// `null` where there is no prediction, which is not the same as none.
    predicted_spike_steps: Option<&'a [Step]>,
    as_predicted: Option<bool>,
    prediction: &'a Prediction,
    summary: Option<&'a SavedSummary>,
    error: Option<&'a str>,
}

pub(super) fn document<'a>(sweep: &Sweep<'a>) -> Document<'a> {
    let point = |point: &'a SweepPoint| Point {
        name: &point.name,
        set: &point.set,
        steps: point.steps,
        outcome: csv::outcome(&point.outcome),
        predicted_spike_steps: point.prediction().map(|one| one.spike_steps.as_slice()),
        as_predicted: point.as_predicted(),
        prediction: &point.predicted,
        summary: point.summary(),
        error: point.error(),
    };
    Document {
        name: sweep.name,
        axes: sweep.axes,
        points: sweep.points.iter().map(point).collect(),
    }
}

/// In the order of the file.
fn as_map<S: Serializer>(set: &&[(String, Value)], serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(set.len()))?;
    for (key, value) in *set {
        map.serialize_entry(key, value)?;
    }
    map.end()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{done, point, row};
    use super::super::{ClosedForm, Outcome};
    use super::*;

    #[test]
    fn absent_is_null_and_no_number_is_lost() {
        let mut ran = done("a", 2, &[row(1, Some(0.0), false, 0), row(2, Some(1.0), true, 0)]);
        let closed_form =
            ClosedForm { first_spike_step: f64::INFINITY, period: 2.5, windows: Vec::new() };
        ran.predicted.closed_form = Some(closed_form);
        let failed = SweepPoint {
            predicted: Prediction { error: Some("no".to_owned()), ..Prediction::default() },
            ..point("b", 2, Outcome::Failed("why".to_owned()))
        };
        let points = [ran, failed, point("c", 2, Outcome::Pending)];
        let axes = ["gpu.name".to_owned()];
        let sweep = Sweep { name: "x", axes: &axes, points: &points };
        let found = serde_json::to_value(document(&sweep)).unwrap();
        assert_eq!((&found["name"], &found["axes"]), (&json!("x"), &json!(["gpu.name"])));
        let column = |name: &str| -> Vec<Value> {
            found["points"].as_array().unwrap().iter().map(|point| point[name].clone()).collect()
        };
        let null = Value::Null;
        for (name, expect) in [
            ("name", [json!("a"), json!("b"), json!("c")]),
            ("outcome", [json!("done"), json!("failed"), json!("pending")]),
            ("predicted_spike_steps", [json!([]), null.clone(), json!([])]),
            ("as_predicted", [json!(false), null.clone(), null.clone()]),
            ("error", [null.clone(), json!("why"), null.clone()]),
        ] {
            assert_eq!(column(name), expect, "{name}");
        }
        assert_eq!(found["points"][0]["set"], json!({"gpu.name": "a"}));
        assert_eq!(found["points"][0]["prediction"]["closed_form"]["first_spike_step"], "inf");
        let summary = &found["points"][0]["summary"];
        assert_eq!((&summary["spike_steps"], &summary["laps"]), (&json!([2]), &json!(4.0)));
        assert_eq!(summary.get("wall_s"), None);
        assert_eq!(column("summary")[1..], [null.clone(), null]);
    }
}
