//! Which experts a token goes to, and with what weight: softmax over all experts in f32, the
//! largest few of it, not renormalised (transformers `JambaSparseMoeBlock`).
//!
//! Shape letters: T rows, E experts, K experts a token. Of equal probabilities the lower expert
//! wins. Order of the sum: the lanes of `simd::sum_by` over one row. A weight is rounded to the
//! compute dtype, a probability is not.

#[cfg(feature = "cuda")]
use std::sync::Arc;

#[cfg(feature = "cuda")]
use super::array::cuda;
use super::array::Array;
#[cfg(feature = "cuda")]
use super::cuda::Floats;
use super::round::to_dtype;
use super::simd::{dot, exp, sum_by, vectorized};
use crate::config::Dtype;

/// How many experts there are, and how many a token goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Routing {
    pub experts: usize,
    pub per_token: usize,
}

/// One token's expert and its weight.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    pub expert: usize,
    pub weight: f32,
}

/// Probabilities of one row, into `p_e`.
fn softmax(logits_e: &[f32], p_e: &mut [f32]) {
    let max = logits_e.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
    vectorized(
        #[inline(always)]
        || {
            p_e.iter_mut().zip(logits_e).for_each(|(p, x)| *p = exp(x - max));
            let total = sum_by(p_e.len(), |i| p_e[i]);
            p_e.iter_mut().for_each(|p| *p /= total);
        },
    );
}

impl Routing {
    /// Choices `[T, K]` from logits[T, E], a row's experts ascending.
    #[must_use]
    pub fn forward(self, logits_te: &[f32], dtype: Dtype) -> Vec<Choice> {
        let Self { experts, per_token } = self;
        assert!(0 < per_token && per_token <= experts, "{per_token} of {experts} experts");
        assert_eq!(logits_te.len() % experts, 0, "logits are not [T, {experts}]");
        let mut p_e = vec![0.0; experts];
        let mut choices = Vec::with_capacity(logits_te.len() / experts * per_token);
        for logits_e in logits_te.chunks_exact(experts) {
            softmax(logits_e, &mut p_e);
            let mut order: Vec<usize> = (0..experts).collect();
            // Stable, so that ties keep their order; total, so that a NaN has a place.
            order.sort_by(|&a, &b| p_e[b].total_cmp(&p_e[a]));
            order.truncate(per_token);
            order.sort_unstable();
            let choice = |&expert: &usize| Choice { expert, weight: to_dtype(p_e[expert], dtype) };
            choices.extend(order.iter().map(choice));
        }
        choices
    }

    /// Divides each token's weights by their sum, rounded to the compute dtype.
    pub fn renormalise(self, choices_tk: &mut [Choice], dtype: Dtype) {
        for choices in choices_tk.chunks_exact_mut(self.per_token) {
            let total: f32 = choices.iter().map(|choice| choice.weight).sum();
            choices.iter_mut().for_each(|one| one.weight = to_dtype(one.weight / total, dtype));
        }
    }

    /// From the gradient by each choice's weight, `[T, K]`: the gradient by the logits[T, E],
    /// overwritten. Which experts are chosen has no gradient.
    pub fn backward(
        self,
        logits_te: &[f32],
        choices_tk: &[Choice],
        dweights_tk: &[f32],
        dlogits_te: &mut [f32],
    ) {
        let Self { experts, per_token } = self;
        assert_eq!(choices_tk.len(), dweights_tk.len(), "one gradient a choice");
        assert_eq!(choices_tk.len() * experts, logits_te.len() * per_token, "not of these logits");
        assert_eq!(logits_te.len(), dlogits_te.len(), "logits and gradient differ");
        let mut p_e = vec![0.0; experts];
        let rows = logits_te.chunks_exact(experts).zip(dlogits_te.chunks_exact_mut(experts));
        let chosen = choices_tk.chunks_exact(per_token).zip(dweights_tk.chunks_exact(per_token));
        for ((logits_e, dlogits_e), (choices, dweights)) in rows.zip(chosen) {
            softmax(logits_e, &mut p_e);
            dlogits_e.fill(0.0);
            let mut mean = 0.0;
            for (choice, dweight) in choices.iter().zip(dweights) {
                dlogits_e[choice.expert] = *dweight;
                mean += p_e[choice.expert] * dweight;
            }
            dlogits_e.iter_mut().zip(&p_e).for_each(|(d, p)| *d = p * (*d - mean));
        }
    }
}

impl Routing {
    /// The choices of logits[T, E] on any device. They are made on the host: which rows an expert
    /// gets must be known there anyway.
    #[must_use]
    pub fn choose(self, logits_te: &Array, dtype: Dtype) -> Vec<Choice> {
        match logits_te {
            Array::Cpu(logits_te) => self.forward(logits_te, dtype),
            #[cfg(feature = "cuda")]
            Array::Cuda(logits_te) => self.forward(&logits_te.to_host(), dtype),
        }
    }

    /// See [`Self::backward`].
    #[must_use]
    pub fn choose_backward(
        self,
        logits_te: &Array,
        choices_tk: &[Choice],
        dweights_tk: &[f32],
    ) -> Array {
        let device = logits_te.device();
        let mut dlogits_te = vec![0.0; logits_te.len()];
        self.backward(&logits_te.to_host(), choices_tk, dweights_tk, &mut dlogits_te);
        device.upload(dlogits_te)
    }
}

impl Array {
    /// Row `rows[i]` of this array += `weights[i]` · row i of `from`. No row is named twice.
    pub fn add_weighted_rows(
        &mut self,
        width: usize,
        rows: &[usize],
        weights: &[f32],
        from: &Self,
    ) {
        assert!(rows.len() == weights.len() && from.len() == rows.len() * width, "rows differ");
        match self {
            Self::Cpu(values) => {
                let each = rows.iter().zip(weights).zip(from.cpu().chunks_exact(width));
                for ((&row, weight), from) in each {
                    let sums = &mut values[row * width..][..width];
                    sums.iter_mut().zip(from).for_each(|(sum, x)| *sum += weight * x);
                }
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(sums) => {
                let gpu = Arc::clone(sums.gpu());
                let places = (rows, weights);
                cuda::add_weighted_rows(&gpu, &mut sums.view_mut(), width, places, from.cuda());
            }
        }
    }

    /// Row i times `weights[i]`.
    #[must_use]
    pub fn scale_rows(&self, width: usize, weights: &[f32]) -> Self {
        assert_eq!(self.len(), weights.len() * width, "one weight a row");
        match self {
            Self::Cpu(values) => {
                let each = values.chunks_exact(width).zip(weights);
                Self::Cpu(each.flat_map(|(row, w)| row.iter().map(move |x| w * x)).collect())
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => {
                let gpu = values.gpu();
                let scaled = cuda::scale_rows(gpu, &values.view(), width, weights);
                Self::Cuda(Floats::new(gpu, scaled))
            }
        }
    }

    /// Each row's scalar product with the same row of `other`, on the host.
    #[must_use]
    pub fn row_dots(&self, width: usize, other: &Self) -> Vec<f32> {
        assert_eq!(self.len(), other.len(), "products of unequal rows");
        match self {
            Self::Cpu(values) => {
                let mut dots = vec![0.0; values.len() / width];
                let each = values.chunks_exact(width).zip(other.cpu().chunks_exact(width));
                vectorized(
                    #[inline(always)]
                    || dots.iter_mut().zip(each).for_each(|(sum, (a, b))| *sum = dot(a, b)),
                );
                dots
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(values) => {
                let (wide, other) = (values.widened(), other.cuda().widened());
                cuda::row_dots(values.gpu(), &wide.view(), width, &other.view())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, finite_difference, random, weighted, wide};

    /// T, E, K: one expert of one, all of them, and the usual few.
    const CASES: [(usize, usize, usize); 5] =
        [(1, 1, 1), (3, 4, 2), (5, 3, 3), (4, 16, 2), (2, 37, 5)];

    /// Probabilities of `chosen`, row by row.
    fn oracle(logits: &[f64], experts: usize, chosen: &[Choice]) -> Vec<f64> {
        let rows = logits.chunks_exact(experts);
        let per_token = chosen.len() / rows.len();
        let row = |(logits, chosen): (&[f64], &[Choice])| {
            let total: f64 = logits.iter().map(|x| x.exp()).sum();
            chosen.iter().map(|one| logits[one.expert].exp() / total).collect::<Vec<_>>()
        };
        rows.zip(chosen.chunks_exact(per_token)).flat_map(row).collect()
    }

    #[test]
    fn forward_against_f64_and_backward_against_finite_differences() {
        for (t, experts, per_token) in CASES {
            let routing = Routing { experts, per_token };
            let (logits, dweights) = (random(t * experts, 1), random(t * per_token, 2));
            let choices = routing.forward(&logits, Dtype::F32);
            let weights: Vec<f32> = choices.iter().map(|one| one.weight).collect();
            assert_close("weights", &weights, oracle(&wide(&logits), experts, &choices), 1e-6);
            for (row, chosen) in choices.chunks_exact(per_token).enumerate() {
                let logits = &logits[row * experts..][..experts];
                let least = chosen.iter().map(|one| logits[one.expert]).fold(f32::MAX, f32::min);
                let larger = logits.iter().filter(|x| **x > least).count();
                assert_eq!(larger, per_token - 1, "the largest are chosen");
                assert!(chosen.is_sorted_by(|a, b| a.expert < b.expert));
                assert_eq!(routing.forward(logits, Dtype::F32), chosen, "row {row} alone");
            }
            let mut dlogits = vec![1.0; logits.len()];
            routing.backward(&logits, &choices, &dweights, &mut dlogits);
            let by_logits = finite_difference(&logits, |logits| {
                weighted(&dweights, &oracle(logits, experts, &choices))
            });
            assert_close("dlogits", &dlogits, by_logits, 1e-6);
        }
    }

    /// radixark/miles#2722: the same experts, and weights of 0.625 and 0.375 instead.
    #[test]
    fn k25_renormalised_weights_are_of_the_same_experts() {
        let routing = Routing { experts: 3, per_token: 2 };
        let logits = [0.5_f32.ln(), 0.3_f32.ln(), 0.2_f32.ln(), 0.0, 0.0, 0.0];
        let plain = routing.forward(&logits, Dtype::F32);
        let mut renormalised = plain.clone();
        routing.renormalise(&mut renormalised, Dtype::F32);
        let experts = |choices: &[Choice]| choices.iter().map(|c| c.expert).collect::<Vec<_>>();
        assert_eq!(experts(&plain), experts(&renormalised));
        let weights = |choices: &[Choice]| choices.iter().map(|c| c.weight).collect::<Vec<_>>();
        let third = 1.0 / 3.0;
        assert_close("plain", &weights(&plain), [0.5, 0.3, third, third], 1e-7);
        assert_close("renormalised", &weights(&renormalised), [0.625, 0.375, 0.5, 0.5], 1e-7);
    }

    /// radixark/miles#2722: probabilities 0.5, 0.3 and 0.2 give the weights 0.5 and 0.3, where
    /// renormalised ones would be 0.625 and 0.375.
    #[test]
    fn weights_are_not_renormalised_and_ties_go_to_the_lower_expert() {
        let weights = |logits: &[f32], per_token| {
            let routing = Routing { experts: logits.len(), per_token };
            let choices = routing.forward(logits, Dtype::F32);
            choices.iter().map(|one| (one.expert, one.weight)).collect::<Vec<_>>()
        };
        let found = weights(&[0.2_f32.ln(), 0.5_f32.ln(), 0.3_f32.ln()], 2);
        assert_eq!(found.iter().map(|one| one.0).collect::<Vec<_>>(), [1, 2]);
        assert_close("weights", &[found[0].1, found[1].1], [0.5, 0.3], 1e-7);
        assert_eq!(weights(&[1.0, 1.0, 1.0, 1.0], 2), [(0, 0.25), (1, 0.25)]);
        let nan = weights(&[1.0, f32::NAN, 2.0], 2);
        assert!(nan.iter().all(|(_, weight)| weight.is_nan()), "a NaN stays visible");
    }
}
