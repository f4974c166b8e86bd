//! One step of an audit.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{bail, Result};
use serde::ser::{SerializeMap, Serializer};
use serde::Serialize;

use super::native::{self, NativeRecord};
use super::Input;
use crate::base::{BlockId, JsonFloat, RequestId, Step};
use crate::gap::{self, Evidence, Finding, Gauge, Legs, Metric, Pairs, WorstToken};
use crate::rollout::import::{Checks, ImportError, Records, Source};
use crate::rollout::Rollout;
use crate::run::fail_on::Watch;

/// A step while its files are read.
pub(super) struct StepAudit {
    step: Step,
    /// Nats.
    floor: f64,
    checks: Checks,
    gauge: Gauge,
    /// Of each sequence its landmarks.
    pairs: Pairs,
    /// Without what is measured already.
    rollouts: Vec<Rollout>,
    files: Vec<PathBuf>,
    /// Where each record stands: which file, and which line of it.
    places: HashMap<RequestId, (usize, u64)>,
}

/// What is left of a step.
#[derive(Serialize)]
pub(super) struct StepRow {
    pub(super) step: Step,
    /// Nats.
    pub(super) floor: f64,
    pub(super) checks: Checks,
    pub(super) findings: Vec<Finding>,
    pub(super) worst: Vec<Worst>,
    pub(super) metrics: Metrics,
}

/// One token of the largest gap, and where it stands.
#[derive(Serialize)]
pub(super) struct Worst {
    pub(super) request: RequestId,
    pub(super) file: PathBuf,
    pub(super) line: u64,
    /// In the completion, from 0.
    pub(super) index: u32,
    pub(super) token_id: u32,
    #[serde(serialize_with = "float")]
    pub(super) infer: f64,
    #[serde(serialize_with = "float")]
    pub(super) train: f64,
}

/// An object of tags and values; absent is null, non-finite is a string.
pub(super) struct Metrics(pub(super) Vec<Metric>);

impl StepAudit {
    pub(super) fn new(step: Step, floor: f64) -> Self {
        Self {
            step,
            floor,
            checks: Checks::default(),
            gauge: Gauge::new(Legs::DecodeTrainer, floor),
            pairs: Pairs { legs: Legs::DecodeTrainer, sequences: Vec::new() },
            rollouts: Vec::new(),
            files: Vec::new(),
            places: HashMap::new(),
        }
    }

    /// `strict` refuses two sides of unlike temperature or mode.
    pub(super) fn read(&mut self, input: &Input, strict: bool) -> Result<()> {
        match input {
            Input::Dump(source) => self.read_dump(source, strict),
            Input::Native { root, step } => {
                self.files.push(root.clone());
                for (record, row) in native::records(root, *step)?.into_iter().zip(1..) {
                    let NativeRecord { rollout, slot, checks } = record;
                    self.add(&rollout, slot, row, &checks)?;
                    self.rollouts.push(rollout);
                }
                Ok(())
            }
        }
    }

    fn read_dump(&mut self, source: &Source, strict: bool) -> Result<()> {
        self.files.push(source.path.clone());
        let mut last = None;
        for record in Records::open(source, strict)? {
            let record = record?;
            let mut checks = record.checks;
            let id = record.rollout.completion.id;
            checks.out_of_order = u64::from(last.is_some_and(|last| id < last));
            last = last.max(Some(id));
            self.add(&record.rollout, None, record.line, &checks)?;
            self.rollouts.push(without_tokens(record.rollout));
        }
        match last {
            Some(_) => Ok(()),
            None => Err(ImportError::Empty { path: source.path.clone() }.into()),
        }
    }

    fn add(
        &mut self,
        rollout: &Rollout,
        slot: Option<BlockId>,
        line: u64,
        checks: &Checks,
    ) -> Result<()> {
        let id = rollout.completion.id;
        let file = self.files.len() - 1;
        if let Some((first, at)) = self.places.insert(id, (file, line)) {
            bail!(
                "{}, line {line}: record {id} is already in {}, line {at}; a record counts once",
                self.files[file].display(),
                self.files[first].display()
            );
        }
        let pairs = gap::pair(std::slice::from_ref(rollout), Legs::DecodeTrainer)?;
        for mut sequence in pairs.sequences {
            sequence.slot = sequence.slot.or(slot);
            self.gauge.add(&sequence);
            self.pairs.sequences.push(sequence.landmarks(self.floor));
        }
        self.checks.add(checks);
        Ok(())
    }

    pub(super) fn finish(self, watch: &mut Watch) -> StepRow {
        // A shift of them all shows whatever the floor is.
        let of_all = self.gauge.shift();
        let table = self.gauge.table();
        let findings = gap::verdict(&Evidence {
            step: self.step,
            rollouts: &self.rollouts,
            pairs: &self.pairs,
            shift: of_all.or(self.gauge.shift_of_bad()),
            floor: if of_all.is_some() { 0.0 } else { self.floor },
            tensors: &[],
            state: None,
            index_bits: None,
        });
        let value = |tag: &str| table.metrics.iter().find(|metric| metric.tag() == tag)?.value;
        let found: Vec<&Finding> = findings.iter().collect();
        watch.look(&format!("step {}", self.step), value, &found);
        let worst = self.gauge.worst().iter().filter(|token| token.gap > 0.0);
        StepRow {
            step: self.step,
            floor: self.floor,
            worst: worst.map(|token| self.worst(token)).collect(),
            checks: self.checks,
            findings,
            metrics: Metrics(table.metrics),
        }
    }

    fn worst(&self, token: &WorstToken) -> Worst {
        let (file, line) = self.places[&token.request];
        Worst {
            request: token.request,
            file: self.files[file].clone(),
            line,
            index: token.paired.index.get(),
            token_id: token.paired.token.get(),
            infer: f64::from(token.paired.infer.get()),
            train: f64::from(token.paired.train.get()),
        }
    }
}

impl Metrics {
    pub(super) fn value(&self, name: &str) -> Option<f64> {
        self.0.iter().find(|metric| metric.name == name).and_then(|metric| metric.value)
    }
}

impl Serialize for Metrics {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for metric in &self.0 {
            map.serialize_entry(&metric.tag(), &metric.value.map(JsonFloat))?;
        }
        map.end()
    }
}

fn float<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    JsonFloat(*value).serialize(serializer)
}

/// What the verdict asks of a record that says nothing of its engine.
fn without_tokens(mut rollout: Rollout) -> Rollout {
    rollout.completion.prompt = Vec::new();
    rollout.completion.tokens = Vec::new();
    rollout.loss_mask = Vec::new();
    rollout.trainer = Some(Vec::new());
    rollout
}

/// How a place reads in a message.
pub(super) fn place(file: &Path, line: u64) -> String {
    format!("{}, line {line}", file.display())
}
