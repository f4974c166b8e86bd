//! The spikes that scheduler and pool foretell, without a tensor of the run. Where the pool is what
//! a device's memory leaves, the pass that measures it comes first.

use anyhow::{ensure, Result};

use super::session::{requests, Session};
use super::{device, parts};
use crate::base::{BlockId, EngineIndex, Step};
use crate::config::{Config, FreeListOrder, Sleep};
use crate::engine::{self, deal, GenerationRequest, Layout, Replay};
use crate::model::{Numerics, Plan};
use crate::report::step_ranges;
use crate::report::sweep::{ClosedForm, EnginePrediction, Prediction};
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
            false => {
                let sharing = device::engines_on_one(&config.engine);
                layout.num_blocks(&engine::block_memory(&plan, &num, &config.engine, sharing))?
            }
        };
        let codec = parts::codec(config, &plan.config)?;
        let task = Task::new(&config.task, config.seed, codec.into())?;
        Ok(Self { plan, num, layout, num_blocks, task })
    }
}

/// Every step of the experiment through each engine's scheduler, pool and batch, with a memory that
/// knows whose bytes are whose. Ends with the spike that is the last one asked for.
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
    let mut all = Replays::new(config, outline);
    let mut steps = 0;
    let mut spike_steps = Vec::new();
    for step in (1..=config.steps).map(Step::new) {
        steps += 1;
        let spiked = all.generate(asked(config, outline, step)?)?;
        for (_, own) in spiked.iter().zip(&mut all.spikes).filter(|(spiked, _)| **spiked) {
            own.push(step);
        }
        if spiked.contains(&true) {
            spike_steps.push(step);
            if stop_after_spikes.is_some_and(|enough| spike_steps.len() as u64 >= enough) {
                break;
            }
        }
    }
    let next_spike = spike_steps.is_empty().then(|| next_spike(config, outline, all.clone()));
    let first = layout.first_wrapped_block(config.engine.state_index_bits);
    let first = first.filter(|block| block.get() < *num_blocks);
    let mut engines = all.predictions(config, outline, first, steps);
    let most = |most: usize, at: usize| {
        if engines[at].laps > engines[most].laps {
            at
        } else {
            most
        }
    };
    let busiest = engines[(0..engines.len()).fold(0, most)].clone();
    if engines.len() == 1 {
        engines.clear();
    }
    Ok(Prediction {
        spike_steps,
        closed_form: busiest.closed_form,
        num_blocks: u64::from(*num_blocks),
        first_wrapped_block: first.map(|block| u64::from(block.get())),
        blocks_per_step: busiest.blocks_per_step,
        laps: busiest.laps,
        engines,
        next_spike: next_spike.flatten(),
        exact: config.rollout.ignore_eos
            && config.engine.faults.is_empty()
            && config.trainer.faults.is_empty(),
        error: None,
    })
}

/// Each engine, replayed.
#[derive(Clone)]
struct Replays {
    engines: Vec<Replay>,
    /// Each one's own, in rising order.
    spikes: Vec<Vec<Step>>,
}

impl Replays {
    fn new(config: &Config, outline: &Outline) -> Self {
        let Outline { layout, num_blocks, .. } = outline;
        let engine = |_| Replay::new(layout.clone(), *num_blocks, &config.engine);
        let engines: Vec<Replay> = (0..config.engine.replicas).map(engine).collect();
        Self { spikes: vec![Vec::new(); engines.len()], engines }
    }

    /// One step of the loop: which engines spike in it.
    fn generate(&mut self, asked: Vec<GenerationRequest>) -> Result<Vec<bool>> {
        let parts = deal(asked, self.engines.len());
        let spikes = self.engines.iter_mut().zip(parts).map(|(engine, part)| {
            let forecasts = engine.generate(part)?;
            Ok(forecasts.iter().any(|forecast| forecast.first_wrong.is_some()))
        });
        spikes.collect()
    }

    /// After so many steps.
    fn predictions(
        &self,
        config: &Config,
        outline: &Outline,
        first_wrapped: Option<BlockId>,
        steps: u64,
    ) -> Vec<EnginePrediction> {
        let engine = &config.engine;
        let in_a_ring = engine.free_list == FreeListOrder::Fifo && engine.sleep != Sleep::DropPool;
        let usable = f64::from(outline.num_blocks - 1);
        let one = |((replay, spikes), index): ((&Replay, &Vec<Step>), u32)| {
            let taken = replay.statistics().blocks_taken as f64;
            let blocks_per_step = taken / steps as f64;
            let on_paper = |first: BlockId| {
                closed_form(f64::from(first.get()), usable, blocks_per_step, config.steps)
            };
            EnginePrediction {
                engine: EngineIndex::new(index),
                spike_steps: spikes.clone(),
                closed_form: first_wrapped.filter(|_| in_a_ring).map(on_paper),
                blocks_per_step,
                laps: taken / usable,
            }
        };
        self.engines.iter().zip(&self.spikes).zip(0..).map(one).collect()
    }
}

/// The first spike after the last step, in as many steps as two more laps of the pool that is
/// gone through least take.
fn next_spike(config: &Config, outline: &Outline, mut all: Replays) -> Option<Step> {
    /// Of a pool that is hardly used; a person's patience ends before.
    const STEPS_MAX: u64 = 1000;
    let taken = all.engines.iter().map(|engine| engine.statistics().blocks_taken).min()?.max(1);
    let two_laps = (2 * u64::from(outline.num_blocks)).saturating_mul(config.steps) / taken + 1;
    let further = config.steps + 1..=config.steps + two_laps.min(STEPS_MAX);
    further.map(Step::new).find(|&step| {
        let asked = asked(config, outline, step);
        let spiked = asked.and_then(|asked| all.generate(asked));
        // A task that ends there has no further step.
        spiked.is_ok_and(|spiked| spiked.contains(&true))
    })
}

/// The requests of one step of the loop.
fn asked(config: &Config, outline: &Outline, step: Step) -> Result<Vec<GenerationRequest>> {
    let rollout = &config.rollout;
    let problems = outline.task.problems(Draw::Rollouts, step, rollout.prompts_per_step)?;
    let eos = &outline.plan.config.eos_token_ids;
    Ok(requests(rollout, eos, step, &problems, rollout.rollouts_per_prompt))
}

/// `12, 24-26 (on paper the first at 11.38, then every 12.00)`, and of several engines each one's.
pub(super) fn foretold_spikes(found: &Prediction) -> String {
    let one = |steps: &[Step], form: &Option<ClosedForm>| {
        let mut text = or_none(steps);
        if let Some(ClosedForm { first_spike_step: first, period, .. }) = form {
            text += &format!(" (on paper the first at {first:.2}, then every {period:.2})");
        }
        text
    };
    let mut text = match &found.engines[..] {
        [] => one(&found.spike_steps, &found.closed_form),
        several => {
            let each = several.iter().map(|of| {
                format!("engine {}: {}", of.engine, one(&of.spike_steps, &of.closed_form))
            });
            format!("{}; {}", or_none(&found.spike_steps), each.collect::<Vec<_>>().join("; "))
        }
    };
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
