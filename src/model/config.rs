//! A model's shape, whatever its family: Hugging Face `config.json`, as transformers 4.x and 5.x
//! write it, checked into a [`HfConfig`].

mod lenient;
mod names;
mod raw;
mod read;
mod write;

use serde::Serialize;

use crate::base::TokenId;
use crate::ops::rope::Llama3;

pub use names::{Family, Names};

/// A decoder: an embedding, layers of a mixer and perhaps a feed-forward, a final norm, a head.
#[derive(Clone, Debug, PartialEq)]
pub struct HfConfig {
    /// How the tensors and `config.json` are spelled; no arithmetic hangs on it.
    pub family: Family,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_hidden_layers: usize,
    /// `None` where no layer attends.
    pub attention: Option<AttentionShape>,
    /// `None` where every layer attends.
    pub mamba: Option<MambaShape>,
    /// `None` where layers are a mixer alone, as Mamba's own are.
    pub feed_forward: Option<FeedForwardShape>,
    /// Of every RMS norm.
    pub rms_norm_eps: f32,
    /// The residual stream stays f32 whatever the compute dtype (Mamba's `residual_in_fp32`).
    pub residual_in_fp32: bool,
    pub tie_word_embeddings: bool,
    /// What the config says of it; nothing here depends on it.
    pub max_position_embeddings: Option<usize>,
    pub bos_token_id: Option<TokenId>,
    /// `config.json`'s, then what `generation_config.json` has beside them.
    pub eos_token_ids: Vec<TokenId>,
    pub pad_token_id: Option<TokenId>,
}

/// Layers `offset`, `offset + period`, `offset + 2 · period`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Every {
    /// At least 1.
    pub period: usize,
    /// Below the period.
    pub offset: usize,
}

impl Every {
    /// All layers.
    pub const ONE: Self = Self { period: 1, offset: 0 };

    #[must_use]
    pub fn has(self, layer: usize) -> bool {
        layer % self.period == self.offset
    }
}

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionShape {
    /// Which layers attend; the others are Mamba.
    pub layers: Every,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Biases of q, k and v.
    pub qkv_bias: bool,
    /// A bias of the output projection.
    pub o_bias: bool,
    /// An RMS norm over each head of q and k (Qwen3).
    pub qk_norm: bool,
    /// `None` without any positional term (Jamba).
    pub rope: Option<RopeShape>,
}

/// Rotary positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeShape {
    pub theta: f64,
    /// Llama 3.1's stretch of the low frequencies.
    pub llama3: Option<Llama3>,
}

/// The Mamba-1 mixer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MambaShape {
    /// Width: expand · hidden size.
    pub d_inner: usize,
    pub d_state: usize,
    pub d_conv: usize,
    pub dt_rank: usize,
    pub conv_bias: bool,
    /// Biases of the input and output projections.
    pub proj_bias: bool,
    /// RMS norms of dt, B and C (Jamba).
    pub dt_b_c_norms: bool,
}

/// The gated feed-forward of each layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedForwardShape {
    /// Width, of an expert too.
    pub intermediate_size: usize,
    pub experts: Option<ExpertsShape>,
}

/// A mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsShape {
    /// Which layers have experts; the others are dense.
    pub layers: Every,
    /// At least 2.
    pub count: usize,
    pub per_token: usize,
}

/// What a layer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerKind {
    pub mixer: MixerKind,
    pub feed_forward: FeedForwardKind,
}

/// What mixes a layer's tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MixerKind {
    Mamba,
    Attention,
}

/// What follows a layer's mixer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FeedForwardKind {
    None,
    Dense,
    Experts,
}

impl HfConfig {
    /// The layer plan, in order.
    #[must_use]
    pub fn layers(&self) -> Vec<LayerKind> {
        let kind = |layer: usize| LayerKind {
            mixer: match &self.attention {
                Some(attention) if attention.layers.has(layer) => MixerKind::Attention,
                _ => MixerKind::Mamba,
            },
            feed_forward: match &self.feed_forward {
                None => FeedForwardKind::None,
                Some(shape) if shape.experts.is_some_and(|experts| experts.layers.has(layer)) => {
                    FeedForwardKind::Experts
                }
                Some(_) => FeedForwardKind::Dense,
            },
        };
        (0..self.num_hidden_layers).map(kind).collect()
    }

    /// How the family spells its tensors.
    #[must_use]
    pub fn names(&self) -> &'static Names {
        self.family.names()
    }

    pub(super) fn attention(&self) -> &AttentionShape {
        self.attention.as_ref().expect("an attention layer has a shape")
    }

    pub(super) fn mamba(&self) -> &MambaShape {
        self.mamba.as_ref().expect("a Mamba layer has a shape")
    }

    pub(super) fn feed_forward(&self) -> &FeedForwardShape {
        self.feed_forward.as_ref().expect("a feed-forward has a shape")
    }

    pub(super) fn experts(&self) -> ExpertsShape {
        self.feed_forward().experts.expect("a mixture of experts has a shape")
    }
}

#[cfg(test)]
mod tests;
