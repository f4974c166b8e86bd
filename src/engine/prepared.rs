//! A batch as the model takes it, with what is looked up about it on a device.

use std::ops::Range;

use super::{CacheView, LayerPlace, Layout, Phase, Row, StepBatch};
use crate::base::GroupId;
use crate::model::{Span, Spans};
use crate::ops::array::Device;
use crate::ops::embedding::Tokens;
use crate::ops::pages::Tables;
use crate::ops::sheet::Sheet;
use crate::ops::state::{StateRow, StateRows};

/// A batch's decode rows and its prefill rows, each in as many parts as the device works on at
/// once.
#[derive(Debug)]
pub struct Prepared {
    pub(super) parts: Vec<Part>,
    /// How many of them are decodes; those come first.
    pub(super) num_decodes: usize,
}

/// Rows that go through a layer together.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub rows: Range<usize>,
    pub tokens: Tokens,
    pub spans: Spans,
    /// Where their states, or their keys and values, lie in each group's blocks.
    groups: Vec<Blocks>,
}

#[derive(Clone, Debug)]
enum Blocks {
    State(StateRows),
    KeyValue(Tables),
}

/// What the blocks of a group hold.
#[derive(Clone, Copy, Debug)]
pub(super) enum Holds {
    State,
    KeyValue { block_tokens: u32 },
}

impl Holds {
    /// Of a layout's groups, in order.
    pub fn of(layout: &Layout) -> Vec<Self> {
        let mut groups = vec![Self::State; layout.groups.len()];
        for LayerPlace { group, view } in &layout.layers {
            groups[group.index()] = match view {
                CacheView::State(_) => Self::State,
                CacheView::KeyValue(view) => Self::KeyValue { block_tokens: view.block_tokens },
            };
        }
        groups
    }
}

impl Part {
    pub fn states(&self, group: GroupId) -> &StateRows {
        match &self.groups[group.index()] {
            Blocks::State(rows) => rows,
            Blocks::KeyValue(_) => panic!("a Mamba layer in a group of attention layers"),
        }
    }

    pub fn tables(&self, group: GroupId) -> &Tables {
        match &self.groups[group.index()] {
            Blocks::KeyValue(tables) => tables,
            Blocks::State(_) => panic!("an attention layer in a group of Mamba layers"),
        }
    }
}

impl Prepared {
    /// Writes down what a pass over the batch looks up, so that every context may have up to
    /// `longest` tokens; 0 for as many as they have.
    pub(super) fn on(
        sheet: &mut Sheet,
        (device, groups): (&Device, &[Holds]),
        batch: &StepBatch,
        longest: u32,
    ) -> Self {
        let mut cut = |rows| {
            let parts = cut(batch, rows, device.parallelism());
            let each = parts.into_iter();
            each.map(|part| part_on(sheet, groups, batch, part, longest)).collect::<Vec<_>>()
        };
        let mut parts = cut(0..batch.num_decodes + batch.padding_rows);
        let num_decodes = parts.len();
        if batch.padding_rows == 0 {
            parts.extend(cut(batch.num_decodes..batch.rows.len()));
        }
        Self { parts, num_decodes }
    }
}

/// Cuts rows into as many parts, as even in tokens as whole rows allow. Invariant numbers do not
/// depend on it.
fn cut(batch: &StepBatch, rows: Range<usize>, count: usize) -> Vec<(Range<usize>, Vec<Span>)> {
    let tokens: usize = rows.clone().map(|row| batch.span(row).len).sum();
    let share = tokens.div_ceil(count);
    let mut parts: Vec<(Range<usize>, Vec<Span>)> = Vec::new();
    for row in rows {
        if parts.last().is_none_or(|(_, spans)| tokens_of(spans) >= share) {
            parts.push((row..row, Vec::new()));
        }
        let (rows, spans) = parts.last_mut().expect("one was just pushed if there was none");
        rows.end = row + 1;
        spans.push(Span { start: tokens_of(spans), ..batch.span(row) });
    }
    parts
}

fn tokens_of(spans: &[Span]) -> usize {
    spans.last().map_or(0, |span| span.start + span.len)
}

fn part_on(
    sheet: &mut Sheet,
    groups: &[Holds],
    batch: &StepBatch,
    (rows, spans): (Range<usize>, Vec<Span>),
    longest: u32,
) -> Part {
    let first = batch.span(rows.start).start;
    let tokens = batch.tokens[first..first + tokens_of(&spans)].to_vec();
    let groups = (0..).map(GroupId::new).zip(groups).map(|(group, holds)| match holds {
        Holds::State => {
            let rows = rows.clone().map(|row| state_row(batch, row, group)).collect();
            Blocks::State(StateRows::on(sheet, rows))
        }
        Holds::KeyValue { block_tokens } => {
            let tables = rows.clone().map(|row| batch.blocks(row, group));
            Blocks::KeyValue(Tables::on(sheet, *block_tokens, &spans, tables, longest))
        }
    });
    let groups = groups.collect();
    let tokens = Tokens::on(sheet, tokens);
    Part { rows, tokens, spans: Spans::on(sheet, spans), groups }
}

/// A decode row reads its block whatever it holds; a prefill row where something is computed. The
/// block that is read is another one than the one stored to where a prefix cache keeps it as it is.
fn state_row(batch: &StepBatch, index: usize, group: GroupId) -> StateRow {
    let reads = |row: &Row| row.phase == Phase::Decode || row.has_initial_state();
    // Padding rows are decodes.
    let reads = batch.rows.get(index).is_none_or(reads);
    let blocks = batch.blocks(index, group);
    StateRow { block: blocks[blocks.len() - 1], from: reads.then_some(blocks[0]) }
}
