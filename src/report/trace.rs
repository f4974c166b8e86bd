//! `trace/step-NNNNN.txt` and `.jsonl`: what the engine saw in the engine steps of one step.
//!
//! The `.jsonl` opens with an object that names the parts of the model; then comes one object an
//! engine step, rows in the order in which they ran. A row's `stream` has a string a part: one
//! 64-bit digest a token, 16 hexadecimal digits each. The `.txt` has the same without digests, rows
//! in the order before the reorder. Neither is larger than its bound; a last line says what was
//! cut.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;
use serde_json::json;

use super::disk::write_pieces;
use super::ReportError;
use crate::base::{BlockId, EngineIndex, EngineStep, Generation, LayerId, RequestId, Step};
use crate::engine::{Trace, TracedRow, TracedStep};
use crate::model::{Part, PartKind};
use crate::ops::extremes::Extremes;

/// A step's trace, and what it takes to write it down.
#[derive(Clone, Copy, Debug)]
pub struct TraceOf<'a> {
    pub step: Step,
    /// See [`crate::model::Plan::parts`].
    pub parts: &'a [Part],
    pub trace: &'a Trace,
    pub max_bytes: u64,
}

impl TraceOf<'_> {
    fn is_of_several_engines(&self) -> bool {
        let mut engines = self.trace.steps.iter().map(|step| step.engine);
        engines.next().is_some_and(|first| engines.any(|other| other != first))
    }
}

/// Writes both files, atomically. The same trace gives the same bytes.
pub fn write_trace(txt: &Path, jsonl: &Path, of: &TraceOf<'_>) -> Result<(), ReportError> {
    let parts: Vec<String> = of.parts.iter().map(Part::to_string).collect();
    let head = json!({ "schema": 1, "step": of.step, "parts": parts }).to_string() + "\n";
    let lines = of.trace.steps.iter().map(|step| line(of.parts, step));
    let cut = |left_out| json!({ "engine_steps_left_out": left_out }).to_string() + "\n";
    write_bounded(jsonl, of, head, lines, cut)?;
    let head = format!("step {}: the batches as the engine saw them\n", of.step);
    let is_of_several = of.is_of_several_engines();
    let tables = of.trace.steps.iter().map(|step| {
        let table = table(of.parts, step);
        if is_of_several {
            format!("\nengine {}{table}", step.engine)
        } else {
            table
        }
    });
    let cut =
        |left_out| format!("\ncut here: {left_out} more engine steps are over trace.max_bytes\n");
    write_bounded(txt, of, head, tables, cut)
}

/// Whole pieces as far as they have room.
fn write_bounded(
    path: &Path,
    of: &TraceOf<'_>,
    head: String,
    pieces: impl Iterator<Item = String>,
    cut: impl Fn(u64) -> String,
) -> Result<(), ReportError> {
    let (mut kept, mut bytes) = (vec![head], 0);
    for piece in pieces {
        bytes += piece.len() as u64;
        if bytes > of.max_bytes {
            break;
        }
        kept.push(piece);
    }
    let left_out = of.trace.cut + (of.trace.steps.len() - (kept.len() - 1)) as u64;
    kept.extend((left_out > 0).then(|| cut(left_out)));
    write_pieces(path, kept.iter().map(String::as_bytes))
}

/// One engine step as a line of the `.jsonl`.
#[derive(Serialize)]
struct Line<'a> {
    engine: EngineIndex,
    engine_step: EngineStep,
    budget: u32,
    waiting: usize,
    preempted: &'a [RequestId],
    rows: Vec<Row<'a>>,
    written: Vec<Written>,
}

#[derive(Serialize)]
struct Row<'a> {
    request: RequestId,
    num_scheduled_tokens: u32,
    num_computed_tokens: u32,
    prompt_tokens: u32,
    samples: bool,
    place_before: usize,
    is_decode_before: bool,
    is_decode: bool,
    state_blocks: Vec<BlockId>,
    state_block_generations: Vec<Generation>,
    state_block_previous_owners: Vec<Option<RequestId>>,
    attn_blocks: &'a [Vec<BlockId>],
    stream: Vec<String>,
}

#[derive(Serialize)]
struct Written {
    layer: Option<LayerId>,
    kind: PartKind,
    min: Option<f32>,
    max: Option<f32>,
    non_finite: u64,
}

fn line(parts: &[Part], step: &TracedStep) -> String {
    let written = |(part, extremes): (&Part, &Extremes)| Written {
        layer: part.layer,
        kind: part.kind,
        min: extremes.range.map(|(low, _)| low),
        max: extremes.range.map(|(_, high)| high),
        non_finite: extremes.non_finite,
    };
    let line = Line {
        engine: step.engine,
        engine_step: step.engine_step,
        budget: step.budget,
        waiting: step.waiting,
        preempted: &step.preempted,
        rows: step.rows.iter().map(row).collect(),
        written: layers(parts).zip(&step.written).map(written).collect(),
    };
    serde_json::to_string(&line).expect("a trace is plain data") + "\n"
}

fn row(row: &TracedRow) -> Row<'_> {
    let hex = |digests: &[u64]| -> String {
        digests.iter().fold(String::with_capacity(16 * digests.len()), |mut text, digest| {
            write!(text, "{digest:016x}").expect("a string grows");
            text
        })
    };
    Row {
        request: row.request,
        num_scheduled_tokens: row.scheduled_tokens,
        num_computed_tokens: row.computed_tokens,
        prompt_tokens: row.prompt_tokens,
        samples: row.samples,
        place_before: row.place_before,
        is_decode_before: row.is_decode_before,
        is_decode: row.is_decode,
        state_blocks: row.state_blocks.iter().map(|held| held.block).collect(),
        state_block_generations: row.state_blocks.iter().map(|held| held.generation).collect(),
        state_block_previous_owners: row.state_blocks.iter().map(|h| h.previous_owner).collect(),
        attn_blocks: &row.attn_blocks,
        stream: row.stream.chunks_exact(row.scheduled_tokens as usize).map(hex).collect(),
    }
}

/// A layer's mixer each: it has the cache.
fn layers(parts: &[Part]) -> impl Iterator<Item = &Part> {
    let mut last = None;
    parts
        .iter()
        .filter(move |part| part.layer.is_some() && last.replace(part.layer) != Some(part.layer))
}

/// One engine step for people.
#[must_use]
pub fn table(parts: &[Part], step: &TracedStep) -> String {
    let tokens: u32 = step.rows.iter().map(|row| row.scheduled_tokens).sum();
    let decodes = step.rows.iter().filter(|row| row.is_decode).count();
    let mut text = format!(
        "\nengine step {}: {} rows, {tokens} of {} tokens, {decodes} decodes; {} requests \
         waiting\n",
        step.engine_step,
        step.rows.len(),
        step.budget,
        step.waiting,
    );
    if !step.preempted.is_empty() {
        let ids: Vec<String> = step.preempted.iter().map(ToString::to_string).collect();
        writeln!(text, "preempted: {}", ids.join(" ")).expect("a string grows");
    }
    text += &row_table(&step.before_the_reorder(), &step.rows);
    if !step.written.is_empty() {
        text += "written to the caches by layer:\n";
        let head = ["layer", "kind", "min", "max", "non-finite"].map(str::to_owned).to_vec();
        let line = |(part, extremes): (&Part, &Extremes)| {
            let number = |value: Option<f32>| value.map_or("-".to_owned(), |v| format!("{v:.6}"));
            let layer = part.layer.map_or(String::new(), |layer| layer.to_string());
            let low = number(extremes.range.map(|(low, _)| low));
            let high = number(extremes.range.map(|(_, high)| high));
            vec![layer, part.kind.name().to_owned(), low, high, extremes.non_finite.to_string()]
        };
        let lines = layers(parts).zip(&step.written).map(line);
        text += &aligned(std::iter::once(head).chain(lines).collect());
    }
    text
}

/// Some rows of a batch in the order given, each with its place among all of them after the
/// reorder.
#[must_use]
pub fn row_table(shown: &[&TracedRow], all: &[TracedRow]) -> String {
    let head = [
        "request",
        "num_scheduled",
        "num_computed",
        "is_decode before",
        "after",
        "row",
        "state blocks (generation, left by)",
        "attention blocks",
    ];
    let flag = |is: bool| if is { "True" } else { "False" }.to_owned();
    let line = |row: &&TracedRow| {
        let place = all.iter().position(|other| std::ptr::eq(other, *row));
        let state = row.state_blocks.iter().map(|held| {
            let owner = held.previous_owner.map_or("nobody".to_owned(), |id| id.to_string());
            format!("{} ({}, {owner})", held.block, held.generation)
        });
        let attention = row.attn_blocks.iter().flatten().map(ToString::to_string);
        vec![
            row.request.to_string(),
            row.scheduled_tokens.to_string(),
            row.computed_tokens.to_string(),
            flag(row.is_decode_before),
            flag(row.is_decode),
            place.map_or(String::new(), |place| place.to_string()),
            state.collect::<Vec<_>>().join(" "),
            attention.collect::<Vec<_>>().join(" "),
        ]
    };
    let head = head.map(str::to_owned).to_vec();
    aligned(std::iter::once(head).chain(shown.iter().map(line)).collect())
}

/// Columns as wide as their widest cell.
#[must_use]
pub fn aligned(lines: Vec<Vec<String>>) -> String {
    let columns = lines.first().map_or(0, Vec::len);
    let width =
        |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let mut row = String::new();
        for (cell, &width) in line.iter().zip(&widths) {
            write!(row, "{cell:<width$}  ").expect("a string grows");
        }
        text += row.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_file_keeps_to_its_bound_and_says_what_it_left_out() {
        let step = |n| TracedStep {
            engine: EngineIndex::default(),
            engine_step: EngineStep::new(n),
            budget: 64,
            preempted: Vec::new(),
            waiting: 0,
            rows: Vec::new(),
            written: Vec::new(),
        };
        let mut trace = Trace::default();
        trace.steps = (1..=5).map(step).collect();
        let line = line(&[], &trace.steps[0]).len() as u64;
        let folder = tempfile::tempdir().unwrap();
        let (txt, jsonl) = (folder.path().join("a.txt"), folder.path().join("a.jsonl"));
        for (max_bytes, cut, lines, left_out) in
            [(5 * line, 0, 6, None), (5 * line, 7, 7, Some(7)), (3 * line, 7, 5, Some(9))]
        {
            trace.cut = cut;
            let of = TraceOf { step: Step::new(2), parts: &[], trace: &trace, max_bytes };
            write_trace(&txt, &jsonl, &of).unwrap();
            let text = std::fs::read_to_string(&jsonl).unwrap();
            assert_eq!(text.lines().count(), lines);
            let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
            assert_eq!(last.get("engine_steps_left_out").and_then(Value::as_u64), left_out);
        }
    }
}
