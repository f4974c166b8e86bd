//! An audit as a person reads it: what was checked, then what was measured.

use std::fmt::{self, Write};

use super::step::{place, StepRow, Worst};
use super::Report;
use crate::gap::HEADLINES;
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
