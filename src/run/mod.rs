//! The loop. The only room that reads the clock.

mod audit;
mod bench;
mod bisect;
mod checkpoint;
mod compare;
mod describe;
mod device;
mod doctor;
mod explain;
mod fail_on;
mod faults;
mod interrupt;
mod judge;
mod kept;
mod launch;
mod matrix;
mod memory;
mod metrics;
mod parts;
mod predict;
mod progress;
mod recorder;
mod replay;
mod score;
mod session;
mod streams;
mod sweep;
mod told;
mod trace;

use std::path::Path;

use anyhow::{Context, Result};

pub use audit::{audit, Audit, Audited};
pub use bench::{bench, bench_products};
pub use bisect::{bisect, BisectOptions};
pub use compare::{compare, RunDifference};
pub use describe::{describe_model, dry_run};
pub use doctor::{doctor, Checkup};
pub use explain::explain;
pub use fail_on::{FailOn, FailOnError, Outcome, Than, Watch};
pub use faults::list_faults;
pub use interrupt::{listen_for_ctrl_c, Interrupted, INTERRUPTED};
pub use judge::judge;
pub use matrix::{fault_matrix, swarm};
pub use score::{score, ScoreOptions};
pub use session::{Comparison, Evaluation, Session};
pub use sweep::{plan_sweep, sweep, SweepFile};
pub use told::told;

use crate::base::Step;
use crate::config::Config;
use crate::report::{RunFolder, Summary};
use checkpoint::Left;
use launch::Launched;
use progress::say;
use recorder::Recorder;

/// How a run is made beside what it does.
#[derive(Clone, Copy, Debug, Default)]
struct Manner {
    /// Ends the run after this many spike steps.
    stop_after_spikes: Option<u64>,
    /// A line a step where there is no terminal.
    quiet: bool,
}

/// One experiment: every step generates, scores before any update, compares, updates, reports.
///
/// # Errors
/// Whatever is wrong with the experiment, its model or the disk. What was already reported stays.
pub fn run(config: &Config, out: &Path) -> Result<Summary> {
    begin(RunFolder::create(out)?, config, Manner::default())
}

/// Goes on with a run that was interrupted, killed or has failed, from its last checkpoint; `None`
/// where it has come to its end. What it leaves is what it would have left, except time.
///
/// # Errors
/// A folder without a run or with one of another configuration, one that another process writes
/// to, torn checkpoints; then as [`run`].
pub fn resume(config: &Config, out: &Path) -> Result<Option<Summary>> {
    let folder = RunFolder::open(out).context("no run to resume, start it without --resume")?;
    let left = Left::open(folder, config)?;
    left.map(|left| go_on(left, config, Manner::default())).transpose()
}

/// The tags of every row that a run of this configuration will write to `steps.jsonl`.
#[must_use]
pub fn metric_tags(config: &Config) -> Vec<String> {
    metrics::tags(config)
}

/// Holds expressions against every step that a run has left.
///
/// # Errors
/// A folder that cannot be read back.
pub fn watch(expressions: &[FailOn], out: &Path) -> Result<Watch> {
    fail_on::watch_run(expressions, &RunFolder::open(out)?)
}

fn begin(folder: RunFolder, config: &Config, manner: Manner) -> Result<Summary> {
    // Nobody else's run or server is touched where the folder is not free.
    let claim = folder.claim(&config.to_json())?;
    let opened = Launched::start(config, folder.root())
        .and_then(|launched| device::guarded(|| Session::open_with(config, launched, None)));
    let mut session = match opened {
        Ok(session) => session,
        Err(error) => {
            folder.abandon(claim);
            return Err(error);
        }
    };
    let mut recorder = Recorder::create((folder, claim), &session, manner.quiet)?;
    let done = device::guarded(|| all(&mut session, &mut recorder, manner));
    recorder.finish(&session, done)
}

fn go_on(left: Left, config: &Config, manner: Manner) -> Result<Summary> {
    match left.step() {
        Some(step) => say(&format!("{}: resuming after step {step}", config.name)),
        None => say(&format!("{}: no checkpoint yet, starting anew", config.name)),
    }
    let (mut session, mut recorder, after) = device::guarded(|| left.resume(config, manner.quiet))?;
    let done = device::guarded(|| match after {
        Some(step) => steps(&mut session, &mut recorder, manner, step.get() + 1),
        None => all(&mut session, &mut recorder, manner),
    });
    recorder.finish(&session, done)
}

fn all(session: &mut Session, recorder: &mut Recorder, manner: Manner) -> Result<()> {
    session.warm_start(|step, loss| {
        recorder.warm_step(step, loss)?;
        Ok(interrupt::check(|| format!("step {step} of the warm start"))?)
    })?;
    if session.config.trainer.warm_start.steps > 0 {
        recorder.checkpoint(session, Step::new(0))?;
    }
    steps(session, recorder, manner, 1)
}

fn steps(session: &mut Session, recorder: &mut Recorder, manner: Manner, first: u64) -> Result<()> {
    for step in (first..=session.config.steps).map(Step::new) {
        let mut clock = recorder.clock();
        trace::watch(session, step, recorder.spikes());
        let mut rollouts = session.generate(step)?;
        clock.lap("generate");
        session.score(&mut rollouts)?;
        clock.lap("score");
        let comparison = session.compare(step, &mut rollouts)?;
        clock.lap("compare");
        let updates = device::guarded(|| session.update(&rollouts));
        clock.lap("update");
        // A step whose update failed is reported all the same: its gap may say why.
        let reports = updates.as_deref().unwrap_or_default();
        recorder.step(session, &comparison, &rollouts, reports, clock)?;
        let seen = session.source.take_trace();
        recorder.trace(session, &comparison, seen)?;
        updates?;
        if manner.stop_after_spikes.is_some_and(|enough| recorder.spikes() >= enough) {
            break;
        }
        if step.get() < session.config.steps {
            let asked = interrupt::check(|| format!("step {step}"));
            if asked.is_err() || step.get().is_multiple_of(session.config.checkpoint.every) {
                recorder.checkpoint(session, step)?;
            }
            asked?;
        }
    }
    recorder.leave_model(session)
}
