//! One decoder layer: h += mixer(norm(h)); h += feed_forward(norm(h)).
//!
//! Rounding points of a block, all of them: those that its mixer and its feed-forward name, each
//! norm (twice, as RMSNorm has it), and each residual sum. What stands between two of them is f32.
//! A backward is f32 throughout: a rounding passes its gradient straight through. Forward works on
//! one chunk of packed rows in place; callers run chunks in parallel.

use super::attention::{self, Attention, Context, Projected};
use super::mamba::{self, Mamba, MambaState};
use super::mlp::{self, Mlp};
use super::unit::{TensorSpec, UnitSpec};
use super::{HfConfig, MixerKind, Numerics, Span};
use crate::ops::rms_norm;
use crate::ops::round::to_dtype;

/// The weights of one layer, packed.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    input_norm_h: Vec<f32>,
    mixer: Mixer,
    ff_norm_h: Vec<f32>,
    mlp: Mlp,
}

#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)] // One a layer, never moved in bulk.
enum Mixer {
    Mamba(Mamba),
    Attention(Attention),
}

/// What a mixer's forward leaves for its backward.
enum Saved {
    Mamba(mamba::Activations),
    /// The projected rows and the heads' output.
    Attention(Projected, Vec<f32>),
}

/// The unit of layer `index`.
pub(super) fn unit(config: &HfConfig, kind: MixerKind, index: usize) -> UnitSpec {
    let prefix = format!("model.layers.{index}.");
    let norm = |name| TensorSpec::new(&prefix, name, &[config.hidden_size]);
    let mut tensors = vec![norm("input_layernorm.weight")];
    tensors.extend(match kind {
        MixerKind::Mamba => mamba::tensors(config, &prefix),
        MixerKind::Attention => attention::tensors(config, &prefix),
    });
    tensors.push(norm("pre_ff_layernorm.weight"));
    tensors.extend(mlp::tensors(config, &prefix));
    UnitSpec { name: format!("layers.{index}"), tensors }
}

impl Block {
    /// From a unit's flat weights; `trains` also packs what the backward needs.
    #[must_use]
    pub fn load(
        config: &HfConfig,
        kind: MixerKind,
        spec: &UnitSpec,
        flat: &[f32],
        trains: bool,
    ) -> Self {
        let mut parts = spec.parts(flat);
        let norm = |part: Option<&[f32]>| part.expect("a unit has its norms").to_vec();
        let input_norm_h = norm(parts.next());
        let mixer = match kind {
            MixerKind::Mamba => Mixer::Mamba(Mamba::load(config, &mut parts, trains)),
            MixerKind::Attention => Mixer::Attention(Attention::load(config, &mut parts, trains)),
        };
        let ff_norm_h = norm(parts.next());
        let mlp = Mlp::load(config, &mut parts, trains);
        assert!(parts.next().is_none(), "unit {} has tensors nobody takes", spec.name);
        Self { input_norm_h, mixer, ff_norm_h, mlp }
    }

    /// The state before a sequence; `None` for attention.
    #[must_use]
    pub fn empty_state(&self) -> Option<MambaState> {
        match &self.mixer {
            Mixer::Mamba(mamba) => Some(mamba.empty_state()),
            Mixer::Attention(_) => None,
        }
    }

    fn mamba(&self) -> &Mamba {
        match &self.mixer {
            Mixer::Mamba(mamba) => mamba,
            Mixer::Attention(_) => panic!("a Mamba pass over an attention layer"),
        }
    }

    fn attention(&self) -> &Attention {
        match &self.mixer {
            Mixer::Attention(attention) => attention,
            Mixer::Mamba(_) => panic!("an attention pass over a Mamba layer"),
        }
    }

    /// Whole sequences from nothing, x[T, H] in place: the trainer's forward.
    pub fn forward(&self, num: &Numerics, spans: &[Span], x_th: &mut [f32]) {
        match &self.mixer {
            Mixer::Mamba(mamba) => {
                let mut states = vec![mamba.empty_state(); spans.len()];
                self.forward_mamba(num, spans, &mut states, x_th);
            }
            Mixer::Attention(attention) => {
                let rows = self.project(num, x_th);
                let contexts = attention.own_contexts(&rows, spans);
                self.forward_attention(num, spans, &rows.q, &contexts, x_th);
            }
        }
    }

    /// A Mamba layer over rows that go on from `states`, which advance.
    pub fn forward_mamba(
        &self,
        num: &Numerics,
        spans: &[Span],
        states: &mut [MambaState],
        x_th: &mut [f32],
    ) {
        let u_th = norm(num, x_th, &self.input_norm_h);
        add(num, x_th, &self.mamba().forward(num, &u_th, spans, states));
        self.feed_forward(num, x_th);
    }

    /// An attention layer's queries, keys and values; x[T, H] stays.
    #[must_use]
    pub fn project(&self, num: &Numerics, x_th: &[f32]) -> Projected {
        self.attention().project(num, &norm(num, x_th, &self.input_norm_h))
    }

    /// The rest of an attention layer, once each span's context is known.
    pub fn forward_attention(
        &self,
        num: &Numerics,
        spans: &[Span],
        q: &[f32],
        contexts: &[Context<'_>],
        x_th: &mut [f32],
    ) {
        add(num, x_th, &self.attention().attend(num, q, spans, contexts));
        self.feed_forward(num, x_th);
    }

    /// A mixer's forward over whole sequences, with what its backward needs.
    fn mix_whole(&self, num: &Numerics, u_th: &[f32], spans: &[Span]) -> Saved {
        match &self.mixer {
            Mixer::Mamba(mamba) => {
                let mut states = vec![mamba.empty_state(); spans.len()];
                Saved::Mamba(mamba.activations(num, u_th, spans, &mut states))
            }
            Mixer::Attention(attention) => {
                let rows = attention.project(num, u_th);
                let contexts = attention.own_contexts(&rows, spans);
                let mixed = attention.mix(num, &rows.q, spans, &contexts);
                Saved::Attention(rows, mixed)
            }
        }
    }

    fn feed_forward(&self, num: &Numerics, x_th: &mut [f32]) {
        let u_th = norm(num, x_th, &self.ff_norm_h);
        add(num, x_th, &self.mlp.forward(num, &u_th));
    }

    /// For whole sequences: from the layer's input and the gradient by its output, in place of
    /// which the gradient by the input is left; the weights' gradients are added to `grads`.
    /// Everything between is recomputed.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(
        &self,
        config: &HfConfig,
        num: &Numerics,
        spec: &UnitSpec,
        spans: &[Span],
        x_th: &[f32],
        dx_th: &mut [f32],
        grads: &mut [f32],
    ) {
        let u_th = norm(num, x_th, &self.input_norm_h);
        let mut middle_th = x_th.to_vec();
        let saved = self.mix_whole(num, &u_th, spans);
        let mixed = match (&self.mixer, &saved) {
            (Mixer::Mamba(m), Saved::Mamba(acts)) => m.output(num, acts),
            (Mixer::Attention(a), Saved::Attention(_, mixed)) => a.output(num, mixed),
            _ => unreachable!("a mixer saves its own"),
        };
        add(num, &mut middle_th, &mixed);
        let v_th = norm(num, &middle_th, &self.ff_norm_h);

        let mut parts: Vec<&mut [f32]> = spec.parts_mut(grads).collect();
        let mlp_parts = parts.split_off(parts.len() - 3);
        let ff_norm = parts.pop().expect("a unit has its norms");
        let mut mixer_parts = parts.into_iter();
        let input_norm = mixer_parts.next().expect("a unit has its norms");

        let dv_th = self.mlp.backward(num, &v_th, dx_th, &mut mlp_parts.into_iter());
        rms_norm::backward(&middle_th, &self.ff_norm_h, num.eps, &dv_th, dx_th, ff_norm);
        let du_th = match (&self.mixer, &saved) {
            (Mixer::Mamba(m), Saved::Mamba(acts)) => {
                m.backward(config, num, &u_th, spans, acts, dx_th, &mut mixer_parts)
            }
            (Mixer::Attention(a), Saved::Attention(rows, mixed)) => {
                a.backward(&u_th, spans, (rows, mixed), dx_th, &mut mixer_parts)
            }
            _ => unreachable!("a mixer saves its own"),
        };
        rms_norm::backward(x_th, &self.input_norm_h, num.eps, &du_th, dx_th, input_norm);
    }
}

fn norm(num: &Numerics, x_th: &[f32], w_h: &[f32]) -> Vec<f32> {
    let mut y_th = vec![0.0; x_th.len()];
    rms_norm::forward(x_th, w_h, num.eps, num.dtype, &mut y_th);
    y_th
}

/// The residual sum.
fn add(num: &Numerics, x_th: &mut [f32], y_th: &[f32]) {
    x_th.iter_mut().zip(y_th).for_each(|(x, y)| *x = to_dtype(*x + y, num.dtype));
}
