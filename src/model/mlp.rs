//! The gated feed-forward: down(silu(gate·x) · (up·x)) (transformers `JambaMLP`, `LlamaMLP`); a
//! dense layer's whole, or one expert.
//!
//! Shape letters: T rows, H hidden, F intermediate. Rounding points: gate, up, their product after
//! silu, down.

use super::unit::TensorSpec;
use super::{HfConfig, Numerics};
use crate::ops::array::{Array, SliceMut};
use crate::ops::gemm::{Into, Joined, Projection};
use crate::ops::weights::{Part, Purpose};

/// The weights, packed.
#[derive(Clone, Debug)]
pub struct Mlp {
    /// To gate and up.
    gate_up: Joined<2>,
    down_proj: Projection,
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
        parts: &mut impl Iterator<Item = Part<'a>>,
        purpose: Purpose,
    ) -> Self {
        let (h, f) = (config.hidden_size, config.feed_forward().intermediate_size);
        let mut next = || parts.next().expect("the unit's tensors are in this order");
        let (gate, up, down) = (next(), next(), next());
        Self {
            gate_up: Joined::new([gate, up].map(|w| (w, w.none())), h, purpose),
            down_proj: Projection::new(down, down.none(), f, purpose),
        }
    }

    /// out[T, H] from the normed rows u[T, H].
    pub(super) fn forward(&self, num: &Numerics, u_th: &Array) -> Array {
        let [gate, up] = self.gate_up.forward(u_th, num.dtype);
        self.down_proj.forward(&gate.swiglu(&up, num.dtype), num.dtype)
    }

    /// Adds the weights' gradients to `parts`, returns the gradient by u[T, H].
    pub(super) fn backward<'a>(
        &self,
        num: &Numerics,
        u_th: &Array,
        dout_th: &Array,
        parts: &mut impl Iterator<Item = SliceMut<'a>>,
    ) -> Array {
        let [gate, up] = self.gate_up.forward(u_th, num.dtype);
        let act = gate.swiglu(&up, num.dtype);
        let mut dact = act.zeros_like();
        self.down_proj.input_gradient(dout_th, Into::Overwrite, &mut dact);
        let [dgate, dup] = gate.swiglu_backward(&up, &dact);
        let mut next = || parts.next().expect("the unit's tensors are in this order");
        let [gate_proj, up_proj] = self.gate_up.each();
        gate_proj.weight_gradient(&dgate, u_th, next());
        up_proj.weight_gradient(&dup, u_th, next());
        self.down_proj.weight_gradient(dout_th, &act, next());
        let mut du_th = u_th.zeros_like();
        gate_proj.input_gradient(&dgate, Into::Overwrite, &mut du_th);
        up_proj.input_gradient(&dup, Into::Add, &mut du_th);
        du_th
    }
}
