//! The spikes that scheduler and pool foretell, without a tensor of the run. Where the pool is what
//! a device's memory leaves, the pass that measures it comes first.

use anyhow::{ensure, Result};

use super::session::{requests, Session};
use super::{device, parts};
use crate::base::Step;
use crate::config::{Config, FreeListOrder, Sleep};
use crate::engine::{self, GenerationRequest, Layout, Replay};
use crate::model::{Numerics, Plan};
use crate::report::step_ranges;
use crate::report::sweep::{ClosedForm, Prediction};
use crate::rollout::{Draw, Task};

/// Why nothing is foretold then.
pub(super) const NOT_WITH_A_CACHE: &str = "with engine.enable_prefix_caching nothing is foretold: \
    which blocks are found depends on the tokens that are sampled";

/// Why nothing is foretold of servers.
pub(super) const NOT_OF_SERVERS: &str = "of servers nothing is foretold: their pools are not seen";

/// What an experiment is made of, weights aside.
pub(super) struct Outline {
    pub plan: Plan,
    pub num: Numerics,
    pub layout: Layout,
    pub num_blocks: u32,
    pub task: Task,
}

impl Outline {
    /// # Errors
    /// Whatever `run` would refuse of the model's config, the task and the pool.
    pub(super) fn of(config: &Config) -> Result<Self> {
        ensure!(config.engine.servers.is_none(), NOT_OF_SERVERS);
        let plan = parts::plan(config)?;
        let num = plan.numerics_of(config);
        let layout = engine::layout(&plan, &num, &config.engine)?;
        // What a device's memory leaves is known only there, by the pass that a run makes too.
        let num_blocks = match config.engine.is_measured() {
            true => device::guarded(|| Session::open(config))?.engine().pool().num_blocks(),
            false => layout.num_blocks(&engine::block_memory(&plan, &num, &config.engine))?,
        };
        let codec = parts::codec(config, &plan.config)?;
        let task = Task::new(&config.task, config.seed, codec.into())?;
        Ok(Self { plan, num, layout, num_blocks, task })
    }
}

/// Every step of the experiment through scheduler, pool and batch, with a memory that knows whose
/// bytes are whose. Ends with the spike that is the last one asked for.
///
/// # Errors
/// A prefix cache, a task without enough problems, or a request that could never run.
pub(super) fn predict(
    config: &Config,
    outline: &Outline,
    stop_after_spikes: Option<u64>,
) -> Result<Prediction> {
    let Outline { layout, num_blocks, .. } = outline;
    ensure!(!config.engine.enable_prefix_caching, NOT_WITH_A_CACHE);
    let rollout = &config.rollout;
    let mut replay = Replay::new(layout.clone(), *num_blocks, &config.engine);
    let mut spike_steps = Vec::new();
    let mut steps = 0;
    for step in (1..=config.steps).map(Step::new) {
        steps += 1;
        let forecasts = replay.generate(asked(config, outline, step)?)?;
        if forecasts.iter().any(|forecast| forecast.first_wrong.is_some()) {
            spike_steps.push(step);
            if stop_after_spikes.is_some_and(|enough| spike_steps.len() as u64 >= enough) {
                break;
            }
        }
    }
    let usable = f64::from(num_blocks - 1);
    let next_spike = spike_steps.is_empty().then(|| next_spike(config, outline, replay.clone()));
    let taken = replay.statistics().blocks_taken as f64;
    let blocks_per_step = taken / steps as f64;
    let first = layout.first_wrapped_block(config.engine.state_index_bits);
    let first = first.filter(|block| block.get() < *num_blocks);
    let engine = &config.engine;
    let in_a_ring = engine.free_list == FreeListOrder::Fifo && engine.sleep != Sleep::DropPool;
    let closed_form = first
        .filter(|_| in_a_ring)
        .map(|first| closed_form(f64::from(first.get()), usable, blocks_per_step, config.steps));
    Ok(Prediction {
        spike_steps,
        closed_form,
        num_blocks: u64::from(*num_blocks),
        first_wrapped_block: first.map(|block| u64::from(block.get())),
        blocks_per_step,
        laps: taken / usable,
        next_spike: next_spike.flatten(),
        exact: rollout.ignore_eos
            && config.engine.faults.is_empty()
            && config.trainer.faults.is_empty(),
        error: None,
    })
}

/// The first spike after the last step, in as many steps as two more laps of the pool take.
fn next_spike(config: &Config, outline: &Outline, mut replay: Replay) -> Option<Step> {
    /// Of a pool that is hardly used; a person's patience ends before.
    const STEPS_MAX: u64 = 1000;
    let taken = replay.statistics().blocks_taken.max(1);
    let two_laps = (2 * u64::from(outline.num_blocks)).saturating_mul(config.steps) / taken + 1;
    let further = config.steps + 1..=config.steps + two_laps.min(STEPS_MAX);
    further.map(Step::new).find(|&step| {
        let asked = asked(config, outline, step);
        let forecasts = asked.and_then(|asked| Ok(replay.generate(asked)?));
        // A task that ends there has no further step.
        forecasts.is_ok_and(|all| all.iter().any(|one| one.first_wrong.is_some()))
    })
}

/// The requests of one step of the loop.
fn asked(config: &Config, outline: &Outline, step: Step) -> Result<Vec<GenerationRequest>> {
    let rollout = &config.rollout;
    let problems = outline.task.problems(Draw::Rollouts, step, rollout.prompts_per_step)?;
    let eos = &outline.plan.config.eos_token_ids;
    Ok(requests(rollout, eos, step, &problems, rollout.rollouts_per_prompt))
}

/// `12, 24-26 (on paper the first at 11.38, then every 12.00)`.
pub(super) fn foretold_spikes(found: &Prediction) -> String {
    let mut text = or_none(&found.spike_steps);
    if let Some(form) = &found.closed_form {
        let (first, period) = (form.first_spike_step, form.period);
        text += &format!(" (on paper the first at {first:.2}, then every {period:.2})");
    }
    if let Some(next) = found.next_spike {
        text += &format!(", and from step {next} on if it went on");
    }
    if !found.exact {
        text += "; a guess: completions may end early, or a fault is planted";
    }
    text
}

/// `12, 24-26`, or `none`.
pub(super) fn or_none(steps: &[Step]) -> String {
    if steps.is_empty() {
        return "none".to_owned();
    }
    step_ranges(steps, ", ")
}

/// On paper: blocks are taken in a ring of `usable` ids from 1 on, so many a step; those from
/// `threshold` on are bad.
fn closed_form(threshold: f64, usable: f64, blocks_per_step: f64, steps: u64) -> ClosedForm {
    let good = threshold - 1.0;
    let bad = |step: &u64| {
        // Takes of the step, counted from 0: does one of them fall past the good ids of its lap?
        let (from, to) = ((step - 1) as f64 * blocks_per_step, *step as f64 * blocks_per_step);
        let lap = (from / usable).floor() * usable;
        from - lap >= good || to > lap + good
    };
    let spikes: Vec<u64> = (1..=steps).filter(bad).collect();
    let windows = spikes.chunk_by(|a, b| a + 1 == *b);
    ClosedForm {
        first_spike_step: threshold / blocks_per_step,
        period: usable / blocks_per_step,
        windows: windows.map(|run| (Step::new(run[0]), Step::new(run[run.len() - 1]))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(threshold: f64, blocks: f64, per_step: f64, steps: u64) -> Vec<(u64, u64)> {
        let form = closed_form(threshold, blocks - 1.0, per_step, steps);
        form.windows.iter().map(|(a, b)| (a.get(), b.get())).collect()
    }

    #[test]
    fn a_ring_of_blocks_on_paper() {
        // 1,440 usable blocks, of which 75 wrap.
        let every = |n: u64| (1..=48 / n).map(|k| (k * n, k * n)).collect::<Vec<_>>();
        assert_eq!(windows(1366.0, 1441.0, 120.0, 48), every(12));
        assert_eq!(windows(1366.0, 1441.0, 240.0, 48), every(6));
        assert_eq!(windows(1366.0, 1441.0, 480.0, 48), every(3));
        assert_eq!(windows(1366.0, 1441.0, 960.0, 6), [(2, 3), (5, 6)]);
        assert_eq!(windows(1366.0, 1441.0, 1920.0, 6), [(1, 6)]);
        // AI21's pool on an 80 GB card: 5,910 blocks a step at 8 rollouts.
        let full = windows(47_663.0, 69_471.0, 5_910.0, 30);
        assert_eq!(full, [(9, 12), (20, 24)]);
        // The step that takes the last good block is good, the next one is not.
        assert_eq!(windows(11.0, 12.0, 5.0, 4), [(3, 3)]);
        let form = closed_form(1366.0, 1440.0, 120.0, 48);
        assert_eq!((form.first_spike_step, form.period), (1366.0 / 120.0, 12.0));
    }
}
