//! What a model computes on the way to log-probabilities, for whoever has a question that these
//! do not answer: logits, hidden states, routers' choices.

use super::super::head;
use super::super::pass::{self, Chunk};
use super::super::{Inspection, Sequence, TrainerError};
use super::Worker;
use crate::base::TokenId;
use crate::model::{row_digests, Block, ExpertsShape};
use crate::ops::routing::Routing;
use crate::rollout::{Routes, TokenRoutes};

/// What the model says of one completion token.
#[derive(Clone, Copy, Debug)]
pub struct Prediction<'a> {
    /// Index of its sequence, in the caller's list.
    pub sequence: usize,
    /// In the completion, from 0.
    pub index: usize,
    pub token: TokenId,
    /// `[V]`, before any temperature.
    pub logits: &'a [f32],
}

impl Worker {
    /// What `see` makes of each completion token, for each sequence. It is called from several
    /// threads; of the logits no more than a few rows a thread exist at once.
    pub(in crate::trainer) fn map_logits<T: Send>(
        &self,
        sequences: &[Sequence],
        see: impl Fn(Prediction<'_>) -> T + Sync,
    ) -> Result<Vec<Vec<T>>, TrainerError> {
        let ((mut chunks, prompt_lens), shape) = (self.pack(sequences), self.shape());
        let root = pass::forward(shape, &self.supply(), &mut chunks, false, None)?;
        let seen: Vec<Vec<T>> = self.device.map(&mut chunks, |_, chunk| {
            let targets = head::targets(chunk, &prompt_lens);
            let mut seen = Vec::with_capacity(targets.len());
            let mut places = places(chunk, &prompt_lens);
            for part in targets.chunks(shape.device.logit_rows()) {
                let logits_rv = root.logits(shape.num, &head::rows(&root, chunk, part)).into_host();
                for (target, logits) in part.iter().zip(logits_rv.chunks_exact(root.vocab())) {
                    let (sequence, index) = places.next().expect("one place a target");
                    seen.push(see(Prediction { sequence, index, token: target.token, logits }));
                }
            }
            seen
        });
        let mut flat = seen.into_iter().flatten();
        let of = |one: &Sequence| flat.by_ref().take(one.tokens.len() - one.prompt_len).collect();
        Ok(sequences.iter().map(of).collect())
    }

    /// Where the model's routers send every token of the sequences; of a model without experts,
    /// nowhere.
    pub(in crate::trainer) fn routes(
        &self,
        sequences: &[Sequence],
    ) -> Result<Vec<Routes>, TrainerError> {
        let (mut chunks, _) = self.pack(sequences);
        let none = TokenRoutes { experts: Vec::new(), weights: Some(Vec::new()) };
        let all = |one: &Sequence| vec![Some(none.clone()); one.tokens.len()];
        let mut routes: Vec<Routes> = sequences.iter().map(all).collect();
        let shape = self.shape();
        let experts = self.plan.config.feed_forward.as_ref().and_then(|shape| shape.experts);
        let Some(ExpertsShape { count, per_token, .. }) = experts else { return Ok(routes) };
        let routing = Routing { experts: count, per_token };
        let mut observe = |block: &Block, chunks: &[Chunk]| {
            for chunk in chunks {
                let logits_te = block.router_logits(shape.num, &chunk.spans, chunk.x.settled());
                let Some(logits_te) = logits_te else { continue };
                let choices = routing.choose(&logits_te, shape.num.dtype);
                let mut rows = choices.chunks_exact(per_token);
                for (span, &sequence) in chunk.spans.iter().zip(&chunk.sequences) {
                    for (token, row) in
                        routes[sequence].iter_mut().zip(rows.by_ref().take(span.len))
                    {
                        let token = token.as_mut().expect("every token is routed");
                        token.experts.push(row.iter().map(|one| one.expert as u32).collect());
                        let weights = token.weights.as_mut().expect("with its weights");
                        weights.push(row.iter().map(|one| one.weight).collect());
                    }
                }
            }
        };
        pass::forward(shape, &self.supply(), &mut chunks, false, Some(&mut observe))?;
        Ok(routes)
    }

    /// `[sequences][parts][tokens]`: digests of the residual stream after each of
    /// [`crate::model::Plan::parts`].
    pub(in crate::trainer) fn streams(
        &self,
        sequences: &[Sequence],
    ) -> Result<Vec<Vec<Vec<u64>>>, TrainerError> {
        let (mut chunks, _) = self.pack(sequences);
        let (shape, hidden) = (self.shape(), self.plan.config.hidden_size);
        let mut streams = vec![Vec::new(); sequences.len()];
        let mut keep = |chunk: &Chunk, x_th: &[f32]| {
            for (span, &sequence) in chunk.spans.iter().zip(&chunk.sequences) {
                let digests = row_digests(hidden, &x_th[span.floats(hidden)]).collect();
                streams[sequence].push(digests);
            }
        };
        let mut observe = |block: &Block, chunks: &[Chunk]| {
            for chunk in chunks {
                keep(chunk, &chunk.x.settled().on_host());
                if block.has_feed_forward() {
                    let mut middle = chunk.x.clone();
                    block.mix(shape.num, &chunk.spans, &mut middle);
                    keep(chunk, &middle.settle(shape.num).on_host());
                }
            }
        };
        pass::forward(shape, &self.supply(), &mut chunks, false, Some(&mut observe))?;
        for chunk in &chunks {
            keep(chunk, &chunk.x.settled().on_host());
        }
        Ok(streams)
    }

    /// Every hidden state and logit of whole sequences, for comparison with other implementations.
    pub(in crate::trainer) fn inspect(
        &self,
        sequences: &[Sequence],
    ) -> Result<Vec<Inspection>, TrainerError> {
        let (mut chunks, _) = self.pack(sequences);
        let (h, v) = (self.plan.config.hidden_size, self.plan.config.vocab_size);
        let mut inspections = vec![Inspection::default(); sequences.len()];
        let mut keep = |chunk: &Chunk, x_th: &[f32]| {
            for (span, &sequence) in chunk.spans.iter().zip(&chunk.sequences) {
                inspections[sequence].hidden.push(x_th[span.floats(h)].to_vec());
            }
        };
        let mut routers = vec![Vec::new(); sequences.len()];
        let mut observe = |block: &Block, chunks: &[Chunk]| {
            for chunk in chunks {
                keep(chunk, &chunk.x.settled().to_host());
                let logits_te = block.router_logits(&self.num, &chunk.spans, chunk.x.settled());
                let Some(logits_te) = logits_te else { continue };
                let logits_te = logits_te.into_host();
                let experts = logits_te.len() / chunk.tokens.len();
                for (span, &sequence) in chunk.spans.iter().zip(&chunk.sequences) {
                    routers[sequence].push(logits_te[span.floats(experts)].to_vec());
                }
            }
        };
        let (shape, supply) = (self.shape(), self.supply());
        let root = pass::forward(shape, &supply, &mut chunks, false, Some(&mut observe))?;
        for chunk in &chunks {
            keep(chunk, &root.norm(&self.num, chunk.x.settled()).into_host());
        }
        for (inspection, router) in inspections.iter_mut().zip(routers) {
            inspection.router_logits = router;
        }
        for chunk in &chunks {
            let logits_tv = root.logits(&self.num, chunk.x.settled()).into_host();
            for (span, &sequence) in chunk.spans.iter().zip(&chunk.sequences) {
                inspections[sequence].logits = logits_tv[span.floats(v)].to_vec();
            }
        }
        Ok(inspections)
    }
}

/// Sequence and completion index of each of a chunk's targets.
fn places<'a>(
    chunk: &'a Chunk,
    prompt_lens: &'a [usize],
) -> impl Iterator<Item = (usize, usize)> + 'a {
    chunk.spans.iter().zip(&chunk.sequences).flat_map(|(span, &sequence)| {
        (0..span.len - prompt_lens[sequence]).map(move |index| (sequence, index))
    })
}
