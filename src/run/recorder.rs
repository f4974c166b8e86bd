//! Hands what a step found to everything that a run leaves.

use std::path::Path;
use std::process;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{anyhow, Result};

use super::metrics;
use super::progress::Progress;
use super::session::{Comparison, Session};
use crate::base::{Position, RequestId, Step};
use crate::config::{self, Config, Update};
use crate::engine::Statistics;
use crate::gap::{self, stats, Finding, FindingKind, Tally, Totals};
use crate::model::save_folder;
use crate::report::html::{
    self, BlockGap, Page, StepBlocks, StepPoint, Trace, TracedToken, WorstToken,
};
use crate::report::tensorboard::{FileName, SessionEnd, Writer, GAP_FIRST};
use crate::report::{self, parquet, RunFolder, StepLog, Summary};
use crate::rollout::Rollout;
use crate::trainer::UpdateReport;

/// Tokens on the report's first screen.
const WORST_KEPT: usize = 10;
/// What a record calls the engine that made it.
const ENGINE: &str = "embedded";

/// The open files of one run.
pub(super) struct Recorder {
    folder: RunFolder,
    steps: StepLog,
    timing: StepLog,
    tensorboard: Writer,
    progress: Progress,
    started: Instant,
    totals: Totals,
    tally: Tally,
    points: Vec<StepPoint>,
    findings: Vec<Finding>,
    worst: Vec<WorstToken>,
    worst_spike: Option<WorstSpike>,
    /// The engine's counts before the step, for what the step itself did.
    before: Statistics,
}

/// The step and the request of the largest gap so far.
struct WorstSpike {
    gap: f64,
    blocks: StepBlocks,
    trace: Trace,
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

/// A new event file in a folder that is there.
pub(super) fn tensorboard_writer(folder: &Path) -> Result<Writer> {
    let now = wall_time_s();
    let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "localhost".to_owned());
    let name = FileName { seconds: now as u64, host: &host, pid: process::id(), n: 0 };
    Ok(Writer::create(folder, &name, now)?)
}

impl Recorder {
    /// Writes what is known before the first step: config, hparams, layout.
    pub(super) fn create(folder: RunFolder, session: &Session, quiet: bool) -> Result<Self> {
        let config = &session.config;
        folder.claim(&config.to_json())?;
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
            tensorboard,
            progress: Progress::new(config.steps, quiet),
            started: Instant::now(),
            totals: Totals::default(),
            tally: Tally::default(),
            points: Vec::new(),
            findings: Vec::new(),
            worst: Vec::new(),
            worst_spike: None,
            before: session.engine.statistics(),
        })
    }

    /// Spike steps so far.
    pub(super) fn spikes(&self) -> u64 {
        self.totals.spike_steps.len() as u64
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
        parquet::write_rollouts(&self.folder.rollouts(step), rollouts, ENGINE)?;
        parquet::write_tokens(&self.folder.tokens(step), rollouts)?;
        let tally =
            Tally::of(rollouts, &comparison.pairs, session.floor(), session.first_wrapped_block());
        self.tally.add(&tally);
        let mut scalars = metrics::gap(comparison, rollouts);
        scalars.extend(metrics::rollout(rollouts));
        scalars.extend(metrics::reward(rollouts, session.config.rollout.rollouts_per_prompt));
        scalars.extend(updates.last().map(metrics::loss).unwrap_or_default());
        let now = session.engine.statistics();
        scalars.extend(metrics::pool(now, self.before, session.engine.pool()));
        scalars.extend(metrics::tally(&tally));
        self.before = now;
        let row = scalars.iter().map(|scalar| (scalar.tag.as_str(), scalar.value));
        self.steps.append(step, row)?;
        self.keep(session, comparison, rollouts);

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
        let point = self.points.last().expect("the step was just kept");
        self.progress.step(step, point, comparison.findings.len());
        Ok(())
    }

    /// What the summary and the page will need.
    fn keep(&mut self, session: &Session, comparison: &Comparison, rollouts: &[Rollout]) {
        self.totals.add(&comparison.gap);
        self.findings.extend(comparison.findings.iter().cloned());
        let rewards: Vec<f64> = rollouts.iter().map(|rollout| rollout.reward).collect();
        self.points.push(StepPoint { gap: comparison.gap, reward_mean: stats::mean(&rewards) });
        let floor = session.floor();
        let bad = |found: &gap::WorstToken| found.gap > floor || found.gap.is_nan();
        let found = gap::worst(&comparison.pairs, WORST_KEPT).into_iter().filter(bad);
        self.worst.extend(found.map(|found| in_text(session, rollouts, found)));
        self.worst.sort_by(|a, b| b.found.gap.total_cmp(&a.found.gap));
        self.worst.truncate(WORST_KEPT);
        let Some(worst) = gap::worst(&comparison.pairs, 1).into_iter().find(bad) else { return };
        if self.worst_spike.as_ref().is_none_or(|known| worst.gap > known.gap) {
            self.worst_spike = Some(WorstSpike {
                gap: worst.gap,
                blocks: step_blocks(session, comparison, rollouts),
                trace: trace(session, comparison, worst.request),
            });
        }
    }

    /// Closes every file, whatever ended the loop, and says what the run was.
    ///
    /// # Errors
    /// What ended the loop; or, after it, what kept the files from being closed.
    pub(super) fn finish(mut self, session: &Session, done: Result<()>) -> Result<Summary> {
        let mut summary = self.summary(session);
        summary.error = done.as_ref().err().map(|error| format!("{error:#}"));
        let closed = self.close(session, &summary);
        self.progress.finish();
        match (done, closed) {
            (Ok(()), closed) => closed.map(|()| summary),
            (Err(first), Ok(())) => Err(first),
            (Err(first), Err(then)) => Err(anyhow!("{first:#}; and then {then:#}")),
        }
    }

    fn close(&mut self, session: &Session, summary: &Summary) -> Result<()> {
        report::write_json(&self.folder.findings(), &self.findings)?;
        let page = Page {
            summary,
            points: &self.points,
            changes: &report::changes(&session.config, &defaults()),
            worst: &self.worst,
            blocks: self.worst_spike.as_ref().map(|spike| &spike.blocks),
            trace: self.worst_spike.as_ref().map(|spike| &spike.trace),
        };
        html::write(&self.folder.report(), &page)?;
        let fine = summary.error.is_none();
        let end = if fine { SessionEnd::Success } else { SessionEnd::Failure };
        self.tensorboard.session_end(wall_time_s(), end)?;
        self.tensorboard.flush()?;
        // Last: whoever finds a summary finds a whole run.
        Ok(report::write_json(&self.folder.summary(), summary)?)
    }

    /// The greedy evaluation and the final weights, where they are asked for.
    pub(super) fn leave_model(&mut self, session: &Session) -> Result<()> {
        let config = &session.config;
        if config.check.greedy_eval_prompts > 0 {
            let found = session.evaluate(config.check.greedy_eval_prompts)?;
            let path = self.folder.root().join("evaluation.json");
            report::write_json(&path, &found)?;
            self.progress.evaluation(&found);
        }
        if config.checkpoint.save_final && config.trainer.update == Update::Adamw {
            let folder = self.folder.checkpoints().join("final");
            save_folder(&folder, &session.plan, &session.trainer.master()?, config.model.dtype)?;
        }
        Ok(())
    }

    fn summary(&self, session: &Session) -> Summary {
        let (engine, totals) = (&session.engine, &self.totals);
        let statistics = engine.statistics();
        let (layout, pool) = (engine.layout(), engine.pool());
        let per_step =
            |count: u64| (totals.steps_done > 0).then(|| count as f64 / totals.steps_done as f64);
        let rewards: Vec<f64> = self.points.iter().filter_map(|point| point.reward_mean).collect();
        let tenth = rewards.len().div_ceil(10);
        Summary {
            schema: Summary::SCHEMA,
            name: session.config.name.clone(),
            error: None,
            steps_done: totals.steps_done,
            n_tokens: totals.n_tokens,
            nonfinite: totals.nonfinite,
            spike_steps: totals.spike_steps.clone(),
            first_spike_step: totals.first_spike_step(),
            spike_windows: totals.spike_windows(),
            spike_period: totals.spike_period(),
            gap_max: totals.gap_max,
            gap_mean: totals.gap_mean(),
            frac_bitwise_equal: totals.frac_bitwise_equal(),
            floor: Some(session.floor()),
            num_blocks: u64::from(pool.num_blocks()),
            state_stride: layout.state_stride,
            first_wrapped_block: session.first_wrapped_block().map(|block| u64::from(block.get())),
            blocks_per_step: per_step(statistics.blocks_taken),
            laps: Some(statistics.blocks_taken as f64 / pool.num_usable() as f64),
            engine_steps: statistics.engine_steps,
            tokens_per_engine_step: (statistics.engine_steps > 0)
                .then(|| statistics.scheduled_tokens as f64 / statistics.engine_steps as f64),
            preemptions: statistics.preemptions,
            tally: self.tally,
            findings: self.findings.clone(),
            reward_mean_first: stats::mean(&rewards[..tenth]),
            reward_mean_last: stats::mean(&rewards[rewards.len() - tenth..]),
            // Nothing of the pool or the optimizer is saved yet, so nothing can go on from here.
            resume_exact: false,
            wall_s: self.started.elapsed().as_secs_f64(),
        }
    }
}

/// The configuration of a file that says nothing but what it must.
fn defaults() -> Config {
    config::parse(&config::defaults_text(), "defaults", &[]).expect("the defaults load")
}

/// A token with what stands around it.
fn in_text(session: &Session, rollouts: &[Rollout], found: gap::WorstToken) -> WorstToken {
    let same = |rollout: &&Rollout| rollout.completion.id == found.request;
    let done = &rollouts.iter().find(same).expect("the token is of this step").completion;
    let tokens: Vec<_> = done.prompt.iter().copied().chain(done.token_ids()).collect();
    let at = done.prompt.len() + found.paired.index.index();
    WorstToken {
        found,
        position: Position::new(at as u32),
        before: session.codec.decode(&tokens[..at]),
        text: session.codec.decode(&tokens[at..=at]),
        after: session.codec.decode(&tokens[at + 1..]),
    }
}

/// The step's requests with recurrent state, each with its largest gap.
fn step_blocks(session: &Session, comparison: &Comparison, rollouts: &[Rollout]) -> StepBlocks {
    let stale = |request| {
        let findings = comparison.findings.iter();
        let mut stale = findings.filter(|finding| finding.kind == FindingKind::StaleState);
        stale.any(|finding| finding.requests.contains(&request))
    };
    let one = |(rollout, sequence): (&Rollout, &gap::Sequence)| {
        let lives = rollout.completion.lives.iter();
        let block = lives.flat_map(|life| &life.state_blocks).map(|held| held.block).max()?;
        let request = sequence.request;
        Some(BlockGap { request, block, gap: sequence.gap()?, stale: stale(request) })
    };
    StepBlocks {
        step: comparison.step,
        first_wrapped: session.first_wrapped_block(),
        floor: session.floor(),
        requests: rollouts.iter().zip(&comparison.pairs.sequences).filter_map(one).collect(),
    }
}

/// A request's tokens, each with its own text.
fn trace(session: &Session, comparison: &Comparison, request: RequestId) -> Trace {
    let sequences = &comparison.pairs.sequences;
    let same = |sequence: &&gap::Sequence| sequence.request == request;
    let sequence = sequences.iter().find(same).expect("the request is of this step");
    let token = |&paired: &gap::PairedToken| TracedToken {
        paired,
        text: session.codec.decode(&[paired.token]),
    };
    Trace { request, tokens: sequence.tokens.iter().map(token).collect() }
}
