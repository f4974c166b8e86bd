//! The words of a request's life, from what was seen of it.

mod beginning;
mod ending;

use anyhow::Result;

use super::super::session::{Comparison, Session};
use super::legs::Parted;
use super::past::Past;
use crate::base::RequestId;
use crate::engine::{Completion, Trace, TracedRow, TracedStep};
use crate::gap::Sequence;
use crate::report::{aligned, Block, RunFolder, Section, Story};
use crate::rollout::Rollout;

/// Engine steps that are listed one by one at each end of a life; the rest is between.
const STEPS_LISTED: usize = 12;

/// All that is known of a request whose step has just been compared.
pub(super) struct Life<'a> {
    pub folder: &'a RunFolder,
    pub session: &'a Session,
    pub comparison: &'a Comparison,
    /// Of the step; the request's own has every leg.
    pub rollouts: &'a [Rollout],
    pub index: usize,
    /// The engine steps that it was in.
    pub trace: &'a Trace,
    pub past: &'a Past,
    pub parted: &'a Parted,
    /// What earlier steps have shown of the engine's state index.
    pub index_bits: Option<u32>,
}

/// The whole story.
pub(super) fn tell(life: &Life<'_>) -> Result<Story> {
    let section = |heading, blocks| Section { heading, blocks };
    let mut sections = vec![
        section("What happened", vec![Block::Text(life.what_happened())]),
        section("Engine steps", vec![Block::Table(life.engine_steps())]),
        section("Blocks", vec![Block::Table(life.blocks())]),
    ];
    if let Some(batch) = life.first_batch() {
        sections.push(section("The batch of its first engine step, before the reorder", batch));
    }
    if let Some(token) = life.first_bad_token() {
        sections.push(section("First bad token", vec![Block::Text(token)]));
    }
    sections.push(section("Legs", life.legs()?));
    sections.push(section("Layers", vec![Block::Table(life.layers())]));
    let findings = life.findings();
    if !findings.is_empty() {
        sections.push(section("Finding", findings.into_iter().map(Block::Text).collect()));
    }
    sections.push(section("See it again", vec![Block::Table(life.commands())]));
    let verdict = if life.is_bad() { "where it went wrong" } else { "a clean request" };
    Ok(Story { title: format!("request {}: {verdict}", life.request()), sections })
}

impl Life<'_> {
    fn done(&self) -> &Completion {
        &self.rollouts[self.index].completion
    }

    fn request(&self) -> RequestId {
        self.done().id
    }

    fn sequence(&self) -> &Sequence {
        &self.comparison.pairs.sequences[self.index]
    }

    /// Of the step's tokens, nats.
    fn floor(&self) -> f64 {
        self.session.floor(self.comparison.pairs.tokens().count() as u64)
    }

    fn is_bad(&self) -> bool {
        self.sequence().is_bad(self.floor())
    }

    /// The engine steps it was in, each with its own row.
    fn rows(&self) -> impl DoubleEndedIterator<Item = (&TracedStep, &TracedRow)> + Clone {
        let request = self.request();
        self.trace.steps.iter().filter_map(move |step| Some((step, step.row_of(request)?)))
    }

    fn engine_steps(&self) -> String {
        let head = ["engine step", "as", "scheduled", "computed before", "row", "rows", "tokens"];
        let line = |(step, row): (&TracedStep, &TracedRow)| -> Vec<String> {
            let place = step.rows.iter().position(|other| other.request == row.request);
            let tokens: u32 = step.rows.iter().map(|row| row.scheduled_tokens).sum();
            vec![
                step.engine_step.to_string(),
                if row.is_decode { "decode" } else { "prefill" }.to_owned(),
                row.scheduled_tokens.to_string(),
                row.computed_tokens.to_string(),
                place.map_or(String::new(), |place| place.to_string()),
                step.rows.len().to_string(),
                format!("{tokens} of {}", step.budget),
            ]
        };
        let all: Vec<Vec<String>> = self.rows().map(line).collect();
        let mut lines = vec![head.map(str::to_owned).to_vec()];
        if all.len() <= 2 * STEPS_LISTED {
            lines.extend(all);
        } else {
            let between = all.len() - 2 * STEPS_LISTED;
            let mut dots = vec![String::new(); head.len()];
            dots[0] = format!("... {between} more");
            lines.extend_from_slice(&all[..STEPS_LISTED]);
            lines.push(dots);
            lines.extend_from_slice(&all[all.len() - STEPS_LISTED..]);
        }
        let cut = match self.trace.cut {
            0 => String::new(),
            cut => {
                format!("{cut} more engine steps are not on record: they took too much memory\n")
            }
        };
        aligned(lines) + &cut
    }
}

/// `1 token`, `2 tokens`, in words where it is one.
fn counted(n: u64, noun: &str) -> String {
    match n {
        1 => format!("one {noun}"),
        n => format!("{n} {noun}s"),
    }
}
