//! Hands what a step found to everything that a run leaves.

use std::path::Path;
use std::process;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::Result;

use serde::{Deserialize, Serialize};

use super::kept::Kept;
use super::progress::Progress;
use super::session::{Comparison, Session};
use super::{checkpoint, metrics, told, trace};
use crate::base::Step;
use crate::config::{self, Config, Update};
use crate::engine::{Statistics, Trace};
use crate::gap::{self, Tally};
use crate::model::save_folder;
use crate::report::html::{self, Page};
use crate::report::tensorboard::{self, EventFile, FileName, SessionEnd, Writer, GAP_FIRST};
use crate::report::{self, check_length, parquet, Claim, ReportError, RunFolder, StepLog, Summary};
use crate::rollout::Rollout;
use crate::trainer::UpdateReport;

/// The open files of one run.
pub(super) struct Recorder {
    folder: RunFolder,
    /// Keeps other processes away.
    _claim: Claim,
    steps: StepLog,
    timing: StepLog,
    tensorboard: Writer,
    progress: Progress,
    started: Instant,
    kept: Kept,
    /// TensorBoard's files of earlier processes.
    earlier: Vec<EventFile>,
    /// Each engine's counts before the step, for what the step itself did.
    before: Vec<Statistics>,
}

/// What a checkpoint keeps of the record: lengths in bytes, and what goes on.
#[derive(Serialize, Deserialize)]
pub(super) struct RecorderState {
    steps: u64,
    timing: u64,
    tensorboard: Vec<EventFile>,
    kept: Kept,
}

impl RecorderState {
    /// That the files are at least as long as they were, before any of them is cut.
    pub(super) fn check(&self, folder: &RunFolder) -> Result<(), ReportError> {
        check_length(&folder.steps(), self.steps)?;
        check_length(&folder.timing(), self.timing)?;
        let tensorboard = folder.tensorboard();
        let mut files = self.tensorboard.iter();
        files.try_for_each(|file| check_length(&tensorboard.join(&file.name), file.bytes))
    }
}

/// What ended the loop, and what then kept the files from being closed.
#[derive(Debug, thiserror::Error)]
#[error("{}; and then {}", told(.first), told(.then))]
struct Twice {
    #[source]
    first: anyhow::Error,
    then: anyhow::Error,
}

/// Seconds of each part of a step, in order.
pub(super) struct Clock {
    last: Instant,
    laps: Vec<(&'static str, f64)>,
}

impl Clock {
    pub(super) fn lap(&mut self, part: &'static str) {
        let now = Instant::now();
        self.laps.push((part, (now - self.last).as_secs_f64()));
        self.last = now;
    }
}

/// Seconds since 1970, for TensorBoard's axis alone.
pub(super) fn wall_time_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// A new event file in a folder that is there, behind those that it has.
pub(super) fn tensorboard_writer(folder: &Path) -> Result<Writer> {
    with_event_file(|name, now| Writer::follow(folder, name, now))
}

/// Opens an event file by the name that this process would give it now, and the time.
fn with_event_file(
    open: impl FnOnce(&FileName<'_>, f64) -> Result<Writer, ReportError>,
) -> Result<Writer> {
    let now = wall_time_s();
    let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "localhost".to_owned());
    let name = FileName { seconds: now as u64, host: &host, pid: process::id(), n: 0 };
    Ok(open(&name, now)?)
}

impl Recorder {
    /// Writes what is known before the first step: config, hparams, layout.
    pub(super) fn create(
        (folder, claim): (RunFolder, Claim),
        session: &Session,
        quiet: bool,
    ) -> Result<Self> {
        let config = &session.config;
        if let Some(servers) = session.source.servers() {
            report::write_json(&folder.servers(), &servers.facts())?;
        }
        let now = wall_time_s();
        let mut tensorboard = tensorboard_writer(&folder.tensorboard())?;
        let headlines: Vec<String> =
            gap::HEADLINES.iter().map(|name| format!("gap/{name}")).collect();
        let mut metrics: Vec<&str> = headlines.iter().map(String::as_str).collect();
        metrics.push("reward/mean");
        tensorboard.session_start(now, &config.name, &report::flatten(config), &metrics)?;
        tensorboard.layout(now, GAP_FIRST)?;
        tensorboard.flush()?;
        Ok(Self {
            steps: StepLog::create(&folder.steps())?,
            timing: StepLog::create(&folder.timing())?,
            folder,
            _claim: claim,
            tensorboard,
            progress: Progress::new(config.steps, Step::new(0), quiet),
            started: Instant::now(),
            kept: Kept::default(),
            earlier: Vec::new(),
            before: session.source.statistics(),
        })
    }

    /// Goes on behind a checkpoint's step, in a session that was restored from it: whatever the
    /// files tell of later steps is dropped.
    pub(super) fn resume(
        (folder, claim): (RunFolder, Claim),
        session: &Session,
        quiet: bool,
        (step, state): (Step, RecorderState),
    ) -> Result<Self> {
        let config = &session.config;
        let path = folder.tensorboard();
        tensorboard::rewind(&path, &state.tensorboard)?;
        let steps = StepLog::reopen(&folder.steps(), state.steps)?;
        let timing = StepLog::reopen(&folder.timing(), state.timing)?;
        folder.drop_after(step)?;
        let tensorboard = with_event_file(|name, now| match config.trainer.warm_start.steps {
            0 => Writer::resume(&path, name, now, Step::new(step.get() + 1)),
            // A reader that were told to drop later steps would drop the warm start's too, which
            // are counted apart.
            _ => Writer::follow(&path, name, now),
        })?;
        Ok(Self {
            steps,
            timing,
            folder,
            _claim: claim,
            tensorboard,
            progress: Progress::new(config.steps, step, quiet),
            started: Instant::now(),
            kept: state.kept,
            earlier: state.tensorboard,
            before: session.source.statistics(),
        })
    }

    /// From which [`Self::resume`] goes on. What was recorded up to now is on the disk first.
    pub(super) fn checkpoint(&mut self, session: &Session, step: Step) -> Result<()> {
        let mut tensorboard = self.earlier.clone();
        tensorboard.push(self.tensorboard.sync()?);
        let state = RecorderState {
            steps: self.steps.sync()?,
            timing: self.timing.sync()?,
            tensorboard,
            kept: self.kept.clone(),
        };
        checkpoint::write(&self.folder, session, step, state)
    }

    /// Spike steps so far.
    pub(super) fn spikes(&self) -> u64 {
        self.kept.totals.spike_steps.len() as u64
    }

    pub(super) fn clock(&self) -> Clock {
        Clock { last: Instant::now(), laps: Vec::new() }
    }

    /// One supervised step before the loop.
    pub(super) fn warm_step(&mut self, step: Step, loss: f64) -> Result<()> {
        let about = "mean cross entropy of the task's own answers, nats a token";
        let scalars = [metrics::scalar("warm_start/loss", Some(loss), about)];
        self.tensorboard.scalars(step, wall_time_s(), &scalars)?;
        self.tensorboard.flush()?;
        self.progress.warm_start(step, loss);
        Ok(())
    }

    /// One step of the loop, to every file.
    pub(super) fn step(
        &mut self,
        session: &Session,
        comparison: &Comparison,
        rollouts: &[Rollout],
        updates: &[UpdateReport],
        mut clock: Clock,
    ) -> Result<()> {
        let step = comparison.step;
        parquet::write_rollouts(&self.folder.rollouts(step), rollouts, session.source.name())?;
        parquet::write_tokens(&self.folder.tokens(step), rollouts)?;
        if let Some(case) = &comparison.case {
            self.folder.write_evidence(step, case)?;
        }
        let tally = Tally::of(
            rollouts,
            &comparison.pairs,
            comparison.gap.floor,
            session.first_wrapped_block(),
        );
        let mut scalars = metrics::gap(comparison, rollouts);
        scalars.extend(metrics::rollout(rollouts));
        scalars.extend(metrics::reward(rollouts, session.config.rollout.rollouts_per_prompt));
        scalars.extend(updates.last().map(metrics::loss).unwrap_or_default());
        if let Some(engines) = session.source.embedded() {
            scalars.extend(metrics::pools(engines, &self.before));
        }
        scalars.extend(metrics::tally(&tally));
        self.before = session.source.statistics();
        let row = scalars.iter().map(|scalar| (scalar.tag.as_str(), scalar.value));
        self.steps.append(step, row)?;
        self.kept.add(session, comparison, rollouts, &tally);

        clock.lap("report");
        let mut perf: Vec<(String, f64)> =
            clock.laps.iter().map(|(part, s)| (format!("perf/{part}_s"), *s)).collect();
        let tokens: usize = rollouts.iter().map(|rollout| rollout.completion.tokens.len()).sum();
        perf.push(("perf/sampled_tokens_per_s".into(), tokens as f64 / clock.laps[0].1));
        self.timing.append(step, perf.iter().map(|(tag, s)| (tag.as_str(), Some(*s))))?;
        scalars.extend(perf.iter().map(|(tag, s)| metrics::scalar(tag, Some(*s), "wall clock")));

        let now = wall_time_s();
        self.tensorboard.scalars(step, now, &scalars)?;
        let d: Vec<f64> = comparison.pairs.finite().map(gap::PairedToken::d).collect();
        let about = "d = logp_trainer - logp_rollout of each sampled token, nats";
        self.tensorboard.histogram(step, now, "gap_detail/d", about, &d)?;
        if !comparison.findings.is_empty() {
            self.tensorboard.findings(step, now, &comparison.findings)?;
        }
        self.tensorboard.flush()?;
        let point = self.kept.points.last().expect("the step was just kept");
        let engines = match session.source.num_engines() {
            1 => Vec::new(),
            _ => self.kept.spiking(step),
        };
        self.progress.step(step, point, &engines, comparison.findings.len());
        Ok(())
    }

    /// What the engine was seen to do in the step, where it was watched.
    pub(super) fn trace(
        &self,
        session: &Session,
        comparison: &Comparison,
        seen: Option<Trace>,
    ) -> Result<()> {
        trace::keep(&self.folder, session, comparison.step, (seen, comparison.gap.spike))
    }

    /// Closes every file, whatever ended the loop, and says what the run was.
    ///
    /// # Errors
    /// What ended the loop; or, after it, what kept the files from being closed.
    pub(super) fn finish(mut self, session: &Session, done: Result<()>) -> Result<Summary> {
        let mut summary = self.kept.summary(session);
        summary.wall_s = self.started.elapsed().as_secs_f64();
        summary.error = done.as_ref().err().map(told);
        let closed = self.close(session, &summary);
        self.progress.finish();
        match (done, closed) {
            (Ok(()), closed) => closed.map(|()| summary),
            (Err(first), Ok(())) => Err(first),
            (Err(first), Err(then)) => Err(Twice { first, then }.into()),
        }
    }

    fn close(&mut self, session: &Session, summary: &Summary) -> Result<()> {
        report::write_json(&self.folder.findings(), &self.kept.findings)?;
        let page = Page {
            summary,
            points: &self.kept.points,
            changes: &report::changes(&session.config, &defaults()),
            worst: &self.kept.worst,
            blocks: self.kept.worst_spike.as_ref().map(|spike| &spike.blocks),
            trace: self.kept.worst_spike.as_ref().map(|spike| &spike.trace),
        };
        html::write(&self.folder.report(), &page)?;
        let fine = summary.error.is_none();
        let end = if fine { SessionEnd::Success } else { SessionEnd::Failure };
        self.tensorboard.session_end(wall_time_s(), end)?;
        self.tensorboard.flush()?;
        // Whoever finds a summary finds a whole run, which needs no checkpoint any more.
        report::write_json(&self.folder.summary(), summary)?;
        if fine {
            self.folder.drop_checkpoints()?;
        }
        Ok(())
    }

    /// The final weights and the greedy evaluation, where they are asked for. What training made is
    /// saved before anything else may fail.
    pub(super) fn leave_model(&mut self, session: &Session) -> Result<()> {
        let config = &session.config;
        if config.checkpoint.save_final && config.trainer.update == Update::Adamw {
            let folder = self.folder.final_model();
            save_folder(&folder, &session.plan, &session.trainer.master()?, config.model.dtype)?;
        }
        if config.check.greedy_eval_prompts > 0 {
            let found = session.evaluate(config.check.greedy_eval_prompts)?;
            let path = self.folder.root().join("evaluation.json");
            report::write_json(&path, &found)?;
            self.progress.evaluation(&found);
        }
        Ok(())
    }
}

/// The configuration of a file that says nothing but what it must.
fn defaults() -> Config {
    config::parse(&config::defaults_text(), "defaults", &[]).expect("the defaults load")
}
