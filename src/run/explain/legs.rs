//! One sequence's residual stream by every leg, and where two of them part.

use anyhow::Result;

use super::super::session::{sequence, Session};
use super::super::streams;
use crate::base::{Position, RequestId};
use crate::engine::{Trace, TracedRow};
use crate::gap::{first_difference, FirstDifference, StreamRow};
use crate::rollout::Rollout;

/// Pairs of legs by name, and where they part; `None` where nothing differs.
pub(super) type Parted = Vec<(&'static str, &'static str, Option<FirstDifference>)>;

/// The streams of one rollout.
pub(super) struct Streams {
    /// As sampled, in the order of the engine steps.
    decode: Vec<StreamRow>,
    prefill: Vec<StreamRow>,
    forced: Vec<StreamRow>,
    trainer: Vec<StreamRow>,
}

impl Streams {
    pub(super) fn of(session: &Session, rollout: &Rollout, trace: &Trace) -> Result<Self> {
        let whole = sequence(rollout);
        let engine = session.engines().get(rollout.completion.engine);
        Ok(Self {
            decode: decoded(trace, rollout.completion.id),
            prefill: streams::prefill(engine, &whole),
            forced: streams::forced_decode(engine, &whole),
            trainer: streams::trainer(&session.trainer, &whole)?,
        })
    }

    /// `bad` is the position of the first token whose log-probabilities differ, of decode and
    /// trainer, and of prefill and trainer.
    pub(super) fn parted(&self, session: &Session, bad: [Option<Position>; 2]) -> Parted {
        let parts = session.plan.parts();
        let first =
            |one: &[StreamRow], other: &[StreamRow], bad| first_difference(&parts, one, other, bad);
        vec![
            ("decode", "trainer", first(&self.decode, &self.trainer, bad[0])),
            ("decode", "prefill", first(&self.decode, &self.prefill, None)),
            ("decode", "forced decode", first(&self.decode, &self.forced, None)),
            ("prefill", "trainer", first(&self.prefill, &self.trainer, bad[1])),
        ]
    }
}

fn decoded(trace: &Trace, request: RequestId) -> Vec<StreamRow> {
    let of_request = trace.steps.iter().filter_map(|step| step.row_of(request));
    let of_row = |row: &TracedRow| {
        streams::rows(row.computed_tokens, row.scheduled_tokens as usize, &row.stream)
    };
    of_request.flat_map(of_row).collect()
}
