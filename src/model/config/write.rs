//! `config.json` as transformers 5 writes it.

use serde_json::{json, Map, Value};

use super::{
    AttentionShape, ExpertsShape, Family, FeedForwardShape, HfConfig, MambaShape, RopeShape,
};

impl HfConfig {
    /// The whole file, for weights stored as `dtype`.
    #[must_use]
    pub fn to_json(&self, dtype: &str) -> Value {
        let ids: Vec<u32> = self.eos_token_ids.iter().map(|id| id.get()).collect();
        let eos = match ids.as_slice() {
            [] => Value::Null,
            [one] => (*one).into(),
            many => many.into(),
        };
        let mut all = object(json!({
            "architectures": [self.names().architecture],
            "bos_token_id": self.bos_token_id,
            "dtype": dtype,
            "eos_token_id": eos,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "initializer_range": 0.02,
            "model_type": self.names().model_type,
            "num_hidden_layers": self.num_hidden_layers,
            "pad_token_id": self.pad_token_id,
            "tie_word_embeddings": self.tie_word_embeddings,
            "use_cache": true,
            "vocab_size": self.vocab_size,
        }));
        if let Some(len) = self.max_position_embeddings {
            all.insert("max_position_embeddings".into(), len.into());
        }
        // The shortest decimal that reads back as this f32.
        let eps = self.rms_norm_eps.to_string().parse::<f64>().unwrap_or(1e-6);
        let name = if self.family == Family::Mamba { "layer_norm_epsilon" } else { "rms_norm_eps" };
        all.insert(name.into(), eps.into());
        if let Some(shape) = &self.feed_forward {
            all.insert("intermediate_size".into(), shape.intermediate_size.into());
        }
        if let Some(shape) = &self.attention {
            all.append(&mut attention(shape));
        }
        match self.family {
            Family::Jamba => all.append(&mut jamba(self)),
            Family::Mamba => all.append(&mut mamba(self)),
            Family::Llama | Family::Qwen2 | Family::Qwen3 => {}
        }
        all.into()
    }
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => unreachable!("{other} is written as an object"),
    }
}

fn attention(shape: &AttentionShape) -> Map<String, Value> {
    let mut all = object(json!({
        "attention_dropout": 0.0,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
    }));
    if let Some(rope) = &shape.rope {
        all.insert("head_dim".into(), shape.head_dim.into());
        all.insert("attention_bias".into(), shape.o_bias.into());
        all.insert("rope_parameters".into(), rope_parameters(rope));
    }
    all
}

fn rope_parameters(rope: &RopeShape) -> Value {
    match rope.llama3 {
        None => json!({ "rope_theta": rope.theta, "rope_type": "default" }),
        Some(llama3) => json!({
            "rope_theta": rope.theta,
            "rope_type": "llama3",
            "factor": llama3.factor,
            "low_freq_factor": llama3.low_freq_factor,
            "high_freq_factor": llama3.high_freq_factor,
            "original_max_position_embeddings": llama3.original_context as u64,
        }),
    }
}

fn jamba(config: &HfConfig) -> Map<String, Value> {
    let AttentionShape { layers, .. } = config.attention();
    let FeedForwardShape { experts, .. } = config.feed_forward();
    let (count, per_token) = experts.map_or((1, 1), |shape| (shape.count, shape.per_token));
    // A dense file has the two all the same, at transformers' defaults.
    let expert_layers =
        experts.map_or((2, 1), |ExpertsShape { layers, .. }| (layers.period, layers.offset));
    let MambaShape { d_inner, d_state, d_conv, dt_rank, conv_bias, proj_bias, .. } = config.mamba();
    object(json!({
        "attn_layer_offset": layers.offset,
        "attn_layer_period": layers.period,
        "expert_layer_offset": expert_layers.1,
        "expert_layer_period": expert_layers.0,
        "mamba_conv_bias": conv_bias,
        "mamba_d_conv": d_conv,
        "mamba_d_state": d_state,
        "mamba_dt_rank": dt_rank,
        "mamba_expand": d_inner / config.hidden_size,
        "mamba_proj_bias": proj_bias,
        "num_experts": count,
        "num_experts_per_tok": per_token,
        "output_router_logits": false,
        "router_aux_loss_coef": 0.001,
        "use_mamba_kernels": false,
    }))
}

fn mamba(config: &HfConfig) -> Map<String, Value> {
    let MambaShape { d_inner, d_state, d_conv, dt_rank, conv_bias, proj_bias, .. } = config.mamba();
    object(json!({
        "conv_kernel": d_conv,
        "expand": d_inner / config.hidden_size,
        "intermediate_size": d_inner,
        "residual_in_fp32": config.residual_in_fp32,
        "state_size": d_state,
        "time_step_rank": dt_rank,
        "use_bias": proj_bias,
        "use_conv_bias": conv_bias,
    }))
}
