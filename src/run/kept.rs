//! What a run remembers of its steps, for its summary and its page.

use serde::{Deserialize, Serialize};

use super::session::{Comparison, Session};
use crate::base::{float, Position, RequestId};
use crate::engine::Statistics;
use crate::gap::{self, stats, Finding, FindingKind, Tally, Totals};
use crate::report::html::{BlockGap, StepBlocks, StepPoint, Trace, TracedToken, WorstToken};
use crate::report::Summary;
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

    /// The run as it stands, without error and without time.
    pub(super) fn summary(&self, session: &Session) -> Summary {
        let (engine, totals) = (session.source.embedded(), &self.totals);
        let done = session.source.statistics();
        let per_step =
            |count: u64| (totals.steps_done > 0).then(|| count as f64 / totals.steps_done as f64);
        let tokens_per_engine_step = |done: Statistics| {
            (done.engine_steps > 0).then(|| done.scheduled_tokens as f64 / done.engine_steps as f64)
        };
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
            floor: Some(self.points.iter().map(|point| point.gap.floor).fold(0.0, f64::max)),
            num_blocks: engine.map(|engine| u64::from(engine.pool().num_blocks())),
            state_stride: engine.and_then(|engine| engine.layout().state_stride),
            first_wrapped_block: session.first_wrapped_block().map(|block| u64::from(block.get())),
            blocks_per_step: done.and_then(|done| per_step(done.blocks_taken)),
            laps: done
                .zip(engine)
                .map(|(done, engine)| done.blocks_taken as f64 / engine.pool().num_usable() as f64),
            engine_steps: done.map(|done| done.engine_steps),
            tokens_per_engine_step: done.and_then(tokens_per_engine_step),
            preemptions: done.map(|done| done.preemptions),
            tally: self.tally,
            findings: self.findings.clone(),
            reward_mean_first: stats::mean(&rewards[..tenth]),
            reward_mean_last: stats::mean(&rewards[rewards.len() - tenth..]),
            resume_exact: session.resume_exact(),
            wall_s: 0.0,
        }
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
        floor: comparison.gap.floor,
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
