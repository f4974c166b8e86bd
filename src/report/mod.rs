//! What a run leaves on disk: TensorBoard events, Parquet records, JSON and one HTML page.
//!
//! Nothing is decided here and no clock is read: values, verdicts and times come from the caller.
//! Files that are rewritten change atomically, files that grow do so by whole records, and every
//! error names its path and cause.

mod disk;
mod error;
mod folder;
pub mod html;
mod json;
pub mod parquet;
mod settings;
mod summary;
pub mod tensorboard;

pub use error::ReportError;
pub use folder::RunFolder;
pub use json::{write_json, StepLog};
pub use settings::{changes, flatten, Change};
pub use summary::{Finding, Summary};

/// One value of one step, with what it means.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric<'a> {
    /// Such as `gap/logp_abs_diff_max`.
    pub tag: &'a str,
    /// Absent where there was nothing to measure. Non-finite values are kept.
    pub value: Option<f64>,
    /// Formula, unit and the names that other projects use for it; Markdown.
    pub description: &'a str,
}
