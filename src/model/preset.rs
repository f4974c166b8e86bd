//! Named shapes with seeded random weights.

use rayon::prelude::*;

use super::{
    AttentionShape, Every, ExpertsShape, Family, FeedForwardShape, HfConfig, MambaShape,
    ModelError, Plan, RopeShape, TensorSpec,
};
use crate::base::{Stream, TokenId};

/// A shape that needs no folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// Four layers of 64, one of them attention; one token a byte.
    TinyJamba,
    /// The same with four experts, two a token, in every second layer.
    TinyJambaMoe,
    /// The same in Mamba-1 layers alone.
    TinyMamba,
    /// The same in attention layers alone.
    TinyLlama,
    SmallJamba,
    /// The shape of AI21-Jamba-Reasoning-3B.
    Jamba3bShape,
}

impl Preset {
    pub const ALL: [Self; 6] = [
        Self::TinyJamba,
        Self::TinyJambaMoe,
        Self::TinyMamba,
        Self::TinyLlama,
        Self::SmallJamba,
        Self::Jamba3bShape,
    ];

    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TinyJamba => "tiny-jamba",
            Self::TinyJambaMoe => "tiny-jamba-moe",
            Self::TinyMamba => "tiny-mamba",
            Self::TinyLlama => "tiny-llama",
            Self::SmallJamba => "small-jamba",
            Self::Jamba3bShape => "jamba-3b-shape",
        }
    }

    /// # Errors
    /// A name that is none of them; the message lists them.
    pub fn from_name(name: &str) -> Result<Self, ModelError> {
        Self::ALL
            .into_iter()
            .find(|preset| preset.name() == name)
            .ok_or_else(|| ModelError::Preset { found: name.to_owned(), known: Self::names() })
    }

    /// All names, for messages.
    pub(super) fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    #[must_use]
    pub fn config(self) -> HfConfig {
        let tiny = tiny_jamba();
        match self {
            Self::TinyJamba => tiny,
            Self::TinyJambaMoe => with_experts(tiny),
            Self::TinyMamba => HfConfig {
                family: Family::Mamba,
                attention: None,
                mamba: tiny.mamba.map(|shape| MambaShape { dt_b_c_norms: false, ..shape }),
                feed_forward: None,
                rms_norm_eps: 1e-5,
                residual_in_fp32: true,
                tie_word_embeddings: true,
                max_position_embeddings: None,
                ..tiny
            },
            Self::TinyLlama => HfConfig {
                family: Family::Llama,
                attention: tiny.attention.map(|shape| AttentionShape {
                    layers: Every::ONE,
                    rope: Some(RopeShape { theta: 10_000.0, llama3: None }),
                    ..shape
                }),
                mamba: None,
                rms_norm_eps: 1e-5,
                ..tiny
            },
            Self::SmallJamba => HfConfig {
                hidden_size: 256,
                num_hidden_layers: 8,
                attention: tiny.attention.map(|shape| AttentionShape {
                    layers: Every { period: 8, offset: 4 },
                    heads: 8,
                    kv_heads: 2,
                    head_dim: 32,
                    ..shape
                }),
                mamba: tiny.mamba.map(|shape| MambaShape { d_inner: 512, dt_rank: 16, ..shape }),
                feed_forward: Some(FeedForwardShape { intermediate_size: 768, experts: None }),
                ..tiny
            },
            Self::Jamba3bShape => jamba_3b(tiny),
        }
    }

    /// Each unit's flat f32 weights; a tensor's numbers depend on the seed and its name alone.
    #[must_use]
    pub fn weights(plan: &Plan, seed: u64) -> Vec<Vec<f32>> {
        let unit = |spec: &super::UnitSpec| {
            let tensors = spec.tensors.par_iter().map(|tensor| Self::tensor(plan, tensor, seed));
            tensors.collect::<Vec<_>>().concat()
        };
        plan.units.par_iter().map(unit).collect()
    }

    /// One tensor's weights. Mamba's own start values where it has them (Gu and Dao 2023: A =
    /// 1..N, Δ log-uniform in 0.001..0.1, D = 1); elsewhere normal with standard deviation
    /// 1/sqrt(fan in), and the projections into the residual stream smaller by 1/sqrt(2 · layers)
    /// (GPT-2).
    #[must_use]
    pub fn tensor(plan: &Plan, tensor: &TensorSpec, seed: u64) -> Vec<f32> {
        let mut stream = Stream::new(seed, &tensor.name, 0);
        let config = &plan.config;
        let name = tensor.name.as_str();
        let mut fill = |value: &mut dyn FnMut(usize, &mut Stream) -> f64| -> Vec<f32> {
            (0..tensor.len()).map(|i| value(i, &mut stream) as f32).collect()
        };
        if name.ends_with("A_log") {
            let states = config.mamba().d_state;
            return fill(&mut |i, _| ((i % states + 1) as f64).ln());
        }
        let vector = tensor.shape.len() == 1;
        if name.ends_with(".D") || vector && name.ends_with(".weight") {
            return fill(&mut |_, _| 1.0);
        }
        if name.ends_with("dt_proj.bias") {
            return fill(&mut |_, stream| {
                let (low, high) = (0.001_f64.ln(), 0.1_f64.ln());
                let delta = (low + (high - low) * stream.uniform()).exp();
                // The inverse of softplus.
                delta + (-(-delta).exp_m1()).ln()
            });
        }
        if name.ends_with(".bias") {
            return fill(&mut |_, _| 0.0);
        }
        let fan_in = *tensor.shape.last().expect("a weight has a shape") as f64;
        let into_residual = name.ends_with("out_proj.weight")
            || name.ends_with("o_proj.weight")
            || name.ends_with("down_proj.weight");
        let is_embedding = *tensor == plan.units[0].tensors[0];
        let deviation = if is_embedding && !config.tie_word_embeddings {
            0.5
        } else if into_residual {
            1.0 / (fan_in * 2.0 * config.num_hidden_layers as f64).sqrt()
        } else {
            1.0 / fan_in.sqrt()
        };
        fill(&mut |_, stream| deviation * stream.normal())
    }
}

/// AI21-Jamba-Reasoning-3B.
fn jamba_3b(tiny: HfConfig) -> HfConfig {
    HfConfig {
        vocab_size: 65_536,
        hidden_size: 2560,
        num_hidden_layers: 28,
        attention: tiny.attention.map(|shape| AttentionShape {
            layers: Every { period: 14, offset: 7 },
            heads: 20,
            kv_heads: 1,
            head_dim: 128,
            ..shape
        }),
        mamba: tiny.mamba.map(|shape| MambaShape { d_inner: 5120, dt_rank: 160, ..shape }),
        feed_forward: Some(FeedForwardShape { intermediate_size: 8192, experts: None }),
        tie_word_embeddings: true,
        max_position_embeddings: Some(262_144),
        eos_token_ids: [2, 519].map(TokenId::new).to_vec(),
        ..tiny
    }
}

/// Four experts, two a token, in every second layer.
fn with_experts(tiny: HfConfig) -> HfConfig {
    let layers = Every { period: 2, offset: 1 };
    let experts = Some(ExpertsShape { layers, count: 4, per_token: 2 });
    let feed_forward = tiny.feed_forward.map(|shape| FeedForwardShape { experts, ..shape });
    HfConfig { feed_forward, ..tiny }
}

fn tiny_jamba() -> HfConfig {
    let token = TokenId::new;
    HfConfig {
        family: Family::Jamba,
        vocab_size: 256,
        hidden_size: 64,
        num_hidden_layers: 4,
        attention: Some(AttentionShape {
            layers: Every { period: 4, offset: 2 },
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            qkv_bias: false,
            o_bias: false,
            qk_norm: false,
            rope: None,
        }),
        mamba: Some(MambaShape {
            d_inner: 128,
            d_state: 16,
            d_conv: 4,
            dt_rank: 4,
            conv_bias: true,
            proj_bias: false,
            dt_b_c_norms: true,
        }),
        feed_forward: Some(FeedForwardShape { intermediate_size: 128, experts: None }),
        rms_norm_eps: 1e-6,
        residual_in_fp32: false,
        tie_word_embeddings: false,
        max_position_embeddings: Some(512),
        bos_token_id: Some(token(1)),
        eos_token_ids: vec![token(2)],
        pad_token_id: Some(token(0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_have_their_published_sizes() {
        let count = |preset: Preset| Plan::new(preset.config()).num_parameters();
        assert_eq!(count(Preset::TinyJamba), 241_964);
        assert_eq!(count(Preset::SmallJamba), 8_082_512);
        // 3.03 billion, a tied head counted once.
        assert_eq!(count(Preset::Jamba3bShape), 3_029_337_472);
    }

    #[test]
    fn weights_depend_on_seed_and_name_alone() {
        let plan = Plan::new(Preset::TinyJamba.config());
        let weights = Preset::weights(&plan, 1);
        assert_eq!(weights, Preset::weights(&plan, 1));
        assert_ne!(weights, Preset::weights(&plan, 2));
        assert_ne!(weights[1], weights[2]);
        assert!(weights.iter().flatten().all(|w| w.is_finite()));
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones() {
        let message = Preset::from_name("jamba").expect_err("unknown").to_string();
        assert_eq!(
            message,
            "unknown preset \"jamba\"; the presets are tiny-jamba, tiny-jamba-moe, \
            tiny-mamba, tiny-llama, small-jamba, jamba-3b-shape"
        );
    }
}
