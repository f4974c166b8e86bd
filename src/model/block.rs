//! One decoder layer: h += mixer(norm(h)); then, where the family has one, h +=
//! feed_forward(norm(h)).
//!
//! Rounding points of a block, all of them: those that its mixer and its feed-forward name, each
//! norm (twice, as RMSNorm has it), and each residual sum (to f32, which is none, where the
//! residual stream is f32). What stands between two of them is f32.
//! A backward is f32, but that a projection's two products take the gradient rounded to the dtype
//! of their other side; a rounding passes its gradient straight through. Forward works on one chunk
//! of packed rows in place; callers run chunks in parallel.

use super::attention::{self, Attention};
use super::mamba::{self, Mamba};
use super::mlp::{self, Mlp};
use super::moe::{self, Moe};
use super::unit::{TensorSpec, UnitSpec};
use super::{FeedForwardKind, HfConfig, LayerKind, MixerKind, Numerics, Residual, Spans};
use crate::ops::array::{Array, SliceMut};
use crate::ops::attention::{Contexts, Projected};
use crate::ops::routing::Choice;
use crate::ops::state::States;
use crate::ops::weights::{Part, Purpose, Weights};

/// The weights of one layer, packed.
#[derive(Clone, Debug)]
pub struct Block {
    input_norm_h: Array,
    mixer: Mixer,
    feed_forward: Option<FeedForward>,
}

#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // One a layer, never moved in bulk.
enum Mixer {
    Mamba(Mamba),
    Attention(Attention),
}

#[derive(Clone, Debug)]
struct FeedForward {
    norm_h: Array,
    experts: Experts,
}

#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // As above.
enum Experts {
    /// A dense layer: every token goes to it.
    One(Mlp),
    Many(Moe),
}

/// What a mixer's forward leaves for its backward.
#[allow(clippy::large_enum_variant)] // One at a time, on the stack.
enum Saved {
    Mamba(mamba::Activations),
    Attention(attention::Activations),
}

/// The unit of layer `index`.
pub(super) fn unit(config: &HfConfig, kind: LayerKind, index: usize) -> UnitSpec {
    let names = config.names();
    let prefix = names.layer(index);
    let norm = |name| TensorSpec::new(&prefix, &format!("{name}.weight"), &[config.hidden_size]);
    let mut tensors = vec![norm(names.input_norm)];
    tensors.extend(match kind.mixer {
        MixerKind::Mamba => mamba::tensors(config, &prefix),
        MixerKind::Attention => attention::tensors(config, &prefix),
    });
    let feed_forward = format!("{prefix}{}.", names.feed_forward);
    if kind.feed_forward != FeedForwardKind::None {
        tensors.push(norm(names.feed_forward_norm));
    }
    match kind.feed_forward {
        FeedForwardKind::None => {}
        FeedForwardKind::Dense => tensors.extend(mlp::tensors(config, &feed_forward)),
        FeedForwardKind::Experts => tensors.extend(moe::tensors(config, &feed_forward)),
    }
    UnitSpec { name: format!("layers.{index}"), tensors }
}

impl Block {
    /// From a unit's weights, laid out for their purpose.
    #[must_use]
    pub fn load(
        config: &HfConfig,
        kind: LayerKind,
        spec: &UnitSpec,
        weights: &Weights,
        purpose: Purpose,
    ) -> Self {
        let mut parts = spec.tensors_of(weights);
        let norm = |part: Option<Part<'_>>| part.expect("a unit has its norms").to_array();
        let input_norm_h = norm(parts.next());
        let mixer = match kind.mixer {
            MixerKind::Mamba => Mixer::Mamba(Mamba::load(config, &mut parts, purpose)),
            MixerKind::Attention => Mixer::Attention(Attention::load(config, &mut parts, purpose)),
        };
        let feed_forward = (kind.feed_forward != FeedForwardKind::None).then(|| FeedForward {
            norm_h: norm(parts.next()),
            experts: match kind.feed_forward {
                FeedForwardKind::Experts => Experts::Many(Moe::load(config, &mut parts, purpose)),
                _ => Experts::One(Mlp::load(config, &mut parts, purpose)),
            },
        });
        assert!(parts.next().is_none(), "unit {} has tensors nobody takes", spec.name);
        Self { input_norm_h, mixer, feed_forward }
    }

    /// From now on the weights of a token's experts, where the layer has any, are divided by their
    /// sum. For forward passes only.
    pub fn renormalise_gate(&mut self) {
        if let Some(FeedForward { experts: Experts::Many(moe), .. }) = &mut self.feed_forward {
            moe.renormalise();
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

    /// Whole sequences from nothing: the trainer's forward.
    pub fn forward(&self, num: &Numerics, spans: &Spans, x: &mut Residual) {
        self.mix(num, spans, x);
        self.feed_forward(num, x);
    }

    /// The first half of [`Self::forward`]: the mixer.
    pub fn mix(&self, num: &Numerics, spans: &Spans, x: &mut Residual) {
        match &self.mixer {
            Mixer::Mamba(mamba) => {
                let mut states = mamba.fresh_states(&self.input_norm_h.device(), spans.len());
                self.mix_mamba(num, spans, &mut states, x);
            }
            Mixer::Attention(_) => {
                let rows = self.project(num, spans, x);
                self.mix_attention(num, spans, &rows, &Contexts::Own, x);
            }
        }
    }

    /// The mixer of a Mamba layer over rows that go on from `states`, which advance.
    pub fn mix_mamba(&self, num: &Numerics, spans: &Spans, states: &mut States, x: &mut Residual) {
        let u_th = x.norm(num, &self.input_norm_h);
        x.add(num, self.mamba().forward(num, &u_th, spans, states));
    }

    /// An attention layer's queries, keys and values.
    #[must_use]
    pub fn project(&self, num: &Numerics, spans: &Spans, x: &mut Residual) -> Projected {
        self.attention().project(num, spans, &x.norm(num, &self.input_norm_h))
    }

    /// The rest of an attention layer's mixer, once each span's context is known.
    pub fn mix_attention(
        &self,
        num: &Numerics,
        spans: &Spans,
        rows: &Projected,
        contexts: &Contexts,
        x: &mut Residual,
    ) {
        x.add(num, self.attention().attend(num, rows, spans, contexts));
    }

    /// A mixer's forward over whole sequences: its output `[T, H]`, and what its backward needs.
    fn mix_whole(&self, num: &Numerics, u_th: &Array, spans: &Spans) -> (Array, Saved) {
        match &self.mixer {
            Mixer::Mamba(mamba) => {
                let mut states = mamba.fresh_states(&u_th.device(), spans.len());
                let acts = mamba.activations(num, u_th, spans, &mut states);
                (mamba.output(num, &acts), Saved::Mamba(acts))
            }
            Mixer::Attention(attention) => {
                let acts = attention.activations(num, u_th, spans);
                (attention.output_of(num, &acts), Saved::Attention(acts))
            }
        }
    }

    /// Whether its passes are launches alone, with nothing computed on the host between them.
    #[must_use]
    pub fn is_launches_alone(&self) -> bool {
        let routes =
            matches!(&self.feed_forward, Some(FeedForward { experts: Experts::Many(_), .. }));
        let turns = matches!(&self.mixer, Mixer::Attention(attention) if attention.turns());
        !routes && !turns
    }

    /// Whether [`Self::feed_forward`] does anything.
    #[must_use]
    pub fn has_feed_forward(&self) -> bool {
        self.feed_forward.is_some()
    }

    /// The second half of a layer, row by row, where the family has one.
    pub fn feed_forward(&self, num: &Numerics, x: &mut Residual) {
        let Some(FeedForward { norm_h, experts }) = &self.feed_forward else { return };
        let u_th = x.norm(num, norm_h);
        let out_th = match experts {
            Experts::One(mlp) => mlp.forward(num, &u_th),
            Experts::Many(moe) => moe.forward(num, &u_th),
        };
        x.add(num, out_th);
    }

    /// The router's logits `[T, E]` for whole sequences, from the layer's input; `None` for a layer
    /// without experts. For comparison with other implementations.
    #[must_use]
    pub fn router_logits(&self, num: &Numerics, spans: &Spans, x_th: &Array) -> Option<Array> {
        let Some(FeedForward { norm_h, experts: Experts::Many(moe) }) = &self.feed_forward else {
            return None;
        };
        let mut middle_th = x_th.clone();
        let (mixed, _) = self.mix_whole(num, &norm(num, x_th, &self.input_norm_h), spans);
        add(num, &mut middle_th, &mixed);
        Some(moe.router_logits(num, &norm(num, &middle_th, norm_h)))
    }

    /// Which experts a forward sends rows to and with what weights, `[T, K]`, from the stream
    /// x[T, H] between mixer and feed-forward; `None` for a layer without experts.
    #[must_use]
    pub fn routes(&self, num: &Numerics, x_th: &Array) -> Option<Vec<Choice>> {
        let Some(FeedForward { norm_h, experts: Experts::Many(moe) }) = &self.feed_forward else {
            return None;
        };
        Some(moe.routes(num, &norm(num, x_th, norm_h)))
    }

    /// For whole sequences: from the layer's input and the gradient by its output, in place of
    /// which the gradient by the input is left; the weights' gradients are added to `grads`.
    /// Everything between is recomputed.
    pub fn backward(
        &self,
        num: &Numerics,
        spec: &UnitSpec,
        spans: &Spans,
        x_th: &Array,
        dx_th: &mut Array,
        grads: &mut Array,
    ) {
        let u_th = norm(num, x_th, &self.input_norm_h);
        let (mixed, saved) = self.mix_whole(num, &u_th, spans);
        let mut parts: Vec<SliceMut<'_>> = spec.gradients_of(grads).collect();
        if let Some(feed_forward) = &self.feed_forward {
            let mut middle_th = x_th.clone();
            add(num, &mut middle_th, &mixed);
            let own = parts.split_off(parts.len() - feed_forward.tensors());
            feed_forward.backward(num, &middle_th, dx_th, own);
        }
        let mut parts = parts.into_iter();
        let input_norm = parts.next().expect("a unit has its norms");
        let du_th = match (&self.mixer, &saved) {
            (Mixer::Mamba(mamba), Saved::Mamba(acts)) => {
                mamba.backward(num, &u_th, spans, acts, dx_th, &mut parts)
            }
            (Mixer::Attention(attention), Saved::Attention(acts)) => {
                attention.backward(num, &u_th, spans, acts, dx_th, &mut parts)
            }
            _ => unreachable!("a mixer saves its own"),
        };
        x_th.rms_norm_backward(&self.input_norm_h, num.eps, &du_th, dx_th, input_norm);
    }
}

impl FeedForward {
    /// How many tensors it took.
    fn tensors(&self) -> usize {
        let inner = match &self.experts {
            Experts::One(_) => mlp::TENSORS,
            Experts::Many(moe) => moe.tensors(),
        };
        1 + inner
    }

    /// Adds the gradient by x[T, H] to that by the sum, in place; the weights' to `parts`.
    fn backward(&self, num: &Numerics, x_th: &Array, dx_th: &mut Array, parts: Vec<SliceMut<'_>>) {
        let v_th = norm(num, x_th, &self.norm_h);
        let mut parts = parts.into_iter();
        let dnorm = parts.next().expect("a unit has its norms");
        let dv_th = match &self.experts {
            Experts::One(mlp) => mlp.backward(num, &v_th, dx_th, &mut parts),
            Experts::Many(moe) => moe.backward(num, &v_th, dx_th, &mut parts),
        };
        x_th.rms_norm_backward(&self.norm_h, num.eps, &dv_th, dx_th, dnorm);
    }
}

fn norm(num: &Numerics, x_th: &Array, w_h: &Array) -> Array {
    x_th.rms_norm(w_h, num.eps, num.dtype)
}

/// The residual sum.
fn add(num: &Numerics, x_th: &mut Array, y_th: &Array) {
    x_th.add_rounded(y_th, num.residual_dtype);
}
