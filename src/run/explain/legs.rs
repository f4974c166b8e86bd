//! One sequence's residual stream by every leg, and where two of them part.

use anyhow::Result;

use super::super::session::{sequence, Session};
use crate::base::{Position, RequestId, TokenId};
use crate::engine::{Feed, Phase, Scratch, Seen, Trace, TracedRow};
use crate::gap::{first_difference, FirstDifference, StreamRow};
use crate::model::row_digests;
use crate::rollout::Rollout;

/// Pairs of legs by name, and where they part; `None` where nothing differs.
pub(super) type Parted = Vec<(&'static str, &'static str, Option<FirstDifference>)>;

/// The streams of one rollout.
pub(super) struct Streams {
    /// As sampled, in the order of the engine steps.
    decode: Vec<StreamRow>,
    prefill: Vec<StreamRow>,
    /// The prompt as a prefill row, then the same tokens one by one as decode rows, in a pool of
    /// their own: the decode kernels without the engine's pool and scheduling.
    forced: Vec<StreamRow>,
    trainer: Vec<StreamRow>,
}

impl Streams {
    pub(super) fn of(session: &Session, rollout: &Rollout, trace: &Trace) -> Result<Self> {
        let whole = sequence(rollout);
        let (tokens, prompt_len) = (&whole.tokens[..], whole.prompt_len);
        let trainer = session.trainer.streams(std::slice::from_ref(&whole))?.remove(0);
        let mut scratch = session.engine.scratch(1);
        let prefill = fed(session, &mut scratch, Phase::Prefill, tokens);
        let mut scratch = session.engine.scratch(1);
        let mut forced = fed(session, &mut scratch, Phase::Prefill, &tokens[..prompt_len]);
        for at in prompt_len..tokens.len() {
            let more = fed(session, &mut scratch, Phase::Decode, &tokens[at..=at]);
            forced.iter_mut().zip(more).for_each(|(all, more)| all.extend(more));
        }
        Ok(Self {
            decode: decoded(trace, rollout.completion.id),
            prefill: rows(0, tokens.len(), &prefill.concat()),
            forced: rows(0, tokens.len(), &forced.concat()),
            trainer: rows(0, tokens.len(), &trainer.concat()),
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

/// `[parts][tokens]` of the next tokens of a scratch's only sequence.
fn fed(
    session: &Session,
    scratch: &mut Scratch,
    phase: Phase,
    tokens: &[TokenId],
) -> Vec<Vec<u64>> {
    let runner = session.engine.runner();
    let mut stream: Vec<Vec<u64>> = Vec::new();
    let mut see = |seen: Seen<'_>| {
        let Seen::Stream { part, x_th } = seen else { return };
        stream.resize(part + 1, Vec::new());
        stream[part].extend(row_digests(runner.hidden(), x_th));
    };
    scratch.feed(runner, &[Feed { sequence: 0, phase, tokens }], Some(&mut see));
    stream
}

fn decoded(trace: &Trace, request: RequestId) -> Vec<StreamRow> {
    let of_request = trace.steps.iter().filter_map(|step| step.row_of(request));
    let of_row =
        |row: &TracedRow| rows(row.computed_tokens, row.scheduled_tokens as usize, &row.stream);
    of_request.flat_map(of_row).collect()
}

/// From `[parts, tokens]`, the first of which is at position `first`.
fn rows(first: u32, tokens: usize, stream: &[u64]) -> Vec<StreamRow> {
    let row = |token: usize| StreamRow {
        position: Position::new(first + token as u32),
        parts: stream.chunks_exact(tokens).map(|part| part[token]).collect(),
    };
    (0..tokens).map(row).collect()
}
