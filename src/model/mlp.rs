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
        let mut next = || parts.next().expect("the unit's tensors are in this order");
        let [(gate_w, up_w), (down_w, none)] = [(next(), next()), (next(), SliceMut::none())];
        let mut dact = act.zeros_like();
        let into = (Into::Overwrite, &mut dact);
        self.down_proj.backward(dout_th, &act, num.dtype, (down_w, none), into);
        let [dgate, dup] = gate.swiglu_backward(&up, &dact);
        let [gate_proj, up_proj] = self.gate_up.each();
        let mut du_th = u_th.zeros_like();
        for (linear, dy, dw, into) in
            [(gate_proj, &dgate, gate_w, Into::Overwrite), (up_proj, &dup, up_w, Into::Add)]
        {
            linear.backward(dy, u_th, num.dtype, (dw, SliceMut::none()), (into, &mut du_th));
        }
        du_th
    }
}
