//! Hugging Face `config.json`, as transformers 4.x and 5.x write it, checked into a [`HfConfig`].

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::ModelError;
use crate::base::TokenId;

/// A dense Jamba's shape. Names are those of transformers' `JambaConfig`.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub attn_layer_period: usize,
    pub attn_layer_offset: usize,
    pub mamba_d_state: usize,
    pub mamba_d_conv: usize,
    pub mamba_expand: usize,
    pub mamba_dt_rank: usize,
    pub mamba_conv_bias: bool,
    pub mamba_proj_bias: bool,
    pub rms_norm_eps: f32,
    pub tie_word_embeddings: bool,
    pub max_position_embeddings: usize,
    pub bos_token_id: Option<TokenId>,
    pub eos_token_ids: Vec<TokenId>,
    pub pad_token_id: Option<TokenId>,
}

/// What stands between the two norms of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MixerKind {
    Mamba,
    Attention,
}

/// One token id or several, as configs have either.
#[derive(Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

/// The file as written; a field that only some releases write is an `Option`.
#[derive(Deserialize)]
struct Raw {
    model_type: Option<String>,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    attn_layer_period: Option<usize>,
    attn_layer_offset: Option<usize>,
    num_experts: Option<usize>,
    hidden_act: Option<String>,
    /// transformers 4.x writes it, always null for a published Jamba.
    sliding_window: Option<usize>,
    mamba_d_state: Option<usize>,
    mamba_d_conv: Option<usize>,
    mamba_expand: Option<usize>,
    /// A number, or "auto" for ceil(hidden / 16).
    mamba_dt_rank: Option<serde_json::Value>,
    mamba_conv_bias: Option<bool>,
    mamba_proj_bias: Option<bool>,
    rms_norm_eps: Option<f64>,
    tie_word_embeddings: Option<bool>,
    max_position_embeddings: Option<usize>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<Ids>,
    pad_token_id: Option<u32>,
}

impl HfConfig {
    /// Reads and checks `config.json` of a model folder.
    ///
    /// # Errors
    /// A file that is missing, not JSON, or describes a model this build does not have.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ModelError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    /// Of the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, ModelError> {
        let raw: Raw = serde_json::from_str(text)
            .map_err(|source| ModelError::Json { path: path.to_owned(), source })?;
        Checker { path, raw: &raw }.check()
    }

    /// Width of the Mamba mixer.
    #[must_use]
    pub fn d_inner(&self) -> usize {
        self.mamba_expand * self.hidden_size
    }

    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.num_attention_heads
    }

    /// The mixer of each layer: attention where layer mod period is the offset (transformers
    /// `JambaConfig.layers_block_type`).
    #[must_use]
    pub fn layers(&self) -> Vec<MixerKind> {
        let kind = |layer: usize| match layer % self.attn_layer_period == self.attn_layer_offset {
            true => MixerKind::Attention,
            false => MixerKind::Mamba,
        };
        (0..self.num_hidden_layers).map(kind).collect()
    }

    /// `config.json` as transformers 5 writes it.
    #[must_use]
    pub fn to_json(&self, dtype: &str) -> serde_json::Value {
        let ids: Vec<u32> = self.eos_token_ids.iter().map(|id| id.get()).collect();
        let eos = match ids.as_slice() {
            [] => serde_json::Value::Null,
            [one] => (*one).into(),
            many => many.into(),
        };
        serde_json::json!({
            "architectures": ["JambaForCausalLM"],
            "attention_dropout": 0.0,
            "attn_layer_offset": self.attn_layer_offset,
            "attn_layer_period": self.attn_layer_period,
            "bos_token_id": self.bos_token_id,
            "dtype": dtype,
            "eos_token_id": eos,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": self.intermediate_size,
            "mamba_conv_bias": self.mamba_conv_bias,
            "mamba_d_conv": self.mamba_d_conv,
            "mamba_d_state": self.mamba_d_state,
            "mamba_dt_rank": self.mamba_dt_rank,
            "mamba_expand": self.mamba_expand,
            "mamba_proj_bias": self.mamba_proj_bias,
            "max_position_embeddings": self.max_position_embeddings,
            "model_type": "jamba",
            "num_attention_heads": self.num_attention_heads,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "num_hidden_layers": self.num_hidden_layers,
            "num_key_value_heads": self.num_key_value_heads,
            "output_router_logits": false,
            "pad_token_id": self.pad_token_id,
            "rms_norm_eps": self.rms_norm_eps.to_string().parse::<f64>().unwrap_or(1e-6),
            "router_aux_loss_coef": 0.001,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": true,
            "use_mamba_kernels": false,
            "vocab_size": self.vocab_size,
        })
    }
}

struct Checker<'a> {
    path: &'a Path,
    raw: &'a Raw,
}

impl Checker<'_> {
    fn wrong(&self, field: &'static str, reason: impl Into<String>) -> ModelError {
        ModelError::Field { path: self.path.to_owned(), field, reason: reason.into() }
    }

    fn positive(&self, field: &'static str, value: Option<usize>) -> Result<usize, ModelError> {
        match value {
            Some(0) => Err(self.wrong(field, "is 0; it must be at least 1")),
            Some(value) => Ok(value),
            None => Err(self.wrong(field, "is missing")),
        }
    }

    fn check(&self) -> Result<HfConfig, ModelError> {
        let raw = self.raw;
        self.check_family()?;
        let hidden_size = self.positive("hidden_size", raw.hidden_size)?;
        let (heads, kv_heads) = self.heads(hidden_size)?;
        let (attn_layer_period, attn_layer_offset) = self.attention_layers()?;
        let eos = match &raw.eos_token_id {
            None => Vec::new(),
            Some(Ids::One(id)) => vec![*id],
            Some(Ids::Many(ids)) => ids.clone(),
        };
        let token = |id: u32| TokenId::new(id);
        Ok(HfConfig {
            vocab_size: self.positive("vocab_size", raw.vocab_size)?,
            hidden_size,
            intermediate_size: self.positive("intermediate_size", raw.intermediate_size)?,
            num_hidden_layers: self.positive("num_hidden_layers", raw.num_hidden_layers)?,
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            attn_layer_period,
            attn_layer_offset,
            mamba_d_state: self.positive("mamba_d_state", raw.mamba_d_state)?,
            mamba_d_conv: self.positive("mamba_d_conv", raw.mamba_d_conv)?,
            mamba_expand: self.positive("mamba_expand", raw.mamba_expand)?,
            mamba_dt_rank: self.dt_rank(hidden_size)?,
            mamba_conv_bias: raw.mamba_conv_bias.unwrap_or(true),
            mamba_proj_bias: raw.mamba_proj_bias.unwrap_or(false),
            rms_norm_eps: self.rms_norm_eps()?,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            max_position_embeddings: raw.max_position_embeddings.unwrap_or(262_144),
            bos_token_id: raw.bos_token_id.map(token),
            eos_token_ids: eos.into_iter().map(token).collect(),
            pad_token_id: raw.pad_token_id.map(token),
        })
    }

    fn check_family(&self) -> Result<(), ModelError> {
        match self.raw.model_type.as_deref() {
            Some("jamba") => {}
            Some(other) => {
                let reason = format!("is {other:?}; this build knows \"jamba\"");
                return Err(self.wrong("model_type", reason));
            }
            None => return Err(self.wrong("model_type", "is missing")),
        }
        match self.raw.num_experts {
            Some(1) => {}
            None => {
                let reason = "is missing, which transformers reads as 16; this build knows 1";
                return Err(self.wrong("num_experts", reason));
            }
            Some(n) => {
                let reason = format!("is {n}; this build knows dense Jamba, num_experts = 1");
                return Err(self.wrong("num_experts", reason));
            }
        }
        if let Some(window) = self.raw.sliding_window {
            let reason = format!("is {window}; this build knows attention to all keys, null");
            return Err(self.wrong("sliding_window", reason));
        }
        match self.raw.hidden_act.as_deref() {
            None | Some("silu") => Ok(()),
            Some(other) => {
                Err(self.wrong("hidden_act", format!("is {other:?}; this build knows \"silu\"")))
            }
        }
    }

    /// As the f32 that it is used as, where a tiny number would become 0.
    fn rms_norm_eps(&self) -> Result<f32, ModelError> {
        let eps = self.raw.rms_norm_eps.unwrap_or(1e-6) as f32;
        if eps > 0.0 && eps.is_finite() {
            return Ok(eps);
        }
        let reason = format!("is {eps} in f32; it must be positive and finite");
        Err(self.wrong("rms_norm_eps", reason))
    }

    fn heads(&self, hidden_size: usize) -> Result<(usize, usize), ModelError> {
        let heads = self.positive("num_attention_heads", self.raw.num_attention_heads)?;
        let kv_heads = match self.raw.num_key_value_heads {
            None => heads,
            some => self.positive("num_key_value_heads", some)?,
        };
        if !hidden_size.is_multiple_of(heads) {
            let reason = format!("is {heads}, which does not divide hidden_size {hidden_size}");
            return Err(self.wrong("num_attention_heads", reason));
        }
        if !heads.is_multiple_of(kv_heads) {
            let reason = format!("is {kv_heads}, which does not divide {heads} attention heads");
            return Err(self.wrong("num_key_value_heads", reason));
        }
        Ok((heads, kv_heads))
    }

    /// transformers#33316: an offset outside the period builds a model without attention.
    fn attention_layers(&self) -> Result<(usize, usize), ModelError> {
        let period = self.positive("attn_layer_period", self.raw.attn_layer_period)?;
        let Some(offset) = self.raw.attn_layer_offset else {
            return Err(self.wrong("attn_layer_offset", "is missing"));
        };
        if offset >= period {
            let reason = format!("is {offset}; it must be below attn_layer_period {period}");
            return Err(self.wrong("attn_layer_offset", reason));
        }
        Ok((period, offset))
    }

    fn dt_rank(&self, hidden_size: usize) -> Result<usize, ModelError> {
        use serde_json::Value;
        match &self.raw.mamba_dt_rank {
            None => Ok(hidden_size.div_ceil(16)),
            Some(Value::String(auto)) if auto == "auto" => Ok(hidden_size.div_ceil(16)),
            Some(value) => match value.as_u64().and_then(|rank| usize::try_from(rank).ok()) {
                Some(rank) if rank > 0 => Ok(rank),
                _ => Err(self.wrong(
                    "mamba_dt_rank",
                    format!("is {value}; it must be a positive number or \"auto\""),
                )),
            },
        }
    }
}

#[cfg(test)]
mod tests;
