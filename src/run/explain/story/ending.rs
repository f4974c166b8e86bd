//! What came of a request: its first bad token, who disagrees with whom, and from which layer on.

use std::collections::HashMap;

use anyhow::Result;

use super::beginning::quoted;
use super::{counted, Life};
use crate::base::{CompletionIndex, LogProb};
use crate::gap::{self, FirstDifference, Legs};
use crate::report::{aligned, Block};
use crate::run::session::Known;

impl Life<'_> {
    /// How it ended, in a sentence.
    pub(super) fn outcome(&self) -> String {
        let (floor, sequence) = (self.floor(), self.sequence());
        let compared = counted(sequence.tokens.len() as u64, "compared token");
        let Some(first) = sequence.first_bad(floor) else {
            return match floor {
                0.0 => format!(
                    "It is clean: engine and trainer have the same log-probability for each of its \
                     {compared}, to the last bit."
                ),
                floor => format!(
                    "It is clean: engine and trainer differ by no more than the floor of {floor:?} \
                     in any of its {compared}."
                ),
            };
        };
        let bad = sequence.tokens.iter().filter(|token| token.gap() > floor).count();
        let others = self.comparison.pairs.bad(floor).count() as u64 - 1;
        let alone = match others {
            0 => "all other requests of the step are clean".to_owned(),
            others => format!("{} of the step went wrong too", counted(others, "other request")),
        };
        let parted = self.decode_and_trainer().map_or(String::new(), |first| {
            format!(" Its forward parts from the trainer's in {first}.")
        });
        format!(
            "Of its {compared} {bad} have another log-probability from the trainer, the first at \
             completion index {first}; {alone}.{parted}"
        )
    }

    pub(super) fn first_bad_token(&self) -> Option<String> {
        let (done, floor) = (self.done(), self.floor());
        let first = self.sequence().first_bad(floor)?;
        let sampled = &done.tokens[first.index()];
        let text = |to: CompletionIndex| {
            let tokens: Vec<_> = done.token_ids().take(to.index()).collect();
            let codec = &self.session.codec;
            let all: Vec<_> = done.prompt.iter().copied().chain(tokens).collect();
            quoted(&codec.decode(&all), true)
        };
        let trainer = self.leg(|rollout| rollout.trainer.as_ref(), first);
        let decode = f64::from(sampled.logp.get());
        let d = trainer.map_or(f64::NAN, |logp| f64::from(logp.get()) - decode);
        Some(format!(
            "Completion index {first}, position {}: token {} {}, after {}. The engine sampled it \
             in engine step {} as a {} row ({} with {} computed before; row {} of {}) with \
             log-probability {}; the trainer gives it {}: d = {} nats.",
            done.prompt.len() + first.index(),
            sampled.token,
            quoted(&self.session.codec.decode(&[sampled.token]), false),
            text(first),
            sampled.engine_step,
            sampled.phase.name(),
            counted(sampled.scheduled_tokens.into(), "token"),
            sampled.computed_tokens,
            sampled.batch_row,
            sampled.batch_rows,
            sampled.logp.get(),
            trainer.map_or("none".to_owned(), |logp| logp.get().to_string()),
            nats(d),
        ))
    }

    /// Every leg at the first bad token, the largest difference of each pair, and whose fault it
    /// is.
    pub(super) fn legs(&self) -> Result<Vec<Block>> {
        let own = std::slice::from_ref(&self.rollouts[self.index]);
        let at = self.sequence().first_bad(self.floor()).unwrap_or_default();
        let legs = [
            ("decode", Some(self.done().tokens[at.index()].logp)),
            ("prefill", self.leg(|rollout| rollout.prefill.as_ref(), at)),
            ("trainer", self.leg(|rollout| rollout.trainer.as_ref(), at)),
            ("reference", self.leg(|rollout| rollout.reference.as_ref(), at)),
        ];
        let mut lines = vec![vec!["leg".to_owned(), format!("log-probability at index {at}")]];
        for (name, logp) in legs {
            let logp = logp.map_or("not taken".to_owned(), |logp| logp.get().to_string());
            lines.push(vec![name.to_owned(), logp]);
        }
        let mut blocks = vec![Block::Table(aligned(lines))];
        let mut lines = vec![vec!["pair".to_owned(), "largest |d|, nats".to_owned()]];
        for legs in
            [Legs::DecodePrefill, Legs::PrefillTrainer, Legs::DecodeTrainer, Legs::TrainerReference]
        {
            let pairs = gap::pair(own, legs)?;
            let gap = pairs.sequences[0].gap().map_or("not taken".to_owned(), nats);
            let pair = format!("{} against {}", legs.infer().name(), legs.train().name());
            lines.push(vec![pair, gap]);
        }
        blocks.push(Block::Table(aligned(lines)));
        if let Some((_, blame)) = gap::blame_requests(own, self.floor())?.first() {
            blocks.push(Block::Text(format!("Three-way check: {blame}.")));
        }
        Ok(blocks)
    }

    pub(super) fn layers(&self) -> String {
        let head = ["legs", "part first in", "at position"].map(str::to_owned).to_vec();
        let line = |(one, other, first): &(&str, &str, Option<FirstDifference>)| {
            let (part, position) = match first {
                Some(first) => (first.part.to_string(), first.position.to_string()),
                None => ("nothing: equal after every layer".to_owned(), String::new()),
            };
            vec![format!("{one} against {other}"), part, position]
        };
        aligned(std::iter::once(head).chain(self.parted.iter().map(line)).collect())
    }

    /// Those that name the request, judged once more with the layers at hand.
    pub(super) fn findings(&self) -> Vec<String> {
        if !self.is_bad() {
            return Vec::new();
        }
        let first = self.decode_and_trainer();
        let layers: HashMap<_, _> =
            first.map(|first| (self.request(), first)).into_iter().collect();
        let Life { session, comparison, rollouts, .. } = self;
        let known = Known {
            spike: comparison.gap.spike,
            index_bits: self.index_bits,
            looks: &comparison.looks,
            layers: Some(&layers),
        };
        let (all, _) = session.judge(comparison.step, rollouts, &comparison.pairs, &known);
        // A spike by its means alone has no request over the floor.
        let all = if all.is_empty() { comparison.findings.clone() } else { all };
        let mut of_request: Vec<String> = all
            .iter()
            .filter(|finding| finding.requests.contains(&self.request()))
            .map(|finding| format!("{}: {}", finding.kind.name(), finding.message))
            .collect();
        if of_request.is_empty() {
            // A finding lists so many requests and counts the rest.
            let kinds =
                all.iter().map(|finding| format!("{}: {}", finding.kind.name(), finding.message));
            of_request.extend(kinds);
        }
        of_request
    }

    fn decode_and_trainer(&self) -> Option<FirstDifference> {
        let mut both =
            self.parted.iter().filter(|(one, other, _)| (*one, *other) == ("decode", "trainer"));
        both.find_map(|(_, _, first)| *first)
    }

    pub(super) fn commands(&self) -> String {
        let (run, request) = (self.folder.root().display(), self.request());
        let mut text = format!("gapscope explain {run} --request {request}\n");
        if self.is_bad() {
            text += &format!("gapscope bisect {run} --step {}\n", self.comparison.step);
        }
        text
    }

    fn leg(
        &self,
        leg: impl Fn(&crate::rollout::Rollout) -> Option<&crate::rollout::LegLogProbs>,
        at: CompletionIndex,
    ) -> Option<LogProb> {
        leg(&self.rollouts[self.index])?.get(at.index()).copied().flatten()
    }
}

/// Five digits, and 0 for nothing but 0.
fn nats(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        1e-3..1e5 => format!("{value:.4}"),
        _ => format!("{value:.4e}"),
    }
}
