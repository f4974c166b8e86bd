//! The sweep's `report.html`: what was swept, what came of it, where the spikes moved, and whom they
//! hit.

use std::fmt::Write;

use super::super::html::text::{count, escape, number, optional, shorten, visible};
use super::super::html::{document, nats};
use super::victims::{Found, Victim, SHOWN_MAX};
use super::words::{not_yet, outcome, short_names, steps, value_text, windows};
use super::{csv, first_spike, map_svg, Outcome, Sweep, SweepPoint};

pub(super) fn render(sweep: &Sweep, victims: &[Found]) -> String {
    let name = escape(sweep.name);
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
        all_victims(sweep, victims),
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
            if !values.contains(&value) {
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
        }
        if let Some(error) = &point.predicted.error {
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
            "<p>Completions may end early here, so that the replay, which lets each run to its \
                 full length, is a guess.</p>\n";
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
    for name in short_names(sweep.axes).into_iter().chain(COLUMNS) {
        write!(html, "<th>{}</th>", visible(name)).expect("a string grows");
    }
    html += "<th></th></tr>\n";
    for point in sweep.points {
        html += "<tr>";
        for key in sweep.axes {
            write!(html, "<td>{}</td>", visible(&value_text(point.value(key))))
                .expect("a string grows");
        }
        for cell in cells(point) {
            let (whole, short) = (escape(&cell), escape(&shorten(&cell, CELL_CHARS)));
            write!(html, "<td title=\"{whole}\">{short}</td>").expect("a string grows");
        }
        let link = match point.outcome {
            Outcome::Done { .. } => {
                format!("<a href=\"points/{}/report.html\">report</a>", percent(&point.name))
            }
            _ => csv::outcome(&point.outcome).to_owned(),
        };
        writeln!(html, "<td>{link}</td></tr>").expect("a string grows");
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
        of(|one| Some(one.num_blocks)),
        of(|one| one.first_wrapped_block),
        optional(summary.and_then(|one| one.blocks_per_step)),
        optional(summary.and_then(|one| one.laps)),
        of(|one| Some(one.engine_steps)),
        of(|one| Some(one.preemptions)),
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

fn all_victims(sweep: &Sweep, victims: &[Found]) -> String {
    if victims.is_empty() {
        return String::new();
    }
    let mut html = String::from(
        "<section class=\"wide\">\n<h2>Worst request of each point, beside its clean twin</h2>\n",
    );
    for (at, victim) in victims {
        let point = &sweep.points[*at];
        match victim {
            Ok(victim) => html += &one_victim(sweep, point, victim),
            Err(error) => {
                writeln!(
                    html,
                    "<p><b>{}</b>: {}</p>",
                    visible(&point.name),
                    visible(&error.to_string())
                )
                .expect("a string grows");
            }
        }
    }
    let spiked = sweep.points.iter().filter_map(SweepPoint::summary);
    let spiked = spiked.filter(|summary| summary.first_spike_step.is_some()).count();
    if spiked > SHOWN_MAX {
        writeln!(html, "<p>The first {SHOWN_MAX} of {spiked} points with a spike are shown.</p>")
            .expect("a string grows");
    }
    html + "</section>\n"
}

fn one_victim(sweep: &Sweep, point: &SweepPoint, victim: &Victim) -> String {
    let Victim { gap, worst, worst_at, first_at, record, twin } = victim;
    let side = |logp: Option<crate::base::LogProb>| logp.map_or("\u{2013}".to_owned(), nats);
    let mut html = format!(
        "<article>\n<h3>{}: request {}</h3>\n<p>Gap {} nats at token {worst_at} of {}: the engine \
         gave it a log-probability of {}, the trainer {}. {}</p>\n<table class=\"twins\">\n\
         <tr><th>prompt</th><td>{}</td></tr>\n",
        visible(&point.name),
        record.request,
        number(*gap),
        record.completion_token_ids.len(),
        side(worst.logp_decode),
        side(worst.logp_trainer),
        match first_at {
            1 => "It is wrong from its first token on.".to_owned(),
            2 => "Its first token is right, it is wrong from the second on.".to_owned(),
            n => format!("Its first {} tokens are right.", n - 1),
        },
        visible(&record.prompt_text),
    );
    let clean = twin.as_ref().map_or("", |(_, twin)| &twin.completion_text);
    let shared = match twin {
        Some(_) => common_prefix(&record.completion_text, clean),
        None => record.completion_text.len(),
    };
    let marked = |text: &str| {
        let (same, other) = text.split_at(shared);
        let mark = if other.is_empty() {
            String::new()
        } else {
            format!("<mark>{}</mark>", visible(other))
        };
        format!("{}{mark}", visible(same))
    };
    let mut row = |name: String, text: String| {
        writeln!(html, "<tr><th>{name}</th><td>{text}</td></tr>").expect("a string grows");
    };
    row(format!("{}<br>with the gap", visible(&point.name)), marked(&record.completion_text));
    match twin {
        Some((other, _)) => {
            let name = visible(&sweep.points[*other].name);
            row(format!("{name}<br>without"), marked(clean));
        }
        None => row("twin".to_owned(), "No other point ran this request without a gap.".to_owned()),
    }
    if twin.is_some() && clean == record.completion_text {
        row(String::new(), "The texts are the same; only the log-probabilities differ.".to_owned());
    }
    html + "</table>\n</article>\n"
}

/// Bytes that two texts begin with alike: whole characters, and no part of an escape such as `\xff`,
/// which stands for one byte.
fn common_prefix(a: &str, b: &str) -> usize {
    let same = std::iter::zip(a.chars(), b.chars()).take_while(|(a, b)| a == b);
    let same: usize = same.map(|(c, _)| c.len_utf8()).sum();
    let escape = a[..same].rfind("\\x").filter(|start| same - start < r"\xff".len());
    escape.unwrap_or(same)
}
