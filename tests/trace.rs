//! `[trace]`: what the engine saw, and that looking changes nothing.

mod common;

use std::fs;

use common::run::Run;
use common::{engine, fixture, random_tokens, trainer, MODELS};
use gapscope::base::{Position, Step, WeightVersion};
use gapscope::engine::{Engine, Feed, Phase, Seen};
use gapscope::gap::{first_difference, StreamRow};
use gapscope::model::{row_digests, Part, PartKind, Plan};
use gapscope::trainer::{Sequence, Trainer};
use serde_json::Value;

const IMPOSTER: &str = "experiments/imposter_request.toml";

/// The lines of a step's trace.
fn lines(run: &Run, step: u64) -> Vec<Value> {
    let [_, jsonl] = run.folder.trace(Step::new(step)).expect("a folder");
    let text = fs::read_to_string(jsonl).expect("a trace");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn rows(engine_step: &Value) -> &[Value] {
    engine_step["rows"].as_array().expect("rows")
}

#[test]
fn the_imposter_is_true_after_a_run_of_false() {
    let run = Run::of(IMPOSTER, &["steps=3", "trace.when=first_spike"]);
    let folder = run.root().join("trace");
    let mut files: Vec<_> = fs::read_dir(&folder)
        .expect("traces")
        .map(|file| file.expect("a file").file_name())
        .collect();
    files.sort();
    assert_eq!(files, ["step-00002.jsonl", "step-00002.txt"], "the first spike alone");

    let lines = lines(&run, 2);
    let mut placed = rows(&lines[1]).to_vec();
    placed.sort_by_key(|row| row["place_before"].as_u64());
    let column = |name: &str| placed.iter().map(|row| row[name].clone()).collect::<Vec<_>>();
    assert_eq!(column("num_scheduled_tokens"), [60, 60, 60, 60, 60, 60, 60, 1]);
    assert_eq!(column("num_computed_tokens"), [0; 8]);
    assert_eq!(column("is_decode_before"), [vec![false; 7], vec![true]].concat());
    assert_eq!(column("is_decode"), [vec![false; 7], vec![true]].concat());
    assert_eq!(rows(&lines[1])[0]["request"], "s2.p0.r7", "decodes come first after the reorder");
    assert_eq!(placed[7]["state_block_previous_owners"][0], "s1.p2.r6");
    assert_eq!(placed[7]["state_block_generations"], serde_json::json!([2, 2, 2]));

    let text = fs::read_to_string(folder.join("step-00002.txt")).expect("a trace");
    let mut table = text.lines().skip_while(|line| !line.starts_with("request"));
    let head = table.next().expect("a head");
    let at = head.find("is_decode before").expect("the column");
    let flags: Vec<&str> =
        table.take(8).map(|line| line[at..].split_whitespace().next().expect("a flag")).collect();
    assert_eq!(flags, [vec!["False"; 7], vec!["True"]].concat());
}

/// A run's files but the trace, without time.
fn others(run: &Run) -> Vec<(String, Vec<u8>)> {
    let without_time = |(name, bytes): (String, Vec<u8>)| match name.as_str() {
        "summary.json" => {
            let mut summary: Value = serde_json::from_slice(&bytes).expect("JSON");
            summary["wall_s"].take();
            (name, summary.to_string().into_bytes())
        }
        _ => (name, bytes),
    };
    let timed = |name: &str| name == "timing.jsonl" || name.starts_with("tb/");
    let files = run.files().into_iter();
    let files = files.filter(|(name, _)| !timed(name) && !name.starts_with("trace/"));
    files.map(without_time).collect()
}

#[test]
fn a_trace_leaves_every_other_file_as_it_was() {
    for more in [&[][..], &["engine.faults=[\"engine_weight_ulp\"]", "trainer.update=none"]] {
        let run = |trace: &str| Run::small(&[&[trace], more].concat());
        let plain = run("trace.when=never");
        assert!(!plain.root().join("trace").exists());
        for (trace, traced) in [("trace.when=always", 3), ("trace.request=s2.p1.r3", 1)] {
            let watched = run(trace);
            let files = fs::read_dir(watched.root().join("trace")).expect("traces").count();
            assert_eq!(files, 2 * traced, "{trace}");
            assert!(others(&plain) == others(&watched), "{trace}: another file differs");
        }
    }
}

#[test]
fn one_request_is_traced_through_its_engine_steps() {
    let run = Run::small(&["trace.request=s2.p1.r3"]);
    let lines = lines(&run, 2);
    let parts = lines[0]["parts"].as_array().expect("parts").len();
    let mut computed = 0;
    for engine_step in &lines[1..] {
        for row in rows(engine_step) {
            let stream = row["stream"].as_array().expect("digests");
            if row["request"] != "s2.p1.r3" {
                assert!(stream.is_empty(), "{row}");
                continue;
            }
            let scheduled = row["num_scheduled_tokens"].as_u64().expect("a count");
            assert_eq!(row["num_computed_tokens"], computed);
            assert_eq!(stream.len(), parts);
            let digits = |text: &Value| text.as_str().expect("hexadecimal").len() as u64;
            assert!(stream.iter().all(|text| digits(text) == 16 * scheduled));
            computed += scheduled;
        }
        let written = engine_step["written"].as_array().expect("layers");
        assert_eq!(written.len(), 4);
        assert!(written.iter().all(|one| one["min"].as_f64() < one["max"].as_f64()), "{written:?}");
    }
    let rollouts = &run.rollouts()[1];
    let own = rollouts.iter().find(|row| row.request.to_string() == "s2.p1.r3").expect("a row");
    let all = own.prompt_token_ids.len() + own.completion_token_ids.len();
    assert_eq!(computed, all as u64 - 1, "the last token is never fed back");
}

#[test]
fn a_trace_keeps_to_its_bound_and_says_so() {
    let run = Run::small(&["trace.when=always", "trace.max_bytes=8KiB"]);
    let lines = lines(&run, 1);
    let last = lines.last().expect("a line");
    assert!(last["engine_steps_left_out"].as_u64().is_some_and(|left_out| left_out > 0), "{last}");
    let [txt, jsonl] = run.folder.trace(Step::new(1)).expect("a folder");
    let head_and_end = 400;
    for path in [&txt, &jsonl] {
        assert!(fs::metadata(path).expect("a file").len() <= (8 << 10) + head_and_end);
    }
    let text = fs::read_to_string(txt).expect("a trace");
    assert!(text.ends_with("more engine steps are over trace.max_bytes\n"), "{text}");
}

/// A sequence's stream as the engine prefills it.
fn prefilled(engine: &Engine, sequence: &Sequence) -> Vec<StreamRow> {
    let mut stream: Vec<Vec<u64>> = Vec::new();
    let mut see = |seen: Seen<'_>| {
        let Seen::Stream { part, x_th } = seen else { return };
        stream.resize(part + 1, Vec::new());
        stream[part].extend(row_digests(engine.runner().hidden(), x_th));
    };
    let feed = Feed { sequence: 0, phase: Phase::Prefill, tokens: &sequence.tokens };
    engine.scratch(1).feed(engine.runner(), &[feed], Some(&mut see));
    by_position(&stream)
}

fn by_position(stream: &[Vec<u64>]) -> Vec<StreamRow> {
    let row = |token: usize| StreamRow {
        position: Position::new(token as u32),
        parts: stream.iter().map(|part| part[token]).collect(),
    };
    (0..stream[0].len()).map(row).collect()
}

/// Engine and trainer over a fixture's weights, one element of a tensor moved by an ulp.
fn moved(name: &str, plan: &Plan, trainer: &Trainer, (unit, element): (usize, usize)) -> Engine {
    let mut engine = engine(name, "");
    let mut weights = trainer.hand_over().expect("weights");
    assert_eq!(weights.units.len(), plan.units.len());
    weights.units[unit] = weights.units[unit].with_ulp(element);
    let newer = WeightVersion::new(weights.version.get() + 1);
    engine.load(newer, weights.units).expect("newer weights");
    engine
}

#[test]
fn one_ulp_in_one_layer_is_found_with_the_part_of_the_layer() {
    for name in MODELS {
        let (plan, trainer) = trainer(&fixture(name), &common::config(common::FIXTURE_TOML));
        let parts = plan.parts();
        let tokens = random_tokens(&plan.config, 24, 5);
        let sequence = Sequence { tokens, prompt_len: 1 };
        let trained = trainer.streams(std::slice::from_ref(&sequence)).expect("streams");
        let trained = by_position(&trained[0]);
        let clean = prefilled(&engine(name, ""), &sequence);
        assert_eq!(first_difference(&parts, &clean, &trained, None), None, "{name}");
        for layer in 0..plan.layers.len() {
            let unit = &plan.units[layer + 1];
            // The first norm is the mixer's; the second, where there is one, the feed-forward's.
            let of_layer = |part: &&Part| part.layer.is_some_and(|of| of.index() == layer);
            let second = unit.tensors.iter().position(|one| {
                ["post_attention_layernorm", "pre_ff_layernorm"]
                    .iter()
                    .any(|n| one.name.contains(n))
            });
            let start = |tensor: usize| unit.tensors[..tensor].iter().map(|one| one.len()).sum();
            let norms = [Some(0), second.map(start)].into_iter().flatten();
            for (part, element) in parts.iter().filter(of_layer).zip(norms) {
                let engine = moved(name, &plan, &trainer, (layer + 1, element));
                let stream = prefilled(&engine, &sequence);
                let found = first_difference(&parts, &stream, &trained, None);
                assert_eq!(found.map(|first| first.part), Some(*part), "{name}");
            }
            let kinds: Vec<PartKind> = parts.iter().filter(of_layer).map(|p| p.kind).collect();
            assert_eq!(kinds.len(), 1 + usize::from(second.is_some()), "{name} {kinds:?}");
        }
    }
}
