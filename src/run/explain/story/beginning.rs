//! How a request came in, as what its first tokens ran, and what lay in its blocks.

use super::{counted, Life};
use crate::base::{BlockId, RequestId};
use crate::config::BatchSplit;
use crate::engine::{Admission, StateBlock, TracedRow, TracedStep};
use crate::ops::slot::state_offset;
use crate::report::{aligned, row_table, Block};

/// Rows of a batch that are shown around the request's own.
const ROWS_SHOWN: usize = 12;
/// Characters of a text that is quoted.
const QUOTED: usize = 48;

impl Life<'_> {
    pub(super) fn what_happened(&self) -> String {
        let mut all = vec![self.asked()];
        for (step, row) in self.beginnings() {
            all.push(self.admitted(step, row));
            all.push(self.began(step, row));
        }
        all.extend(self.wrapped());
        all.push(self.outcome());
        all.retain(|sentence| !sentence.is_empty());
        all.join(" ")
    }

    /// The first row of each of its lives.
    fn beginnings(&self) -> impl Iterator<Item = (&TracedStep, &TracedRow)> {
        self.rows().filter(|(_, row)| row.admission != Admission::Running)
    }

    /// Who it is.
    fn asked(&self) -> String {
        let (done, rollout) = (self.done(), &self.rollouts[self.index]);
        let completions = self.rollouts.iter().map(|other| &other.completion);
        let beside = completions.filter(|other| other.engine == done.engine);
        let before = beside.clone().filter(|other| other.id < done.id).count();
        let several = self.session.engines().iter().len() > 1;
        let there = if several { format!(" on engine {}", done.engine) } else { String::new() };
        format!(
            "{} is one of {} of step {}{there}, the {} to arrive: {} ending in {}, to which it \
             sampled {}, {}.",
            done.id,
            counted(beside.count() as u64, "request"),
            self.comparison.step,
            ordinal(before as u64 + 1),
            counted(done.prompt.len() as u64, "prompt token"),
            quoted(&rollout.prompt_text, true),
            counted(done.tokens.len() as u64, "token"),
            quoted(&rollout.completion_text, false),
        )
    }

    fn admitted(&self, step: &TracedStep, row: &TracedRow) -> String {
        let (request, own) = (row.request, row.scheduled_tokens);
        let others = step.rows.len() as u64 - 1;
        let taken: u32 = step.rows.iter().map(|row| row.scheduled_tokens).sum::<u32>() - own;
        let came = match row.admission {
            Admission::Resumed => "was preempted, lost its blocks, and came back",
            _ => "was admitted",
        };
        // Whoever gets less than it needs is the last one to get anything.
        if !row.samples {
            format!(
                "{request} {came} in engine step {} with the {} of budget that the {} of the batch \
                 had left ({taken} of {}).",
                step.engine_step,
                counted(own.into(), "token"),
                counted(others, "other request"),
                step.budget,
            )
        } else {
            format!(
                "{request} {came} in engine step {}, which computed all its {} at once, beside {}.",
                step.engine_step,
                counted(own.into(), "token"),
                counted(others, "other request"),
            )
        }
    }

    /// As what its first row ran.
    fn began(&self, step: &TracedStep, row: &TracedRow) -> String {
        if row.state_blocks.is_empty() {
            return String::new();
        }
        if row.computed_tokens > 0 {
            return format!("It went on from {} computed before.", row.computed_tokens);
        }
        if !row.is_decode {
            return "Its first chunk ran as a prefill row, which starts from zero whatever its \
                    blocks hold."
                .to_owned();
        }
        let blocks = row.state_blocks.iter().map(|held| {
            let left = match held.previous_owner {
                Some(owner) => format!("{owner} had left {}", self.use_of(step, held.block, owner)),
                None => "nobody had left anything, so that it was still zero".to_owned(),
            };
            format!("block {}, where {left}", held.block)
        });
        format!(
            "{} A decode row reads its state blocks whatever they hold, so it read {}. The rest of \
             the request goes on from there.",
            self.taken_for_a_decode(step, row),
            blocks.collect::<Vec<_>>().join("; "),
        )
    }

    /// By which half of the split rule.
    fn taken_for_a_decode(&self, step: &TracedStep, row: &TracedRow) -> String {
        let split = match self.session.config.engine.batch_split {
            BatchSplit::IsPrefilling => "is_prefilling",
            BatchSplit::ComputedTokens => "computed_tokens",
            BatchSplit::ScheduledTokens => "scheduled_tokens",
        };
        if !row.is_decode_before {
            return format!(
                "The reorder knew its row for a first chunk, but the split rule {split} then ran \
                 it as a decode: it has one token, and no longer row stands before it."
            );
        }
        let placed = step.before_the_reorder();
        let before = placed[..row.place_before].iter().rev();
        let prefills = before.take_while(|row| !row.is_decode_before).count();
        format!(
            "Its row was sorted among the decodes by the split rule {split}, although nothing of \
             it was computed yet: before the reorder is_decode is True for it, after {} for which \
             it is False.",
            counted(prefills as u64, "row"),
        )
    }

    /// What a narrow index does to its blocks.
    fn wrapped(&self) -> Option<String> {
        let bits = self.session.config.engine.state_index_bits;
        let (first, layout) = (self.session.first_wrapped_block()?, self.session.engine().layout());
        let (step, row) = self.rows().next()?;
        let stride = layout.state_stride?;
        let one = |held: &StateBlock| {
            let block = held.block;
            let other = state_offset(block.get().into(), stride, bits) / stride;
            let found = match held.previous_owner {
                Some(owner) => {
                    format!("what {owner} had left, {}", self.use_of(step, block, owner))
                }
                None => "zeros, for nobody had held it".to_owned(),
            };
            format!(
                "its prefill stored the state of block {block} inside block {other}, and in block \
                 {block} its decodes found {found}"
            )
        };
        let far = row.state_blocks.iter().filter(|held| held.block >= first);
        let all: Vec<String> = far.map(one).collect();
        (!all.is_empty()).then(|| {
            format!(
                "Its state lies past the reach of a state index of {bits} bits, which ends before \
                 block {first}, and only prefills index so: {}.",
                all.join("; ")
            )
        })
    }

    /// What a previous owner held a block as.
    fn use_of(&self, step: &TracedStep, block: BlockId, owner: RequestId) -> String {
        let Some(used) = self.past.of(self.rollouts, owner, block, step.engine_step) else {
            return "its bytes".to_owned();
        };
        let what = match used.state_of {
            Some(group) => format!("its state of {}", self.group(group.index())),
            None => "its keys and values".to_owned(),
        };
        format!("{what} (engine steps {} to {})", used.first, used.last)
    }

    /// A Mamba group by its layers, which share the block's pages.
    fn group(&self, group: usize) -> String {
        let layers = &self.session.engine().layout().groups[group].layers;
        let ids: Vec<String> = layers.iter().map(ToString::to_string).collect();
        format!("Mamba layer{} {}", if ids.len() == 1 { "" } else { "s" }, ids.join(", "))
    }

    pub(super) fn blocks(&self) -> String {
        let head = ["block", "holds", "handed out", "before"].map(str::to_owned).to_vec();
        let mut lines = vec![head];
        for (step, row) in self.beginnings() {
            for (group, held) in row.state_blocks.iter().enumerate() {
                let before = held.previous_owner.map_or("nobody".to_owned(), |owner| {
                    format!("{owner}: {}", self.use_of(step, held.block, owner))
                });
                lines.push(vec![
                    held.block.to_string(),
                    format!("state of {}", self.group(group)),
                    counted(held.generation.get().into(), "time"),
                    before,
                ]);
            }
        }
        for life in &self.done().lives {
            let ids: Vec<String> = life.attn_blocks.iter().map(ToString::to_string).collect();
            if !ids.is_empty() {
                let unread = "never read beyond what was written".to_owned();
                lines.push(vec![ids.join(" "), "keys and values".into(), String::new(), unread]);
            }
        }
        aligned(lines)
    }

    /// Its own row and those around it, as they stood when the batch was put together.
    pub(super) fn first_batch(&self) -> Option<Vec<Block>> {
        let (step, row) = self.rows().next()?;
        let placed = step.before_the_reorder();
        let last = (row.place_before + 2).min(placed.len());
        let shown = &placed[last.saturating_sub(ROWS_SHOWN)..last];
        let mut blocks = vec![Block::Table(row_table(shown, &step.rows))];
        let hidden = placed.len() - shown.len();
        if hidden > 0 {
            let rows = counted(hidden as u64, "other row");
            blocks.push(Block::Text(format!("{rows} of this batch are not shown.")));
        }
        Some(blocks)
    }
}

fn ordinal(n: u64) -> String {
    let ending = match (n % 10, n % 100) {
        (1, rest) if rest != 11 => "st",
        (2, rest) if rest != 12 => "nd",
        (3, rest) if rest != 13 => "rd",
        _ => "th",
    };
    format!("{n}{ending}")
}

/// A text in quotes without the space around it, its end or its beginning where it is long.
pub(super) fn quoted(text: &str, end: bool) -> String {
    let text = if end { text.trim_start() } else { text };
    let hidden = text.chars().count().saturating_sub(QUOTED);
    let shown: String = match end {
        true => text.chars().skip(hidden).collect(),
        false => text.chars().take(QUOTED).collect(),
    };
    let spelled = |c: char| match c.is_control() {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    let shown: String = shown.chars().map(spelled).collect();
    match (hidden, end) {
        (0, _) => format!("\"{shown}\""),
        (_, true) => format!("...\"{shown}\""),
        (_, false) => format!("\"{shown}\"..."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_as_one_says_them() {
        for (n, expected) in [
            (1, "1st"),
            (2, "2nd"),
            (3, "3rd"),
            (4, "4th"),
            (11, "11th"),
            (112, "112th"),
            (123, "123rd"),
        ] {
            assert_eq!(ordinal(n), expected);
        }
    }

    #[test]
    fn long_texts_are_cut_where_they_matter_least() {
        assert_eq!(quoted("\n\n a\nb", true), "\"a\\nb\"");
        assert_eq!(quoted("\n", false), "\"\\n\"");
        let long = format!("{}end", "x".repeat(60));
        assert!(
            quoted(&long, true).starts_with("...\"x") && quoted(&long, true).ends_with("end\"")
        );
        assert!(quoted(&long, false).ends_with("xx\"..."));
    }
}
