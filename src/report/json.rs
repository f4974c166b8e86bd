//! JSON objects and JSON Lines.

use std::path::{Path, PathBuf};

use serde::ser::{SerializeMap, Serializer};
use serde::Serialize;

use super::disk::{write_atomic, Appender};
use super::ReportError;
use crate::base::{JsonFloat, Step};

/// Writes `value` as one indented JSON document, atomically.
///
/// The value's own `Serialize` must keep non-finite floats: serde_json makes them `null`, which
/// means absent.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), ReportError> {
    let mut bytes = serde_json::to_vec_pretty(value)
        .map_err(|source| ReportError::MakeJson { path: path.to_owned(), source })?;
    bytes.push(b'\n');
    write_atomic(path, &bytes)
}

/// A file of one flat object a step: `{"step":1,"gap/logp_abs_diff_max":0.0,...}`.
#[derive(Debug)]
pub struct StepLog {
    path: PathBuf,
    file: Appender,
}

impl StepLog {
    /// Starts an empty file; one that exists is refused.
    pub fn create(path: &Path) -> Result<Self, ReportError> {
        Ok(Self { path: path.to_owned(), file: Appender::create(path)? })
    }

    /// Goes on with a file at the length that [`Self::sync`] gave; later lines, and a torn one, are
    /// dropped.
    pub fn reopen(path: &Path, len_bytes: u64) -> Result<Self, ReportError> {
        Ok(Self { path: path.to_owned(), file: Appender::reopen(path, len_bytes)? })
    }

    /// What was added is on the disk; returns the file's length in bytes.
    pub fn sync(&mut self) -> Result<u64, ReportError> {
        self.file.sync()
    }

    /// Adds one whole line and hands it to the operating system.
    ///
    /// Keys stay in the order given; absent is `null`; NaN and the infinities are strings.
    pub fn append<'a>(
        &mut self,
        step: Step,
        values: impl IntoIterator<Item = (&'a str, Option<f64>)>,
    ) -> Result<(), ReportError> {
        let mut line = Vec::new();
        row(&mut line, step, values)
            .map_err(|source| ReportError::MakeJson { path: self.path.clone(), source })?;
        line.push(b'\n');
        self.file.append(&line)
    }
}

fn row<'a>(
    line: &mut Vec<u8>,
    step: Step,
    values: impl IntoIterator<Item = (&'a str, Option<f64>)>,
) -> Result<(), serde_json::Error> {
    let mut json = serde_json::Serializer::new(line);
    let mut map = json.serialize_map(None)?;
    map.serialize_entry("step", &step)?;
    for (key, value) in values {
        assert_ne!(key, "step", "the row's own key");
        map.serialize_entry(key, &value.map(JsonFloat))?;
    }
    map.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_keep_order_absence_and_non_finite_values() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steps.jsonl");
        let mut log = StepLog::create(&path).unwrap();
        let values = [
            ("gap/z", Some(0.0)),
            ("gap/a", None),
            ("gap/nan", Some(f64::NAN)),
            ("gap/inf", Some(f64::NEG_INFINITY)),
            ("gap/tiny", Some(1.25e-300)),
        ];
        log.append(Step::new(1), values).unwrap();
        log.append(Step::new(u64::MAX), []).unwrap();
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "{\"step\":1,\"gap/z\":0.0,\"gap/a\":null,\"gap/nan\":\"NaN\",\"gap/inf\":\"-inf\",\
             \"gap/tiny\":1.25e-300}\n{\"step\":18446744073709551615}\n"
        );
    }
}
