//! From what left the last block to log-probabilities of targets, and back.
//!
//! Logits exist for a bounded number of rows at a time; a row is never cut.

use super::pass::{Chunk, Shape};
use crate::base::{Contract, LogProb, TokenId};
use crate::model::Root;
use crate::ops::array::Array;
use crate::ops::log_softmax;
use crate::ops::sampling::log_prob_rows;

/// One prediction: what row `row` of a chunk says of `token`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub row: usize,
    pub token: TokenId,
}

/// A sequence's predictions of its tokens from `prompt_len` on, for each sequence of a chunk.
pub(super) fn targets(chunk: &Chunk, prompt_lens: &[usize]) -> Vec<Target> {
    let of_span = |(span, &sequence): (&crate::model::Span, &usize)| {
        let first = span.start + prompt_lens[sequence];
        let tokens = &chunk.tokens;
        (first..span.start + span.len).map(|at| Target { row: at - 1, token: tokens[at] })
    };
    chunk.spans.iter().zip(&chunk.sequences).flat_map(of_span).collect()
}

/// log p of every target under the contract, and under the contract for the policy ratio.
pub(super) fn log_probs(
    shape: Shape<'_>,
    root: &Root,
    chunk: &Chunk,
    targets: &[Target],
    contract: &Contract,
) -> Vec<Scored> {
    let ratio = contract.for_policy_ratio();
    let mut scored = Vec::with_capacity(targets.len());
    for part in targets.chunks(shape.device.logit_rows()) {
        let logits_rv = root.logits(shape.num, &rows(root, chunk, part));
        let tokens = tokens(part);
        let by = |contract| log_prob_rows(&logits_rv, root.vocab(), &tokens, contract);
        let both = by(contract).into_iter().zip(by(&ratio));
        scored.extend(both.map(|(contract, ratio)| Scored { contract, ratio }));
    }
    scored
}

/// One target's log-probabilities.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scored {
    /// What is compared with the engine's record.
    pub contract: LogProb,
    /// Of logits / T without filters: GRPO's old and new log-probabilities.
    pub ratio: LogProb,
}

/// The targets' rows side by side.
pub(super) fn rows(root: &Root, chunk: &Chunk, targets: &[Target]) -> Array {
    let rows: Vec<usize> = targets.iter().map(|target| target.row).collect();
    chunk.x.settled().gather_rows(root.hidden(), &rows)
}

fn tokens(targets: &[Target]) -> Vec<TokenId> {
    targets.iter().map(|target| target.token).collect()
}

/// From d loss / d log p of each target, where log p is of logits / `temperature`: adds the root's
/// gradient to `grads`, returns the gradient by what left the last block, `[T, H]`.
pub(super) fn backward(
    shape: Shape<'_>,
    root: &Root,
    chunk: &Chunk,
    targets: &[Target],
    upstream: &[f32],
    temperature: f32,
    grads: &mut Array,
) -> Array {
    assert_eq!(targets.len(), upstream.len(), "one gradient a target");
    let mut parts = Vec::new();
    let at_once = shape.device.logit_rows();
    for (part, upstream) in targets.chunks(at_once).zip(upstream.chunks(at_once)) {
        let x_rh = rows(root, chunk, part);
        let logits_rv = root.logits(shape.num, &x_rh);
        let tokens = tokens(part);
        let dlogits_rv =
            log_softmax::backward_rows(&logits_rv, root.vocab(), &tokens, upstream, temperature);
        let spec = &shape.plan.units[0];
        parts.push(root.backward_head(shape.num, spec, &x_rh, &dlogits_rv, grads));
    }
    let rows: Vec<usize> = targets.iter().map(|target| target.row).collect();
    let dx_rh = Array::concat(shape.device, parts);
    dx_rh.scatter_rows(root.hidden(), &rows, chunk.tokens.len())
}
