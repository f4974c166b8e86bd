//! A Hugging Face folder out of a GGUF file, as llama.cpp's converter writes one of a Llama: the
//! weights dequantised, its order of the rotary rows undone, the tokenizer put back together.

mod header;
mod tokenizer;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use candle_core::quantized::QTensor;
use candle_core::Device;
use serde_json::json;

use super::root::HEAD;
use super::save::save;
use super::{HfConfig, ModelError, Plan, TensorSpec};
use crate::config::Dtype;
use header::Gguf;

const ARCHITECTURE: &str = "llama";
const EMBEDDING: &str = "token_embd.weight";
const OUTPUT: &str = "output.weight";

/// What a layer's tensors are called: by transformers after `model.layers.N.`, by GGUF after
/// `blk.N.`, without `.weight`.
const LAYER_NAMES: [(&str, &str); 9] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// Reads `file` and writes `folder`, its weights in `dtype`. In memory are the weights as
/// quantised, and one tensor dequantised.
///
/// # Errors
/// A file that is torn, no GGUF, of another architecture than llama, or with a tensor, type or
/// tokenizer that this build does not know; a folder that exists already or cannot be written.
pub fn save_gguf(folder: &Path, file: &Path, dtype: Dtype) -> Result<(), ModelError> {
    let mut gguf = Gguf::open(file)?;
    let plan = plan(&gguf)?;
    let files = tokenizer::files(&gguf, &plan.config)?;
    let quantised = quantised(&mut gguf, &plan)?;
    let values = |spec: &TensorSpec| {
        let mut values = dequantised(&quantised[spec.name.as_str()]);
        if let Some(head_rows) = rotary_rows(&plan.config, &spec.name) {
            values = by_halves(&values, head_rows, spec.shape[1]);
        }
        Cow::Owned(values)
    };
    save(folder, &plan, dtype, &files, &values)
}

/// By way of the `config.json` that transformers would have, so that it passes the same checks.
fn plan(gguf: &Gguf) -> Result<Plan, ModelError> {
    let found = gguf.text("general.architecture")?;
    if found != ARCHITECTURE {
        let reason = format!("is {found:?}; this build knows {ARCHITECTURE:?}");
        return Err(gguf.wrong("general.architecture", reason));
    }
    let scaling = gguf.optional("llama.rope.scaling.type", Gguf::text)?;
    if let Some(other) = scaling.filter(|kind| *kind != "none") {
        let reason = format!("is {other:?}; this build knows \"none\"");
        return Err(gguf.wrong("llama.rope.scaling.type", reason));
    }
    let config = json!({
        "model_type": "llama",
        "vocab_size": gguf.shape(EMBEDDING)?.first(),
        "hidden_size": gguf.count("llama.embedding_length")?,
        "intermediate_size": gguf.count("llama.feed_forward_length")?,
        "num_hidden_layers": gguf.count("llama.block_count")?,
        "num_attention_heads": gguf.count("llama.attention.head_count")?,
        "num_key_value_heads": gguf.optional("llama.attention.head_count_kv", Gguf::count)?,
        "head_dim": gguf.optional("llama.attention.key_length", Gguf::count)?,
        "max_position_embeddings": gguf.count("llama.context_length")?,
        "rms_norm_eps": gguf.number("llama.attention.layer_norm_rms_epsilon")?,
        "rope_theta": gguf.optional("llama.rope.freq_base", Gguf::number)?,
        "tie_word_embeddings": !gguf.has(OUTPUT),
        "bos_token_id": gguf.optional("tokenizer.ggml.bos_token_id", Gguf::count)?,
        "eos_token_id": gguf.optional("tokenizer.ggml.eos_token_id", Gguf::count)?,
        "pad_token_id": gguf.optional("tokenizer.ggml.padding_token_id", Gguf::count)?,
    });
    let config = HfConfig::parse(&config.to_string(), gguf.path())?;
    // What changes the arithmetic, and the value at which it changes nothing.
    let head_dim = config.attention().head_dim;
    for (key, plain) in [
        ("llama.rope.dimension_count", head_dim),
        ("llama.attention.value_length", head_dim),
        ("llama.expert_count", 0),
    ] {
        if let Some(other) = gguf.optional(key, Gguf::count)?.filter(|count| *count != plain) {
            return Err(gguf.wrong(key, format!("is {other}; this build knows {plain} here")));
        }
    }
    Ok(Plan::new(config))
}

/// Every tensor of the plan, by its name there. The file has no other.
fn quantised<'p>(
    gguf: &mut Gguf,
    plan: &'p Plan,
) -> Result<BTreeMap<&'p str, QTensor>, ModelError> {
    let specs = || plan.units.iter().flat_map(|unit| &unit.tensors);
    let known: BTreeSet<String> = specs().map(|spec| gguf_name(&spec.name)).collect();
    if let Some(other) = gguf.names().find(|name| !known.contains(*name)) {
        return Err(gguf.wrong_tensor(other, "this build's Llama has no place for it"));
    }
    let mut all = BTreeMap::new();
    for spec in specs() {
        let name = gguf_name(&spec.name);
        let tensor = gguf.read(&name, &spec.shape)?;
        let values = dequantised(&tensor);
        if let Some(at) = values.iter().position(|w| !w.is_finite()) {
            let reason = format!("element {at} is {}; weights must be finite", values[at]);
            return Err(gguf.wrong_tensor(&name, reason));
        }
        all.insert(spec.name.as_str(), tensor);
    }
    Ok(all)
}

fn gguf_name(name: &str) -> String {
    match name {
        "model.embed_tokens.weight" => return EMBEDDING.to_owned(),
        "model.norm.weight" => return "output_norm.weight".to_owned(),
        HEAD => return OUTPUT.to_owned(),
        _ => {}
    }
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let (number, rest) = layer.expect("what is not the root's is a layer's");
    let part = rest.strip_suffix(".weight").expect("a plan without biases");
    let (_, theirs) =
        LAYER_NAMES.iter().find(|(ours, _)| *ours == part).expect("a row for every tensor");
    format!("blk.{number}.{theirs}.weight")
}

fn dequantised(tensor: &QTensor) -> Vec<f32> {
    let values = tensor.dequantize(&Device::Cpu).and_then(|one| one.flatten_all()?.to_vec1());
    values.expect("candle dequantises on the CPU what it took in")
}

/// The rows of one head, of those tensors whose rows rotary positions turn.
fn rotary_rows(config: &HfConfig, name: &str) -> Option<usize> {
    let turned = name.ends_with("q_proj.weight") || name.ends_with("k_proj.weight");
    turned.then(|| config.attention().head_dim)
}

/// transformers turns row i of a head with row i + half, llama.cpp 2i with 2i + 1, so its converter
/// interleaves the halves.
fn by_halves(interleaved: &[f32], head_rows: usize, row_len: usize) -> Vec<f32> {
    let heads = interleaved.chunks_exact(head_rows * row_len);
    let row = |head: &'_ [f32], row: usize| head[row * row_len..][..row_len].to_vec();
    let halves = |head: &[f32]| -> Vec<f32> {
        let even = (0..head_rows).step_by(2);
        let odd = (1..head_rows).step_by(2);
        even.chain(odd).flat_map(|i| row(head, i)).collect()
    };
    heads.flat_map(halves).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_each_head_go_back_to_their_halves() {
        let row = |i: u8| [f32::from(i), f32::from(i) + 0.5];
        let interleaved = [0, 2, 1, 3, 10, 12, 11, 13].map(row).concat();
        let want = [0, 1, 2, 3, 10, 11, 12, 13].map(row).concat();
        assert_eq!(by_halves(&interleaved, 4, 2), want);
    }
}
