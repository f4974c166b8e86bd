//! Tiny shapes of every family that together switch everything a config can switch.

use gapscope::model::{
    AttentionShape, Every, ExpertsShape, Family, FeedForwardShape, HfConfig, MambaShape, Preset,
    RopeShape,
};
use gapscope::ops::rope::Llama3;

/// The tiny preset, then shapes that differ from it in all that they can.
pub fn odd_shapes() -> Vec<(&'static str, HfConfig)> {
    let (experts, single) =
        (experts(2, 3, Every { period: 2, offset: 0 }), experts(1, 5, Every::ONE));
    vec![
        ("tiny", Preset::TinyJamba.config()),
        ("biased", biased_jamba()),
        ("odd, tied", tied_jamba()),
        ("experts", experts),
        ("one of five experts", single),
        ("mamba", mamba(true)),
        ("biased mamba", mamba(false)),
        ("llama", llama()),
        ("qwen2", qwen2()),
        ("qwen3", qwen3()),
    ]
}

fn biased_jamba() -> HfConfig {
    HfConfig {
        vocab_size: 101,
        hidden_size: 40,
        num_hidden_layers: 3,
        attention: Some(AttentionShape {
            layers: Every { period: 3, offset: 1 },
            ..heads(5, 1, 8)
        }),
        mamba: Some(MambaShape {
            d_inner: 80,
            d_state: 8,
            d_conv: 2,
            // As "auto": ceil(40 / 16).
            dt_rank: 3,
            conv_bias: false,
            proj_bias: true,
            dt_b_c_norms: true,
        }),
        feed_forward: dense(56),
        rms_norm_eps: 1e-5,
        ..Preset::TinyJamba.config()
    }
}

fn tied_jamba() -> HfConfig {
    HfConfig {
        vocab_size: 67,
        hidden_size: 18,
        num_hidden_layers: 3,
        attention: Some(AttentionShape {
            layers: Every { period: 2, offset: 0 },
            ..heads(6, 3, 3)
        }),
        mamba: Some(MambaShape {
            d_inner: 54,
            d_state: 17,
            d_conv: 3,
            dt_rank: 2,
            conv_bias: true,
            proj_bias: true,
            dt_b_c_norms: true,
        }),
        feed_forward: dense(23),
        tie_word_embeddings: true,
        ..Preset::TinyJamba.config()
    }
}

fn experts(per_token: usize, count: usize, layers: Every) -> HfConfig {
    let experts = Some(ExpertsShape { layers, count, per_token });
    HfConfig {
        feed_forward: Some(FeedForwardShape { intermediate_size: 12, experts }),
        ..tied_jamba()
    }
}

fn mamba(plain: bool) -> HfConfig {
    let base = Preset::TinyMamba.config();
    if plain {
        let mamba = base.mamba.map(|shape| MambaShape { d_inner: 40, dt_rank: 2, ..shape });
        return HfConfig {
            hidden_size: 20,
            num_hidden_layers: 2,
            mamba,
            tie_word_embeddings: false,
            ..base
        };
    }
    HfConfig {
        vocab_size: 41,
        hidden_size: 12,
        num_hidden_layers: 2,
        mamba: Some(MambaShape {
            d_inner: 36,
            d_state: 9,
            d_conv: 3,
            dt_rank: 1,
            conv_bias: false,
            proj_bias: true,
            dt_b_c_norms: false,
        }),
        residual_in_fp32: false,
        ..base
    }
}

fn llama() -> HfConfig {
    let llama3 = Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        // So short that a head has frequencies of all three kinds.
        original_context: 256.0,
    };
    HfConfig {
        vocab_size: 67,
        hidden_size: 24,
        num_hidden_layers: 2,
        attention: Some(AttentionShape {
            qkv_bias: true,
            o_bias: true,
            rope: Some(RopeShape { theta: 500.0, llama3: Some(llama3) }),
            // Not hidden / heads.
            ..heads(3, 1, 10)
        }),
        feed_forward: dense(31),
        ..Preset::TinyLlama.config()
    }
}

fn qwen2() -> HfConfig {
    let rope = Some(RopeShape { theta: 1e6, llama3: None });
    HfConfig {
        family: Family::Qwen2,
        hidden_size: 30,
        num_hidden_layers: 2,
        attention: Some(AttentionShape { qkv_bias: true, rope, ..heads(5, 5, 6) }),
        feed_forward: dense(17),
        tie_word_embeddings: true,
        ..llama()
    }
}

fn qwen3() -> HfConfig {
    let rope = Some(RopeShape { theta: 1e6, llama3: None });
    HfConfig {
        family: Family::Qwen3,
        attention: Some(AttentionShape { qk_norm: true, rope, ..heads(4, 2, 14) }),
        ..qwen2()
    }
}

fn dense(intermediate_size: usize) -> Option<FeedForwardShape> {
    Some(FeedForwardShape { intermediate_size, experts: None })
}

/// Every layer, nothing but heads.
fn heads(heads: usize, kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        layers: Every::ONE,
        heads,
        kv_heads,
        head_dim,
        qkv_bias: false,
        o_bias: false,
        qk_norm: false,
        rope: None,
    }
}
