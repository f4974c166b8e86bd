//! `config.json` and `generation_config.json` as written.

use std::path::Path;

use serde::Deserialize;

use super::lenient::Float;
use crate::base::TokenId;
use crate::model::ModelError;

/// One token id or several, as configs have either.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
pub(super) enum Ids {
    One(u32),
    Many(Vec<u32>),
}

/// The file as written, of any family; a field that only some families or releases write is an
/// `Option`, and all are.
#[derive(Deserialize)]
pub(super) struct Raw {
    pub model_type: Option<String>,
    pub vocab_size: Option<usize>,
    pub hidden_size: Option<usize>,
    pub intermediate_size: Option<usize>,
    pub num_hidden_layers: Option<usize>,
    pub hidden_act: Option<String>,
    pub tie_word_embeddings: Option<bool>,
    pub max_position_embeddings: Option<usize>,
    pub bos_token_id: Option<u32>,
    pub eos_token_id: Option<Ids>,
    pub pad_token_id: Option<u32>,
    pub rms_norm_eps: Option<Float>,
    /// Mamba's spelling.
    pub layer_norm_epsilon: Option<Float>,

    pub num_attention_heads: Option<usize>,
    pub num_key_value_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub attention_bias: Option<bool>,
    pub mlp_bias: Option<bool>,
    pub sliding_window: Option<usize>,
    pub use_sliding_window: Option<bool>,
    pub max_window_layers: Option<usize>,
    pub layer_types: Option<Vec<String>>,
    pub rope_theta: Option<Float>,
    /// transformers 4.x; null for plain rotary positions.
    pub rope_scaling: Option<RawRope>,
    /// transformers 5.x.
    pub rope_parameters: Option<RawRope>,

    pub attn_layer_period: Option<usize>,
    pub attn_layer_offset: Option<usize>,
    pub expert_layer_period: Option<usize>,
    pub expert_layer_offset: Option<usize>,
    pub num_experts: Option<usize>,
    pub num_experts_per_tok: Option<usize>,
    pub mamba_d_state: Option<usize>,
    pub mamba_d_conv: Option<usize>,
    pub mamba_expand: Option<usize>,
    /// A number, or "auto" for ceil(hidden / 16).
    pub mamba_dt_rank: Option<serde_json::Value>,
    pub mamba_conv_bias: Option<bool>,
    pub mamba_proj_bias: Option<bool>,

    pub state_size: Option<usize>,
    pub conv_kernel: Option<usize>,
    pub expand: Option<usize>,
    pub time_step_rank: Option<serde_json::Value>,
    pub use_bias: Option<bool>,
    pub use_conv_bias: Option<bool>,
    pub residual_in_fp32: Option<bool>,
}

#[derive(Deserialize)]
pub(super) struct RawRope {
    pub rope_theta: Option<Float>,
    pub rope_type: Option<String>,
    /// The older spelling of `rope_type`.
    pub r#type: Option<String>,
    pub factor: Option<Float>,
    pub low_freq_factor: Option<Float>,
    pub high_freq_factor: Option<Float>,
    pub original_max_position_embeddings: Option<Float>,
}

/// What is read of `generation_config.json`.
#[derive(Deserialize)]
pub(super) struct RawGeneration {
    pub eos_token_id: Option<Ids>,
}

pub(super) fn text(path: &Path) -> Result<String, ModelError> {
    std::fs::read_to_string(path)
        .map_err(|source| ModelError::Read { path: path.to_owned(), source })
}

/// What is not JSON is told by line and column, a value of the wrong kind by its field as well.
pub(super) fn parse<'de, T: Deserialize<'de>>(
    text: &'de str,
    path: &Path,
) -> Result<T, ModelError> {
    let path = path.to_owned();
    serde_path_to_error::deserialize(&mut serde_json::Deserializer::from_str(text)).map_err(
        |error| {
            let field = error.path().to_string();
            let source = error.into_inner();
            match source.is_data() && field != "." {
                true => ModelError::JsonField { path, field, source },
                false => ModelError::Json { path, source },
            }
        },
    )
}

pub(super) fn token_ids(ids: Option<&Ids>) -> Vec<TokenId> {
    let ids = match ids {
        None => Vec::new(),
        Some(Ids::One(id)) => vec![*id],
        Some(Ids::Many(ids)) => ids.clone(),
    };
    ids.into_iter().map(TokenId::new).collect()
}
