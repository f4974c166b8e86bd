//! What a sweep leaves: a table, the same as JSON, the spike map, and a page that explains it.
//!
//! All of it is made anew from the points' own folders after every point, so that a sweep that was
//! interrupted and resumed ends with the same bytes as one that was not.

mod csv;
mod first_spike;
mod json;
mod knobs;
mod map;
mod map_png;
mod map_svg;
mod page;
mod saved;
#[cfg(test)]
mod testing;
mod twins;
mod victims;
mod words;

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::Value;

use super::disk::write_atomic;
use super::{of_engines, write_json, ReportError};
use crate::base::{float, EngineIndex, Step};

pub use map_png::spike_map_png;
pub use saved::{read_steps, read_summary, SavedFinding, SavedSummary, StepGapRow};

/// A sweep as far as it has come.
#[derive(Clone, Copy, Debug)]
pub struct Sweep<'a> {
    pub name: &'a str,
    /// Dotted keys that vary, in the order of the file.
    pub axes: &'a [String],
    pub points: &'a [SweepPoint],
}

/// One point: what was set, what was predicted, what came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct SweepPoint {
    /// The knobs, such as `rollouts_per_prompt=8,gpu_memory_utilization=0.9`; also the name of its
    /// folder.
    pub name: String,
    /// Dotted keys and their values.
    pub set: Vec<(String, Value)>,
    /// As planned; a run may end earlier.
    pub steps: u64,
    pub predicted: Prediction,
    pub outcome: Outcome,
}

/// What replaying scheduler and pool says of a point before it runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Prediction {
    /// In rising order.
    pub spike_steps: Vec<Step>,
    pub closed_form: Option<ClosedForm>,
    /// Of each engine's pool.
    pub num_blocks: u64,
    pub first_wrapped_block: Option<u64>,
    /// Of several engines the one that takes most, as are the laps and the closed form.
    #[serde(serialize_with = "float::serialize")]
    pub blocks_per_step: f64,
    #[serde(serialize_with = "float::serialize")]
    pub laps: f64,
    /// Each engine's own, where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub engines: Vec<EnginePrediction>,
    /// Where none of the steps spikes: the first one after them that would, as far as was looked.
    pub next_spike: Option<Step>,
    /// Whether completions have a fixed length and no fault is planted; else the replay is a guess.
    pub exact: bool,
    /// Why there is no prediction; all else is then without meaning.
    pub error: Option<String>,
}

/// One of several engines, whose pool has a schedule of its own.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnginePrediction {
    pub engine: EngineIndex,
    pub spike_steps: Vec<Step>,
    pub closed_form: Option<ClosedForm>,
    #[serde(serialize_with = "float::serialize")]
    pub blocks_per_step: f64,
    #[serde(serialize_with = "float::serialize")]
    pub laps: f64,
}

/// The period of a pool that is gone through in a ring, on paper.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClosedForm {
    /// Threshold block over blocks a step; the spike falls in the step that this rounds up to.
    #[serde(serialize_with = "float::serialize")]
    pub first_spike_step: f64,
    /// Usable blocks over blocks a step.
    #[serde(serialize_with = "float::serialize")]
    pub period: f64,
    /// First and last step of each.
    pub windows: Vec<(Step, Step)>,
}

/// What came of a point.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    Pending,
    /// Why it could not be run.
    Failed(String),
    /// The run's own account; `gaps` in rising order of steps.
    Done {
        summary: Box<SavedSummary>,
        gaps: Vec<StepGapRow>,
    },
}

/// Writes `sweep.csv`, `sweep.json`, `spike_map.svg` and `report.html` into the sweep's folder,
/// each atomically. The texts in the page are read from `points/*/`.
pub fn write_sweep(folder: &Path, sweep: &Sweep) -> Result<(), ReportError> {
    write_atomic(&folder.join("sweep.csv"), csv::table(sweep).as_bytes())?;
    write_json(&folder.join("sweep.json"), &json::document(sweep))?;
    write_atomic(&folder.join("spike_map.svg"), map_svg::draw(sweep).into_file().as_bytes())?;
    let page = page::render(sweep, &victims::find(folder, sweep));
    write_atomic(&folder.join("report.html"), page.as_bytes())
}

/// Where a point's run lies in the sweep's folder.
#[must_use]
pub fn point_folder(folder: &Path, name: &str) -> PathBuf {
    folder.join("points").join(name)
}

impl Prediction {
    /// In words; `None` of one engine.
    #[must_use]
    pub fn spikes_by_engine(&self, separator: &str) -> Option<String> {
        let each = self.engines.iter().map(|one| (one.engine, &one.spike_steps[..]));
        of_engines(each, separator)
    }
}

impl SweepPoint {
    /// The run's account; `None` before there is one.
    #[must_use]
    pub fn summary(&self) -> Option<&SavedSummary> {
        match &self.outcome {
            Outcome::Done { summary, .. } => Some(summary),
            Outcome::Pending | Outcome::Failed(_) => None,
        }
    }

    /// The prediction where there is one.
    #[must_use]
    pub fn prediction(&self) -> Option<&Prediction> {
        self.predicted.error.is_none().then_some(&self.predicted)
    }

    /// Whether the steps that ran spiked exactly where the replay says, and of several engines each
    /// where it is to; `None` where one of the two is missing.
    #[must_use]
    pub fn as_predicted(&self) -> Option<bool> {
        let (summary, prediction) = (self.summary()?, self.prediction()?);
        let same = |predicted: &[Step], found: &[Step]| {
            predicted.iter().filter(|step| step.get() <= summary.steps_done).eq(found)
        };
        let engines = || std::iter::zip(&prediction.engines, &summary.engines);
        Some(
            same(&prediction.spike_steps, &summary.spike_steps)
                && prediction.engines.len() == summary.engines.len()
                && engines().all(|(one, ran)| same(&one.spike_steps, &ran.spike_steps)),
        )
    }

    /// Why the point failed, or ended before its last step.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        match &self.outcome {
            Outcome::Pending => None,
            Outcome::Failed(error) => Some(error),
            Outcome::Done { summary, .. } => summary.error.as_deref(),
        }
    }

    fn gaps(&self) -> &[StepGapRow] {
        match &self.outcome {
            Outcome::Done { gaps, .. } => gaps,
            Outcome::Pending | Outcome::Failed(_) => &[],
        }
    }

    /// The value of a knob; `null` where the point does not set it.
    fn value(&self, key: &str) -> &Value {
        self.set.iter().find(|(name, _)| name == key).map_or(&Value::Null, |(_, value)| value)
    }
}
