//! `gapscope faults run`: every fault planted in a small run, and whether it is found and named.
//!
//! Each case runs twice, with its fault and without. What the run with the fault leaves of a step
//! is judged by another process, which is given evidence and nothing else: records, second looks,
//! fingerprints and page layout, but no settings, no policy and no fault's name. What is true is
//! known from the twin: the requests that came out another way.

mod blind;
mod cases;
mod played;
mod swarm;
mod truth;
mod weighed;

use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use super::progress::say;
use super::{interrupt, told};
use crate::config::FAULTS;
use crate::gap::FindingKind;
use crate::report::write_json;
use cases::{Case, CASES};
use weighed::weigh;

pub use swarm::swarm;

/// The table, in the folder of the runs.
const FILE: &str = "fault_matrix.json";

/// Every fault's row.
#[derive(Debug, Serialize)]
struct Matrix {
    faults: Vec<Row>,
}

#[derive(Debug, Serialize)]
struct Row {
    fault: &'static str,
    /// Of the public report; empty where there is none.
    row: &'static str,
    /// What the case sets, beside the fault.
    case: String,
    /// Something was said of the first step that the fault touched, or of a later one.
    detected: bool,
    /// The verdict has the right kind, and the requests, block or tensor that the case asks for.
    named: bool,
    /// No kind of culprit fits, and the verdict says so of exactly the right requests.
    rightly_unexplained: bool,
    /// From the first step that the fault touched, which is 1; absent where the run was stopped.
    steps_to_detect: Option<u64>,
    /// Something was said of the same run without the fault.
    false_alarm_on_clean: bool,
    /// Of the first step that something was said of.
    found: Vec<FindingKind>,
    /// Why it is not named, or what kept it from running.
    note: Option<String>,
}

impl Row {
    fn is_right(&self) -> bool {
        let judged = self.named || self.rightly_unexplained;
        self.detected && judged && !self.false_alarm_on_clean
    }
}

/// Plants every fault, or those of these names; leaves all runs and `fault_matrix.json` in `out`.
/// The second is whether every row came out right.
///
/// # Errors
/// An unknown name, a folder that holds such runs already, a full disk, Ctrl-C.
pub fn fault_matrix(out: &Path, only: &[String]) -> Result<(String, bool)> {
    let chosen = chosen(only)?;
    let mut matrix = Matrix { faults: Vec::new() };
    for case in chosen {
        let row = match try_case(case, &out.join(case.fault)) {
            Ok(row) => row,
            Err(error) if error.is::<super::Interrupted>() => return Err(error),
            Err(error) => Row { note: Some(told(&error)), ..blank(case) },
        };
        say(&line(&row));
        matrix.faults.push(row);
        interrupt::check(|| format!("the case of {}", case.fault))?;
    }
    let path = out.join(FILE);
    write_json(&path, &matrix)?;
    let all_right = matrix.faults.iter().all(Row::is_right);
    Ok((format!("{}\n{}\n", total(&matrix), path.display()), all_right))
}

fn chosen(only: &[String]) -> Result<Vec<&'static Case>> {
    if only.is_empty() {
        return Ok(CASES.iter().collect());
    }
    let find = |name: &String| {
        CASES.iter().find(|case| case.fault == name).with_context(|| {
            let known: Vec<&str> = CASES.iter().map(|case| case.fault).collect();
            format!("no fault {name} can be run; those that can are {}", known.join(", "))
        })
    };
    only.iter().map(find).collect()
}

fn blank(case: &Case) -> Row {
    Row {
        fault: case.fault,
        row: FAULTS.iter().find(|entry| entry.name == case.fault).map_or("", |entry| entry.row),
        case: case.set.join(" "),
        detected: false,
        named: false,
        rightly_unexplained: false,
        steps_to_detect: None,
        false_alarm_on_clean: false,
        found: Vec::new(),
        note: None,
    }
}

fn try_case(case: &Case, out: &Path) -> Result<Row> {
    let (clean, planted) = (case.config(&[], false, out)?, case.config(&[], true, out)?);
    let weighed = weigh(case, &clean, &planted, out)?;
    let both = weighed.touched.zip(weighed.told);
    Ok(Row {
        detected: both.is_some() || weighed.stopped,
        named: weighed.is_named() && !weighed.is_unexplained,
        rightly_unexplained: weighed.is_named() && weighed.is_unexplained,
        steps_to_detect: both.map(|(touched, told)| told.get() - touched.get() + 1),
        false_alarm_on_clean: weighed.false_alarm,
        found: weighed.found,
        note: weighed.complaint,
        ..blank(case)
    })
}

fn line(row: &Row) -> String {
    let Row { fault, row: id, .. } = row;
    let detected = if row.detected { "yes" } else { "NO" };
    let named = match row {
        Row { named: true, .. } => "yes",
        Row { rightly_unexplained: true, .. } => "-",
        _ => "NO",
    };
    let steps = row.steps_to_detect.map_or("-".to_owned(), |steps| steps.to_string());
    let found: Vec<&str> = row.found.iter().map(|kind| kind.name()).collect();
    let mut text = format!(
        "{id:<4} {fault:<26} detected {detected:<3} named {named:<3} steps {steps:<3} clean {:<5} \
         {}",
        if row.false_alarm_on_clean { "ALARM" } else { "quiet" },
        found.join(", "),
    );
    if let Some(note) = &row.note {
        text += &format!("\n     {note}");
    }
    text
}

fn total(matrix: &Matrix) -> String {
    let count = |is: fn(&Row) -> bool| matrix.faults.iter().filter(|row| is(row)).count();
    format!(
        "{} faults: {} detected, {} named, {} rightly unexplained, {} false alarms on clean twins",
        matrix.faults.len(),
        count(|row| row.detected),
        count(|row| row.named),
        count(|row| row.rightly_unexplained),
        count(|row| row.false_alarm_on_clean),
    )
}
