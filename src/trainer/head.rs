//! From what left the last block to log-probabilities of targets, and back.
//!
//! Logits exist for a bounded number of rows at a time; a row is never cut.

use super::pass::{Chunk, Shape};
use crate::base::{Contract, LogProb, TokenId};
use crate::model::Root;
use crate::ops::log_softmax;
use crate::ops::sampling::Sampler;

/// Rows whose logits exist at once: 64 x 65,536 x 4 bytes are 16 MiB a thread.
const LOGIT_ROWS: usize = 64;

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
    let (mut sampler, mut scored) = (Sampler::default(), Vec::with_capacity(targets.len()));
    for part in targets.chunks(LOGIT_ROWS) {
        let logits_tv = root.logits(shape.num, &rows(shape, chunk, part));
        for (target, logits_v) in part.iter().zip(logits_tv.chunks_exact(root.vocab())) {
            scored.push(Scored {
                contract: sampler.log_prob(logits_v, target.token, contract),
                ratio: sampler.log_prob(logits_v, target.token, &ratio),
            });
        }
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

/// Copies the targets' rows side by side.
fn rows(shape: Shape<'_>, chunk: &Chunk, targets: &[Target]) -> Vec<f32> {
    let h = shape.plan.config.hidden_size;
    targets.iter().flat_map(|target| &chunk.x_th[target.row * h..][..h]).copied().collect()
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
    grads: &mut [f32],
) -> Vec<f32> {
    assert_eq!(targets.len(), upstream.len(), "one gradient a target");
    let (h, v) = (shape.plan.config.hidden_size, root.vocab());
    let mut dx_th = vec![0.0; chunk.x_th.len()];
    for (part, upstream) in targets.chunks(LOGIT_ROWS).zip(upstream.chunks(LOGIT_ROWS)) {
        let x_rh = rows(shape, chunk, part);
        let mut logits_rv = root.logits(shape.num, &x_rh);
        let mut dlogits_rv = vec![0.0; logits_rv.len()];
        let rows = logits_rv.chunks_exact_mut(v).zip(dlogits_rv.chunks_exact_mut(v));
        for ((logits, dlogits), (target, up)) in rows.zip(part.iter().zip(upstream)) {
            logits.iter_mut().for_each(|x| *x /= temperature);
            log_softmax::backward(logits, target.token.index(), up / temperature, dlogits);
        }
        let spec = &shape.plan.units[0];
        let dx_rh = root.backward_head(shape.num, spec, &x_rh, &dlogits_rv, grads);
        for (target, dx) in part.iter().zip(dx_rh.chunks_exact(h)) {
            dx_th[target.row * h..][..h].copy_from_slice(dx);
        }
    }
    dx_th
}
