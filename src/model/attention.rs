//! Jamba's attention: grouped heads, causal, no positional term (transformers `JambaAttention`).
//!
//! Shape letters: T rows, H hidden, Q and G query and key/value heads, E head width, S keys.
//! Rounding points: q, k, v; p before p·v; the output of the heads; o_proj's output.

use super::unit::TensorSpec;
use super::{HfConfig, Numerics, Span};
use crate::ops::attention::{self, Heads};
use crate::ops::gemm::{weight_gradient, Into, Linear};

/// The weights of one mixer, packed.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    heads: Heads,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
}

/// Rows that have been projected and wait for their context.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Projected {
    /// `[T, Q·E]`.
    pub q: Vec<f32>,
    /// `[T, G·E]`.
    pub k: Vec<f32>,
    /// `[T, G·E]`.
    pub v: Vec<f32>,
}

/// The keys and values that one sequence's rows may see, `[S, G·E]` each; its own rows are last.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    pub k: &'a [f32],
    pub v: &'a [f32],
}

pub(super) fn tensors(config: &HfConfig, prefix: &str) -> Vec<TensorSpec> {
    let (h, e) = (config.hidden_size, config.head_dim());
    let (q, kv) = (config.num_attention_heads * e, config.num_key_value_heads * e);
    [("q", [q, h]), ("k", [kv, h]), ("v", [kv, h]), ("o", [h, q])]
        .map(|(name, shape)| {
            TensorSpec::new(prefix, &format!("self_attn.{name}_proj.weight"), &shape)
        })
        .into()
}

impl Attention {
    /// Takes the mixer's tensors, in the order of [`tensors`].
    pub(super) fn load<'a>(
        config: &HfConfig,
        parts: &mut impl Iterator<Item = &'a [f32]>,
        trains: bool,
    ) -> Self {
        let heads = Heads {
            query: config.num_attention_heads,
            key_value: config.num_key_value_heads,
            width: config.head_dim(),
        };
        let h = config.hidden_size;
        let mut linear = |inner| {
            let w = parts.next().expect("the unit's tensors are in this order");
            Linear::new(w, &[], inner, trains)
        };
        let (q_proj, k_proj, v_proj) = (linear(h), linear(h), linear(h));
        let o_proj = linear(heads.query_row());
        Self { heads, q_proj, k_proj, v_proj, o_proj }
    }

    /// From the normed rows u[T, H].
    pub(super) fn project(&self, num: &Numerics, u_th: &[f32]) -> Projected {
        Projected {
            q: self.q_proj.forward(u_th, num.dtype),
            k: self.k_proj.forward(u_th, num.dtype),
            v: self.v_proj.forward(u_th, num.dtype),
        }
    }

    /// out[T, H] from q[T, Q·E] and each span's context.
    pub(super) fn attend(
        &self,
        num: &Numerics,
        q: &[f32],
        spans: &[Span],
        contexts: &[Context<'_>],
    ) -> Vec<f32> {
        self.output(num, &self.mix(num, q, spans, contexts))
    }

    /// out[T, H] from the heads' output.
    pub(super) fn output(&self, num: &Numerics, mixed: &[f32]) -> Vec<f32> {
        self.o_proj.forward(mixed, num.dtype)
    }

    /// The heads' output, `[T, Q·E]`.
    pub(super) fn mix(
        &self,
        num: &Numerics,
        q: &[f32],
        spans: &[Span],
        contexts: &[Context<'_>],
    ) -> Vec<f32> {
        assert_eq!(spans.len(), contexts.len(), "one context a sequence");
        let mut mixed = vec![0.0; q.len()];
        for (span, context) in spans.iter().zip(contexts) {
            let rows = span.floats(self.heads.query_row());
            let out = &mut mixed[rows.clone()];
            attention::forward(self.heads, &q[rows], context.k, context.v, num.dtype, out);
        }
        mixed
    }

    /// Each span's own keys and values as its context: a sequence seen whole.
    pub(super) fn own_contexts<'a>(&self, rows: &'a Projected, spans: &[Span]) -> Vec<Context<'a>> {
        let width = self.heads.key_value_row();
        let own = |span: &Span| {
            let at = span.floats(width);
            Context { k: &rows.k[at.clone()], v: &rows.v[at] }
        };
        spans.iter().map(own).collect()
    }

    /// From a forward's projected rows and heads' output: adds the weights' gradients to `parts`,
    /// returns the gradient by u[T, H].
    pub(super) fn backward<'a>(
        &self,
        u_th: &[f32],
        spans: &[Span],
        (rows, mixed): (&Projected, &[f32]),
        dout_th: &[f32],
        parts: &mut impl Iterator<Item = &'a mut [f32]>,
    ) -> Vec<f32> {
        let mut dmixed = vec![0.0; mixed.len()];
        self.o_proj.input_gradient(dout_th, Into::Overwrite, &mut dmixed);
        let mut d = Projected {
            q: vec![0.0; rows.q.len()],
            k: vec![0.0; rows.k.len()],
            v: vec![0.0; rows.v.len()],
        };
        for span in spans {
            let (wide, narrow) =
                (span.floats(self.heads.query_row()), span.floats(self.heads.key_value_row()));
            let mut gradients = attention::Gradients {
                q: &mut d.q[wide.clone()],
                k: &mut d.k[narrow.clone()],
                v: &mut d.v[narrow.clone()],
            };
            let (k, v) = (&rows.k[narrow.clone()], &rows.v[narrow]);
            let (q, dmixed) = (&rows.q[wide.clone()], &dmixed[wide]);
            attention::backward(self.heads, q, k, v, dmixed, &mut gradients);
        }
        let mut next = || parts.next().expect("the unit's tensors are in this order");
        let mut du_th = vec![0.0; u_th.len()];
        for (linear, dy) in [(&self.q_proj, &d.q), (&self.k_proj, &d.k), (&self.v_proj, &d.v)] {
            linear.input_gradient(dy, Into::Add, &mut du_th);
            weight_gradient(dy, u_th, linear.outputs(), next());
        }
        weight_gradient(dout_th, mixed, self.o_proj.outputs(), next());
        du_th
    }
}
