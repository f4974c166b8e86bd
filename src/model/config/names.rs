//! The table of spellings: one row a family, one column a tensor.

/// The model families that this build knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Mamba and attention layers, dense or with experts.
    Jamba,
    /// Mamba-1 alone.
    Mamba,
    Llama,
    Qwen2,
    Qwen3,
}

/// How a family's files spell what all families have. Tensor names are without `.weight` and
/// `.bias`; those of a layer come after `layers` and the layer's number.
#[derive(Debug, PartialEq, Eq)]
pub struct Names {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    pub architecture: &'static str,
    pub embedding: &'static str,
    pub final_norm: &'static str,
    pub layers: &'static str,
    pub input_norm: &'static str,
    pub mamba: &'static str,
    pub attention: &'static str,
    pub feed_forward_norm: &'static str,
    pub feed_forward: &'static str,
}

const JAMBA: Names = Names {
    model_type: "jamba",
    architecture: "JambaForCausalLM",
    embedding: "model.embed_tokens",
    final_norm: "model.final_layernorm",
    layers: "model.layers",
    input_norm: "input_layernorm",
    mamba: "mamba",
    attention: "self_attn",
    feed_forward_norm: "pre_ff_layernorm",
    feed_forward: "feed_forward",
};

const LLAMA: Names = Names {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    final_norm: "model.norm",
    feed_forward_norm: "post_attention_layernorm",
    feed_forward: "mlp",
    ..JAMBA
};

const QWEN2: Names = Names { model_type: "qwen2", architecture: "Qwen2ForCausalLM", ..LLAMA };

const QWEN3: Names = Names { model_type: "qwen3", architecture: "Qwen3ForCausalLM", ..LLAMA };

const MAMBA: Names = Names {
    model_type: "mamba",
    architecture: "MambaForCausalLM",
    embedding: "backbone.embeddings",
    final_norm: "backbone.norm_f",
    layers: "backbone.layers",
    input_norm: "norm",
    mamba: "mixer",
    ..JAMBA
};

impl Family {
    pub const ALL: [Self; 5] = [Self::Jamba, Self::Mamba, Self::Llama, Self::Qwen2, Self::Qwen3];

    #[must_use]
    pub const fn names(self) -> &'static Names {
        match self {
            Self::Jamba => &JAMBA,
            Self::Mamba => &MAMBA,
            Self::Llama => &LLAMA,
            Self::Qwen2 => &QWEN2,
            Self::Qwen3 => &QWEN3,
        }
    }
}

impl Names {
    /// The prefix of layer `index`'s tensors.
    #[must_use]
    pub fn layer(&self, index: usize) -> String {
        format!("{}.{index}.", self.layers)
    }
}
