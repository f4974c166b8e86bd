//! `report.html`: one file that explains a run on its first screen, without network or script.

mod blocks;
mod chart;
pub(super) mod scale;
pub(super) mod svg;
pub(super) mod text;
mod trace;

use std::fmt::Write;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::disk::write_atomic;
use super::{step_ranges, Change, EngineSummary, ReportError, Summary};
use crate::base::{float, LogProb, Position};
use crate::gap::{self, Finding, StepGap};
use text::{count, escape, number, optional, plain, visible};

pub use blocks::{BlockGap, StepBlocks};
pub use trace::{Trace, TracedToken};

/// What the page shows. The caller chooses; the page only draws, in the order given.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    pub summary: &'a Summary,
    /// In rising order of steps.
    pub points: &'a [StepPoint],
    /// See [`super::changes`].
    pub changes: &'a [Change],
    /// The worst first; ten fill the page.
    pub worst: &'a [WorstToken],
    /// Of the step with the largest gap; absent without a spike.
    pub blocks: Option<&'a StepBlocks>,
    /// The request with the largest gap; absent without a spike.
    pub trace: Option<&'a Trace>,
}

/// One step in the charts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepPoint {
    pub gap: StepGap,
    #[serde(with = "float::optional")]
    pub reward_mean: Option<f64>,
}

/// One sampled token with its surroundings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorstToken {
    pub found: gap::WorstToken,
    /// In prompt + completion.
    pub position: Position,
    /// What stands before it (prompt and completion), the token's own text, and what follows.
    pub before: String,
    pub text: String,
    pub after: String,
}

/// Writes the page, atomically. The same run gives the same bytes.
pub fn write(path: &Path, page: &Page<'_>) -> Result<(), ReportError> {
    write_atomic(path, render(page).as_bytes())
}

fn render(page: &Page<'_>) -> String {
    let body = format!(
        "<header>\n<h1>{name}</h1>\n<p class=\"verdict\">{verdict}</p>\n{figures}</header>\n\
         <main>\n<div class=\"charts\">\n{gap}{reward}</div>\n\
         <div class=\"side\">\n{findings}{changes}</div>\n{worst}{spike}</main>\n",
        name = visible(&page.summary.name),
        verdict = verdict(page.summary),
        figures = figures(page.summary),
        gap = chart::gap(page.points, page.summary.floor),
        reward = chart::reward(page.points),
        findings = findings(&page.summary.findings),
        changes = changes(page.changes),
        worst = engines(&page.summary.engines) + &worst(page.worst, &page.summary.engines),
        spike = spike(page),
    );
    document(&page.summary.name, &body)
}

/// A whole page with its style, and nothing that is fetched.
pub(super) fn document(name: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{} · gapscope</title>\n<style>\n{}{}</style>\n</head>\n<body>\n\
         {body}</body>\n</html>\n",
        escape(&plain(name)),
        include_str!("style.css"),
        include_str!("svg.css"),
    )
}

/// The worst spike step and the worst request from close by.
fn spike(page: &Page<'_>) -> String {
    let blocks = page.blocks.filter(|blocks| !blocks.requests.is_empty()).map(blocks::draw);
    let trace = page.trace.map(|trace| trace::draw(trace, page.summary.floor));
    let charts: String = blocks.into_iter().chain(trace).collect();
    if charts.is_empty() {
        return charts;
    }
    format!(
        "<section class=\"wide\">\n<h2>The worst spike</h2>\n\
         <div class=\"charts half\">\n{charts}</div>\n</section>\n"
    )
}

/// The run in one sentence, of facts only.
fn verdict(summary: &Summary) -> String {
    match &summary.error {
        None => outcome(summary),
        Some(error) => format!("Ended early: {}. {}", escape(error), outcome(summary)),
    }
}

fn outcome(summary: &Summary) -> String {
    if summary.n_tokens == 0 {
        return "No token was compared.".to_owned();
    }
    let tokens = format!("{} compared", plural(summary.n_tokens, "token"));
    let steps = plural(summary.steps_done, "step");
    let spikes = match (summary.spike_steps.len() as u64, summary.first_spike_step) {
        (0, _) | (_, None) => "no spike".to_owned(),
        (1, Some(first)) => format!("1 spike, at step {first}"),
        (spikes, Some(first)) => format!("{spikes} spikes, the first at step {first}"),
    };
    let nonfinite = match summary.nonfinite {
        0 => String::new(),
        tokens => format!("; {} with a non-finite logprob", plural(tokens, "token")),
    };
    format!("{tokens} over {steps}: {spikes}{nonfinite}.")
}

fn plural(n: u64, noun: &str) -> String {
    format!("{} {noun}{}", count(n), if n == 1 { "" } else { "s" })
}

fn figures(summary: &Summary) -> String {
    let counted = |n: Option<u64>| n.map_or("\u{2013}".to_owned(), count);
    let rewards = [summary.reward_mean_first, summary.reward_mean_last].map(optional).join(" → ");
    let rows = [
        ("largest gap, nats", optional(summary.gap_max)),
        ("mean gap, nats", optional(summary.gap_mean)),
        ("floor, nats", optional(summary.floor)),
        ("bit-equal tokens", summary.frac_bitwise_equal.map_or("–".to_owned(), percent)),
        ("reward, first → last tenth", rewards),
        ("blocks", counted(summary.num_blocks)),
        ("laps of the pool", optional(summary.laps)),
        ("preemptions", counted(summary.preemptions)),
    ];
    let mut html = String::from("<dl>\n");
    for (name, value) in rows {
        writeln!(html, "<div><dt>{name}</dt><dd>{value}</dd></div>").expect("a string grows");
    }
    html + "</dl>\n"
}

/// Rounded towards "not all": 100 % is said only of all.
fn percent(fraction: f64) -> String {
    if fraction == 1.0 {
        "all".to_owned()
    } else if fraction.is_finite() {
        format!("{:.2} %", (fraction * 1e4).floor() / 1e2)
    } else {
        number(fraction)
    }
}

fn findings(findings: &[Finding]) -> String {
    let mut html = String::from("<section>\n<h2>Findings</h2>\n");
    if findings.is_empty() {
        html += "<p class=\"none\">None.</p>\n";
    } else {
        html += "<ul class=\"findings\">\n";
        for finding in findings {
            writeln!(
                html,
                "<li><b>{}</b> <span class=\"where\">step {}, {} against {}</span><br>{}</li>",
                finding.kind.name(),
                finding.step,
                finding.leg.infer().name(),
                finding.leg.train().name(),
                visible(&finding.message),
            )
            .expect("a string grows");
        }
        html += "</ul>\n";
    }
    html + "</section>\n"
}

fn changes(changes: &[Change]) -> String {
    let mut html = String::from("<section>\n<h2>Not at its default</h2>\n");
    if changes.is_empty() {
        html += "<p class=\"none\">Everything is.</p>\n";
    } else {
        html += "<div class=\"scroll\"><table class=\"config\">\n";
        for Change { key, value, default } in changes {
            let default = default.as_ref().map_or("–".to_owned(), setting);
            writeln!(
                html,
                "<tr><td>{}</td><td>{}</td><td class=\"default\">{}</td></tr>",
                visible(key),
                setting(value),
                default,
            )
            .expect("a string grows");
        }
        html += "</table></div>\n";
    }
    html + "</section>\n"
}

/// A value as one writes it, without JSON's quotes.
fn setting(value: &Value) -> String {
    match value {
        Value::Null => "–".to_owned(),
        Value::String(text) => visible(text),
        other => visible(&other.to_string()),
    }
}

/// With as many digits as tell an f32 from its neighbours: gaps of one ulp are shown too.
pub(super) fn nats(logp: LogProb) -> String {
    match logp.is_finite() {
        true => logp.get().to_string().replace('-', "\u{2212}"),
        false => number(f64::from(logp.get())),
    }
}

/// Each one's own account, where there are several.
fn engines(engines: &[EngineSummary]) -> String {
    if engines.is_empty() {
        return String::new();
    }
    let mut html = String::from(
        "<section class=\"wide\">\n<h2>Engines</h2>\n<table>\n<tr>\
         <th class=\"n\">engine</th><th>spike steps</th>\
         <th class=\"n\">blocks a step</th><th class=\"n\">laps of its pool</th>\
         <th class=\"n\">engine steps</th><th class=\"n\">preemptions</th></tr>\n",
    );
    for one in engines {
        let spikes = step_ranges(&one.spike_steps, ", ");
        writeln!(
            html,
            "<tr><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            one.engine,
            if spikes.is_empty() { "none" } else { &spikes },
            optional(one.blocks_per_step),
            number(one.laps),
            count(one.engine_steps),
            count(one.preemptions),
        )
        .expect("a string grows");
    }
    html + "</table>\n</section>\n"
}

fn worst(tokens: &[WorstToken], engines: &[EngineSummary]) -> String {
    let mut html = String::from("<section class=\"worst\">\n<h2>Worst tokens</h2>\n");
    if tokens.is_empty() {
        return html + "<p class=\"none\">None.</p>\n</section>\n";
    }
    html += "<table>\n<tr><th class=\"n\">|d|, nats</th><th class=\"n\">rollout</th>\
             <th class=\"n\">trainer</th><th class=\"text\">text</th><th class=\"n\">token</th>\
             <th>request</th><th class=\"n\">position</th><th class=\"n\">block</th></tr>\n";
    for token in tokens {
        let gap::WorstToken { request, engine, slot, paired, gap } = token.found;
        let mut block = slot.map_or("–".to_owned(), |block| block.to_string());
        if !engines.is_empty() {
            block += &format!(" of engine {engine}");
        }
        writeln!(
            html,
            "<tr><td class=\"n\"><b>{}</b></td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"text\"><div><span class=\"before\"><bdi>{}</bdi></span><mark>{}</mark>\
             <span class=\"after\">{}</span></div></td><td class=\"n\">{}</td><td>{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{block}</td></tr>",
            number(gap),
            nats(paired.infer),
            nats(paired.train),
            visible(&token.before),
            visible(&token.text),
            visible(&token.after),
            paired.token,
            request,
            token.position,
        )
        .expect("a string grows");
    }
    html + "</table>\n</section>\n"
}

#[cfg(test)]
mod tests;
