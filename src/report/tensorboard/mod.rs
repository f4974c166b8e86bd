//! TensorBoard event files: `tensorboard-rs`'s record framing and messages over a file of our own.
//!
//! The crate's high-level writer hands records to a thread that loses them on exit, and has neither
//! text nor hparams nor layouts. Here whole records are collected and each flush is one write.

mod file_name;
mod layout;
mod message;

use std::collections::HashMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tensorboard_proto::event::{Event, SessionLog, SessionLog_SessionStatus};
use tensorboard_proto::summary::Summary_Value;
use tensorboard_rs::record_writer::RecordWriter;

pub use file_name::FileName;
pub use layout::{Category, Chart, GAP_FIRST};

use super::disk::{remove, Appender};
use super::{ReportError, Scalar};
use crate::base::Step;
use crate::gap::Finding;
use message::About;

/// How a session ended, for the hparams page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionEnd {
    Success,
    Failure,
}

/// An encoded picture.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// A PNG file.
    pub png: Vec<u8>,
    /// Pixels.
    pub width: u32,
    pub height: u32,
}

/// An event file at some moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventFile {
    pub name: String,
    /// Its length then.
    pub bytes: u64,
}

/// Brings a run's folder back to where it had these files: they are cut to their lengths, and event
/// files of other names go.
pub fn rewind(folder: &Path, files: &[EventFile]) -> Result<(), ReportError> {
    for name in file_name::all_in(folder)? {
        let path = folder.join(&name);
        if files.iter().all(|file| file.name != name) {
            remove(&path)?;
        }
    }
    for EventFile { name, bytes } in files {
        Appender::reopen(&folder.join(name), *bytes)?;
    }
    Ok(())
}

/// One event file. Wall times are seconds since 1970 and come from the caller, as steps do.
///
/// Nothing reaches the file before [`Writer::flush`]. Within a file the steps of a tag rise
/// strictly: TensorBoard drops a tag's earlier points when a smaller step follows.
#[derive(Debug)]
pub struct Writer {
    file: Appender,
    /// Whole records that are not in the file yet.
    buffer: Vec<u8>,
    /// The smallest step that a tag may write next; a tag that is missing has written nothing.
    next_step: HashMap<String, i64>,
    first_step: i64,
    last_step: i64,
}

impl Writer {
    /// Starts a run's first file in `folder`.
    pub fn create(
        folder: &Path,
        name: &FileName<'_>,
        wall_time_s: f64,
    ) -> Result<Self, ReportError> {
        let file = Appender::create(&folder.join(name.to_string()))?;
        let mut writer = Self {
            file,
            buffer: Vec::new(),
            next_step: HashMap::new(),
            first_step: 0,
            last_step: 0,
        };
        let mut version = Event::new();
        version.set_file_version("brain.Event:2".to_owned());
        writer.record(wall_time_s, 0, version);
        Ok(writer)
    }

    /// A further file of a run. Its name sorts behind those before, because readers take files in
    /// the order of names.
    pub fn follow(
        folder: &Path,
        name: &FileName<'_>,
        wall_time_s: f64,
    ) -> Result<Self, ReportError> {
        Self::create(folder, &name.behind_all_in(folder)?, wall_time_s)
    }

    /// Goes on with a run in a new file, whose first step is `first_step`.
    ///
    /// The file says so in its second record, and readers drop what earlier files hold of that step
    /// and later ones, whatever the tag.
    pub fn resume(
        folder: &Path,
        name: &FileName<'_>,
        wall_time_s: f64,
        first_step: Step,
    ) -> Result<Self, ReportError> {
        let mut writer = Self::follow(folder, name, wall_time_s)?;
        writer.first_step = signed(first_step)?;
        let mut log = SessionLog::new();
        log.set_status(SessionLog_SessionStatus::START);
        let mut start = Event::new();
        start.set_session_log(log);
        writer.record(wall_time_s, writer.first_step, start);
        Ok(writer)
    }

    /// One point for every scalar that has a value. TensorBoard keeps 32 bits of it.
    pub fn scalars(
        &mut self,
        step: Step,
        wall_time_s: f64,
        scalars: &[Scalar],
    ) -> Result<(), ReportError> {
        let values = scalars.iter().filter_map(|scalar| {
            let about = About { tag: &scalar.tag, description: &scalar.description };
            Some(message::scalar(about, scalar.value?))
        });
        self.summary(signed(step)?, wall_time_s, values.collect())
    }

    /// The distribution of `values` in equal buckets. Non-finite ones have no place on its axis and
    /// are left out; they are counted in `gap/nonfinite`.
    pub fn histogram(
        &mut self,
        step: Step,
        wall_time_s: f64,
        tag: &str,
        description: &str,
        values: &[f64],
    ) -> Result<(), ReportError> {
        let value = message::histogram(About { tag, description }, values);
        self.summary(signed(step)?, wall_time_s, vec![value])
    }

    /// A picture.
    pub fn image(
        &mut self,
        step: Step,
        wall_time_s: f64,
        tag: &str,
        description: &str,
        image: &Image,
    ) -> Result<(), ReportError> {
        let value = message::image(About { tag, description }, image);
        self.summary(signed(step)?, wall_time_s, vec![value])
    }

    /// A text, shown as Markdown.
    pub fn text(
        &mut self,
        step: Step,
        wall_time_s: f64,
        tag: &str,
        description: &str,
        markdown: &str,
    ) -> Result<(), ReportError> {
        let value = message::text(About { tag, description }, markdown);
        self.summary(signed(step)?, wall_time_s, vec![value])
    }

    /// All findings of a step as one text under the tag `findings`; none write nothing.
    pub fn findings(
        &mut self,
        step: Step,
        wall_time_s: f64,
        findings: &[Finding],
    ) -> Result<(), ReportError> {
        if findings.is_empty() {
            return Ok(());
        }
        let lines: Vec<_> = findings
            .iter()
            .map(|finding| {
                format!(
                    "- **{}** at step {}: {}",
                    finding.kind.name(),
                    finding.step,
                    finding.message
                )
            })
            .collect();
        self.text(
            step,
            wall_time_s,
            "findings",
            "What the spikes were blamed on",
            &lines.join("\n"),
        )
    }

    /// The charts of the custom-scalars page.
    pub fn layout(
        &mut self,
        wall_time_s: f64,
        categories: &[Category<'_>],
    ) -> Result<(), ReportError> {
        self.summary(self.first_step, wall_time_s, vec![layout::value(categories)])
    }

    /// The run's row on the hparams page: its settings (see [`super::flatten`]) and the tags of the
    /// metrics to show beside them. A `null` setting is left out.
    pub fn session_start(
        &mut self,
        wall_time_s: f64,
        name: &str,
        settings: &[(String, Value)],
        metric_tags: &[&str],
    ) -> Result<(), ReportError> {
        let values = vec![
            message::experiment(name, settings, metric_tags, wall_time_s),
            message::session_start(settings, wall_time_s),
        ];
        self.summary(self.first_step, wall_time_s, values)
    }

    /// Closes the row that [`Writer::session_start`] opened, at the last step written.
    pub fn session_end(&mut self, wall_time_s: f64, end: SessionEnd) -> Result<(), ReportError> {
        let value = message::session_end(end, wall_time_s);
        self.summary(self.last_step, wall_time_s, vec![value])
    }

    /// Hands everything to the operating system, in one write. After an error nothing is lost: the
    /// file is as before and the next flush tries again.
    pub fn flush(&mut self) -> Result<(), ReportError> {
        if !self.buffer.is_empty() {
            self.file.append(&self.buffer)?;
            self.buffer.clear();
        }
        Ok(())
    }

    /// As [`Self::flush`], through to the disk; returns the file as it is now.
    pub fn sync(&mut self) -> Result<EventFile, ReportError> {
        self.flush()?;
        let bytes = self.file.sync()?;
        let name = self.file.path().file_name().expect("an event file has a name");
        Ok(EventFile { name: name.to_string_lossy().into_owned(), bytes })
    }

    /// One event with all values, or an error and no event.
    fn summary(
        &mut self,
        step: i64,
        wall_time_s: f64,
        mut values: Vec<Summary_Value>,
    ) -> Result<(), ReportError> {
        for value in &mut values {
            match self.next_step.get(&value.tag) {
                Some(&next) if step < next => return Err(goes_back(&value.tag, step, next)),
                // Readers want a tag described once, and keep the first description anyway.
                Some(_) => value.metadata.clear(),
                None if step < self.first_step => {
                    return Err(goes_back(&value.tag, step, self.first_step))
                }
                None => {}
            }
        }
        for value in &values {
            let previous = self.next_step.insert(value.tag.clone(), step + 1);
            assert_ne!(previous, Some(step + 1), "{} is twice in one call", value.tag);
        }
        if !values.is_empty() {
            let mut event = Event::new();
            event.mut_summary().set_value(values.into());
            self.record(wall_time_s, step, event);
        }
        Ok(())
    }

    fn record(&mut self, wall_time_s: f64, step: i64, mut event: Event) {
        event.set_wall_time(wall_time_s);
        event.set_step(step);
        self.last_step = self.last_step.max(step);
        RecordWriter::new(&mut self.buffer)
            .write(&message::bytes(&event))
            .expect("a vector takes every byte");
    }
}

fn goes_back(tag: &str, step: i64, next: i64) -> ReportError {
    ReportError::StepGoesBack { tag: tag.to_owned(), step, next }
}

/// TensorBoard's steps are i64, and one that came out negative would empty its tag. The largest is
/// left unused, so that there always is a next one.
fn signed(step: Step) -> Result<i64, ReportError> {
    i64::try_from(step.get())
        .ok()
        .filter(|&step| step < i64::MAX)
        .ok_or(ReportError::StepTooLarge { step: step.get() })
}

#[cfg(test)]
mod tests;
