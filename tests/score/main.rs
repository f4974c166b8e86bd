//! `gapscope score`, by the binary: every leg against transformers and against the others.

#[path = "../common/mod.rs"]
mod common;
mod refusals;

use std::fs;
use std::path::{Path, PathBuf};

use common::run::gapscope;
use common::{assert_close, device, fixture, Golden};
use gapscope::base::{Stream, TokenId};
use gapscope::config::Dtype;
use gapscope::engine::{CacheSpec, Feed, Layout, Phase, Runner, Scratch};
use gapscope::model::{load_master, load_plan, Model};
use gapscope::ops::weights::Weights;
use serde_json::{json, Value};
use tempfile::TempDir;

const LEGS: [&str; 4] = ["trainer", "prefill", "decode", "reference"];

/// One line of input.
#[derive(Clone, Debug)]
struct Line {
    id: Value,
    tokens: Vec<u32>,
    prompt_len: Option<usize>,
}

fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

fn write_input(folder: &TempDir, lines: &[Line]) -> PathBuf {
    let line = |Line { id, tokens, prompt_len }: &Line| match prompt_len {
        Some(len) => format!("{}\n", json!({"id": id, "token_ids": tokens, "prompt_len": len})),
        None => format!("{}\n", json!({"id": id, "token_ids": tokens})),
    };
    let file = folder.path().join("tokens.jsonl");
    fs::write(&file, lines.iter().map(line).collect::<String>()).expect("written");
    file
}

/// What the binary prints.
fn printed(model: &Path, input: &Path, args: &[&str]) -> String {
    let mut command = gapscope();
    command.args(["score", "--model", path(model), "--input", path(input)]).args(args);
    let output = command.assert().success().get_output().clone();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "nothing to warn of");
    String::from_utf8(output.stdout).expect("UTF-8")
}

/// Ids and log-probabilities.
fn parsed(text: &str) -> Vec<(Value, Vec<f32>)> {
    let line = |line: &str| {
        let value: Value = serde_json::from_str(line).expect("an object a line");
        let logps = value["logprobs"].as_array().expect("an array");
        let logps = logps.iter().map(|logp| logp.as_f64().expect("finite") as f32).collect();
        (value["id"].clone(), logps)
    };
    text.lines().map(line).collect()
}

fn scored(model: &Path, lines: &[Line], args: &[&str]) -> Vec<(Value, Vec<f32>)> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = write_input(&folder, lines);
    let found = parsed(&printed(model, &input, args));
    assert_eq!(found.len(), lines.len(), "a line a line");
    for ((id, logps), line) in found.iter().zip(lines) {
        assert_eq!(*id, line.id, "the order of the input");
        assert_eq!(logps.len(), line.tokens.len() - line.prompt_len.unwrap_or(1));
    }
    found
}

fn bits(scores: &[(Value, Vec<f32>)]) -> Vec<Vec<u32>> {
    scores.iter().map(|(_, logps)| logps.iter().map(|logp| logp.to_bits()).collect()).collect()
}

/// Seeded sequences of 2 to `longest` tokens.
fn random_lines(vocab: u64, count: usize, longest: u64) -> Vec<Line> {
    let mut stream = Stream::new(5, "score", vocab);
    let line = |index: usize| {
        let len = stream.integer(2, longest);
        let tokens = (0..len).map(|_| stream.integer(0, vocab - 1) as u32).collect();
        let prompt_len = (!index.is_multiple_of(3)).then(|| stream.integer(1, len - 1) as usize);
        Line { id: json!(format!("line {index}")), tokens, prompt_len }
    };
    (0..count).map(line).collect()
}

#[test]
fn every_leg_is_what_transformers_computes() {
    let golden = Golden::tiny_jamba();
    let line = |(id, row): (usize, Vec<TokenId>)| Line {
        id: json!(id),
        tokens: row.iter().map(|token| token.get()).collect(),
        prompt_len: None,
    };
    let lines: Vec<Line> = golden.rows().into_iter().enumerate().map(line).collect();
    for leg in LEGS {
        let found = scored(&fixture("tiny-jamba"), &lines, &["--leg", leg]);
        let flat: Vec<f32> = found.into_iter().flat_map(|(_, logps)| logps).collect();
        assert_close(leg, &flat, &golden.f32("target_logprobs"), 2e-5);
    }
}

/// The engine's and the trainer's forward agree on every bit, candle's to its rounding.
#[test]
fn the_legs_agree() {
    let arithmetic = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/models/arithmetic");
    let families = ["tiny-jamba", "tiny-jamba-moe", "tiny-mamba", "tiny-llama", "tiny-qwen3"];
    for model in families.map(fixture).into_iter().chain([arithmetic]) {
        let vocab = load_plan(&model).expect("a model folder").config.vocab_size as u64;
        let lines = random_lines(vocab, 7, 40);
        for (args, candle) in [
            (["--dtype", "f32", "--temperature", "1"], true),
            (["--dtype", "f32", "--temperature", "0.7"], true),
            // Roundings of activations are the model's own, and candle has none.
            (["--dtype", "bf16", "--temperature", "0.7"], false),
        ] {
            let of_leg = |leg| scored(&model, &lines, &[&["--leg", leg][..], &args].concat());
            let trainer = of_leg("trainer");
            for leg in ["prefill", "decode"] {
                assert_eq!(bits(&of_leg(leg)), bits(&trainer), "{model:?} {leg} {args:?}");
            }
            let reference = if candle { of_leg("reference") } else { trainer.clone() };
            for ((_, found), (_, expected)) in reference.iter().zip(&trainer) {
                assert_close("reference", found, expected, 1e-4);
            }
        }
    }
}

#[test]
fn a_temperature_and_a_dtype_change_the_numbers() {
    let lines = random_lines(256, 2, 30);
    let of = |args: &[&str]| bits(&scored(&fixture("tiny-jamba"), &lines, args));
    let plain = of(&[]);
    assert_eq!(of(&["--temperature", "1"]), plain);
    assert_eq!(of(&["--dtype", "f32", "--leg", "trainer"]), plain);
    for args in [["--temperature", "0.9"], ["--dtype", "bf16"]] {
        assert_ne!(of(&args), plain, "{args:?}");
    }
}

/// More sequences than are scored at once: none sees its batch mates, and repeated ids stay apart.
#[test]
fn a_long_file_is_its_lines() {
    let mut lines = random_lines(256, 150, 120);
    lines.iter_mut().for_each(|line| line.id = json!("the same"));
    for leg in ["trainer", "prefill", "decode"] {
        let together = bits(&scored(&fixture("tiny-jamba"), &lines, &["--leg", leg]));
        for index in [0, 63, 64, 149] {
            let alone = scored(&fixture("tiny-jamba"), &lines[index..=index], &["--leg", leg]);
            assert_eq!(bits(&alone)[0], together[index], "{leg}, line {index}");
        }
    }
}

#[test]
fn a_file_is_written_whole_and_holds_what_would_be_printed() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = write_input(&folder, &random_lines(256, 3, 20));
    let text = printed(&fixture("tiny-jamba"), &input, &[]);
    let output = folder.path().join("scores.jsonl");
    fs::write(&output, "older").expect("written");
    let args = ["--output", path(&output)];
    let said = printed(&fixture("tiny-jamba"), &input, &args);
    let targets: usize = parsed(&text).iter().map(|(_, logps)| logps.len()).sum();
    let expected = format!("{targets} log-probabilities of 3 sequence(s): {}\n", output.display());
    assert_eq!(said, expected);
    assert_eq!(fs::read_to_string(&output).expect("scores"), text);
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 2, "nothing else stays");
}

/// However many rows of logits exist at once, each row has the same bits.
#[test]
fn k26_chunks_of_rows_change_no_bit() {
    const ROWS: usize = 1_030;
    let (plan, master) = load_master(&fixture("tiny-jamba")).expect("a model folder");
    let num = plan.numerics(Dtype::F32, Dtype::F32);
    let round = |flat| Weights::of_master(&device().upload(flat), num.dtype);
    let units: Vec<Weights> = master.into_iter().map(round).collect();
    let spec = CacheSpec::of_model(&plan.config, num.dtype, num.state_dtype, ROWS as u32);
    let layout = Layout::new(&spec).expect("a layout");
    let runner = Runner::new(num, &layout, Model::load(&plan, &num, &units), 64);
    let tokens = common::random_tokens(&plan.config, ROWS, 1);
    let feed = Feed { sequence: 0, phase: Phase::Prefill, tokens: &tokens };
    let x_th = Scratch::new(&device(), &layout, 1).feed(&runner, &[feed], None);
    let logits = |rows: usize| -> Vec<u32> {
        let part = |start: usize| {
            let end = (start + rows).min(tokens.len());
            runner.logits(&x_th.row_range(runner.hidden(), start..end)).into_host()
        };
        (0..tokens.len()).step_by(rows).flat_map(part).map(f32::to_bits).collect()
    };
    let whole = logits(ROWS);
    assert_eq!(whole.len(), ROWS * plan.config.vocab_size);
    for rows in [1, 7, 64, 1_024] {
        assert_eq!(logits(rows), whole, "{rows} rows");
    }
}
