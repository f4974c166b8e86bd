//! Decode rows over tokens that are known: a decode replayed.

use super::{Feed, Phase, Runner, Scratch};
use crate::base::{Contract, LogProb, TokenId};
use crate::ops::array::Array;

/// A sequence whose tokens from `prompt_len` on are forced, and scored.
#[derive(Clone, Copy, Debug)]
pub struct Forced<'a> {
    pub tokens: &'a [TokenId],
    pub prompt_len: usize,
}

impl<'a> Forced<'a> {
    /// The prompt as one prefill row.
    fn prompt(&self, sequence: usize) -> Feed<'a> {
        Feed { sequence, phase: Phase::Prefill, tokens: &self.tokens[..self.prompt_len] }
    }

    /// The token at `at` as a decode row; none where nothing comes after it.
    fn after(&self, sequence: usize, at: usize) -> Option<Feed<'a>> {
        let tokens = self.tokens.get(at..=at).filter(|_| at + 1 < self.tokens.len())?;
        Some(Feed { sequence, phase: Phase::Decode, tokens })
    }
}

impl Runner {
    /// The prompts as prefill rows, then every later token as a decode row of its own, the
    /// sequences side by side in a fresh pool. Log-probabilities under the contract.
    #[must_use]
    pub fn decode_forced(
        &self,
        contract: &Contract,
        mut scratch: Scratch,
        sequences: &[Forced<'_>],
    ) -> Vec<Vec<LogProb>> {
        let mut scores = vec![Vec::new(); sequences.len()];
        let more = |i: &usize| sequences[*i].prompt_len < sequences[*i].tokens.len();
        let prompt = |i: usize| sequences[i].prompt(i);
        let mut feeds: Vec<Feed<'_>> = (0..sequences.len()).filter(more).map(prompt).collect();
        // Of every sequence that is still fed.
        let mut scored = 0;
        while !feeds.is_empty() {
            let x_th = scratch.feed(self, &feeds, None);
            let place = |feed: &Feed<'_>| sequences[feed.sequence].prompt_len + scored;
            let target = |feed: &Feed<'_>| sequences[feed.sequence].tokens[place(feed)];
            let targets: Vec<TokenId> = feeds.iter().map(target).collect();
            let rows = x_th.gather_rows(self.hidden(), &last_rows(&feeds));
            for (feed, logp) in feeds.iter().zip(self.each_row(contract, &rows, &targets)) {
                scores[feed.sequence].push(logp);
            }
            let next = |feed: &Feed<'_>| sequences[feed.sequence].after(feed.sequence, place(feed));
            feeds = feeds.iter().filter_map(next).collect();
            scored += 1;
        }
        scores
    }

    /// log p of each target from the row before it, `[T, H]` as it left the last layer.
    fn each_row(&self, contract: &Contract, x_th: &Array, targets: &[TokenId]) -> Vec<LogProb> {
        let at_once = self.device().logit_rows();
        let mut parts: Vec<&[TokenId]> = targets.chunks(at_once).collect();
        let scored = self
            .device()
            .map(&mut parts, |i, targets| self.log_probs(contract, x_th, i * at_once, targets));
        scored.into_iter().flatten().collect()
    }
}

/// The last row of each feed, in the batch.
fn last_rows(feeds: &[Feed<'_>]) -> Vec<usize> {
    let mut end = 0;
    let last = |feed: &Feed<'_>| {
        end += feed.tokens.len();
        end - 1
    };
    feeds.iter().map(last).collect()
}
