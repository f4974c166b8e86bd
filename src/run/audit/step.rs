//! One step of an audit.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{bail, Result};
use serde::ser::{SerializeMap, Serializer};
use serde::Serialize;

use super::rescore::{Model, Rescored, RescoredRow};
use super::routes::RouteRow;
use super::Input;
use crate::base::{BlockId, Contract, JsonFloat, RequestId, Step};
use crate::gap::{self, Evidence, Finding, Gauge, Legs, Metric, Pairs, RouteTally, WorstToken};
use crate::rollout::import::{Checks, ImportError};
use crate::rollout::{Rollout, Routes};
use crate::run::fail_on::Watch;
use crate::run::score;

/// One record, wherever it stood.
pub(super) struct Record {
    pub(super) rollout: Rollout,
    /// Of what its trainer's side is.
    pub(super) trainer_contract: Contract,
    /// The engine's and the trainer's captures of a router.
    pub(super) routes: [Option<Routes>; 2],
    /// Its first state block, where that is known.
    pub(super) slot: Option<BlockId>,
    /// Counted from 1; of a run's folder the row.
    pub(super) line: u64,
    pub(super) checks: Checks,
    /// Whether it says what its engine did, so that a verdict may ask for its tokens.
    pub(super) is_native: bool,
}

/// A step while its files are read.
pub(super) struct StepAudit<'a> {
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
    /// Engine against trainer.
    routes: RouteTally,
    /// Where a model is at hand.
    rescored: Option<Rescored<'a>>,
    /// Read, and not measured yet: what is rescored at once.
    waiting: Vec<Record>,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) rescored: Option<RescoredRow>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) routes: Vec<RouteRow>,
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

impl<'a> StepAudit<'a> {
    pub(super) fn new(step: Step, floor: f64, model: Option<&'a mut Model>) -> Self {
        Self {
            step,
            floor,
            checks: Checks::default(),
            gauge: Gauge::new(Legs::DecodeTrainer, floor),
            pairs: Pairs { legs: Legs::DecodeTrainer, sequences: Vec::new() },
            rollouts: Vec::new(),
            files: Vec::new(),
            places: HashMap::new(),
            routes: RouteTally::default(),
            rescored: model.map(|model| Rescored::new(model, floor)),
            waiting: Vec::new(),
        }
    }

    /// `strict` refuses two sides of unlike temperature, filters or mode.
    pub(super) fn read(&mut self, input: &Input, strict: bool) -> Result<()> {
        self.files.push(input.path().to_owned());
        let mut last = None;
        for record in input.records(strict)? {
            let mut record = record?;
            let id = record.rollout.completion.id;
            record.checks.out_of_order = u64::from(last.is_some_and(|last| id < last));
            last = last.max(Some(id));
            self.take(record)?;
        }
        match (last, input) {
            (None, Input::Dump(source)) => {
                Err(ImportError::Empty { path: source.path.clone() }.into())
            }
            _ => Ok(()),
        }
    }

    fn take(&mut self, record: Record) -> Result<()> {
        let (id, line) = (record.rollout.completion.id, record.line);
        let file = self.files.len() - 1;
        if let Some((first, at)) = self.places.insert(id, (file, line)) {
            bail!(
                "{}, line {line}: record {id} is already in {}, line {at}; a record counts once",
                self.files[file].display(),
                self.files[first].display()
            );
        }
        self.checks.add(&record.checks);
        let longest = self.waiting.iter().chain([&record]).map(Record::len).max().unwrap_or(0);
        if self.rescored.is_none() || !score::fit(self.waiting.len() + 1, longest) {
            self.measure_waiting()?;
        }
        self.waiting.push(record);
        Ok(())
    }

    fn measure_waiting(&mut self) -> Result<()> {
        let mut records = std::mem::take(&mut self.waiting);
        if let Some(rescored) = &self.rescored {
            rescored.fill_trainer(&mut records)?;
        }
        let gaps: Vec<Option<f64>> =
            records.iter().map(|record| self.measure(record)).collect::<Result<_>>()?;
        if let Some(rescored) = &mut self.rescored {
            rescored.add(&mut records, &gaps)?;
        }
        self.rollouts.extend(records.into_iter().map(Record::measured));
        Ok(())
    }

    /// The record's largest |d|.
    fn measure(&mut self, record: &Record) -> Result<Option<f64>> {
        let pairs = gap::pair(std::slice::from_ref(&record.rollout), Legs::DecodeTrainer)?;
        let mut sequence = pairs.sequences.into_iter().next().expect("one of one record");
        sequence.slot = sequence.slot.or(record.slot);
        self.gauge.add(&sequence);
        if let [Some(engine), Some(trainer)] = &record.routes {
            self.routes.add(engine, trainer);
        }
        self.pairs.sequences.push(sequence.landmarks(self.floor));
        Ok(sequence.gap())
    }

    pub(super) fn finish(mut self, watch: &mut Watch) -> Result<StepRow> {
        self.measure_waiting()?;
        let told = self.rescored.as_ref().and_then(Rescored::finish);
        let mut routes: Vec<RouteRow> =
            RouteRow::new("engine / trainer", &self.routes).into_iter().collect();
        routes.extend(self.rescored.iter().flat_map(Rescored::routes));
        let (rescored, mode) = told.map_or((None, None), |told| (Some(told.row), told.mode));
        // A shift of them all shows whatever the floor is.
        let of_all = self.gauge.shift();
        let table = self.gauge.table();
        let floor = if of_all.is_some() { 0.0 } else { self.floor };
        let findings = gap::verdict(&Evidence {
            shift: of_all.or(self.gauge.shift_of_bad()),
            mode: mode.as_ref(),
            ..Evidence::new(self.step, &self.rollouts, &self.pairs, floor)
        });
        let worst = self.gauge.worst().iter().filter(|token| token.gap > 0.0);
        let row = StepRow {
            step: self.step,
            floor: self.floor,
            worst: worst.map(|token| self.worst(token)).collect(),
            checks: self.checks,
            findings,
            metrics: Metrics(table.metrics),
            rescored,
            routes,
        };
        let value = |tag: &str| row.all_metrics().find(|metric| metric.tag() == tag)?.value;
        let found: Vec<&Finding> = row.findings.iter().collect();
        watch.look(&format!("step {}", row.step), value, &found);
        Ok(row)
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

impl Record {
    /// Tokens of prompt and completion.
    pub(super) fn len(&self) -> usize {
        let completion = &self.rollout.completion;
        completion.prompt.len() + completion.tokens.len()
    }

    /// What the verdict asks of it: of one that says nothing of its engine, no token.
    fn measured(self) -> Rollout {
        let mut rollout = self.rollout;
        if !self.is_native {
            rollout.completion.prompt = Vec::new();
            rollout.completion.tokens = Vec::new();
            rollout.loss_mask = Vec::new();
            rollout.trainer = Some(Vec::new());
            rollout.reference = None;
        }
        rollout
    }
}

impl StepRow {
    /// The gap's own, then those of each side against the model at hand.
    pub(super) fn all_metrics(&self) -> impl Iterator<Item = &Metric> {
        let sides = self.rescored.iter().flat_map(|rescored| &rescored.sides);
        self.metrics.0.iter().chain(sides.flat_map(|side| &side.metrics.0))
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

/// How a place reads in a message.
pub(super) fn place(file: &Path, line: u64) -> String {
    format!("{}, line {line}", file.display())
}
