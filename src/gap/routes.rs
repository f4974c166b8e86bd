//! Whether two routers sent the same tokens to the same experts, and with what weight.
//!
//! The two questions are kept apart: replaying an engine's expert ids in a trainer makes the ids
//! agree and leaves the weights to be computed, and normalised, anew (radixark/miles#2722).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::base::float;
use crate::rollout::{Routes, TokenRoutes};

/// Sums over tokens, layer by layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteTally {
    /// Tokens that a side has no capture of; they are in no other number.
    pub not_captured: u64,
    /// One for each layer with experts, in order.
    pub layers: Vec<LayerRoutes>,
}

/// One layer's sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LayerRoutes {
    pub tokens: u64,
    /// Tokens that both sides send to the same experts, in whatever order.
    pub agreeing: u64,
    /// Choices of the agreeing tokens for which both sides have a weight.
    pub weighed: u64,
    #[serde(with = "float")]
    pub weight_diff_sum: f64,
    #[serde(with = "float")]
    pub weight_diff_max: f64,
}

impl RouteTally {
    /// Adds one sequence's captures by either side.
    ///
    /// # Panics
    /// If the two are not of the same tokens and layers.
    pub fn add(&mut self, a: &Routes, b: &Routes) {
        assert_eq!(a.len(), b.len(), "routes of unlike sequences");
        for (a, b) in a.iter().zip(b) {
            match (a, b) {
                (Some(a), Some(b)) => self.add_token(a, b),
                _ => self.not_captured += 1,
            }
        }
    }

    fn add_token(&mut self, a: &TokenRoutes, b: &TokenRoutes) {
        assert_eq!(a.experts.len(), b.experts.len(), "routes of unlike models");
        self.layers.resize(self.layers.len().max(a.experts.len()), LayerRoutes::default());
        for (layer, sums) in self.layers.iter_mut().enumerate() {
            sums.add(&choices(a, layer), &choices(b, layer));
        }
    }

    /// Tokens of which both sides have a capture.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.layers.first().map_or(0, |layer| layer.tokens)
    }

    /// Share of tokens and layers that agree; `None` where nothing was captured.
    #[must_use]
    pub fn agreement(&self) -> Option<f64> {
        let sum = |of: fn(&LayerRoutes) -> u64| self.layers.iter().map(of).sum::<u64>() as f64;
        let tokens = sum(|layer| layer.tokens);
        (tokens > 0.0).then(|| sum(|layer| layer.agreeing) / tokens)
    }

    /// The first layer with experts, counted from 0 among those, in which a token goes elsewhere.
    #[must_use]
    pub fn first_differing_layer(&self) -> Option<usize> {
        self.layers.iter().position(|layer| layer.agreeing < layer.tokens)
    }

    /// Mean and largest difference of a weight where the experts agree; `None` without any.
    #[must_use]
    pub fn weight_diff(&self) -> Option<(f64, f64)> {
        let weighed: u64 = self.layers.iter().map(|layer| layer.weighed).sum();
        let sum: f64 = self.layers.iter().map(|layer| layer.weight_diff_sum).sum();
        let most = self.layers.iter().map(|layer| layer.weight_diff_max).fold(0.0, f64::max);
        (weighed > 0).then(|| (sum / weighed as f64, most))
    }
}

/// Each chosen expert's weight, if there is one.
type Choices = BTreeMap<u32, Option<f32>>;

fn choices(token: &TokenRoutes, layer: usize) -> Choices {
    let weight = |at: usize| token.weights.as_ref().map(|weights| weights[layer][at]);
    token.experts[layer].iter().enumerate().map(|(at, &expert)| (expert, weight(at))).collect()
}

impl LayerRoutes {
    /// Adds another sequence's sums.
    pub(super) fn merge(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.agreeing += other.agreeing;
        self.weighed += other.weighed;
        self.weight_diff_sum += other.weight_diff_sum;
        self.weight_diff_max = self.weight_diff_max.max(other.weight_diff_max);
    }

    fn add(&mut self, a: &Choices, b: &Choices) {
        self.tokens += 1;
        if !a.keys().eq(b.keys()) {
            return;
        }
        self.agreeing += 1;
        for (a, b) in a.values().zip(b.values()) {
            let (Some(a), Some(b)) = (a, b) else { continue };
            let difference = (f64::from(*b) - f64::from(*a)).abs();
            self.weighed += 1;
            self.weight_diff_sum += difference;
            self.weight_diff_max = self.weight_diff_max.max(difference);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(experts: &[u32], weights: Option<&[f32]>) -> Option<TokenRoutes> {
        let weights = weights.map(|weights| vec![weights.to_vec()]);
        Some(TokenRoutes { experts: vec![experts.to_vec()], weights })
    }

    fn tally(a: &Routes, b: &Routes) -> RouteTally {
        let mut tally = RouteTally::default();
        tally.add(a, b);
        tally
    }

    /// Gate probabilities 0.5, 0.3 and 0.2, top-2: plain weights against renormalised ones, and a
    /// capture replayed whole.
    #[test]
    fn k25_ids_and_weights_are_two_questions() {
        let plain = token(&[0, 1], Some(&[0.5, 0.3]));
        let renormalised = token(&[1, 0], Some(&[0.375, 0.625]));
        let found = tally(&vec![plain.clone()], &vec![renormalised]);
        assert_eq!((found.agreement(), found.first_differing_layer()), (Some(1.0), None));
        let (mean, most) = found.weight_diff().expect("weights");
        assert!((most - 0.125).abs() < 1e-7 && (mean - (0.125 + 0.075) / 2.0).abs() < 1e-7);
        let replayed = tally(&vec![plain.clone()], &vec![plain.clone()]);
        assert_eq!((replayed.agreement(), replayed.weight_diff()), (Some(1.0), Some((0.0, 0.0))));

        // A token without a capture is none that went to expert 0.
        let found = tally(&vec![plain.clone(), None], &vec![token(&[0, 2], None), plain.clone()]);
        assert_eq!((found.not_captured, found.tokens()), (1, 1));
        assert_eq!((found.agreement(), found.first_differing_layer()), (Some(0.0), Some(0)));
        assert_eq!(found.weight_diff(), None);
        assert_eq!(tally(&vec![None], &vec![plain]).agreement(), None);
    }

    #[test]
    fn the_first_layer_that_differs_is_named() {
        let two = |second: &[u32]| {
            Some(TokenRoutes { experts: vec![vec![3, 1], second.to_vec()], weights: None })
        };
        let found = tally(&vec![two(&[0, 2]), two(&[0, 2])], &vec![two(&[2, 0]), two(&[0, 1])]);
        assert_eq!(found.first_differing_layer(), Some(1));
        assert_eq!(found.agreement(), Some(0.75));
    }
}
