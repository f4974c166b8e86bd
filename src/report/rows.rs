//! `steps.jsonl` read back, a row at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::Deserialize;

use super::ReportError;
use crate::base::{JsonFloat, Step};

/// One step's metrics.
#[derive(Clone, Debug, PartialEq)]
pub struct StepRow {
    pub step: Step,
    /// By tag; `None` is absent.
    pub metrics: BTreeMap<String, Option<f64>>,
}

/// Reads a run's `steps.jsonl`, a row at a time; its steps rise.
///
/// # Errors
/// A file that cannot be opened; then, in place of a row, a line that is torn, no row, or out of
/// order.
pub fn read_rows(
    path: &Path,
) -> Result<impl Iterator<Item = Result<StepRow, ReportError>>, ReportError> {
    Ok(Rows::<WholeRow>::open(path)?.map(|row| row.map(StepRow::from)))
}

/// What a line of one flat object a step is read into.
pub(super) trait Stepped: DeserializeOwned {
    fn step(&self) -> Step;
}

/// The rows of a file whose steps rise. After an error there are no more.
pub(super) struct Rows<T> {
    path: PathBuf,
    file: Option<BufReader<File>>,
    line: u64,
    last: Option<Step>,
    row: PhantomData<T>,
}

impl<T: Stepped> Rows<T> {
    pub(super) fn open(path: &Path) -> Result<Self, ReportError> {
        let file = BufReader::new(File::open(path).map_err(ReportError::io("read", path))?);
        Ok(Self { path: path.to_owned(), file: Some(file), line: 0, last: None, row: PhantomData })
    }

    fn read(&mut self) -> Result<Option<T>, ReportError> {
        let Some(file) = &mut self.file else { return Ok(None) };
        let mut text = Vec::new();
        file.read_until(b'\n', &mut text).map_err(ReportError::io("read", &self.path))?;
        self.line += 1;
        if text.is_empty() {
            return Ok(None);
        }
        if text.pop() != Some(b'\n') {
            return Err(self.bad(&"the line is torn: it has no end"));
        }
        let row: T = serde_json::from_slice(&text).map_err(|error| self.bad(&error))?;
        let step = row.step();
        if self.last.is_some_and(|last| last >= step) {
            return Err(self.bad(&format!("step {step} does not rise")));
        }
        self.last = Some(step);
        Ok(Some(row))
    }

    fn bad(&self, found: &dyn std::fmt::Display) -> ReportError {
        let (path, line) = (self.path.clone(), self.line);
        ReportError::BadRecord { path, line, found: found.to_string() }
    }
}

impl<T: Stepped> Iterator for Rows<T> {
    type Item = Result<T, ReportError>;

    fn next(&mut self) -> Option<Self::Item> {
        let row = self.read().transpose();
        if !matches!(row, Some(Ok(_))) {
            self.file = None;
        }
        row
    }
}

#[derive(Deserialize)]
struct WholeRow {
    step: Step,
    #[serde(flatten)]
    metrics: BTreeMap<String, Option<JsonFloat>>,
}

impl Stepped for WholeRow {
    fn step(&self) -> Step {
        self.step
    }
}

impl From<WholeRow> for StepRow {
    fn from(row: WholeRow) -> Self {
        let metrics = row.metrics.into_iter().map(|(tag, value)| (tag, value.map(|float| float.0)));
        Self { step: row.step, metrics: metrics.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::StepLog;
    use super::*;

    #[test]
    fn every_value_reads_back_as_it_was_logged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steps.jsonl");
        let mut log = StepLog::create(&path).unwrap();
        let values = [
            ("gap/z", Some(-0.0)),
            ("gap/a", None),
            ("gap/nan", Some(f64::NAN)),
            ("gap/inf", Some(f64::NEG_INFINITY)),
            ("gap/tenth", Some(0.1)),
        ];
        log.append(Step::new(3), values).unwrap();
        log.append(Step::new(9), []).unwrap();
        let rows: Vec<StepRow> = read_rows(&path).unwrap().map(Result::unwrap).collect();
        let bits = |value: Option<f64>| value.map(f64::to_bits);
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].step, rows[1].step), (Step::new(3), Step::new(9)));
        assert_eq!(rows[0].metrics.len(), values.len());
        for (tag, value) in values {
            assert_eq!(bits(rows[0].metrics[tag]), bits(value), "{tag}");
        }
        assert!(rows[1].metrics.is_empty());
    }

    #[test]
    fn a_bad_line_is_named_and_ends_the_reading() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steps.jsonl");
        for (text, line, expect) in [
            ("{\"step\":1}\n{\"step\":2,\"a\":0.0", 2, "the line is torn: it has no end"),
            ("{\"step\":2}\n{\"step\":2}\n{\"step\":3}\n", 2, "step 2 does not rise"),
            ("{\"step\":1,\"a\":true}\n", 1, "a number, \"NaN\", \"inf\" or \"-inf\""),
            ("{\"a\":1.0}\n", 1, "missing field `step`"),
        ] {
            std::fs::write(&path, text).unwrap();
            let mut rows = read_rows(&path).unwrap().skip(line - 1);
            let error = rows.next().unwrap().unwrap_err().to_string();
            let start = format!("{}, line {line}: {expect}", path.display());
            assert!(error.starts_with(&start), "{error}");
            assert!(rows.next().is_none(), "{text}");
        }
    }
}
