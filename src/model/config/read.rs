//! From the file as written to a checked [`HfConfig`]: one function a family.

use std::path::Path;

use super::lenient::{quoted, Float};
use super::raw::{parse, text, token_ids, Raw, RawGeneration};
use super::*;
use crate::model::ModelError;

impl HfConfig {
    /// Reads and checks `config.json` of a model folder.
    ///
    /// # Errors
    /// A file that is missing, not JSON, or describes a model this build does not have.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        Self::parse(&text(path)?, path)
    }

    /// Of the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, ModelError> {
        let raw: Raw = parse(&quoted(text), path)?;
        Checker { path, raw: &raw }.check()
    }

    /// Adds the end tokens of `generation_config.json` that `config.json` lacks: a model's turns
    /// may end with any of them (huggingface/trl#7039).
    ///
    /// # Errors
    /// A file that cannot be read or is not JSON.
    pub fn add_generation_config(&mut self, path: &Path) -> Result<(), ModelError> {
        let text = quoted(&text(path)?);
        let raw: RawGeneration = parse(&text, path)?;
        for id in token_ids(raw.eos_token_id.as_ref()) {
            if !self.eos_token_ids.contains(&id) {
                self.eos_token_ids.push(id);
            }
        }
        Ok(())
    }
}

/// More than any model has, and few enough that no product of sizes leaves 64 bits and no plan of a
/// damaged file fills the memory.
const MOST_IDS: usize = 1 << 22;
const MOST_WIDE: usize = 1 << 18;
const MOST_LAYERS: usize = 1 << 10;
const MOST_EXPERTS: usize = 1 << 10;

struct Checker<'a> {
    path: &'a Path,
    raw: &'a Raw,
}

impl Checker<'_> {
    fn wrong(&self, field: &str, reason: impl Into<String>) -> ModelError {
        let (path, field) = (self.path.to_owned(), field.to_owned());
        ModelError::Field { path, field, reason: reason.into() }
    }

    /// A size of a tensor.
    fn positive(&self, field: &str, value: Option<usize>) -> Result<usize, ModelError> {
        self.within(MOST_WIDE, field, value)
    }

    fn within(&self, most: usize, field: &str, value: Option<usize>) -> Result<usize, ModelError> {
        match value {
            Some(0) => Err(self.wrong(field, "is 0; it must be at least 1")),
            Some(value) if value <= most => Ok(value),
            Some(value) => {
                Err(self.wrong(field, format!("is {value}; this build knows up to {most}")))
            }
            None => Err(self.wrong(field, "is missing")),
        }
    }

    /// A width that is a multiple of another one.
    fn widened(&self, field: &str, by: Option<usize>, width: usize) -> Result<usize, ModelError> {
        let by = self.positive(field, by)?;
        if by * width <= MOST_WIDE {
            return Ok(by * width);
        }
        let reason = format!("is {by}, times {width}; this build knows widths up to {MOST_WIDE}");
        Err(self.wrong(field, reason))
    }

    /// As the f32 that it is used as, where a tiny number would become 0.
    fn positive_f32(&self, field: &str, value: f64) -> Result<f32, ModelError> {
        let value = value as f32;
        if value > 0.0 && value.is_finite() {
            return Ok(value);
        }
        Err(self.wrong(field, format!("is {value} in f32; it must be positive and finite")))
    }

    fn check(&self) -> Result<HfConfig, ModelError> {
        let family = self.family()?;
        if let Some(other) = self.raw.hidden_act.as_deref().filter(|act| *act != "silu") {
            let reason = format!("is {other:?}; this build knows \"silu\"");
            return Err(self.wrong("hidden_act", reason));
        }
        let common = self.common(family)?;
        match family {
            Family::Jamba => self.jamba(common),
            Family::Mamba => self.mamba(common),
            Family::Llama => {
                let bias = self.raw.attention_bias.unwrap_or(false);
                self.transformer(common, (bias, bias))
            }
            Family::Qwen2 => self.transformer(common, (true, false)),
            Family::Qwen3 => {
                let bias = self.raw.attention_bias.unwrap_or(false);
                self.transformer(common, (bias, bias))
            }
        }
    }

    fn family(&self) -> Result<Family, ModelError> {
        let Some(found) = self.raw.model_type.as_deref() else {
            return Err(self.wrong("model_type", "is missing"));
        };
        Family::ALL.into_iter().find(|family| family.names().model_type == found).ok_or_else(|| {
            let known = Family::ALL.map(|family| format!("{:?}", family.names().model_type));
            let reason = format!("is {found:?}; this build knows {}", known.join(", "));
            self.wrong("model_type", reason)
        })
    }

    /// What every family has; without layers' shapes.
    fn common(&self, family: Family) -> Result<HfConfig, ModelError> {
        let raw = self.raw;
        // What transformers takes where a file is silent.
        let (eps, default, tied) = match family {
            Family::Mamba => ("layer_norm_epsilon", 1e-5, true),
            _ => ("rms_norm_eps", 1e-6, false),
        };
        let found = if family == Family::Mamba { raw.layer_norm_epsilon } else { raw.rms_norm_eps };
        Ok(HfConfig {
            family,
            vocab_size: self.within(MOST_IDS, "vocab_size", raw.vocab_size)?,
            hidden_size: self.positive("hidden_size", raw.hidden_size)?,
            num_hidden_layers: self.within(
                MOST_LAYERS,
                "num_hidden_layers",
                raw.num_hidden_layers,
            )?,
            attention: None,
            mamba: None,
            feed_forward: None,
            rms_norm_eps: self.positive_f32(eps, found.map_or(default, |Float(eps)| eps))?,
            residual_in_fp32: false,
            tie_word_embeddings: raw.tie_word_embeddings.unwrap_or(tied),
            max_position_embeddings: raw.max_position_embeddings,
            bos_token_id: raw.bos_token_id.map(TokenId::new),
            eos_token_ids: token_ids(raw.eos_token_id.as_ref()),
            pad_token_id: raw.pad_token_id.map(TokenId::new),
        })
    }

    fn jamba(&self, common: HfConfig) -> Result<HfConfig, ModelError> {
        let raw = self.raw;
        if let Some(window) = raw.sliding_window {
            return Err(self.window(window));
        }
        let layers = self.every(
            ("attn_layer_period", raw.attn_layer_period),
            ("attn_layer_offset", raw.attn_layer_offset),
        )?;
        let h = common.hidden_size;
        let feed_forward = FeedForwardShape {
            intermediate_size: self.positive("intermediate_size", raw.intermediate_size)?,
            experts: self.experts()?,
        };
        let mamba = MambaShape {
            d_inner: self.widened("mamba_expand", raw.mamba_expand, h)?,
            d_state: self.positive("mamba_d_state", raw.mamba_d_state)?,
            d_conv: self.positive("mamba_d_conv", raw.mamba_d_conv)?,
            dt_rank: self.rank("mamba_dt_rank", raw.mamba_dt_rank.as_ref(), h)?,
            conv_bias: raw.mamba_conv_bias.unwrap_or(true),
            proj_bias: raw.mamba_proj_bias.unwrap_or(false),
            dt_b_c_norms: true,
        };
        Ok(HfConfig {
            attention: Some(AttentionShape { layers, ..self.heads(h, None)? }),
            mamba: Some(mamba),
            feed_forward: Some(feed_forward),
            max_position_embeddings: common.max_position_embeddings.or(Some(262_144)),
            ..common
        })
    }

    fn mamba(&self, common: HfConfig) -> Result<HfConfig, ModelError> {
        let raw = self.raw;
        let h = common.hidden_size;
        let mamba = MambaShape {
            d_inner: self.widened("expand", raw.expand, h)?,
            d_state: self.positive("state_size", raw.state_size)?,
            d_conv: self.positive("conv_kernel", raw.conv_kernel)?,
            dt_rank: self.rank("time_step_rank", raw.time_step_rank.as_ref(), h)?,
            conv_bias: raw.use_conv_bias.unwrap_or(true),
            proj_bias: raw.use_bias.unwrap_or(false),
            dt_b_c_norms: false,
        };
        let residual_in_fp32 = raw.residual_in_fp32.unwrap_or(true);
        Ok(HfConfig { mamba: Some(mamba), residual_in_fp32, ..common })
    }

    /// Llama and those like it.
    fn transformer(
        &self,
        common: HfConfig,
        (qkv_bias, o_bias): (bool, bool),
    ) -> Result<HfConfig, ModelError> {
        let raw = self.raw;
        self.full_attention(common.num_hidden_layers)?;
        if raw.mlp_bias == Some(true) {
            return Err(self.wrong("mlp_bias", "is true; this build knows false"));
        }
        let heads = self.heads(common.hidden_size, raw.head_dim)?;
        if !heads.head_dim.is_multiple_of(2) {
            let reason = format!("is {}; rotary positions turn pairs", heads.head_dim);
            return Err(self.wrong("head_dim", reason));
        }
        let qk_norm = common.family == Family::Qwen3;
        let rope = Some(self.rope()?);
        let intermediate_size = self.positive("intermediate_size", raw.intermediate_size)?;
        Ok(HfConfig {
            attention: Some(AttentionShape { qkv_bias, o_bias, qk_norm, rope, ..heads }),
            feed_forward: Some(FeedForwardShape { intermediate_size, experts: None }),
            ..common
        })
    }

    /// Head counts and width; everything else off.
    fn heads(&self, hidden: usize, dim: Option<usize>) -> Result<AttentionShape, ModelError> {
        let heads = self.positive("num_attention_heads", self.raw.num_attention_heads)?;
        let kv_heads = match self.raw.num_key_value_heads {
            None => heads,
            some => self.positive("num_key_value_heads", some)?,
        };
        let head_dim = match dim {
            Some(_) => self.widened("head_dim", dim, heads)? / heads,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                let reason = format!("is {heads}, which does not divide hidden_size {hidden}");
                return Err(self.wrong("num_attention_heads", reason));
            }
        };
        if !heads.is_multiple_of(kv_heads) {
            let reason = format!("is {kv_heads}, which does not divide {heads} attention heads");
            return Err(self.wrong("num_key_value_heads", reason));
        }
        let (layers, rope) = (Every::ONE, None);
        let (qkv_bias, o_bias, qk_norm) = (false, false, false);
        Ok(AttentionShape { layers, heads, kv_heads, head_dim, qkv_bias, o_bias, qk_norm, rope })
    }

    /// A window would only act in layers from `max_window_layers` on, where it is switched on.
    fn full_attention(&self, layers: usize) -> Result<(), ModelError> {
        let raw = self.raw;
        let other = |kind: &&String| *kind != "full_attention";
        if let Some(kind) = raw.layer_types.iter().flatten().find(other) {
            let reason = format!("has {kind:?}; this build knows \"full_attention\"");
            return Err(self.wrong("layer_types", reason));
        }
        match raw.sliding_window {
            Some(window)
                if raw.use_sliding_window == Some(true)
                    && raw.layer_types.is_none()
                    && raw.max_window_layers.unwrap_or(0) < layers =>
            {
                Err(self.window(window))
            }
            _ => Ok(()),
        }
    }

    fn window(&self, window: usize) -> ModelError {
        let reason = format!("is {window}; this build knows attention to all keys, null");
        self.wrong("sliding_window", reason)
    }

    fn rope(&self) -> Result<RopeShape, ModelError> {
        let (section, rope) = match (&self.raw.rope_parameters, &self.raw.rope_scaling) {
            (Some(rope), _) => ("rope_parameters", Some(rope)),
            (None, rope) => ("rope_scaling", rope.as_ref()),
        };
        let theta = rope.and_then(|rope| rope.rope_theta).or(self.raw.rope_theta);
        let theta = theta.map_or(10_000.0, |Float(theta)| theta);
        self.positive_f32("rope_theta", theta)?;
        let kind = rope.and_then(|rope| rope.rope_type.as_deref().or(rope.r#type.as_deref()));
        let field = |name: &str| format!("{section}.{name}");
        let llama3 = match (rope, kind.unwrap_or("default")) {
            (_, "default") => None,
            (Some(rope), "llama3") => {
                let get = |name, value: Option<Float>| match value {
                    None => Err(self.wrong(&field(name), "is missing")),
                    Some(Float(x)) => self.positive_f32(&field(name), x).map(f64::from),
                };
                let context = rope.original_max_position_embeddings;
                Some(Llama3 {
                    factor: get("factor", rope.factor)?,
                    low_freq_factor: get("low_freq_factor", rope.low_freq_factor)?,
                    high_freq_factor: get("high_freq_factor", rope.high_freq_factor)?,
                    original_context: get("original_max_position_embeddings", context)?,
                })
            }
            (_, other) => {
                let reason = format!("is {other:?}; this build knows \"default\" and \"llama3\"");
                return Err(self.wrong(&field("rope_type"), reason));
            }
        };
        Ok(RopeShape { theta, llama3 })
    }

    /// transformers#33316: an offset outside the period builds a model without such layers.
    fn every(
        &self,
        (period_name, period): (&str, Option<usize>),
        (offset_name, offset): (&str, Option<usize>),
    ) -> Result<Every, ModelError> {
        let period = self.positive(period_name, period)?;
        let Some(offset) = offset else { return Err(self.wrong(offset_name, "is missing")) };
        if offset >= period {
            let reason = format!("is {offset}; it must be below {period_name} {period}");
            return Err(self.wrong(offset_name, reason));
        }
        Ok(Every { period, offset })
    }

    fn experts(&self) -> Result<Option<ExpertsShape>, ModelError> {
        let raw = self.raw;
        let count = self.within(MOST_EXPERTS, "num_experts", raw.num_experts)?;
        if count == 1 {
            return Ok(None);
        }
        let per_token = self.positive("num_experts_per_tok", raw.num_experts_per_tok)?;
        if per_token > count {
            let reason = format!("is {per_token}, of {count} experts");
            return Err(self.wrong("num_experts_per_tok", reason));
        }
        let layers = self.every(
            ("expert_layer_period", raw.expert_layer_period),
            ("expert_layer_offset", raw.expert_layer_offset),
        )?;
        Ok(Some(ExpertsShape { layers, count, per_token }))
    }

    fn rank(
        &self,
        field: &str,
        value: Option<&serde_json::Value>,
        hidden_size: usize,
    ) -> Result<usize, ModelError> {
        use serde_json::Value;
        match value {
            None => Ok(hidden_size.div_ceil(16)),
            Some(Value::String(auto)) if auto == "auto" => Ok(hidden_size.div_ceil(16)),
            Some(value) => match value.as_u64().and_then(|rank| usize::try_from(rank).ok()) {
                Some(rank) if rank > 0 => self.positive(field, Some(rank)),
                _ => {
                    let reason = format!("is {value}; it must be a positive number or \"auto\"");
                    Err(self.wrong(field, reason))
                }
            },
        }
    }
}
