//! A run again from its first step on, without its records: the pool outlives the steps, so that a
//! later start would not see what a spike came of.

use std::fs;

use anyhow::{ensure, Context, Result};

use super::interrupt;
use super::session::{Comparison, Session};
use crate::base::Step;
use crate::config::Config;
use crate::report::sweep::read_steps;
use crate::report::{step_ranges, RunFolder};
use crate::rollout::Rollout;

/// The configuration that a run was made with.
pub(super) fn config_of(folder: &RunFolder) -> Result<Config> {
    let path = folder.config();
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let config = Config::from_json(&text, &path.display().to_string())?;
    ensure!(
        config.engine.servers.is_none(),
        "the completions of {} came from servers, which draw others when they are asked again: \
         only a run of the embedded engine can be seen again",
        folder.root().display()
    );
    Ok(config)
}

/// The step asked for, or the first that spiked; `verb` is what for.
pub(super) fn spike(folder: &RunFolder, asked: Option<Step>, verb: &str) -> Result<Step> {
    let spikes: Vec<Step> =
        read_steps(&folder.steps())?.iter().filter(|row| row.spike).map(|row| row.step).collect();
    let root = folder.root().display();
    let Some(&first) = spikes.first() else {
        anyhow::bail!("no step of {root} spiked: there is nothing to {verb}");
    };
    let step = asked.unwrap_or(first);
    ensure!(
        spikes.contains(&step),
        "step {step} of {root} has no spike: those that have are {}",
        step_ranges(&spikes, ", ")
    );
    Ok(step)
}

/// Every step up to `until`; `before` is called at its start, `after` between its comparison and
/// its update.
pub(super) fn replay(
    config: &Config,
    until: Step,
    mut before: impl FnMut(&mut Session, Step),
    mut after: impl FnMut(&mut Session, Comparison, Vec<Rollout>) -> Result<Vec<Rollout>>,
) -> Result<()> {
    let mut session = Session::open(config)?;
    session
        .warm_start(|step, _| Ok(interrupt::check(|| format!("step {step} of a warm start"))?))?;
    for step in (1..=until.get()).map(Step::new) {
        before(&mut session, step);
        let mut rollouts = session.generate(step)?;
        session.score(&mut rollouts)?;
        let comparison = session.compare(step, &mut rollouts)?;
        let rollouts = after(&mut session, comparison, rollouts)?;
        session.update(&rollouts)?;
        interrupt::check(|| format!("step {step} of a replay"))?;
    }
    Ok(())
}
