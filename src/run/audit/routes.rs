//! Routers' choices, of the records that carry them.

use std::fmt::{self, Write};

use anyhow::{bail, ensure, Result};
use serde::Serialize;

use crate::gap::RouteTally;
use crate::model::{FeedForwardKind, LayerKind, Plan};
use crate::rollout::Routes;

/// How two captures agree.
#[derive(Serialize)]
pub(super) struct RouteRow {
    /// `engine / trainer` and the like.
    between: &'static str,
    /// Of which both have a capture.
    tokens: u64,
    /// Tokens that one of them has no capture of; they are in no other number.
    not_captured: u64,
    /// How many layers have experts.
    layers: usize,
    /// Share of tokens and layers whose experts are the same.
    agreement: Option<f64>,
    /// Counted from 0 among the layers with experts.
    first_differing_layer: Option<usize>,
    /// Of the weights where the experts are the same.
    weight_diff_mean: Option<f64>,
    weight_diff_max: Option<f64>,
}

impl RouteRow {
    /// Nothing where no record carries routes.
    pub(super) fn new(between: &'static str, tally: &RouteTally) -> Option<Self> {
        let weight_diff = tally.weight_diff();
        (tally.tokens() + tally.not_captured > 0).then(|| Self {
            between,
            tokens: tally.tokens(),
            not_captured: tally.not_captured,
            layers: tally.layers.len(),
            agreement: tally.agreement(),
            first_differing_layer: tally.first_differing_layer(),
            weight_diff_mean: weight_diff.map(|(mean, _)| mean),
            weight_diff_max: weight_diff.map(|(_, most)| most),
        })
    }

    pub(super) fn write(&self, text: &mut String) -> fmt::Result {
        let Self { between, tokens, layers, not_captured, .. } = self;
        write!(text, "  routes    {between}: ")?;
        match self.agreement {
            Some(share) => write!(
                text,
                "{:.2} % of {tokens} tokens in {layers} layer(s) go to the same experts",
                100.0 * share
            )?,
            None => write!(text, "no data")?,
        }
        if let Some(layer) = self.first_differing_layer {
            write!(text, "; the first expert layer that differs is {layer}, counted from 0")?;
        }
        if let Some((mean, most)) = self.weight_diff_mean.zip(self.weight_diff_max) {
            write!(text, "; their weights differ by {mean:.4} on average and by up to {most:.4}")?;
        }
        if *not_captured > 0 {
            write!(text, "; {not_captured} token(s) not captured")?;
        }
        writeln!(text)
    }
}

/// Routes that the model's routers could have taken.
///
/// # Errors
/// Another number of layers with experts, or an expert that there is not.
pub(super) fn check(routes: &Routes, plan: &Plan) -> Result<()> {
    let has_experts = |layer: &&LayerKind| layer.feed_forward == FeedForwardKind::Experts;
    let layers = plan.layers.iter().filter(has_experts).count();
    let shape = plan.config.feed_forward.as_ref().and_then(|shape| shape.experts);
    let experts = shape.map_or(0, |shape| shape.count);
    for (at, token) in routes.iter().enumerate() {
        let Some(token) = token else { continue };
        let found = token.layers();
        ensure!(
            found == layers,
            "the routes are of {found} layers with experts, the model has {layers}"
        );
        let outside = token.experts.iter().flatten().find(|&&expert| expert as usize >= experts);
        if let Some(expert) = outside {
            bail!("token {at} is routed to expert {expert}, and the model has {experts}");
        }
    }
    Ok(())
}
