//! The sweep's `report.html`: what was swept, what came of it, where the spikes moved, and whom
//! they hit.

use std::fmt::Write;

use super::super::html::document;
use super::super::html::text::{count, escape, optional, shorten, visible};
use super::victims::Found;
use super::words::{not_yet, outcome, short_names, steps, value_text, windows};
use super::{csv, first_spike, map_svg, twins, Outcome, Sweep, SweepPoint};

pub(super) fn render(sweep: &Sweep, victims: &[Found]) -> String {
    let name = visible(sweep.name);
    let body = format!(
        "<header>\n<h1>{name}</h1>\n<p class=\"verdict\">{}</p>\n<p>{}</p>\n</header>\n\
         <main class=\"sweep\">\n<div class=\"charts wide\">\n{}</div>\n\
         <div class=\"pair\">\n<div class=\"charts\">\n{}</div>\n{}</div>\n{}{}</main>\n",
        escape(&outcome(sweep)),
        swept(sweep),
        map_svg::draw(sweep).into_element(),
        first_spike::draw(sweep).into_element(),
        notes(sweep),
        table(sweep),
        twins::section(sweep, victims),
    );
    document(sweep.name, &body)
}

/// Each knob with the values it takes, in the order in which they first occur.
fn swept(sweep: &Sweep) -> String {
    let mut knobs = Vec::new();
    for key in sweep.axes {
        let mut values: Vec<String> = Vec::new();
        for point in sweep.points {
            let value = visible(&value_text(point.value(key)));
            if !value.is_empty() && !values.contains(&value) {
                values.push(value);
            }
        }
        knobs.push(format!("<b>{}</b> over {}", visible(key), values.join(", ")));
    }
    if knobs.is_empty() {
        "Nothing was varied.".to_owned()
    } else {
        format!("Swept: {}.", knobs.join("; "))
    }
}

/// What the charts alone would let one believe, put right.
fn notes(sweep: &Sweep) -> String {
    let mut html = String::from("<section>\n<h2>Read with care</h2>\n");
    let mut notes = Vec::new();
    for point in sweep.points {
        if let Outcome::Failed(error) = &point.outcome {
            notes.push((point, format!("failed: {error}")));
        } else if let Some(error) = point.error() {
            notes.push((point, format!("ended early: {error}")));
        } else if let Some(error) = &point.predicted.error {
            notes.push((point, format!("no prediction: {error}")));
        }
        notes.extend(not_yet(point).map(|note| (point, note)));
    }
    if notes.is_empty() {
        html += "<p class=\"none\">Nothing to note.</p>\n";
    } else {
        html += "<ul class=\"findings\">\n";
        for (point, note) in notes {
            writeln!(html, "<li><b>{}</b><br>{}</li>", visible(&point.name), visible(&note))
                .expect("a string grows");
        }
        html += "</ul>\n";
    }
    if sweep.points.iter().any(|point| point.prediction().is_some_and(|one| !one.exact)) {
        html +=
            "<p>Completions may end early here, or a fault is planted, so that the replay, which \
             knows neither, is a guess.</p>\n";
    }
    html + "</section>\n"
}

const COLUMNS: [&str; 15] = [
    "spikes",
    "replay",
    "first",
    "on paper",
    "period",
    "on paper",
    "largest gap",
    "bad requests",
    "blocks",
    "wrapped from",
    "blocks a step",
    "laps",
    "engine steps",
    "preempted",
    "findings",
];

/// Longer lists of steps are whole under the pointer, and in sweep.csv.
const CELL_CHARS: usize = 26;

fn table(sweep: &Sweep) -> String {
    let mut html = String::from(
        "<section class=\"wide scroll-x\">\n<h2>Points</h2>\n<table class=\"points\">\n<tr>",
    );
    html += "<th></th>";
    for name in short_names(sweep.axes).into_iter().chain(COLUMNS) {
        write!(html, "<th>{}</th>", visible(name).replace('_', "_<wbr>")).expect("a string grows");
    }
    html += "</tr>\n";
    for point in sweep.points {
        let link = match point.outcome {
            Outcome::Done { .. } => {
                format!("<a href=\"points/{}/report.html\">report</a>", percent(&point.name))
            }
            _ => csv::outcome(&point.outcome).to_owned(),
        };
        write!(html, "<tr><td>{link}</td>").expect("a string grows");
        for key in sweep.axes {
            write!(html, "<td>{}</td>", visible(&value_text(point.value(key))))
                .expect("a string grows");
        }
        for cell in cells(point) {
            let short = shorten(&cell, CELL_CHARS);
            let title = match short == cell {
                true => String::new(),
                false => format!(" title=\"{}\"", escape(&cell)),
            };
            write!(html, "<td{title}>{}</td>", escape(&short)).expect("a string grows");
        }
        html += "</tr>\n";
    }
    html + "</table>\n</section>\n"
}

fn cells(point: &SweepPoint) -> [String; COLUMNS.len()] {
    let dash = || "\u{2013}".to_owned();
    let (summary, prediction) = (point.summary(), point.prediction());
    let closed = prediction.and_then(|one| one.closed_form.as_ref());
    let or_none = |text: String| if text.is_empty() { "none".to_owned() } else { text };
    let of = |value: fn(&super::SavedSummary) -> Option<u64>| {
        summary.map_or_else(dash, |one| value(one).map_or_else(dash, count))
    };
    [
        summary.map_or_else(dash, |one| or_none(windows(&one.spike_windows))),
        prediction.map_or_else(dash, |one| or_none(steps(&one.spike_steps))),
        of(|one| one.first_spike_step.map(|step| step.get())),
        optional(closed.map(|one| one.first_spike_step)),
        optional(summary.and_then(|one| one.spike_period)),
        optional(closed.map(|one| one.period)),
        optional(summary.and_then(|one| one.gap_max)),
        of(|one| Some(one.tally.bad_requests)),
        of(|one| one.num_blocks),
        of(|one| one.first_wrapped_block),
        optional(summary.and_then(|one| one.blocks_per_step)),
        optional(summary.and_then(|one| one.laps)),
        of(|one| one.engine_steps),
        of(|one| one.preemptions),
        csv::findings(point),
    ]
}

/// One step of a path as a link has it.
fn percent(name: &str) -> String {
    let mut link = String::new();
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~=,+".contains(&byte) {
            link.push(char::from(byte));
        } else {
            write!(link, "%{byte:02X}").expect("a string grows");
        }
    }
    link
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{done, point, row, spikes};
    use super::super::{write_sweep, ClosedForm, Prediction};
    use super::*;

    const ODD: &str = "a=\"<b>\"\n,'&\u{202e}";

    fn odd(point: SweepPoint) -> SweepPoint {
        SweepPoint { set: vec![("x.<knob>".to_owned(), json!(ODD))], ..point }
    }

    /// Nothing that was handed in is markup, and nothing is fetched.
    fn check(sweep: &Sweep) -> String {
        let folder = tempfile::tempdir().unwrap();
        write_sweep(folder.path(), sweep).unwrap();
        let mut files: Vec<_> =
            folder.path().read_dir().unwrap().map(|file| file.unwrap().file_name()).collect();
        files.sort();
        assert_eq!(files, ["report.html", "spike_map.svg", "sweep.csv", "sweep.json"]);
        let read = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        let (page, map) = (read("report.html"), read("spike_map.svg"));
        for never in ["<b>\"", "<knob>", "<script", "http", "url(", "\u{202e}", "\"NaN", "\"inf"] {
            assert!(!page.contains(never), "{never}\n{page}");
            assert!(never == "http" || !map.contains(never), "{never}\n{map}");
        }
        assert!(map.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\" "), "{map}");
        serde_json::from_str::<serde_json::Value>(&read("sweep.json")).unwrap();
        page
    }

    #[test]
    fn absurd_sweeps_have_a_page() {
        let long: Vec<_> = (1..=10_000).map(|step| row(step, Some(1e-6), false, 0)).collect();
        let infinite = [row(1, Some(f64::INFINITY), true, 0), row(2, None, true, 9)];
        let no_prediction = Prediction { error: Some(ODD.to_owned()), ..Prediction::default() };
        let closed_form =
            ClosedForm { first_spike_step: f64::INFINITY, period: f64::NAN, windows: Vec::new() };
        let endless = Prediction { closed_form: Some(closed_form), ..Prediction::default() };
        for points in [
            vec![],
            vec![odd(point(ODD, 1, Outcome::Pending))],
            vec![odd(point("a", u64::MAX, Outcome::Pending)); 40],
            vec![odd(point("a", 0, Outcome::Failed(ODD.to_owned())))],
            vec![odd(done(ODD, 10_000, &long))],
            vec![odd(SweepPoint { predicted: no_prediction, ..done("a", 2, &infinite) })],
            vec![SweepPoint { predicted: endless, ..done("a", 2, &infinite) }],
        ] {
            let axes = ["x.<knob>".to_owned()];
            check(&Sweep { name: ODD, axes: &axes, points: &points });
            check(&Sweep { name: ODD, axes: &[], points: &points });
        }
    }

    #[test]
    fn the_page_says_what_was_swept_and_what_came_of_it() {
        let set = |value: u64, point: SweepPoint| SweepPoint {
            set: vec![("rollout.rollouts_per_prompt".to_owned(), json!(value))],
            ..point
        };
        let gaps = [row(1, Some(0.0), false, 0), row(2, Some(1.0), true, 0)];
        let predicted = Prediction { spike_steps: spikes(&[2]), ..Prediction::default() };
        let points = [
            set(8, SweepPoint { predicted, ..done("r=8 %", 2, &gaps) }),
            set(16, done("r=16", 2, &gaps[..1])),
        ];
        let axes = ["rollout.rollouts_per_prompt".to_owned()];
        let page = check(&Sweep { name: "index-wrap", axes: &axes, points: &points });
        for expect in [
            "<h1>index-wrap</h1>",
            "2 of 2 points ran; 1 of them with a spike, first at step 2. Spike steps are exactly",
            "Swept: <b>rollout.rollouts_per_prompt</b> over 8, 16.",
            "<a href=\"points/r=8%20%25/report.html\">report</a>",
            "r=8 %, step 2: 1 nats, predicted",
            "in 1 steps",
            // Its records are not there to be read.
            "points/r=8 % is not a run folder",
            "is a guess",
        ] {
            assert!(page.contains(expect), "{expect}\n{page}");
        }
    }
}
