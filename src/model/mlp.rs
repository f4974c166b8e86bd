//! The gated feed-forward: down(silu(gate·x) · (up·x)) (transformers `JambaMLP`, `LlamaMLP`); a
//! dense layer's whole, or one expert.
//!
//! Shape letters: T rows, H hidden, F intermediate. Rounding points: gate, up, their product after
//! silu, down.

use super::unit::TensorSpec;
use super::{HfConfig, Numerics};
use crate::ops::gemm::{weight_gradient, Into, Linear};
use crate::ops::swiglu;

/// The weights, packed.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
}

/// How many [`tensors`] has.
pub(super) const TENSORS: usize = 3;

pub(super) fn tensors(config: &HfConfig, prefix: &str) -> [TensorSpec; TENSORS] {
    let (h, f) = (config.hidden_size, config.feed_forward().intermediate_size);
    [("gate", [f, h]), ("up", [f, h]), ("down", [h, f])]
        .map(|(name, shape)| TensorSpec::new(prefix, &format!("{name}_proj.weight"), &shape))
}

impl Mlp {
    /// Takes the tensors, in the order of [`tensors`].
    pub(super) fn load<'a>(
        config: &HfConfig,
        parts: &mut impl Iterator<Item = &'a [f32]>,
        trains: bool,
    ) -> Self {
        let (h, f) = (config.hidden_size, config.feed_forward().intermediate_size);
        let mut linear = |inner| {
            let w = parts.next().expect("the unit's tensors are in this order");
            Linear::new(w, &[], inner, trains)
        };
        Self { gate_proj: linear(h), up_proj: linear(h), down_proj: linear(f) }
    }

    /// out[T, H] from the normed rows u[T, H].
    pub(super) fn forward(&self, num: &Numerics, u_th: &[f32]) -> Vec<f32> {
        let mut gate = self.gate_proj.forward(u_th, num.dtype);
        swiglu::forward(&mut gate, &self.up_proj.forward(u_th, num.dtype), num.dtype);
        self.down_proj.forward(&gate, num.dtype)
    }

    /// Adds the weights' gradients to `parts`, returns the gradient by u[T, H].
    pub(super) fn backward<'a>(
        &self,
        num: &Numerics,
        u_th: &[f32],
        dout_th: &[f32],
        parts: &mut impl Iterator<Item = &'a mut [f32]>,
    ) -> Vec<f32> {
        let gate = self.gate_proj.forward(u_th, num.dtype);
        let up = self.up_proj.forward(u_th, num.dtype);
        let mut act = gate.clone();
        swiglu::forward(&mut act, &up, num.dtype);
        let mut dact = vec![0.0; act.len()];
        self.down_proj.input_gradient(dout_th, Into::Overwrite, &mut dact);
        let (mut dgate, mut dup) = (vec![0.0; act.len()], vec![0.0; act.len()]);
        swiglu::backward(&gate, &up, &dact, &mut dgate, &mut dup);
        let mut next = || parts.next().expect("the unit's tensors are in this order");
        let f = self.gate_proj.outputs();
        weight_gradient(&dgate, u_th, f, next());
        weight_gradient(&dup, u_th, f, next());
        weight_gradient(dout_th, &act, self.down_proj.outputs(), next());
        let mut du_th = vec![0.0; u_th.len()];
        self.gate_proj.input_gradient(&dgate, Into::Overwrite, &mut du_th);
        self.up_proj.input_gradient(&dup, Into::Add, &mut du_th);
        du_th
    }
}
