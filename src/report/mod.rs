//! What a run leaves on disk: TensorBoard events, Parquet records, JSON and one HTML page.
//!
//! Nothing is decided here and no clock is read: values, verdicts and times come from the caller.
//! Files that are rewritten change atomically, files that grow do so by whole records, and every
//! error names its path and cause.

mod checkpoint;
mod claim;
mod disk;
mod error;
mod folder;
pub mod html;
mod json;
pub mod parquet;
mod rows;
mod settings;
mod steps;
mod story;
mod summary;
pub mod sweep;
pub mod tensorboard;
mod trace;

pub use checkpoint::{write_checkpoint, SavedArray, SavedCheckpoint};
pub use claim::Claim;
pub use disk::check_length;
pub use error::ReportError;
pub use folder::RunFolder;
pub use json::{write_json, StepLog};
pub use rows::{read_rows, StepRow};
pub use settings::{changes, flatten, Change};
use steps::of_engines;
pub use steps::step_ranges;
pub use story::{write_story, Block, Section, Story};
pub use summary::{EngineSummary, Summary};
pub use trace::{aligned, row_table, write_trace, TraceOf};

use crate::gap;

/// One value of one step, with what it means.
#[derive(Clone, Debug, PartialEq)]
pub struct Scalar {
    /// Such as `gap/logp_abs_diff_max`.
    pub tag: String,
    /// Absent where there was nothing to measure. Non-finite values are kept.
    pub value: Option<f64>,
    /// Formula, unit and the names that other projects use for it; Markdown.
    pub description: String,
}

impl From<&gap::Metric> for Scalar {
    fn from(metric: &gap::Metric) -> Self {
        Self { tag: metric.tag(), value: metric.value, description: metric.description() }
    }
}
