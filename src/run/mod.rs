//! The loop. The only room that reads the clock.

mod audit;
mod bench;
mod compare;
mod describe;
mod fail_on;
mod interrupt;
mod memory;
mod metrics;
mod parts;
mod predict;
mod progress;
mod recorder;
mod score;
mod session;
mod sweep;

use std::path::Path;

use anyhow::Result;

pub use audit::{audit, Audit, Audited};
pub use bench::bench;
pub use compare::{compare, RunDifference};
pub use describe::{describe_model, dry_run};
pub use fail_on::{FailOn, FailOnError, Outcome, Than, Watch};
pub use interrupt::{listen_for_ctrl_c, Interrupted, INTERRUPTED};
pub use score::{score, ScoreOptions};
pub use session::{Comparison, Evaluation, Session};
pub use sweep::{plan_sweep, sweep, SweepFile};

use crate::base::Step;
use crate::config::Config;
use crate::report::{RunFolder, Summary};
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
    run_in(|| Ok(RunFolder::create(out)?), config, Manner::default())
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
pub fn watch(expressions: &[FailOn], out: &Path, summary: &Summary) -> Result<Watch> {
    Ok(fail_on::watch_run(expressions, &RunFolder::open(out)?, &summary.findings)?)
}

fn run_in(
    folder: impl FnOnce() -> Result<RunFolder>,
    config: &Config,
    manner: Manner,
) -> Result<Summary> {
    // The session first: a run that cannot start leaves nothing.
    let mut session = Session::open(config)?;
    let mut recorder = Recorder::create(folder()?, &session, manner.quiet)?;
    let done = steps(&mut session, &mut recorder, manner.stop_after_spikes);
    recorder.finish(&session, done)
}

fn steps(session: &mut Session, recorder: &mut Recorder, enough: Option<u64>) -> Result<()> {
    session.warm_start(|step, loss| {
        recorder.warm_step(step, loss)?;
        Ok(interrupt::check(|| format!("step {step} of the warm start"))?)
    })?;
    for step in (1..=session.config.steps).map(Step::new) {
        let mut clock = recorder.clock();
        let mut rollouts = session.generate(step)?;
        clock.lap("generate");
        session.score(&mut rollouts)?;
        clock.lap("score");
        let comparison = session.compare(step, &mut rollouts)?;
        clock.lap("compare");
        let updates = session.update(&rollouts);
        clock.lap("update");
        // A step whose update failed is reported all the same: its gap may say why.
        let reports = updates.as_deref().unwrap_or_default();
        recorder.step(session, &comparison, &rollouts, reports, clock)?;
        updates?;
        if enough.is_some_and(|spikes| recorder.spikes() >= spikes) {
            break;
        }
        if step.get() < session.config.steps {
            interrupt::check(|| format!("step {step}"))?;
        }
    }
    recorder.leave_model(session)
}
