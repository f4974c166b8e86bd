//! A point's run read back from its folder.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::super::rows::{Rows, Stepped};
use super::super::{of_engines, EngineSummary, ReportError, Summary};
use crate::base::float::{optional, JsonFloat};
use crate::base::{BlockId, EngineIndex, RequestId, Step};
use crate::gap::{FindingKind, Legs, Tally};

/// `summary.json` without its time; [`Summary`] says what the fields mean.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedSummary {
    pub schema: u32,
    pub name: String,
    pub error: Option<String>,
    pub steps_done: u64,
    pub n_tokens: u64,
    pub nonfinite: u64,
    pub spike_steps: Vec<Step>,
    pub first_spike_step: Option<Step>,
    pub spike_windows: Vec<(Step, Step)>,
    #[serde(with = "optional")]
    pub spike_period: Option<f64>,
    #[serde(with = "optional")]
    pub gap_max: Option<f64>,
    #[serde(with = "optional")]
    pub gap_mean: Option<f64>,
    #[serde(with = "optional")]
    pub frac_bitwise_equal: Option<f64>,
    #[serde(with = "optional")]
    pub floor: Option<f64>,
    pub num_blocks: Option<u64>,
    pub state_stride: Option<u64>,
    pub first_wrapped_block: Option<u64>,
    #[serde(with = "optional")]
    pub blocks_per_step: Option<f64>,
    #[serde(with = "optional")]
    pub laps: Option<f64>,
    pub engine_steps: Option<u64>,
    #[serde(with = "optional")]
    pub tokens_per_engine_step: Option<f64>,
    pub preemptions: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub engines: Vec<EngineSummary>,
    #[serde(flatten)]
    pub tally: Tally,
    pub findings: Vec<SavedFinding>,
    #[serde(with = "optional")]
    pub reward_mean_first: Option<f64>,
    #[serde(with = "optional")]
    pub reward_mean_last: Option<f64>,
}

/// What the summary says of a finding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedFinding {
    pub kind: FindingKind,
    pub leg: Legs,
    pub step: Step,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineIndex>,
    pub requests: Vec<RequestId>,
    pub blocks: Vec<BlockId>,
    pub message: String,
}

/// What `steps.jsonl` says of one step's gap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepGapRow {
    pub step: Step,
    /// Largest |d| of the step, nats; absent where nothing was compared.
    pub gap_max: Option<f64>,
    pub spike: bool,
    /// Tokens with a non-finite log-probability on either side.
    pub nonfinite: u64,
}

impl SavedSummary {
    /// In words; `None` of one engine.
    #[must_use]
    pub fn spikes_by_engine(&self, separator: &str) -> Option<String> {
        let each = self.engines.iter().map(|one| (one.engine, &one.spike_steps[..]));
        of_engines(each, separator)
    }
}

/// Reads a run's `summary.json`.
pub fn read_summary(path: &Path) -> Result<SavedSummary, ReportError> {
    let text = fs::read(path).map_err(ReportError::io("read", path))?;
    let summary: SavedSummary =
        serde_json::from_slice(&text).map_err(|error| bad(path, error.line() as u64, &error))?;
    if summary.schema == Summary::SCHEMA {
        Ok(summary)
    } else {
        let found = format!("schema {}, and this is {}", summary.schema, Summary::SCHEMA);
        Err(bad(path, 1, &found))
    }
}

/// Reads a run's `steps.jsonl`; its steps rise.
pub fn read_steps(path: &Path) -> Result<Vec<StepGapRow>, ReportError> {
    Rows::<Row>::open(path)?.map(|row| row.map(StepGapRow::from)).collect()
}

fn bad(path: &Path, line: u64, found: &dyn std::fmt::Display) -> ReportError {
    ReportError::BadRecord { path: path.to_owned(), line, found: found.to_string() }
}

/// The line's keys that matter here.
#[derive(Deserialize)]
struct Row {
    step: Step,
    #[serde(rename = "gap/logp_abs_diff_max", with = "optional")]
    gap_max: Option<f64>,
    #[serde(rename = "gap/spike")]
    spike: JsonFloat,
    #[serde(rename = "gap/nonfinite")]
    nonfinite: JsonFloat,
}

impl Stepped for Row {
    fn step(&self) -> Step {
        self.step
    }
}

impl From<Row> for StepGapRow {
    fn from(row: Row) -> Self {
        let Row { step, gap_max, spike, nonfinite } = row;
        Self { step, gap_max, spike: spike.0 != 0.0, nonfinite: nonfinite.0 as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::StepLog;
    use super::*;

    #[test]
    fn steps_read_back_as_they_were_logged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steps.jsonl");
        let mut log = StepLog::create(&path).unwrap();
        for (step, gap, spike, nonfinite) in
            [(1, Some(0.0), 0.0, 0.0), (2, None, 1.0, 3.0), (30, Some(f64::INFINITY), 1.0, 0.0)]
        {
            let values = [
                ("gap/other", None),
                ("gap/logp_abs_diff_max", gap),
                ("gap/nonfinite", Some(nonfinite)),
                ("gap/spike", Some(spike)),
            ];
            log.append(Step::new(step), values).unwrap();
        }
        let row = |step, gap_max, spike, nonfinite| StepGapRow {
            step: Step::new(step),
            gap_max,
            spike,
            nonfinite,
        };
        assert_eq!(
            read_steps(&path).unwrap(),
            [
                row(1, Some(0.0), false, 0),
                row(2, None, true, 3),
                row(30, Some(f64::INFINITY), true, 0)
            ]
        );
    }

    #[test]
    fn a_line_that_is_no_step_is_named() {
        let good = "{\"step\":1,\"gap/logp_abs_diff_max\":null,\"gap/nonfinite\":0.0,\
            \"gap/spike\":0.0}\n";
        let torn = format!("{good}{}", &good[..good.len() - 1].replace(":1", ":2"));
        for (text, line, expect) in [
            (torn.as_str(), 2, "the line is torn: it has no end"),
            (&format!("{good}{good}"), 2, "step 1 does not rise"),
            (&format!("{good}\n"), 2, "EOF while parsing a value"),
            ("{\"step\":1}\n", 1, "missing field `gap/logp_abs_diff_max`"),
            (&good.replace("0.0}", "null}"), 1, "a number, \"NaN\", \"inf\" or \"-inf\""),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("steps.jsonl");
            fs::write(&path, text).unwrap();
            let error = read_steps(&path).unwrap_err().to_string();
            let start = format!("{}, line {line}: {expect}", path.display());
            assert!(error.starts_with(&start), "{error}");
            assert!(error.ends_with("; remove the run's folder and run it again"), "{error}");
        }
        let missing = Path::new("/nowhere/steps.jsonl");
        let error = read_steps(missing).unwrap_err().to_string();
        assert!(error.starts_with("cannot read /nowhere/steps.jsonl: "), "{error}");
    }
}
