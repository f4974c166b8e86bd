//! Logits of a model, shown row by row to whoever has a question that a log-probability does not
//! answer.

use super::super::head::{self, LOGIT_ROWS};
use super::super::pass::{self, Chunk};
use super::super::{Sequence, TrainerError};
use super::Trainer;
use crate::base::TokenId;

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

impl Trainer {
    /// What `see` makes of each completion token, for each sequence. It is called from several
    /// threads; of the logits no more than a few rows a thread exist at once.
    ///
    /// # Errors
    /// [`TrainerError::RankLeft`].
    pub fn map_logits<T: Send>(
        &self,
        sequences: &[Sequence],
        see: impl Fn(Prediction<'_>) -> T + Sync,
    ) -> Result<Vec<Vec<T>>, TrainerError> {
        let ((mut chunks, prompt_lens), shape) = (self.pack(sequences), self.shape());
        let root = self
            .with_units(|units| pass::forward(shape, units, &mut chunks, false, &mut |_, _| {}))?;
        let seen: Vec<Vec<T>> = self.device.map(&mut chunks, |_, chunk| {
            let targets = head::targets(chunk, &prompt_lens);
            let mut seen = Vec::with_capacity(targets.len());
            let mut places = places(chunk, &prompt_lens);
            for part in targets.chunks(LOGIT_ROWS) {
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
