//! A mixture of experts: each token goes to a few gated feed-forwards, whose outputs are summed by
//! the router's weights (transformers `JambaSparseMoeBlock`).
//!
//! Shape letters: T rows, H hidden, E experts, K experts a token. Rounding points: the router's
//! logits; its weights after an f32 softmax; those of each expert (see `mlp`); the weighted sum,
//! once. A token's sum runs over its experts ascending, so it depends on nothing but the token.

use super::mlp::{self, Mlp};
use super::unit::TensorSpec;
use super::{HfConfig, Numerics};
use crate::ops::array::{Array, SliceMut};
use crate::ops::gemm::{Into, Projection};
use crate::ops::routing::{Choice, Routing};
use crate::ops::weights::{Part, Purpose};

/// The weights, packed.
#[derive(Clone, Debug)]
pub struct Moe {
    routing: Routing,
    router: Projection,
    experts: Vec<Mlp>,
    /// Whether a token's weights are divided by their sum. False of every family here.
    renormalises: bool,
}

/// The rows that one expert works on, side by side.
struct Share {
    expert: usize,
    /// Index of the choice, `row · K + k`, for each of the rows.
    choices: Vec<usize>,
    rows: Vec<usize>,
    /// By the router, one a row.
    weights: Vec<f32>,
    /// `[rows, H]`.
    u: Array,
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
        parts: &mut impl Iterator<Item = Part<'a>>,
        purpose: Purpose,
    ) -> Self {
        let shape = config.experts();
        let router = parts.next().expect("the unit's tensors are in this order");
        Self {
            routing: Routing { experts: shape.count, per_token: shape.per_token },
            router: Projection::new(router, router.none(), config.hidden_size, purpose),
            experts: (0..shape.count).map(|_| Mlp::load(config, parts, purpose)).collect(),
            renormalises: false,
        }
    }

    /// From now on; for forward passes only.
    pub(super) fn renormalise(&mut self) {
        self.renormalises = true;
    }

    /// How many tensors it took.
    pub(super) fn tensors(&self) -> usize {
        1 + mlp::TENSORS * self.experts.len()
    }

    /// The router's logits `[T, E]` of the normed rows u[T, H].
    pub(super) fn router_logits(&self, num: &Numerics, u_th: &Array) -> Array {
        self.router.forward(u_th, num.dtype)
    }

    /// The experts of the normed rows u[T, H] and their weights, `[T, K]`.
    pub(super) fn routes(&self, num: &Numerics, u_th: &Array) -> Vec<Choice> {
        let mut choices = self.routing.choose(&self.router_logits(num, u_th), num.dtype);
        if self.renormalises {
            self.routing.renormalise(&mut choices, num.dtype);
        }
        choices
    }

    /// out[T, H] from the normed rows u[T, H].
    pub(super) fn forward(&self, num: &Numerics, u_th: &Array) -> Array {
        let h = self.router.inner();
        // Sums are f32 until the last expert has added its own.
        let mut out_th = u_th.zeros_like();
        for share in self.shares(u_th, &self.routes(num, u_th)) {
            let y = self.experts[share.expert].forward(num, &share.u);
            out_th.add_weighted_rows(h, &share.rows, &share.weights, &y);
        }
        out_th.round_to(num.dtype);
        out_th
    }

    /// What each expert that has any rows works on, experts ascending.
    fn shares(&self, u_th: &Array, choices_tk: &[Choice]) -> Vec<Share> {
        let (h, k) = (self.router.inner(), self.routing.per_token);
        let share = |expert: usize| {
            let own = (0..choices_tk.len()).filter(|&choice| choices_tk[choice].expert == expert);
            let choices: Vec<usize> = own.collect();
            let rows: Vec<usize> = choices.iter().map(|choice| choice / k).collect();
            let weights = choices_tk.iter().filter(|choice| choice.expert == expert);
            let weights = weights.map(|choice| choice.weight).collect();
            let u = u_th.gather_rows(h, &rows);
            Share { expert, choices, rows, weights, u }
        };
        (0..self.experts.len()).map(share).filter(|share| !share.choices.is_empty()).collect()
    }

    /// Adds the weights' gradients to `parts`, returns the gradient by u[T, H].
    pub(super) fn backward<'a>(
        &self,
        num: &Numerics,
        u_th: &Array,
        dout_th: &Array,
        parts: &mut impl Iterator<Item = SliceMut<'a>>,
    ) -> Array {
        assert!(!self.renormalises, "the gradient is of weights that are not renormalised");
        let h = self.router.inner();
        let logits = self.router_logits(num, u_th);
        let choices = self.routing.choose(&logits, num.dtype);
        let drouter = parts.next().expect("the unit's tensors are in this order");
        let mut parts: Vec<SliceMut<'a>> = parts.take(self.tensors() - 1).collect();
        let mut dweights = vec![0.0; choices.len()];
        let mut du_th = u_th.zeros_like();
        for share in self.shares(u_th, &choices) {
            let expert = &self.experts[share.expert];
            let dout = dout_th.gather_rows(h, &share.rows);
            let dots = dout.row_dots(h, &expert.forward(num, &share.u));
            for (&choice, dot) in share.choices.iter().zip(dots) {
                dweights[choice] = dot;
            }
            let dy = dout.scale_rows(h, &share.weights);
            let own = &mut parts[mlp::TENSORS * share.expert..][..mlp::TENSORS];
            let mut own = own.iter_mut().map(SliceMut::reborrow);
            let du = expert.backward(num, &share.u, &dy, &mut own);
            du_th.add_weighted_rows(h, &share.rows, &vec![1.0; share.rows.len()], &du);
        }
        let dlogits = self.routing.choose_backward(&logits, &choices, &dweights);
        let own = (drouter, SliceMut::none());
        self.router.backward(&dlogits, u_th, num.dtype, own, (Into::Add, &mut du_th));
        du_th
    }
}
