//! One step of the loop against the clock: its verbs, and each step of the engine within it.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;

use super::floor::{Load, Work};
use super::machine::Machine;
use crate::base::{EngineIndex, Step};
use crate::config::Update;
use crate::engine::{Moment, Placement};
use crate::run::device::ranks_on_one;
use crate::run::recorder::Recorder;
use crate::run::session::Session;

/// A backward is two forwards, after the forward itself and the one that it recomputes.
const FORWARDS_A_TRAINED_TOKEN: f64 = 4.0;

/// One step of an engine.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EngineStep {
    pub engine: EngineIndex,
    pub decodes: usize,
    pub prefills: usize,
    pub load: Load,
    /// Scheduling and building rows, before anything is launched.
    pub build_s: f64,
    /// The forward and the sampling, up to tokens on the host.
    pub forward_s: f64,
    /// Handing tokens to their requests, after it.
    pub update_s: f64,
}

impl EngineStep {
    fn seconds(&self) -> f64 {
        self.build_s + self.forward_s + self.update_s
    }
}

/// Seconds of each part of a step of the loop.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Parts {
    pub generate: f64,
    pub score: f64,
    /// Measures of the gap, verdicts, records and TensorBoard.
    pub check: f64,
    pub train: f64,
    pub hand_over: f64,
}

/// What one step of the loop took.
pub(super) struct Timed {
    pub parts: Parts,
    /// Of all engines, as they came to an end.
    pub engine: Vec<EngineStep>,
    pub placement: Placement,
    /// GPUs that the trainer's ranks are on, or the one CPU.
    pub trainers: u64,
    pub requests: usize,
    /// Tokens of all completions.
    pub sampled: u64,
    /// Tokens of prompts and completions.
    pub tokens: u64,
}

/// How fast, and how fast at most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rate {
    pub per_s: f64,
    pub floor: f64,
}

/// Seconds since it was last asked.
struct Stopwatch(Instant);

impl Stopwatch {
    fn start() -> Self {
        Self(Instant::now())
    }

    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let seconds = (now - self.0).as_secs_f64();
        self.0 = now;
        seconds
    }
}

impl Timed {
    /// Takes one step of the loop, in the order of a run.
    ///
    /// # Errors
    /// As the run itself.
    pub(super) fn take(
        session: &mut Session,
        recorder: &mut Recorder,
        work: &Work,
        step: Step,
    ) -> Result<Self> {
        let device = session.engine().runner().device().clone();
        let trains = session.config.trainer.update == Update::Adamw;
        let (mut parts, mut engine, mut clock) = (Parts::default(), Vec::new(), recorder.clock());
        let mut watch = Stopwatch::start();
        let mut lap = || {
            device.wait();
            watch.lap()
        };
        let (engines, placement) = (session.engines().iter().len(), session.engines().placement());
        let mut note = note_steps(work, &mut engine, engines);
        let mut rollouts = session.generate_told(step, &mut note)?;
        drop(note);
        parts.generate = lap();
        clock.lap("generate");
        session.score(&mut rollouts)?;
        parts.score = lap();
        let comparison = session.compare(step, &mut rollouts)?;
        parts.check = lap();
        let mut reports = Vec::new();
        if trains {
            reports = session.learn(&rollouts)?;
            parts.train = lap();
            session.hand_over()?;
            parts.hand_over = lap();
        }
        recorder.step(session, &comparison, &rollouts, &reports, clock)?;
        parts.check += lap();
        let sampled = rollouts.iter().map(|r| r.completion.tokens.len() as u64).sum();
        let prompts: u64 = rollouts.iter().map(|r| r.completion.prompt.len() as u64).sum();
        let (requests, tokens) = (rollouts.len(), sampled + prompts);
        let trainers = u64::from(session.config.trainer.ranks) / ranks_on_one(&session.config);
        Ok(Self { parts, engine, placement, trainers, requests, sampled, tokens })
    }

    /// Engine steps of as many decodes as ever ran together, and of nothing else.
    pub(super) fn full_decodes(&self) -> Vec<&EngineStep> {
        let decodes = || self.engine.iter().filter(|step| step.prefills == 0);
        let full = decodes().map(|step| step.decodes).max().unwrap_or(0);
        decodes().filter(|step| step.decodes == full).collect()
    }

    /// Sampled tokens a second of [`Self::full_decodes`].
    pub(super) fn decode(&self, work: &Work, machine: &Machine) -> Option<Rate> {
        of_engine(&self.full_decodes(), work, machine)
    }

    /// Tokens a second of the engine steps that hold prefills and nothing else.
    pub(super) fn prefill(&self, work: &Work, machine: &Machine) -> Option<Rate> {
        let prefills: Vec<_> = self.engine.iter().filter(|step| step.decodes == 0).collect();
        of_engine(&prefills, work, machine)
    }

    /// Sampled tokens a second from the prompts to the last completion.
    pub(super) fn generate(&self, work: &Work, machine: &Machine) -> Rate {
        let mut floors_s: BTreeMap<EngineIndex, f64> = BTreeMap::new();
        for step in &self.engine {
            *floors_s.entry(step.engine).or_default() += work.floor_s(step.load, machine);
        }
        let floor_s = match self.placement {
            Placement::OneEach => floors_s.into_values().fold(0.0, f64::max),
            Placement::SharedCpu | Placement::SharedGpu => floors_s.into_values().sum(),
        };
        let sampled = self.sampled as f64;
        Rate { per_s: sampled / self.parts.generate, floor: sampled / floor_s }
    }

    /// Tokens a second of the trainer's forward, prompts included.
    pub(super) fn score(&self, work: &Work, machine: &Machine) -> Rate {
        self.pass(self.parts.score, work, machine)
    }

    /// Tokens a second of the update, prompts included.
    pub(super) fn train(&self, work: &Work, machine: &Machine) -> Rate {
        let Rate { per_s, floor } = self.pass(self.parts.train, work, machine);
        Rate { per_s, floor: floor / FORWARDS_A_TRAINED_TOKEN }
    }

    fn pass(&self, seconds: f64, work: &Work, machine: &Machine) -> Rate {
        let load = Load { tokens: self.tokens, logits: self.sampled, bytes: 0.0 };
        let tokens = self.tokens as f64;
        let floor = self.trainers as f64 * tokens / work.floor_s(load, machine);
        Rate { per_s: tokens / seconds, floor }
    }
}

/// Tokens a second of some engine steps together; `None` of none.
fn of_engine(steps: &[&EngineStep], work: &Work, machine: &Machine) -> Option<Rate> {
    let tokens: u64 = steps.iter().map(|step| step.load.tokens).sum();
    let seconds: f64 = steps.iter().map(|step| step.seconds()).sum();
    let floor_s: f64 = steps.iter().map(|step| work.floor_s(step.load, machine)).sum();
    let tokens = tokens as f64;
    (!steps.is_empty()).then(|| Rate { per_s: tokens / seconds, floor: tokens / floor_s })
}

/// Hears of the engines' steps and notes what each took.
fn note_steps<'a>(
    work: &'a Work,
    steps: &'a mut Vec<EngineStep>,
    engines: usize,
) -> impl FnMut(EngineIndex, Moment<'_>) + use<'a> {
    let start = || (Stopwatch::start(), EngineStep::default());
    let mut under_way: Vec<_> = (0..engines).map(|_| start()).collect();
    move |engine, moment| {
        let (watch, now) = &mut under_way[engine.index()];
        let lap = watch.lap();
        match moment {
            Moment::Begun => {}
            Moment::Built(batch) => {
                let (decodes, rows) = (batch.num_decodes, batch.rows.len());
                let (prefills, load) = (rows - decodes, work.of_batch(batch));
                *now = EngineStep { engine, decodes, prefills, load, build_s: lap, ..*now };
                // What it took to look at the batch is nobody's.
                watch.lap();
            }
            Moment::Sampled => now.forward_s = lap,
            Moment::Updated => steps.push(EngineStep { update_s: lap, ..*now }),
        }
    }
}
