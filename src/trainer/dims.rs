//! What the reference leg needs to know of a model, apart from the model room's own blocks.

use std::collections::BTreeMap;

use crate::model::{HfConfig, MixerKind};

/// What the reference needs to know of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Dims {
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    /// One entry a layer: attention, or else Mamba.
    pub attention_layers: Vec<bool>,
    pub heads: usize,
    pub kv_heads: usize,
    /// Mamba's inner width: expand * hidden.
    pub d_inner: usize,
    pub d_state: usize,
    pub d_conv: usize,
    pub dt_rank: usize,
    /// Of every RMS norm.
    pub eps: f64,
    /// The output head is the embedding; there is no `lm_head.weight`.
    pub tied: bool,
    pub conv_bias: bool,
    /// `in_proj` and `out_proj` have biases.
    pub proj_bias: bool,
}

impl From<&HfConfig> for Dims {
    fn from(config: &HfConfig) -> Self {
        let attention = |kind: &MixerKind| *kind == MixerKind::Attention;
        Self {
            vocab: config.vocab_size,
            hidden: config.hidden_size,
            intermediate: config.intermediate_size,
            attention_layers: config.layers().iter().map(attention).collect(),
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            d_inner: config.d_inner(),
            d_state: config.mamba_d_state,
            d_conv: config.mamba_d_conv,
            dt_rank: config.mamba_dt_rank,
            eps: f64::from(config.rms_norm_eps),
            tied: config.tie_word_embeddings,
            conv_bias: config.mamba_conv_bias,
            proj_bias: config.mamba_proj_bias,
        }
    }
}

impl Dims {
    /// Every tensor by name and shape.
    #[must_use]
    pub fn tensors(&self) -> BTreeMap<String, Vec<usize>> {
        let (h, i) = (self.hidden, self.intermediate);
        let mut all = BTreeMap::new();
        let mut put = |name: String, shape: &[usize]| {
            all.insert(name, shape.to_vec());
        };
        put("model.embed_tokens.weight".into(), &[self.vocab, h]);
        put("model.final_layernorm.weight".into(), &[h]);
        if !self.tied {
            put("lm_head.weight".into(), &[self.vocab, h]);
        }
        for (layer, &attention) in self.attention_layers.iter().enumerate() {
            let mut put = |name: &str, shape: &[usize]| {
                put(format!("model.layers.{layer}.{name}"), shape);
            };
            put("input_layernorm.weight", &[h]);
            put("pre_ff_layernorm.weight", &[h]);
            put("feed_forward.gate_proj.weight", &[i, h]);
            put("feed_forward.up_proj.weight", &[i, h]);
            put("feed_forward.down_proj.weight", &[h, i]);
            if attention {
                self.attention_tensors(put);
            } else {
                self.mamba_tensors(put);
            }
        }
        all
    }

    fn attention_tensors(&self, mut put: impl FnMut(&str, &[usize])) {
        let h = self.hidden;
        let kv = h / self.heads * self.kv_heads;
        put("self_attn.q_proj.weight", &[h, h]);
        put("self_attn.k_proj.weight", &[kv, h]);
        put("self_attn.v_proj.weight", &[kv, h]);
        put("self_attn.o_proj.weight", &[h, h]);
    }

    fn mamba_tensors(&self, mut put: impl FnMut(&str, &[usize])) {
        let (h, d, n, r) = (self.hidden, self.d_inner, self.d_state, self.dt_rank);
        put("mamba.in_proj.weight", &[2 * d, h]);
        put("mamba.conv1d.weight", &[d, 1, self.d_conv]);
        put("mamba.x_proj.weight", &[r + 2 * n, d]);
        put("mamba.dt_layernorm.weight", &[r]);
        put("mamba.b_layernorm.weight", &[n]);
        put("mamba.c_layernorm.weight", &[n]);
        put("mamba.dt_proj.weight", &[d, r]);
        put("mamba.dt_proj.bias", &[d]);
        put("mamba.A_log", &[d, n]);
        put("mamba.D", &[d]);
        put("mamba.out_proj.weight", &[h, d]);
        if self.conv_bias {
            put("mamba.conv1d.bias", &[d]);
        }
        if self.proj_bias {
            put("mamba.in_proj.bias", &[2 * d]);
            put("mamba.out_proj.bias", &[h]);
        }
    }
}
