//! An audit as a person reads it: what was checked, then what was measured.

use std::fmt::{self, Write};

use super::rescore::{RescoredRow, SideRow};
use super::step::{place, StepRow, Worst};
use super::Report;
use crate::gap::{FindingKind, Legs, Opinion, HEADLINES};
use crate::rollout::import::{Checks, SideChecks};

/// Shown beside the headlines.
const MORE: [&str; 5] =
    ["logp_abs_diff_p50", "logp_diff_mean", "ratio_max", "prob_pearson", "seq_mult_prob_error_max"];

pub(super) fn text(report: &Report) -> String {
    let mut text = String::new();
    write(&mut text, report).expect("a string takes every text");
    text
}

fn write(text: &mut String, report: &Report) -> fmt::Result {
    let records: u64 = report.steps.iter().map(|row| row.checks.records).sum();
    let mut formats: Vec<&str> = report.inputs.iter().map(|input| input.format).collect();
    formats.sort_unstable();
    formats.dedup();
    writeln!(
        text,
        "{} of {}: {} step(s), {records} record(s)",
        counted(report.inputs.len() as u64, "input"),
        formats.join(" and "),
        report.steps.len()
    )?;
    for note in &report.notes {
        writeln!(text, "note: {note}")?;
    }
    for row in &report.steps {
        step(text, row)?;
    }
    Ok(())
}

fn step(text: &mut String, row: &StepRow) -> fmt::Result {
    let compared = row.metrics.value("n_tokens").unwrap_or(0.0);
    writeln!(
        text,
        "\nstep {}: {}, {compared} tokens compared, floor {:?} nats",
        row.step,
        counted(row.checks.records, "record"),
        row.floor
    )?;
    checks(text, &row.checks)?;
    for finding in &row.findings {
        writeln!(text, "  finding   {}: {}", finding.kind.name(), finding.message)?;
    }
    let unexplained = row.findings.iter().any(|found| found.kind == FindingKind::Unexplained);
    let unsure = row.checks.unknown_contracts + row.checks.unlike_contracts > 0;
    if unexplained && unsure && row.rescored.is_none() {
        writeln!(
            text,
            "  note      whether a temperature or filter of one side explains it cannot be told \
             from the sampled tokens' log-probabilities alone; --model DIR tries it on all logits"
        )?;
    }
    if let Some(rescored) = &row.rescored {
        self::rescored(text, row, rescored)?;
    }
    for one in &row.routes {
        one.write(text)?;
    }
    if compared == 0.0 {
        return writeln!(text, "  no data");
    }
    for name in HEADLINES.iter().chain(&MORE) {
        let metric = row.metrics.0.iter().find(|metric| metric.name == *name);
        let metric = metric.expect("the table has every headline");
        let value = metric.value.map_or("no data".to_owned(), |value| format!("{value:?}"));
        writeln!(text, "  {:<36}{value}", metric.tag())?;
    }
    for Worst { request, file, line, index, token_id, infer, train } in &row.worst {
        writeln!(
            text,
            "  worst     {request} ({}), completion index {index}, token {token_id}: infer \
             {infer}, train {train}",
            place(file, *line)
        )?;
    }
    Ok(())
}

/// Both sides and the model: who agrees with whom.
fn rescored(text: &mut String, row: &StepRow, rescored: &RescoredRow) -> fmt::Result {
    let title = ["three-way", "tokens", "mean |d|", "max |d|", "k3 mean"];
    let [name, columns @ ..] = title;
    let line = |text: &mut String, name: &str, columns: [String; 4]| {
        let [n, mean, max, k3] = columns;
        writeln!(text, "  {name:<22}{n:>10}{mean:>14}{max:>14}{k3:>14}")
    };
    line(text, name, columns.map(str::to_owned))?;
    let sides = rescored.sides.iter().map(|side| (pair_name(side.legs), &side.metrics));
    for (name, metrics) in [("engine / trainer", &row.metrics)].into_iter().chain(sides) {
        let value = |name| metrics.value(name);
        let nats = |name| value(name).map_or("no data".to_owned(), |nats| format!("{nats:.4e}"));
        let n = value("n_tokens").unwrap_or(0.0).to_string();
        let [mean, max, k3] = ["logp_abs_diff_mean", "logp_abs_diff_max", "k3_mean"].map(nats);
        line(text, name, [n, mean, max, k3])?;
    }
    for side in &rescored.sides {
        self::side(text, side)?;
    }
    for one in &rescored.opinions {
        write!(text, "  opinion   {}: {}", counted(one.requests_total, "record"), one.opinion)?;
        match (one.opinion, one.requests.as_slice()) {
            (Opinion::AllAgree, _) | (_, []) => writeln!(text)?,
            (_, [first, ..]) => writeln!(text, "; first {first}")?,
        }
    }
    Ok(())
}

fn pair_name(legs: Legs) -> &'static str {
    match legs {
        Legs::DecodeReference => "engine / rescored",
        _ => "trainer / rescored",
    }
}

fn side(text: &mut String, side: &SideRow) -> fmt::Result {
    let name = side.legs.infer().name();
    if let Some(refit) = &side.refit {
        let (n, stated, found) =
            (counted(refit.tokens as u64, "token"), side.stated, refit.contract);
        let (before, after) = (refit.before, refit.after);
        let verdict = if side.holds { "fits" } else { "does not fit the rest" };
        write!(
            text,
            "  refit     {name}: stated {stated:.3}, mean |d| {before:.4e}; from the logits of {n} \
             {found:.3}, mean |d| {after:.4e}, {verdict}"
        )?;
        match refit.kept_mass {
            Some(mass) => writeln!(text, "; it keeps a mass of {mass:.4}, ln {:.4}", mass.ln())?,
            None => writeln!(text)?,
        }
    }
    if let Some((request, index)) = side.first_removed {
        writeln!(
            text,
            "  removed   {name}: {} outside what {:.3} keeps by the model, so without a \
             log-probability and not compared; first {request}, completion index {index}",
            counted(side.removed, "sampled token"),
            side.contract
        )?;
    }
    Ok(())
}

fn checks(text: &mut String, checks: &Checks) -> fmt::Result {
    let excluded = |side: &SideChecks| -> String {
        let kinds = side.kinds().into_iter().filter(|(_, count)| *count > 0);
        kinds.map(|(kind, count)| format!("{count} {kind}")).collect::<Vec<_>>().join(", ")
    };
    for (name, side) in [("infer", &checks.infer), ("train", &checks.train)] {
        if side.excluded() > 0 {
            writeln!(text, "  excluded  {name}: {}", excluded(side))?;
        }
        if side.positive > 0 {
            let count = counted(side.positive, "log-probability");
            writeln!(text, "  warning   {name}: {count} above 0, kept in the means")?;
        }
        if side.zero_tails > 0 {
            writeln!(
                text,
                "  warning   {name}: {} in runs of exactly 0.0 at the end of {}; 0.0 is \
                 probability 1, not a missing value",
                counted(side.zero_tail_tokens, "token"),
                counted(side.zero_tails, "record")
            )?;
        }
    }
    for (count, of, what) in [
        (checks.masked_records, "record", "left out whole by sample_loss_mask"),
        (checks.first_tokens, "token", "left out: the first of a text has no log-probability"),
        (checks.out_of_order, "record", "behind one with a higher id"),
        (checks.unknown_contracts, "record", "without temperature and mode: taken to be alike"),
        (checks.unlike_contracts, "record", "of unlike temperature, filters or mode: as asked"),
    ] {
        if count > 0 {
            writeln!(text, "  note      {} {what}", counted(count, of))?;
        }
    }
    Ok(())
}

fn counted(count: u64, of: &str) -> String {
    match (count, of.strip_suffix('y')) {
        (1, _) => format!("1 {of}"),
        (_, Some(stem)) => format!("{count} {stem}ies"),
        (_, None) => format!("{count} {of}s"),
    }
}
