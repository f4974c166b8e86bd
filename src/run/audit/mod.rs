//! Log-probabilities that others produced: checks first, then the measures, step by step.
//!
//! One step is held at a time, and of it 8 bytes a token and comparison: quantiles need every |d|.
//! With a model at hand there are three comparisons, and a step's records are rescored a batch at a
//! time.

mod native;
mod rescore;
mod routes;
mod step;
mod text;

use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use serde::Serialize;

use self::native::NativeRecord;
use self::rescore::Model;
use self::step::{Record, StepAudit, StepRow};
use super::fail_on::{FailOn, Watch};
use crate::base::Step;
use crate::config::Config;
use crate::gap::{self, Legs, Pairs};
use crate::report::{write_json, StepLog};
use crate::rollout::import::{self, Imported, Records, Source};

/// The floor of dumps that state none, nats: a factor of e in probability. Healthy bf16 engines
/// stay below it but for single tokens (torchtitan reports 1.56 as the largest of a run).
const FOREIGN_FLOOR: f64 = 1.0;

/// What to audit, and how.
#[derive(Clone, Copy, Debug)]
pub struct Audit<'a> {
    /// Files and folders of dumps, and run folders.
    pub rollouts: &'a [PathBuf],
    /// `nemo-rl`, `prime-rl`, `vllm`, `torchtitan` or `native`; found out where it is absent.
    pub format: Option<&'a str>,
    pub fail_on: &'a [FailOn],
    /// Compares two sides whose temperature, filters or mode differ all the same.
    pub allow_unlike: bool,
    /// The largest |d| that is healthy, nats.
    pub floor: Option<f64>,
    /// Rescores every record by this configuration's model.
    pub model: Option<&'a Config>,
    /// Where `audit.json` and `steps.jsonl` go.
    pub out: Option<&'a Path>,
}

/// What an audit has to say.
#[derive(Clone, Debug)]
pub struct Audited {
    pub text: String,
    /// What the steps say of [`Audit::fail_on`].
    pub watch: Watch,
}

/// Reads, checks and measures.
///
/// # Errors
/// A condition on a metric that there is not; an input that is missing, broken, of an unknown
/// format, or whose two sides are not of the same tokens; a model that cannot be read, that a
/// record does not fit, or that the machine has no memory for; a folder that cannot be written.
pub fn audit(asked: &Audit) -> Result<Audited> {
    let tags = tags(asked.model.is_some());
    asked.fail_on.iter().try_for_each(|expression| expression.check_known(&tags))?;
    let mut watch = Watch::new(asked.fail_on);
    if let Some(floor) = asked.floor.filter(|floor| !(floor.is_finite() && *floor >= 0.0)) {
        bail!("--floor {floor} is not a finite number of nats from 0 on");
    }
    let Inputs { inputs, notes } = inputs(asked)?;
    one_sided(&inputs, asked.model.is_some())?;
    let strict = !asked.allow_unlike;
    let mut model = asked.model.map(|config| Model::open(config, &inputs, strict)).transpose()?;
    let mut log = asked.out.map(create).transpose()?;
    let mut rows: Vec<StepRow> = Vec::new();
    for of_step in inputs.chunk_by(|a, b| a.step() == b.step()) {
        let floor = asked.floor.unwrap_or_else(|| floor_of(of_step));
        let mut step = StepAudit::new(of_step[0].step(), floor, model.as_mut());
        for input in of_step {
            step.read(input, strict)?;
        }
        let row = step.finish(&mut watch)?;
        if let Some(log) = &mut log {
            let values = row.all_metrics().map(|metric| (metric.tag(), metric.value));
            let values: Vec<_> = values.collect();
            let values = values.iter().map(|(tag, value)| (tag.as_str(), *value));
            log.append(row.step, values)?;
        }
        rows.push(row);
    }
    model.iter().for_each(Model::finish);
    let report =
        Report { schema: 1, inputs: &shown(&inputs), notes, steps: rows, fail_on: watch.lines() };
    if let Some(out) = asked.out {
        write_json(&out.join("audit.json"), &report)?;
    }
    Ok(Audited { text: text::text(&report), watch })
}

/// Records of the engine alone are compared with a model's.
fn one_sided(inputs: &[Input], has_model: bool) -> Result<()> {
    let alone = inputs.iter().find_map(|input| match input {
        Input::Dump(source) if source.format.is_of_engine() => Some(source),
        _ => None,
    });
    if let Some(Source { path, format, .. }) = alone.filter(|_| !has_model) {
        bail!(
            "{} holds the engine's log-probabilities alone, as {} writes them: pass --model DIR, \
             the model that it sampled from",
            path.display(),
            format.name()
        );
    }
    Ok(())
}

/// `audit.json`.
#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    inputs: &'a [Shown],
    notes: Vec<String>,
    steps: Vec<StepRow>,
    /// What held, and what had no data.
    fail_on: Vec<String>,
}

#[derive(Serialize)]
struct Shown {
    path: PathBuf,
    format: &'static str,
    step: Step,
}

/// What one step is read from.
enum Input {
    Dump(Source),
    Native { root: PathBuf, step: Step },
}

impl Input {
    fn step(&self) -> Step {
        match self {
            Self::Dump(source) => source.step,
            Self::Native { step, .. } => *step,
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::Dump(source) => &source.path,
            Self::Native { root, .. } => root,
        }
    }

    fn records(&self, strict: bool) -> Result<Box<dyn Iterator<Item = Result<Record>> + '_>> {
        Ok(match self {
            Self::Dump(source) => {
                let records = Records::open(source, strict)?;
                Box::new(records.map(|record| Ok(record?.into())))
            }
            Self::Native { root, step } => {
                let records = native::records(root, *step)?.into_iter().zip(1..);
                Box::new(records.map(|(record, row)| Ok(record.in_row(row))))
            }
        })
    }
}

impl From<Imported> for Record {
    fn from(imported: Imported) -> Self {
        let Imported { rollout, trainer_contract, routes, line, checks } = imported;
        Self { rollout, trainer_contract, routes, slot: None, line, checks, is_native: false }
    }
}

impl NativeRecord {
    fn in_row(self, row: u64) -> Record {
        let Self { rollout, slot, checks } = self;
        let trainer_contract = rollout.completion.contract;
        // A run keeps no routes.
        let routes = [None, None];
        Record { rollout, trainer_contract, routes, slot, line: row, checks, is_native: true }
    }
}

struct Inputs {
    /// Sorted by step.
    inputs: Vec<Input>,
    notes: Vec<String>,
}

fn inputs(asked: &Audit) -> Result<Inputs> {
    let is_native = |path: &PathBuf| match asked.format {
        Some(format) => format == "native",
        None => native::is_run(path),
    };
    let (runs, dumps): (Vec<PathBuf>, Vec<PathBuf>) =
        asked.rollouts.iter().cloned().partition(is_native);
    let format = match asked.format {
        None | Some("native") => None,
        Some(name) => Some(name.parse().map_err(anyhow::Error::msg)?),
    };
    let found = import::find(&dumps, format)?;
    let mut inputs: Vec<Input> = found.sources.into_iter().map(Input::Dump).collect();
    for root in runs {
        if !native::is_run(&root) {
            bail!("{} is not a run folder: it has no config.json or no tokens", root.display());
        }
        let steps = native::steps(&root)?;
        inputs.extend(steps.into_iter().map(|step| Input::Native { root: root.clone(), step }));
    }
    inputs.sort_by_key(Input::step);
    let note = |path: &PathBuf| format!("{} left out: no STABLE marker", path.display());
    Ok(Inputs { inputs, notes: found.unstable.iter().map(note).collect() })
}

fn shown(inputs: &[Input]) -> Vec<Shown> {
    let one = |input: &Input| match input {
        Input::Dump(Source { path, format, step }) => {
            Shown { path: path.clone(), format: format.name(), step: *step }
        }
        Input::Native { root, step } => Shown { path: root.clone(), format: "native", step: *step },
    };
    inputs.iter().map(one).collect()
}

fn floor_of(inputs: &[Input]) -> f64 {
    let floors = inputs.iter().map(|input| match input {
        Input::Dump(_) => FOREIGN_FLOOR,
        Input::Native { root, .. } => native::floor(root),
    });
    floors.fold(0.0, f64::max)
}

fn create(out: &Path) -> Result<StepLog> {
    if out.join("audit.json").exists() {
        bail!("{} already holds an audit; pass another --out", out.display());
    }
    std::fs::create_dir_all(out)
        .with_context(|| format!("cannot make {}; pass another --out", out.display()))?;
    Ok(StepLog::create(&out.join("steps.jsonl"))?)
}

/// Of every metric that a step has.
fn tags(with_model: bool) -> Vec<String> {
    let legs = [Legs::DecodeTrainer, Legs::DecodeReference, Legs::TrainerReference];
    let legs = &legs[..if with_model { 3 } else { 1 }];
    let table = |&legs: &Legs| gap::measures(&Pairs { legs, sequences: Vec::new() }, 0.0);
    legs.iter().flat_map(|legs| table(legs).metrics).map(|metric| metric.tag()).collect()
}
