//! One sequence's residual stream, a digest a part and token, by whoever can compute it outside the
//! run; and where its routers send it.

use anyhow::Result;

use crate::base::{LayerId, Position, TokenId};
use crate::engine::{Engine, Feed, Phase, Scratch, Seen};
use crate::gap::StreamRow;
use crate::model::row_digests;
use crate::ops::routing::Choice;
use crate::rollout::{Routes, TokenRoutes};
use crate::trainer::{Sequence, Trainer};

/// One prefill row of an engine's scratch pool.
pub(super) fn prefill(engine: &Engine, whole: &Sequence) -> Vec<StreamRow> {
    let stream = fed(engine, &mut engine.scratch(1), Phase::Prefill, &whole.tokens);
    rows(0, whole.tokens.len(), &stream.concat())
}

/// The prompt as a prefill row, then the same tokens one by one as decode rows, in a pool of their
/// own: the decode kernels without the engine's pool and scheduling.
pub(super) fn forced_decode(engine: &Engine, whole: &Sequence) -> Vec<StreamRow> {
    let (tokens, prompt_len) = (&whole.tokens[..], whole.prompt_len);
    let mut scratch = engine.scratch(1);
    let mut stream = fed(engine, &mut scratch, Phase::Prefill, &tokens[..prompt_len]);
    for at in prompt_len..tokens.len() {
        let more = fed(engine, &mut scratch, Phase::Decode, &tokens[at..=at]);
        stream.iter_mut().zip(more).for_each(|(all, more)| all.extend(more));
    }
    rows(0, tokens.len(), &stream.concat())
}

/// The trainer's pass over this sequence and no other.
pub(super) fn trainer(trainer: &Trainer, whole: &Sequence) -> Result<Vec<StreamRow>> {
    let stream = trainer.streams(std::slice::from_ref(whole))?.remove(0);
    Ok(rows(0, whole.tokens.len(), &stream.concat()))
}

/// From `[parts, tokens]`, the first of which is at position `first`.
pub(super) fn rows(first: u32, tokens: usize, stream: &[u64]) -> Vec<StreamRow> {
    let row = |token: usize| StreamRow {
        position: Position::new(first + token as u32),
        parts: stream.chunks_exact(tokens).map(|part| part[token]).collect(),
    };
    (0..tokens).map(row).collect()
}

/// Where an engine's prefill sends each token in `layer`, whose experts are the model's part number
/// `part`.
pub(super) fn prefill_routes(
    engine: &Engine,
    whole: &Sequence,
    (part, layer): (usize, LayerId),
) -> Routes {
    let mut middle_th = Vec::new();
    let mut see = |seen: Seen<'_>| match seen {
        Seen::Stream { part: before, x_th } if before + 1 == part => middle_th.extend(x_th),
        _ => {}
    };
    let feed = Feed { sequence: 0, phase: Phase::Prefill, tokens: &whole.tokens };
    engine.scratch(1).feed(engine.runner(), &[feed], Some(&mut see));
    let choices = engine.runner().routes(layer, middle_th).expect("the part is of experts");
    let token = |choices: &[Choice]| TokenRoutes {
        experts: vec![choices.iter().map(|one| one.expert as u32).collect()],
        weights: Some(vec![choices.iter().map(|one| one.weight).collect()]),
    };
    let per_token = choices.len() / whole.tokens.len();
    choices.chunks_exact(per_token).map(|choices| Some(token(choices))).collect()
}

/// Where the trainer sends each token in its layer with experts number `nth`, counted from 0 among
/// those.
pub(super) fn trainer_routes(trainer: &Trainer, whole: &Sequence, nth: usize) -> Result<Routes> {
    let all = trainer.routes(std::slice::from_ref(whole))?.remove(0);
    let of_layer = |token: TokenRoutes| TokenRoutes {
        experts: vec![token.experts[nth].clone()],
        weights: token.weights.map(|weights| vec![weights[nth].clone()]),
    };
    Ok(all.into_iter().map(|token| token.map(of_layer)).collect())
}

/// `[parts][tokens]` of the next tokens of a scratch's only sequence.
fn fed(engine: &Engine, scratch: &mut Scratch, phase: Phase, tokens: &[TokenId]) -> Vec<Vec<u64>> {
    let runner = engine.runner();
    let mut stream: Vec<Vec<u64>> = Vec::new();
    let mut see = |seen: Seen<'_>| {
        let Seen::Stream { part, x_th } = seen else { return };
        stream.resize(part + 1, Vec::new());
        stream[part].extend(row_digests(runner.hidden(), x_th));
    };
    scratch.feed(runner, &[Feed { sequence: 0, phase, tokens }], Some(&mut see));
    stream
}
