//! A mixture of experts: each token goes to a few gated feed-forwards, whose outputs are summed by
//! the router's weights (transformers `JambaSparseMoeBlock`).
//!
//! Shape letters: T rows, H hidden, E experts, K experts a token. Rounding points: the router's
//! logits; its weights after an f32 softmax; those of each expert (see `mlp`); the weighted sum,
//! once. A token's sum runs over its experts ascending, so it depends on nothing but the token.

use super::mlp::{self, Mlp};
use super::unit::TensorSpec;
use super::{HfConfig, Numerics};
use crate::ops::gemm::{weight_gradient, Into, Linear};
use crate::ops::round::slice_to_dtype;
use crate::ops::routing::{Choice, Routing};
use crate::ops::simd::dot;

/// The weights, packed.
#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    routing: Routing,
    router: Linear,
    experts: Vec<Mlp>,
}

/// The rows that one expert works on, side by side.
struct Share {
    expert: usize,
    /// Index of the choice, `row · K + k`, for each of the rows.
    choices: Vec<usize>,
    /// `[rows, H]`.
    u: Vec<f32>,
}

pub(super) fn tensors(config: &HfConfig, prefix: &str) -> Vec<TensorSpec> {
    let (count, h) = (config.experts().count, config.hidden_size);
    let mut list = vec![TensorSpec::new(prefix, "router.weight", &[count, h])];
    let expert = |e: usize| mlp::tensors(config, &format!("{prefix}experts.{e}."));
    list.extend((0..count).flat_map(expert));
    list
}

impl Moe {
    /// Takes the tensors, in the order of [`tensors`].
    pub(super) fn load<'a>(
        config: &HfConfig,
        parts: &mut impl Iterator<Item = &'a [f32]>,
        trains: bool,
    ) -> Self {
        let shape = config.experts();
        let router = parts.next().expect("the unit's tensors are in this order");
        Self {
            routing: Routing { experts: shape.count, per_token: shape.per_token },
            router: Linear::new(router, &[], config.hidden_size, trains),
            experts: (0..shape.count).map(|_| Mlp::load(config, parts, trains)).collect(),
        }
    }

    /// How many tensors it took.
    pub(super) fn tensors(&self) -> usize {
        1 + mlp::TENSORS * self.experts.len()
    }

    /// The router's logits `[T, E]` of the normed rows u[T, H].
    pub(super) fn router_logits(&self, num: &Numerics, u_th: &[f32]) -> Vec<f32> {
        self.router.forward(u_th, num.dtype)
    }

    /// out[T, H] from the normed rows u[T, H].
    pub(super) fn forward(&self, num: &Numerics, u_th: &[f32]) -> Vec<f32> {
        let h = self.router.inner();
        let choices = self.routing.forward(&self.router_logits(num, u_th), num.dtype);
        let mut out_th = vec![0.0; u_th.len()];
        for share in self.shares(u_th, &choices) {
            let y = self.experts[share.expert].forward(num, &share.u);
            for (&choice, y_h) in share.choices.iter().zip(y.chunks_exact(h)) {
                let out_h = &mut out_th[choice / self.routing.per_token * h..][..h];
                let weight = choices[choice].weight;
                out_h.iter_mut().zip(y_h).for_each(|(sum, y)| *sum += weight * y);
            }
        }
        slice_to_dtype(&mut out_th, num.dtype);
        out_th
    }

    /// What each expert that has any rows works on, experts ascending.
    fn shares(&self, u_th: &[f32], choices: &[Choice]) -> Vec<Share> {
        let (h, k) = (self.router.inner(), self.routing.per_token);
        let share = |expert: usize| {
            let own = (0..choices.len()).filter(|&choice| choices[choice].expert == expert);
            let own: Vec<usize> = own.collect();
            let u = own.iter().flat_map(|choice| &u_th[choice / k * h..][..h]).copied().collect();
            Share { expert, choices: own, u }
        };
        (0..self.experts.len()).map(share).filter(|share| !share.choices.is_empty()).collect()
    }

    /// Adds the weights' gradients to `parts`, returns the gradient by u[T, H].
    pub(super) fn backward<'a>(
        &self,
        num: &Numerics,
        u_th: &[f32],
        dout_th: &[f32],
        parts: &mut impl Iterator<Item = &'a mut [f32]>,
    ) -> Vec<f32> {
        let (h, k) = (self.router.inner(), self.routing.per_token);
        let logits = self.router_logits(num, u_th);
        let choices = self.routing.forward(&logits, num.dtype);
        let drouter = parts.next().expect("the unit's tensors are in this order");
        let mut parts: Vec<&mut [f32]> = parts.take(self.tensors() - 1).collect();
        let mut dweights = vec![0.0; choices.len()];
        let mut du_th = vec![0.0; u_th.len()];
        for share in self.shares(u_th, &choices) {
            let expert = &self.experts[share.expert];
            let mut dy = expert.forward(num, &share.u);
            for (&choice, dy_h) in share.choices.iter().zip(dy.chunks_exact_mut(h)) {
                let dout_h = &dout_th[choice / k * h..][..h];
                dweights[choice] = dot(dout_h, dy_h);
                let weight = choices[choice].weight;
                dy_h.iter_mut().zip(dout_h).for_each(|(d, dout)| *d = weight * dout);
            }
            let own = &mut parts[mlp::TENSORS * share.expert..][..mlp::TENSORS];
            let du =
                expert.backward(num, &share.u, &dy, &mut own.iter_mut().map(|part| &mut **part));
            for (&choice, du_h) in share.choices.iter().zip(du.chunks_exact(h)) {
                let sum_h = &mut du_th[choice / k * h..][..h];
                sum_h.iter_mut().zip(du_h).for_each(|(sum, d)| *sum += d);
            }
        }
        let mut dlogits = vec![0.0; logits.len()];
        self.routing.backward(&logits, &choices, &dweights, &mut dlogits);
        weight_gradient(&dlogits, u_th, self.routing.experts, drouter);
        self.router.input_gradient(&dlogits, Into::Add, &mut du_th);
        du_th
    }
}
