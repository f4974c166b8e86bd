//! Planted faults of the scoring pass. A healthy pass goes through none of this.

use super::head::{self, Scored, Target};
use super::pass::{Chunk, Shape};
use crate::base::{Contract, LogProb, Position, Stream, TokenId};
use crate::config::{Dtype, Fault};
use crate::model::{MixerKind, Root, Span, Spans};
use crate::ops::array::{Array, Device};
use crate::ops::embedding::Tokens;

/// Of [`Fault::Dropout`].
const DROPOUT_RATE: f64 = 0.1;

/// How a chunk's pass is off.
#[derive(Debug, Default)]
pub(super) struct Planted {
    /// The rows as Mamba layers see them.
    state: Option<Spans>,
    /// The rows as attention layers see them.
    context: Option<Spans>,
    dropout: Option<Stream>,
}

impl Planted {
    /// The rows as a layer's mixer sees them.
    pub(super) fn spans<'a>(&'a self, mixer: MixerKind, own: &'a Spans) -> &'a Spans {
        let other = match mixer {
            MixerKind::Mamba => &self.state,
            MixerKind::Attention => &self.context,
        };
        other.as_ref().unwrap_or(own)
    }

    /// What becomes of the embedded tokens.
    pub(super) fn embedded(&mut self, x_th: &mut Array, dtype: Dtype) {
        let Some(stream) = &mut self.dropout else { return };
        let kept = 1.0 / (1.0 - DROPOUT_RATE) as f32;
        let mut drop = |x: f32| if stream.uniform() < DROPOUT_RATE { 0.0 } else { x * kept };
        let dropped = x_th.to_host().into_iter().map(&mut drop).collect();
        *x_th = x_th.device().upload(dropped);
        x_th.round_to(dtype);
    }
}

/// Plants the faults that change a pass. `pass` counts passes, so that no two drop the same.
pub(super) fn plant(
    faults: &[Fault],
    pass: u64,
    pad: TokenId,
    device: &Device,
    chunks: &mut [Chunk],
    prompt_lens: &mut [usize],
) {
    for (index, chunk) in (0..).zip(chunks) {
        for fault in faults {
            match fault {
                Fault::PadsEnterState => left_pad(chunk, prompt_lens, pad, device),
                Fault::NoDocumentReset => {
                    let whole = Span { start: 0, len: chunk.tokens.len(), position: FIRST };
                    chunk.planted.state = Some(Spans::new(device, vec![whole]));
                }
                Fault::PositionOffset => {
                    let longest = longest(chunk);
                    let moved = |span: &Span| Span { position: at(longest - span.len), ..*span };
                    let moved = chunk.spans.iter().map(moved).collect();
                    chunk.planted.context = Some(Spans::new(device, moved));
                }
                Fault::Dropout => chunk.planted.dropout = Some(Stream::new(pass, "dropout", index)),
                _ => {}
            }
        }
    }
}

const FIRST: Position = Position::new(0);

fn at(place: usize) -> Position {
    Position::new(u32::try_from(place).expect("a chunk is shorter than 2^32 tokens"))
}

fn longest(chunk: &Chunk) -> usize {
    chunk.spans.iter().map(|span| span.len).max().unwrap_or(0)
}

/// Fills every sequence up in front to the longest of its chunk. Attention is masked: padding has
/// spans of its own there. Mamba layers take padding and sequence for one.
fn left_pad(chunk: &mut Chunk, prompt_lens: &mut [usize], pad: TokenId, device: &Device) {
    let longest = longest(chunk);
    let (mut tokens, mut spans, mut context) = (Vec::new(), Vec::new(), Vec::new());
    for (span, &sequence) in chunk.spans.iter().zip(&chunk.sequences) {
        let (start, pads) = (tokens.len(), longest - span.len);
        tokens.resize(start + pads, pad);
        tokens.extend_from_slice(&chunk.tokens[span.start..span.start + span.len]);
        spans.push(Span { start, len: longest, position: FIRST });
        if pads > 0 {
            context.push(Span { start, len: pads, position: FIRST });
        }
        context.push(Span { start: start + pads, len: span.len, position: FIRST });
        prompt_lens[sequence] += pads;
    }
    chunk.tokens = Tokens::new(device, tokens);
    chunk.spans = Spans::new(device, spans);
    chunk.planted.context = Some(Spans::new(device, context));
}

/// What becomes of a chunk's scores under [`Fault::BatchDependentReduction`]: the normaliser is
/// summed in as many parts as there are sequences in the chunk. One part is the healthy sum.
pub(super) fn sum_by_batch(
    shape: Shape<'_>,
    root: &Root,
    chunk: &Chunk,
    targets: &[Target],
    contract: &Contract,
    scored: &mut [Scored],
) {
    let parts = chunk.sequences.len();
    if parts < 2 || (!contract.scores_raw_logits() && contract.has_filters()) {
        return;
    }
    let temperature = if contract.scores_raw_logits() { 1.0 } else { contract.temperature };
    let at_once = shape.device.logit_rows();
    let rows = targets.chunks(at_once).zip(scored.chunks_mut(at_once));
    for (targets, scored) in rows {
        let logits_rv = root.logits(shape.num, &head::rows(root, chunk, targets)).into_host();
        let each = logits_rv.chunks_exact(root.vocab()).zip(targets).zip(scored);
        for ((logits_v, target), scored) in each {
            let scaled: Vec<f32> = logits_v.iter().map(|x| x / temperature).collect();
            scored.contract = log_prob_in_parts(&scaled, target.token, parts);
        }
    }
}

fn log_prob_in_parts(logits_v: &[f32], token: TokenId, parts: usize) -> LogProb {
    let max = logits_v.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
    let part = |part: &[f32]| part.iter().fold(0.0_f32, |sum, &x| sum + (x - max).exp());
    let sum: f32 = logits_v.chunks(logits_v.len().div_ceil(parts)).map(part).sum();
    LogProb::new((logits_v[token.index()] - max) - sum.ln())
}

#[cfg(test)]
mod tests {
    /// Three numbers whose f32 sum is 0 from left to right, and 1 with the large pair first.
    #[test]
    fn k24_the_order_of_a_sum_is_part_of_it() {
        let left_to_right = [1e8_f32, 1.0, -1e8].iter().fold(0.0_f32, |sum, x| sum + x);
        let pair_first = [1e8_f32, -1e8, 1.0].iter().fold(0.0_f32, |sum, x| sum + x);
        assert_eq!((left_to_right, pair_first), (0.0, 1.0));
    }
}
