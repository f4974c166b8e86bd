//! A tiny Llama in GGUF, written by candle, and the model that it must become.

use std::collections::BTreeMap;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use gapscope::base::TokenId;
use gapscope::model::{
    AttentionShape, Every, Family, FeedForwardShape, HfConfig, Plan, RopeShape, TensorSpec,
};
use tempfile::TempDir;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use crate::common::random_weights;

/// What each kind of tensor is stored as, by the end of its name there.
pub const KINDS: [(&str, GgmlDType); 3] = [
    ("_norm.weight", GgmlDType::F32),
    ("token_embd.weight", GgmlDType::Q8_0),
    ("", GgmlDType::Q4_1),
];

const NAMES: [(&str, &str); 12] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
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

/// What a file holds, to be changed before it is written.
pub struct Tiny {
    pub metadata: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, QTensor>,
    /// The model that the tensors are of, and its dequantised weights.
    pub plan: Plan,
    pub units: Vec<Vec<f32>>,
}

impl Tiny {
    pub fn new(tied: bool) -> Self {
        let plan = Plan::new(config(tied));
        let (mut tensors, mut units) = (BTreeMap::new(), random_weights(&plan, 4));
        for (spec, flat) in plan.units.iter().zip(&mut units) {
            let mut rest = flat.as_mut_slice();
            for tensor in &spec.tensors {
                let (values, after) = std::mem::take(&mut rest).split_at_mut(tensor.len());
                rest = after;
                let name = theirs(&tensor.name);
                let kind = KINDS.iter().find(|(end, _)| name.ends_with(end)).expect("a kind").1;
                let rows = interleaved(&plan, tensor, values);
                tensors.insert(name, quantised(&rows, &tensor.shape, kind));
                // A row is quantised by itself, so its place does not matter.
                let own = quantised(values, &tensor.shape, kind).dequantize(&Device::Cpu);
                let own = own.and_then(|own| own.flatten_all()?.to_vec1::<f32>());
                values.copy_from_slice(&own.expect("dequantised"));
            }
        }
        Self { metadata: metadata(&plan.config), tensors, plan, units }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let metadata: Vec<_> = self.metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let tensors: Vec<_> = self.tensors.iter().map(|(k, v)| (k.as_str(), v)).collect();
        let mut file = Cursor::new(Vec::new());
        gguf_file::write(&mut file, &metadata, &tensors).expect("written");
        file.into_inner()
    }

    /// In a folder that goes with the first value.
    pub fn file(&self) -> (TempDir, PathBuf) {
        let parent = tempfile::tempdir().expect("a temporary folder");
        let file = parent.path().join("tiny.gguf");
        fs::write(&file, self.bytes()).expect("written");
        (parent, file)
    }

    pub fn set(&mut self, key: &str, value: Value) {
        self.metadata.insert(key.to_owned(), value);
    }
}

fn config(tied: bool) -> HfConfig {
    HfConfig {
        family: Family::Llama,
        vocab_size: tokens().len(),
        hidden_size: 64,
        num_hidden_layers: 2,
        attention: Some(AttentionShape {
            layers: Every::ONE,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            qkv_bias: false,
            o_bias: false,
            qk_norm: false,
            rope: Some(RopeShape { theta: 5000.0, llama3: None }),
        }),
        mamba: None,
        feed_forward: Some(FeedForwardShape { intermediate_size: 96, experts: None }),
        rms_norm_eps: 2e-5,
        residual_in_fp32: false,
        tie_word_embeddings: tied,
        max_position_embeddings: Some(128),
        bos_token_id: Some(TokenId::new(0)),
        eos_token_ids: vec![TokenId::new(1)],
        pad_token_id: Some(TokenId::new(1)),
    }
}

/// Two control tokens, one for each byte, and the results of the merges.
pub fn tokens() -> Vec<String> {
    let mut bytes: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    bytes.sort_unstable();
    let control = ["<|start|>", "<|end|>"].map(str::to_owned);
    let bytes = bytes.into_iter().map(String::from);
    let merged = MERGES.map(|merge| merge.replace(' ', ""));
    control.into_iter().chain(bytes).chain(merged).collect()
}

/// U+0120 stands for a blank.
const MERGES: [&str; 5] = ["\u{120} \u{120}", "t h", "th e", "\u{120} the", "\u{120}\u{120} 1"];

fn metadata(config: &HfConfig) -> BTreeMap<String, Value> {
    let texts = |all: Vec<String>| Value::Array(all.into_iter().map(Value::String).collect());
    let tokens = tokens();
    let control = |id: usize| Value::I32(if id < 2 { 3 } else { 1 });
    let types = Value::Array((0..tokens.len()).map(control).collect());
    let merges = texts(MERGES.map(str::to_owned).to_vec());
    let number = |n: usize| Value::U32(n as u32);
    [
        ("general.architecture", Value::String("llama".into())),
        ("llama.block_count", number(config.num_hidden_layers)),
        ("llama.context_length", Value::U64(128)),
        ("llama.embedding_length", number(config.hidden_size)),
        ("llama.feed_forward_length", number(96)),
        ("llama.attention.head_count", number(4)),
        ("llama.attention.head_count_kv", Value::U16(2)),
        ("llama.rope.freq_base", Value::F32(5000.0)),
        ("llama.rope.dimension_count", Value::I32(16)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(config.rms_norm_eps)),
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.tokens", texts(tokens)),
        ("tokenizer.ggml.token_type", types),
        ("tokenizer.ggml.merges", merges),
        ("tokenizer.ggml.bos_token_id", number(0)),
        ("tokenizer.ggml.eos_token_id", number(1)),
        ("tokenizer.ggml.padding_token_id", number(1)),
        ("tokenizer.chat_template", Value::String("{{ messages }}".into())),
    ]
    .into_iter()
    .map(|(key, value)| (key.to_owned(), value))
    .collect()
}

/// The name that llama.cpp's converter gives a tensor.
fn theirs(name: &str) -> String {
    let (_, their_part) = NAMES
        .iter()
        .find(|(ours, _)| name.ends_with(&format!("{ours}.weight")))
        .expect("a known tensor");
    match name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')) {
        Some((layer, _)) => format!("blk.{layer}.{their_part}.weight"),
        None => format!("{their_part}.weight"),
    }
}

/// As llama.cpp's converter permutes: w.reshape(heads, 2, head_dim / 2, ...).swapaxes(1, 2).
fn interleaved(plan: &Plan, spec: &TensorSpec, values: &[f32]) -> Vec<f32> {
    let turned = spec.name.ends_with("q_proj.weight") || spec.name.ends_with("k_proj.weight");
    if !turned {
        return values.to_vec();
    }
    let dim = plan.config.attention.as_ref().expect("attention").head_dim;
    let (heads, width) = (spec.shape[0] / dim, spec.shape[1]);
    let mut out = Vec::with_capacity(values.len());
    for head in 0..heads {
        for pair in 0..dim / 2 {
            for half in 0..2 {
                let row = head * dim + half * dim / 2 + pair;
                out.extend_from_slice(&values[row * width..][..width]);
            }
        }
    }
    out
}

pub fn quantised(values: &[f32], shape: &[usize], kind: GgmlDType) -> QTensor {
    let tensor = Tensor::from_slice(values, shape, &Device::Cpu).expect("a tensor");
    QTensor::quantize(&tensor, kind).expect("quantised")
}

/// The bytes of ggml's type number of a tensor.
pub fn kind_at(bytes: &[u8], name: &str) -> std::ops::Range<usize> {
    let place = bytes.windows(name.len()).rposition(|part| part == name.as_bytes());
    let after = place.expect("the tensor") + name.len();
    let dimensions = u32::from_le_bytes(bytes[after..][..4].try_into().expect("four bytes"));
    let start = after + 4 + 8 * dimensions as usize;
    start..start + 4
}

pub fn path(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}
