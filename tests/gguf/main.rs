//! `gapscope model init --from-gguf`: a tiny file of our own, whose every weight is known, and
//! SmolLM2-135M, whose goldens transformers made.

#[path = "../common/mod.rs"]
mod common;
mod refusals;
mod smollm2;
mod tiny;

use std::fs;
use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use common::run::gapscope;
use gapscope::base::TokenId;
use gapscope::model::load_master;
use gapscope::rollout::{Codec, SpecialTokens};
use serde_json::json;
use tiny::{path, tokens, Tiny};

/// The command ends well and names the folder.
fn init(file: &Path, folder: &Path, args: &[&str]) {
    let mut command = gapscope();
    command.args(["model", "init", "--from-gguf", path(file), path(folder)]).args(args);
    let output = command.assert().success().get_output().clone();
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{}\n", folder.display()));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

fn bits(units: &[Vec<f32>]) -> Vec<u32> {
    units.iter().flatten().map(|w| w.to_bits()).collect()
}

#[test]
fn the_folder_is_the_dequantised_model() {
    for tied in [true, false] {
        let tiny = Tiny::new(tied);
        let (parent, file) = tiny.file();
        let folder = parent.path().join("f32");
        init(&file, &folder, &[]);
        let (plan, units) = load_master(&folder).expect("a model folder");
        assert_eq!(plan, tiny.plan, "tied: {tied}");
        assert_eq!(bits(&units), bits(&tiny.units), "tied: {tied}");

        let folder = parent.path().join("bf16");
        init(&file, &folder, &["--dtype", "bf16"]);
        let (plan, units) = load_master(&folder).expect("a model folder");
        assert_eq!(plan, tiny.plan);
        let rounded = |w: &f32| half::bf16::from_f32(*w).to_f32();
        let want: Vec<Vec<f32>> =
            tiny.units.iter().map(|unit| unit.iter().map(rounded).collect()).collect();
        assert_eq!(bits(&units), bits(&want));
    }
}

#[test]
fn keys_that_may_be_absent_have_their_defaults() {
    let mut tiny = Tiny::new(true);
    for key in [
        "llama.attention.head_count_kv",
        "llama.rope.freq_base",
        "llama.rope.dimension_count",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.padding_token_id",
        "tokenizer.chat_template",
    ] {
        tiny.metadata.remove(key);
    }
    // As many key heads as query heads, which are as wide.
    for layer in 0..2 {
        for name in ["attn_k", "attn_v"] {
            let query = tiny::quantised(&[0.5; 64 * 64], &[64, 64], tiny::KINDS[2].1);
            tiny.tensors.insert(format!("blk.{layer}.{name}.weight"), query);
        }
    }
    let (parent, file) = tiny.file();
    let folder = parent.path().join("model");
    init(&file, &folder, &[]);
    let (plan, _) = load_master(&folder).expect("a model folder");
    let attention = plan.config.attention.expect("attention");
    assert_eq!((attention.heads, attention.kv_heads), (4, 4));
    assert_eq!(attention.rope.expect("rotary positions").theta, 10_000.0);
    assert_eq!(plan.config.pad_token_id, None);
}

fn codec(folder: &Path) -> Codec {
    let vocab = tokens().len() as u32;
    Codec::open(folder, vocab, SpecialTokens::default()).expect("a tokenizer")
}

#[test]
fn the_tokenizer_cuts_as_the_file_says() {
    let all = tokens();
    let ids = |words: &[&str]| -> Vec<TokenId> {
        let id = |word: &&str| all.iter().position(|token| token == word).expect("a token") as u32;
        words.iter().map(|word| TokenId::new(id(word))).collect()
    };
    let blank = "\u{120}";
    let (two, blank_the, two_one) = ("\u{120}\u{120}", "\u{120}the", "\u{120}\u{120}1");
    for (pre, text, want) in [
        ("smollm", "the the", &["the", blank_the][..]),
        ("gpt-2", "the the", &["the", blank_the]),
        // A digit alone, so that nothing merges with it, and blanks keep together before it.
        ("smollm", "t  1", &["t", two, "1"]),
        ("gpt-2", "t  1", &["t", blank, blank, "1"]),
        ("smollm", "12", &["1", "2"]),
        ("smollm", "<|start|>the<|end|>", &["<|start|>", "the", "<|end|>"]),
        ("smollm", "\u{e9}", &["\u{c3}", "\u{a9}"]),
    ] {
        let mut tiny = Tiny::new(true);
        tiny.set("tokenizer.ggml.pre", Value::String(pre.into()));
        let (parent, file) = tiny.file();
        let folder = parent.path().join("model");
        init(&file, &folder, &[]);
        let codec = codec(&folder);
        assert_eq!(codec.encode_prompt(text).expect("ids"), ids(want), "{pre}: {text:?}");
        assert_eq!(codec.decode(&ids(want)), text, "{pre}");
        assert!(
            all.iter().any(|token| token == two_one),
            "a merge that a digit of its own forbids"
        );
    }
}

#[test]
fn a_file_may_ask_for_a_first_token() {
    let mut tiny = Tiny::new(true);
    tiny.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
    let (parent, file) = tiny.file();
    let folder = parent.path().join("model");
    init(&file, &folder, &[]);
    let codec = codec(&folder);
    let the = codec.encode("the").expect("ids");
    assert_eq!(codec.encode_prompt("the").expect("ids"), [&[TokenId::new(0)], &the[..]].concat());

    let config = fs::read_to_string(folder.join("tokenizer_config.json")).expect("a file");
    let config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
    let want = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
        "bos_token": "<|start|>", "eos_token": "<|end|>", "pad_token": "<|end|>",
        "unk_token": null, "chat_template": "{{ messages }}",
    });
    assert_eq!(config, want);
}
