//! Attention: grouped heads, causal; with biases, norms of q and k and rotary positions where the
//! shape has them (transformers `JambaAttention`, `LlamaAttention`, `Qwen2Attention`,
//! `Qwen3Attention`).
//!
//! Shape letters: T rows, H hidden, Q and G query and key/value heads, E head width, S keys.
//! Rounding points: q, k, v with their biases; q and k after their norms (twice, as RMSNorm has
//! it); sines and cosines; q and k once turned; p before p·v; the output of the heads; o_proj's
//! output with its bias.

use super::unit::TensorSpec;
use super::{AttentionShape, HfConfig, Numerics, Span};
use crate::ops::attention::{self, Heads};
use crate::ops::gemm::{bias_gradient, weight_gradient, Into, Linear};
use crate::ops::rms_norm;
use crate::ops::rope::Rope;

/// The weights of one mixer, packed.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    heads: Heads,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    /// Over each head of q and of k.
    norms: Option<Norms>,
    rope: Option<Rope>,
    shape: AttentionShape,
}

#[derive(Clone, Debug, PartialEq)]
struct Norms {
    q_e: Vec<f32>,
    k_e: Vec<f32>,
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
    /// q and k before their norms; empty where they have none.
    raw: Projected,
    rows: Projected,
    /// The heads' output, `[T, Q·E]`.
    mixed: Vec<f32>,
}

impl Attention {
    /// Takes the mixer's tensors, in the order of [`tensors`].
    pub(super) fn load<'a>(
        config: &HfConfig,
        parts: &mut impl Iterator<Item = &'a [f32]>,
        trains: bool,
    ) -> Self {
        let shape = config.attention().clone();
        let (h, width) = (config.hidden_size, shape.head_dim);
        let heads = Heads { query: shape.heads, key_value: shape.kv_heads, width };
        let mut next = |present: bool| match present {
            true => parts.next().expect("the unit's tensors are in this order"),
            false => &[],
        };
        let mut linear = |inner, bias| {
            let w = next(true);
            Linear::new(w, next(bias), inner, trains)
        };
        let [q_proj, k_proj, v_proj] = [(); 3].map(|()| linear(h, shape.qkv_bias));
        let o_proj = linear(heads.query_row(), shape.o_bias);
        let norms =
            shape.qk_norm.then(|| Norms { q_e: next(true).to_vec(), k_e: next(true).to_vec() });
        let rope = shape.rope.map(|rope| Rope::new(rope.theta, width, rope.llama3));
        Self { heads, q_proj, k_proj, v_proj, o_proj, norms, rope, shape }
    }

    /// From the normed rows u[T, H].
    pub(super) fn project(&self, num: &Numerics, spans: &[Span], u_th: &[f32]) -> Projected {
        self.project_keeping(num, spans, u_th).1
    }

    /// Also what went into the norms of q and k, where there are any.
    fn project_keeping(
        &self,
        num: &Numerics,
        spans: &[Span],
        u_th: &[f32],
    ) -> (Projected, Projected) {
        let mut rows = Projected {
            q: self.q_proj.forward(u_th, num.dtype),
            k: self.k_proj.forward(u_th, num.dtype),
            v: self.v_proj.forward(u_th, num.dtype),
        };
        let mut raw = Projected::default();
        if let Some(norms) = &self.norms {
            for (row, raw, w_e) in
                [(&mut rows.q, &mut raw.q, &norms.q_e), (&mut rows.k, &mut raw.k, &norms.k_e)]
            {
                let mut normed = vec![0.0; row.len()];
                rms_norm::forward(row, w_e, num.eps, num.dtype, &mut normed);
                *raw = std::mem::replace(row, normed);
            }
        }
        if let Some(rope) = &self.rope {
            let turns = rope.turns(spans.iter().flat_map(|span| span.positions()), num.dtype);
            rope.forward(&turns, &mut rows.q, num.dtype);
            rope.forward(&turns, &mut rows.k, num.dtype);
        }
        (raw, rows)
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
    fn output(&self, num: &Numerics, mixed: &[f32]) -> Vec<f32> {
        self.o_proj.forward(mixed, num.dtype)
    }

    /// The heads' output, `[T, Q·E]`.
    fn mix(&self, num: &Numerics, q: &[f32], spans: &[Span], contexts: &[Context<'_>]) -> Vec<f32> {
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

    /// Whole sequences up to the output projection.
    pub(super) fn activations(&self, num: &Numerics, u_th: &[f32], spans: &[Span]) -> Activations {
        let (raw, rows) = self.project_keeping(num, spans, u_th);
        let mixed = self.mix(num, &rows.q, spans, &self.own_contexts(&rows, spans));
        Activations { raw, rows, mixed }
    }

    /// out[T, H].
    pub(super) fn output_of(&self, num: &Numerics, acts: &Activations) -> Vec<f32> {
        self.output(num, &acts.mixed)
    }

    /// From a forward's activations: adds the weights' gradients to `parts`, returns the gradient
    /// by u[T, H].
    pub(super) fn backward<'a>(
        &self,
        num: &Numerics,
        u_th: &[f32],
        spans: &[Span],
        acts: &Activations,
        dout_th: &[f32],
        parts: &mut impl Iterator<Item = &'a mut [f32]>,
    ) -> Vec<f32> {
        let mut d = self.backward_heads(spans, acts, dout_th);
        if let Some(rope) = &self.rope {
            let turns = rope.turns(spans.iter().flat_map(|span| span.positions()), num.dtype);
            rope.backward(&turns, &mut d.q);
            rope.backward(&turns, &mut d.k);
        }
        let mut next = |present: bool| match present {
            true => parts.next().expect("the unit's tensors are in this order"),
            false => &mut [],
        };
        let linears = [&self.q_proj, &self.k_proj, &self.v_proj];
        let grads = linears.map(|_| (next(true), next(self.shape.qkv_bias)));
        weight_gradient(dout_th, &acts.mixed, self.o_proj.outputs(), next(true));
        bias_gradient(dout_th, next(self.shape.o_bias));
        if let Some(norms) = &self.norms {
            for (dy, raw, w_e) in
                [(&mut d.q, &acts.raw.q, &norms.q_e), (&mut d.k, &acts.raw.k, &norms.k_e)]
            {
                let mut draw = vec![0.0; dy.len()];
                rms_norm::backward(raw, w_e, num.eps, dy, &mut draw, next(true));
                *dy = draw;
            }
        }
        let mut du_th = vec![0.0; u_th.len()];
        for ((linear, dy), (dw, dbias)) in linears.into_iter().zip([&d.q, &d.k, &d.v]).zip(grads) {
            linear.input_gradient(dy, Into::Add, &mut du_th);
            weight_gradient(dy, u_th, linear.outputs(), dw);
            bias_gradient(dy, dbias);
        }
        du_th
    }

    /// Through the output projection and the heads: the gradient by the projected rows.
    fn backward_heads(&self, spans: &[Span], acts: &Activations, dout_th: &[f32]) -> Projected {
        let rows = &acts.rows;
        let mut dmixed = vec![0.0; acts.mixed.len()];
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
        d
    }
}
