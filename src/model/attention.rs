//! Attention: grouped heads, causal; with biases, norms of q and k and rotary positions where the
//! shape has them (transformers `JambaAttention`, `LlamaAttention`, `Qwen2Attention`,
//! `Qwen3Attention`).
//!
//! Shape letters: T rows, H hidden, Q and G query and key/value heads, E head width, S keys.
//! Rounding points: q, k, v with their biases; q and k after their norms (twice, as RMSNorm has
//! it); sines and cosines; q and k once turned; p before p·v; the output of the heads; o_proj's
//! output with its bias.

use super::unit::TensorSpec;
use super::{AttentionShape, HfConfig, Numerics, Spans};
use crate::ops::array::{Array, SliceMut};
use crate::ops::attention::{Contexts, Heads, Projected};
use crate::ops::gemm::{Into, Joined, Projection};
use crate::ops::rope::{Rope, Turns};
use crate::ops::weights::{Part, Purpose};

/// The weights of one mixer, packed.
#[derive(Clone, Debug)]
pub struct Attention {
    heads: Heads,
    /// To q, k and v.
    qkv: Joined<3>,
    o_proj: Projection,
    /// Over each head of q and of k.
    norms: Option<Norms>,
    rope: Option<Rope>,
    shape: AttentionShape,
}

#[derive(Clone, Debug)]
struct Norms {
    q_e: Array,
    k_e: Array,
}

/// The tensors in flat order; what the shape lacks is left out.
pub(super) fn tensors(config: &HfConfig, prefix: &str) -> Vec<TensorSpec> {
    let (h, shape) = (config.hidden_size, config.attention());
    let e = shape.head_dim;
    let (q, kv) = (shape.heads * e, shape.kv_heads * e);
    let prefix = format!("{prefix}{}.", config.names().attention);
    let mut list = Vec::new();
    let mut push = |name: &str, shape: &[usize]| list.push(TensorSpec::new(&prefix, name, shape));
    for (name, outputs, inner, bias) in [
        ("q_proj", q, h, shape.qkv_bias),
        ("k_proj", kv, h, shape.qkv_bias),
        ("v_proj", kv, h, shape.qkv_bias),
        ("o_proj", h, q, shape.o_bias),
    ] {
        push(&format!("{name}.weight"), &[outputs, inner]);
        if bias {
            push(&format!("{name}.bias"), &[outputs]);
        }
    }
    if shape.qk_norm {
        push("q_norm.weight", &[e]);
        push("k_norm.weight", &[e]);
    }
    list
}

/// What a mixer's forward leaves for its backward.
pub(super) struct Activations {
    /// q and k before their norms, where they have any.
    raw: Option<[Array; 2]>,
    rows: Projected,
    /// The heads' output, `[T, Q·E]`.
    mixed: Array,
}

impl Attention {
    /// Takes the mixer's tensors, in the order of [`tensors`].
    pub(super) fn load<'a>(
        config: &HfConfig,
        parts: &mut impl Iterator<Item = Part<'a>>,
        purpose: Purpose,
    ) -> Self {
        let shape = config.attention().clone();
        let (h, width) = (config.hidden_size, shape.head_dim);
        let heads = Heads { query: shape.heads, key_value: shape.kv_heads, width };
        let mut next = || parts.next().expect("the unit's tensors are in this order");
        let mut linear = |bias: bool| {
            let w = next();
            (w, if bias { next() } else { w.none() })
        };
        let qkv = Joined::new([(); 3].map(|()| linear(shape.qkv_bias)), h, purpose);
        let (w, bias) = linear(shape.o_bias);
        let o_proj = Projection::new(w, bias, heads.query_row(), purpose);
        let norms = shape.qk_norm.then(|| Norms { q_e: next().to_array(), k_e: next().to_array() });
        let rope = shape.rope.map(|rope| Rope::new(rope.theta, width, rope.llama3));
        Self { heads, qkv, o_proj, norms, rope, shape }
    }

    /// Whether q and k are turned by their positions.
    pub(super) fn turns(&self) -> bool {
        self.rope.is_some()
    }

    /// From the normed rows u[T, H].
    pub(super) fn project(&self, num: &Numerics, spans: &Spans, u_th: &Array) -> Projected {
        self.project_keeping(num, spans, u_th).1
    }

    /// Also what went into the norms of q and k, where there are any.
    fn project_keeping(
        &self,
        num: &Numerics,
        spans: &Spans,
        u_th: &Array,
    ) -> (Option<[Array; 2]>, Projected) {
        let [q, k, v] = self.qkv.forward(u_th, num.dtype);
        let mut rows = Projected { q, k, v };
        let raw = self.norms.as_ref().map(|norms| {
            let (q, k) = (
                rows.q.rms_norm(&norms.q_e, num.eps, num.dtype),
                rows.k.rms_norm(&norms.k_e, num.eps, num.dtype),
            );
            [std::mem::replace(&mut rows.q, q), std::mem::replace(&mut rows.k, k)]
        });
        if let Some(rope) = &self.rope {
            let turns = turns(rope, num, spans);
            rows.q.rope(rope, &turns, num.dtype);
            rows.k.rope(rope, &turns, num.dtype);
        }
        (raw, rows)
    }

    /// out[T, H] from the projected rows and each span's context.
    pub(super) fn attend(
        &self,
        num: &Numerics,
        rows: &Projected,
        spans: &Spans,
        contexts: &Contexts,
    ) -> Array {
        self.output(num, &rows.attend(self.heads, spans, contexts, num.dtype))
    }

    /// out[T, H] from the heads' output.
    fn output(&self, num: &Numerics, mixed: &Array) -> Array {
        self.o_proj.forward(mixed, num.dtype)
    }

    /// Whole sequences up to the output projection.
    pub(super) fn activations(&self, num: &Numerics, u_th: &Array, spans: &Spans) -> Activations {
        let (raw, rows) = self.project_keeping(num, spans, u_th);
        let mixed = rows.attend(self.heads, spans, &Contexts::Own, num.dtype);
        Activations { raw, rows, mixed }
    }

    /// out[T, H].
    pub(super) fn output_of(&self, num: &Numerics, acts: &Activations) -> Array {
        self.output(num, &acts.mixed)
    }

    /// From a forward's activations: adds the weights' gradients to `parts`, returns the gradient
    /// by u[T, H].
    pub(super) fn backward<'a>(
        &self,
        num: &Numerics,
        u_th: &Array,
        spans: &Spans,
        acts: &Activations,
        dout_th: &Array,
        parts: &mut impl Iterator<Item = SliceMut<'a>>,
    ) -> Array {
        let mut next = |present: bool| match present {
            true => parts.next().expect("the unit's tensors are in this order"),
            false => SliceMut::none(),
        };
        let grads = [(); 3].map(|()| (next(true), next(self.shape.qkv_bias)));
        let own = (next(true), next(self.shape.o_bias));
        let mut dmixed = acts.mixed.zeros_like();
        let into = (Into::Overwrite, &mut dmixed);
        self.o_proj.backward(dout_th, &acts.mixed, num.dtype, own, into);
        let mut d = acts.rows.backward(self.heads, spans, &dmixed);
        if let Some(rope) = &self.rope {
            let turns = turns(rope, num, spans);
            d.q.rope_backward(rope, &turns);
            d.k.rope_backward(rope, &turns);
        }
        if let (Some(norms), Some([raw_q, raw_k])) = (&self.norms, &acts.raw) {
            for (dy, raw, w_e) in [(&mut d.q, raw_q, &norms.q_e), (&mut d.k, raw_k, &norms.k_e)] {
                let mut draw = dy.zeros_like();
                raw.rms_norm_backward(w_e, num.eps, dy, &mut draw, next(true));
                *dy = draw;
            }
        }
        let mut du_th = u_th.zeros_like();
        for ((linear, dy), own) in self.qkv.each().iter().zip([&d.q, &d.k, &d.v]).zip(grads) {
            linear.backward(dy, u_th, num.dtype, own, (Into::Add, &mut du_th));
        }
        du_th
    }
}

/// Of each packed row, by its place in its sequence.
fn turns(rope: &Rope, num: &Numerics, spans: &Spans) -> Turns {
    rope.turns(spans.iter().flat_map(|span| span.positions()), num.dtype)
}
