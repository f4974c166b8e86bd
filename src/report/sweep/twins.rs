//! The texts of the victims, each above that of its clean twin.

use std::fmt::Write;

use super::super::html::nats;
use super::super::html::text::{number, visible};
use super::victims::{Found, Victim, SHOWN_MAX};
use super::{Sweep, SweepPoint};
use crate::base::LogProb;

pub(super) fn section(sweep: &Sweep, victims: &[Found]) -> String {
    if victims.is_empty() {
        return String::new();
    }
    let mut html = String::from(
        "<section class=\"wide\">\n<h2>A victim of each point, beside its clean twin</h2>\n",
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
    let side = |logp: Option<LogProb>| logp.map_or("\u{2013}".to_owned(), nats);
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
        visible(&tail(&record.prompt_text)),
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
    row("with the gap".to_owned(), marked(&record.completion_text));
    match twin {
        Some((other, _)) => {
            let name = visible(&sweep.points[*other].name);
            row(format!("without, at {name}"), marked(clean));
        }
        None => row("twin".to_owned(), "No other point ran this request without a gap.".to_owned()),
    }
    if twin.is_some() && clean == record.completion_text {
        row(String::new(), "The texts are the same; only the log-probabilities differ.".to_owned());
    }
    html + "</table>\n</article>\n"
}

/// Of a long prompt what the model read last.
fn tail(text: &str) -> String {
    const CHARS_MAX: usize = 240;
    match text.chars().count().checked_sub(CHARS_MAX) {
        None | Some(0) => text.to_owned(),
        Some(cut) => ['\u{2026}'].into_iter().chain(text.chars().skip(cut + 1)).collect(),
    }
}

/// Bytes that two texts begin with alike: whole characters, and no part of an escape such as
/// `\xff`, which stands for one byte.
fn common_prefix(a: &str, b: &str) -> usize {
    let same = std::iter::zip(a.chars(), b.chars()).take_while(|(a, b)| a == b);
    let same: usize = same.map(|(c, _)| c.len_utf8()).sum();
    let escape = a[..same].rfind("\\x").filter(|start| same - start < r"\xff".len());
    escape.unwrap_or(same)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_part_at_whole_characters() {
        for (a, b, expect) in [
            ("", "", 0),
            ("abc", "abd", 2),
            ("é1", "é2", 2),
            (r"R\x91a", r"R\x96a", 1),
            (r"R\x91a", r"R\x91b", 5),
            (r"R\", r"R\x", 2),
        ] {
            assert_eq!(common_prefix(a, b), expect, "{a} {b}");
        }
        assert_eq!(tail(&"é".repeat(240)).chars().count(), 240);
        assert_eq!(tail(&format!("{}z", "é".repeat(240))).chars().count(), 240);
        assert!(tail(&"x".repeat(1000)).starts_with("\u{2026}xxx"));
    }
}
