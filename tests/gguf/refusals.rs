//! Files that are broken or beyond this build, in exact words.

use std::fs;
use std::path::Path;

use candle_core::quantized::gguf_file::Value;
use candle_core::quantized::GgmlDType;
use gapscope::config::Dtype;
use gapscope::model::save_gguf;

use crate::common::run::gapscope;
use crate::tiny::{kind_at, path, quantised, Tiny};

/// Exit code 1, this message, nothing else, and no folder.
fn refused(file: &Path, message: &str) {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let folder = parent.path().join("model");
    let mut command = gapscope();
    command.args(["model", "init", "--from-gguf", path(file), path(&folder)]);
    let output = command.output().expect("the binary starts");
    assert_eq!(String::from_utf8_lossy(&output.stderr), format!("error: {message}\n"));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert_eq!(output.status.code(), Some(1));
    assert!(!folder.exists(), "{message}");
}

/// A file with a change is refused with this after its path.
fn check(change: impl FnOnce(&mut Tiny), want: &str) {
    let mut tiny = Tiny::new(true);
    change(&mut tiny);
    let (_parent, file) = tiny.file();
    refused(&file, &format!("{}: {want}", file.display()));
}

fn check_bytes(change: impl FnOnce(&mut Vec<u8>), want: &str) {
    let (_parent, file) = Tiny::new(true).file();
    let mut bytes = fs::read(&file).expect("the file");
    change(&mut bytes);
    fs::write(&file, bytes).expect("written");
    refused(&file, &want.replace("FILE", path(&file)));
}

fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

#[test]
fn files() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let missing = parent.path().join("missing.gguf");
    let reason = "No such file or directory (os error 2)";
    refused(&missing, &format!("cannot read {}: {reason}", missing.display()));
    let folder = parent.path();
    refused(folder, &format!("cannot read {}: it is not a regular file", folder.display()));

    let (whole, file) = Tiny::new(true).file();
    let made = whole.path().join("model");
    fs::create_dir(&made).expect("a folder");
    let mut command = gapscope();
    command.args(["model", "init", "--from-gguf", path(&file), path(&made)]);
    let message =
        format!("error: {} already exists; name a folder that does not\n", made.display());
    assert_eq!(String::from_utf8_lossy(&command.assert().code(1).get_output().stderr), message);
}

#[test]
fn broken_bytes() {
    let len = Tiny::new(true).bytes().len();
    let hint = "copy or download it again";
    check_bytes(
        |bytes| bytes[3] = b'X',
        &format!(
            "FILE holds {len} bytes that are no whole GGUF file (it begins with \"GGUX\", not \
             \"GGUF\"): {hint}"
        ),
    );
    check_bytes(
        |bytes| bytes[4] = 1,
        &format!(
            "FILE holds {len} bytes that are no whole GGUF file (its version is 1; 2 and 3 are \
             read): {hint}"
        ),
    );
    check_bytes(
        |bytes| bytes.truncate(1000),
        &format!(
            "FILE holds 1000 bytes that are no whole GGUF file (the header needs 4 bytes more \
             where 2 are left): {hint}"
        ),
    );
    check_bytes(
        |bytes| bytes.truncate(len - 100),
        &format!(
            "FILE holds {} bytes that are no whole GGUF file (tensor token_embd.weight ends at \
             byte {}): {hint}",
            len - 100,
            // 263 rows of two blocks of 34 bytes, filled up to a multiple of 32.
            len - 4
        ),
    );
    check_bytes(
        |bytes| {
            let place = kind_at(bytes, "blk.1.attn_q.weight");
            bytes[place].copy_from_slice(&19_u32.to_le_bytes());
        },
        "FILE: tensor blk.1.attn_q.weight: is of ggml's type 19; F32, F16, BF16, Q4_0, Q4_1, Q5_0, \
         Q5_1, Q8_0 and Q2_K to Q6_K are read",
    );
}

/// No length is a whole file but the whole one's, and none is a panic.
#[test]
fn every_truncation_is_an_error() {
    let tiny = Tiny::new(true);
    let (parent, file) = tiny.file();
    let whole = fs::read(&file).expect("the file");
    let header = whole.len() - whole.len() / 2;
    let lengths = (0..header.min(2048)).chain((header..whole.len()).step_by(997));
    for len in lengths {
        fs::write(&file, &whole[..len]).expect("written");
        let folder = parent.path().join("model");
        let error = save_gguf(&folder, &file, Dtype::F32).expect_err("torn").to_string();
        let start = format!("{} holds {len} bytes that are no whole GGUF file (", file.display());
        assert!(error.starts_with(&start), "{error}");
    }
}

#[test]
fn models_of_another_kind() {
    check(
        |tiny| tiny.set("general.architecture", text("qwen2")),
        "general.architecture: is \"qwen2\"; this build knows \"llama\"",
    );
    check(
        |tiny| tiny.set("llama.rope.scaling.type", text("yarn")),
        "llama.rope.scaling.type: is \"yarn\"; this build knows \"none\"",
    );
    check(
        |tiny| tiny.set("llama.rope.dimension_count", Value::U32(8)),
        "llama.rope.dimension_count: is 8; this build knows 16 here",
    );
    check(
        |tiny| tiny.set("llama.expert_count", Value::U32(8)),
        "llama.expert_count: is 8; this build knows 0 here",
    );
    check(
        |tiny| tiny.set("llama.attention.head_count", Value::U32(0)),
        "num_attention_heads: is 0; it must be at least 1",
    );
    check(
        |tiny| tiny.set("llama.attention.head_count_kv", Value::U32(3)),
        "num_key_value_heads: is 3, which does not divide 4 attention heads",
    );
    check(
        |tiny| {
            tiny.metadata.remove("llama.block_count");
        },
        "llama.block_count: is missing",
    );
    check(
        |tiny| tiny.set("llama.block_count", text("two")),
        "llama.block_count: is a text, where a count is needed",
    );
    check(
        |tiny| tiny.set("llama.block_count", Value::I32(-2)),
        "llama.block_count: is -2, where a count is needed",
    );
    check(
        |tiny| tiny.set("general.alignment", Value::U32(0)),
        "general.alignment: is 0; it is a power of two up to 1048576",
    );
}

#[test]
fn tensors() {
    let vector = |value: f32| quantised(&[value; 64], &[64], GgmlDType::F32);
    check(
        |tiny| {
            tiny.tensors.remove("blk.1.ffn_up.weight");
        },
        "tensor blk.1.ffn_up.weight: is missing",
    );
    check(
        |tiny| {
            tiny.tensors.insert("rope_freqs.weight".into(), vector(1.0));
        },
        "tensor rope_freqs.weight: this build's Llama has no place for it",
    );
    check(
        |tiny| {
            let halved = quantised(&[1.0; 32], &[32], GgmlDType::F32);
            tiny.tensors.insert("output_norm.weight".into(), halved);
        },
        "tensor output_norm.weight: has shape [32]; the metadata give [64]",
    );
    check(
        |tiny| {
            tiny.tensors.insert("output_norm.weight".into(), vector(f32::NAN));
        },
        "tensor output_norm.weight: element 0 is NaN; weights must be finite",
    );
}

#[test]
fn tokenizers() {
    check(
        |tiny| tiny.set("tokenizer.ggml.model", text("llama")),
        "tokenizer.ggml.model: is \"llama\"; this build knows byte-level BPE, \"gpt2\"",
    );
    check(
        |tiny| tiny.set("tokenizer.ggml.pre", text("llama-bpe")),
        "tokenizer.ggml.pre: is \"llama-bpe\"; this build knows \"gpt-2\" and \"smollm\"",
    );
    check(
        |tiny| {
            tiny.metadata.remove("tokenizer.ggml.merges");
        },
        "tokenizer.ggml.merges: is missing",
    );
    check(
        |tiny| tiny.set("tokenizer.ggml.merges", Value::Array(vec![text("t th")])),
        "tokenizer.ggml.merges: Token `tth` out of vocabulary",
    );
    check(
        |tiny| tiny.set("tokenizer.ggml.merges", Value::Array(vec![Value::U8(1)])),
        "tokenizer.ggml.merges: is a list, where a list of texts is needed",
    );
    let change = |tiny: &mut Tiny, change: fn(&mut Vec<Value>)| match tiny
        .metadata
        .get_mut("tokenizer.ggml.tokens")
    {
        Some(Value::Array(tokens)) => change(tokens),
        other => panic!("{other:?} is no list"),
    };
    check(
        |tiny| change(tiny, |tokens| tokens[5] = tokens[4].clone()),
        "tokenizer.ggml.tokens: tokens 4 and 5 are both \"#\"",
    );
    check(
        |tiny| change(tiny, |tokens| tokens.push(text("more"))),
        "tokenizer.ggml.tokens: has 264 tokens, and token_embd.weight 263 rows",
    );
    check(
        |tiny| tiny.set("tokenizer.ggml.token_type", Value::Array(vec![Value::I32(1)])),
        "tokenizer.ggml.token_type: has 1 entries for 263 tokens",
    );
    check(
        |tiny| tiny.set("tokenizer.ggml.eos_token_id", Value::U32(263)),
        "tokenizer.ggml.eos_token_id: is 263, of 263 tokens",
    );
    check(
        |tiny| tiny.set("tokenizer.ggml.add_eos_token", Value::Bool(true)),
        "tokenizer.ggml.add_eos_token: is true, and a prompt that ends in EOS has no completion",
    );
    check(
        |tiny| {
            tiny.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
            tiny.metadata.remove("tokenizer.ggml.bos_token_id");
        },
        "tokenizer.ggml.bos_token_id: is missing, and tokenizer.ggml.add_bos_token is true",
    );
}
