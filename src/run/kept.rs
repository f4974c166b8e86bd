//! What a run remembers of its steps, for its summary and its page.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::session::{Comparison, Session};
use crate::base::{float, EngineIndex, Position, RequestId, Step};
use crate::engine::{Engine, Engines, Statistics};
use crate::gap::{self, stats, Finding, FindingKind, Tally, Totals};
use crate::report::html::{BlockGap, StepBlocks, StepPoint, Trace, TracedToken, WorstToken};
use crate::report::{EngineSummary, Summary};
use crate::rollout::Rollout;

/// Tokens on the report's first screen.
const WORST_KEPT: usize = 10;
/// Kept in a checkpoint, it goes on after a resume as if nothing had happened.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(super) struct Kept {
    pub totals: Totals,
    pub tally: Tally,
    pub points: Vec<StepPoint>,
    pub findings: Vec<Finding>,
    /// By engine: the spike steps in which a request of its own was over the floor.
    spikes_by_engine: BTreeMap<EngineIndex, Vec<Step>>,
    pub worst: Vec<WorstToken>,
    pub worst_spike: Option<WorstSpike>,
}

/// The step and the request of the largest gap so far.
#[derive(Clone, Serialize, Deserialize)]
pub(super) struct WorstSpike {
    #[serde(with = "float")]
    gap: f64,
    pub blocks: StepBlocks,
    pub trace: Trace,
}

impl Kept {
    /// Adds a step.
    pub(super) fn add(
        &mut self,
        session: &Session,
        comparison: &Comparison,
        rollouts: &[Rollout],
        tally: &Tally,
    ) {
        self.totals.add(&comparison.gap);
        self.tally.add(tally);
        self.findings.extend(comparison.findings.iter().cloned());
        let rewards: Vec<f64> = rollouts.iter().map(|rollout| rollout.reward).collect();
        self.points.push(StepPoint { gap: comparison.gap, reward_mean: stats::mean(&rewards) });
        let floor = comparison.gap.floor;
        if comparison.gap.spike {
            let bad = comparison.pairs.bad(floor).map(|sequence| sequence.engine);
            for engine in bad.collect::<BTreeSet<_>>() {
                self.spikes_by_engine.entry(engine).or_default().push(comparison.step);
            }
        }
        let bad = |found: &gap::WorstToken| found.gap > floor || found.gap.is_nan();
        let found = gap::worst(&comparison.pairs, WORST_KEPT).into_iter().filter(bad);
        self.worst.extend(found.map(|found| in_text(session, rollouts, found)));
        self.worst.sort_by(|a, b| b.found.gap.total_cmp(&a.found.gap));
        self.worst.truncate(WORST_KEPT);
        let Some(worst) = gap::worst(&comparison.pairs, 1).into_iter().find(bad) else { return };
        if self.worst_spike.as_ref().is_none_or(|known| worst.gap > known.gap) {
            self.worst_spike = Some(WorstSpike {
                gap: worst.gap,
                blocks: step_blocks(session, comparison, rollouts, worst.engine),
                trace: trace(session, comparison, worst.request),
            });
        }
    }

    /// The run as it stands, without error and without time.
    pub(super) fn summary(&self, session: &Session) -> Summary {
        let (engine, totals) = (session.source.embedded().map(Engines::first), &self.totals);
        let done = session.source.statistics();
        let sum = |count: fn(&Statistics) -> u64| {
            (!done.is_empty()).then(|| done.iter().map(count).sum::<u64>())
        };
        let engine_steps = sum(|one| one.engine_steps);
        let tokens_per_engine_step = |steps: u64| {
            (steps > 0).then(|| sum(|one| one.scheduled_tokens).unwrap_or(0) as f64 / steps as f64)
        };
        let mut engines = self.engines(session);
        let busiest = engines.iter().max_by(|a, b| a.laps.total_cmp(&b.laps));
        let (laps, blocks_per_step) =
            (busiest.map(|one| one.laps), busiest.and_then(|one| one.blocks_per_step));
        if engines.len() == 1 {
            engines.clear();
        }
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
            // Of several pools each has its own.
            spike_period: totals.spike_period().filter(|_| engines.is_empty()),
            gap_max: totals.gap_max,
            gap_mean: totals.gap_mean(),
            frac_bitwise_equal: totals.frac_bitwise_equal(),
            floor: Some(self.points.iter().map(|point| point.gap.floor).fold(0.0, f64::max)),
            num_blocks: engine.map(|engine| u64::from(engine.pool().num_blocks())),
            state_stride: engine.and_then(|engine| engine.layout().state_stride),
            first_wrapped_block: session.first_wrapped_block().map(|block| u64::from(block.get())),
            blocks_per_step,
            laps,
            engine_steps,
            tokens_per_engine_step: engine_steps.and_then(tokens_per_engine_step),
            preemptions: sum(|one| one.preemptions),
            engines,
            tally: self.tally,
            findings: self.findings.clone(),
            reward_mean_first: stats::mean(&rewards[..tenth]),
            reward_mean_last: stats::mean(&rewards[rewards.len() - tenth..]),
            resume_exact: session.resume_exact(),
            wall_s: 0.0,
        }
    }
}

impl Kept {
    /// Of the step that was added last: the engines whose requests spiked in it.
    pub(super) fn spiking(&self, step: Step) -> Vec<EngineIndex> {
        let spiked = |(_, steps): &(&EngineIndex, &Vec<Step>)| steps.last() == Some(&step);
        self.spikes_by_engine.iter().filter(spiked).map(|(&engine, _)| engine).collect()
    }

    /// Each embedded engine's own account.
    fn engines(&self, session: &Session) -> Vec<EngineSummary> {
        let engines = session.source.embedded().into_iter().flat_map(Engines::iter);
        let steps = self.totals.steps_done;
        let one = |(engine, index): (&Engine, u32)| {
            let (index, done) = (EngineIndex::new(index), engine.statistics());
            let taken = done.blocks_taken as f64;
            EngineSummary {
                engine: index,
                spike_steps: self.spikes_by_engine.get(&index).cloned().unwrap_or_default(),
                blocks_per_step: (steps > 0).then(|| taken / steps as f64),
                laps: taken / engine.pool().num_usable() as f64,
                engine_steps: done.engine_steps,
                preemptions: done.preemptions,
            }
        };
        engines.zip(0..).map(one).collect()
    }
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

/// An engine's requests of the step with recurrent state, each with its largest gap.
fn step_blocks(
    session: &Session,
    comparison: &Comparison,
    rollouts: &[Rollout],
    engine: EngineIndex,
) -> StepBlocks {
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
    let several = session.source.num_engines() > 1;
    let of_engine = |(rollout, _): &(&Rollout, &gap::Sequence)| rollout.completion.engine == engine;
    let pairs = rollouts.iter().zip(&comparison.pairs.sequences);
    StepBlocks {
        step: comparison.step,
        engine: several.then_some(engine),
        first_wrapped: session.first_wrapped_block(),
        floor: comparison.gap.floor,
        requests: pairs.filter(of_engine).filter_map(one).collect(),
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
