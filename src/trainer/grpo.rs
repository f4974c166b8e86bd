//! The GRPO loss and its gradient, over flat tokens.
//!
//! Per selected token, with A the sequence's advantage, all in nats and f64:
//!
//! - ratio r = exp(new - old); surrogate = min(r A, clamp(r, 1 - low, 1 + high) A)
//! - importance weight w = min(exp(old - rollout), cap), a constant without gradient
//! - k3 = exp(reference - new) - (reference - new) - 1
//! - loss = -w surrogate + kl_coef k3
//!
//! `old` is recomputed by the trainer before the step's first update, from logits / T. Sources:
//! Shao et al. 2024 (DeepSeekMath, eq. 3 and 4), Yu et al. 2025 (DAPO: two clip bounds, token
//! mean), Yao et al. 2025 (truncated importance weights). The KL term is not weighted by w.

use std::ops::Range;

use super::TrainerError;
use crate::config::{LossAggregation, TrainerConfig};

/// The knobs of the loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// The ratio is clipped to [1 - low, 1 + high].
    pub clip_low: f64,
    pub clip_high: f64,
    /// Weight of k3; with 0 it is logged where a reference is given, and adds no gradient.
    pub kl_coef: f64,
    /// The importance weight's upper bound; absent, every weight is 1.
    pub importance_cap: Option<f64>,
    pub aggregation: LossAggregation,
}

impl From<&TrainerConfig> for Options {
    fn from(config: &TrainerConfig) -> Self {
        Self {
            clip_low: config.clip_ratio_low,
            clip_high: config.clip_ratio_high,
            kl_coef: config.kl_coef,
            importance_cap: config.importance_cap,
            aggregation: config.loss_agg,
        }
    }
}

/// What the loss of a minibatch is divided by, counted over the whole of it, so that packing it
/// into chunks changes nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tokens under the mask.
    pub tokens: usize,
    /// Sequences with at least one such token; the others weigh nothing.
    pub sequences: usize,
}

impl Counts {
    /// Adds one sequence's mask.
    pub fn add(&mut self, mask: &[bool]) {
        let selected = count(mask);
        self.tokens += selected;
        self.sequences += usize::from(selected > 0);
    }
}

/// Whole sequences, packed into flat arrays of one length `n`. Log-probabilities are in nats.
#[derive(Clone, Copy, Debug)]
pub struct Chunk<'a> {
    /// Each sequence's tokens, ascending and disjoint; what no span covers is ignored.
    pub spans: &'a [Range<usize>],
    /// One a sequence.
    pub advantages: &'a [f64],
    /// Which tokens count.
    pub mask: &'a [bool],
    /// Under the weights that are being updated.
    pub new: &'a [f64],
    /// Under the weights before the step's first update, by the trainer's own forward.
    pub old: &'a [f64],
    /// Under the frozen start weights. Must be there when `kl_coef` is not 0.
    pub reference: Option<&'a [f64]>,
    /// As the engine recorded them. Must be there when there is an importance cap.
    pub rollout: Option<&'a [f64]>,
}

/// Every term of one minibatch's loss. Means and fractions are over tokens unless said otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Terms {
    pub counts: Counts,
    /// `policy_loss + kl_coef * kl`.
    pub loss: f64,
    /// Under the loss's own aggregation.
    pub policy_loss: f64,
    /// k3 to the reference, under the loss's own aggregation.
    pub kl: Option<f64>,
    /// Mean of r - 1 - ln r: how far the weights have moved since `old` was computed.
    pub approx_kl: f64,
    pub ratio_mean: f64,
    pub ratio_min: f64,
    pub ratio_max: f64,
    /// Tokens held at 1 - low: A < 0 and r below it.
    pub clip_fraction_low: f64,
    /// Tokens held at 1 + high: A > 0 and r above it.
    pub clip_fraction_high: f64,
    pub importance: Option<ImportanceTerms>,
    /// Over sequences.
    pub advantage_mean: f64,
    /// Over sequences, divided by n.
    pub advantage_std: f64,
}

/// The truncated importance weights of one minibatch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImportanceTerms {
    /// Of the weights as used.
    pub mean: f64,
    /// Of exp(old - rollout) before the cap, which would hide it.
    pub uncapped_max: f64,
    pub fraction_capped: f64,
}

/// The loss of one minibatch, fed chunk by chunk in any packing.
#[derive(Clone, Debug)]
pub struct Loss {
    options: Options,
    counts: Counts,
    seen: Counts,
    advantages: Vec<f64>,
    sums: Sums,
}

/// Running sums, one token after the other: the same bits however the tokens are packed.
#[derive(Clone, Debug)]
struct Sums {
    policy: f64,
    kl: Option<f64>,
    approx_kl: f64,
    ratio: f64,
    ratio_min: f64,
    ratio_max: f64,
    clipped_low: usize,
    clipped_high: usize,
    importance: f64,
    importance_max: f64,
    capped: usize,
}

/// One selected token.
#[derive(Clone, Copy, Debug)]
struct Token {
    advantage: f64,
    new: f64,
    old: f64,
    reference: Option<f64>,
    rollout: Option<f64>,
    /// Its share of the minibatch's loss.
    share: f64,
}

impl Loss {
    /// `counts` is over the whole minibatch.
    ///
    /// # Errors
    /// [`TrainerError::NoTokens`]: a loss over nothing is not 0.
    pub fn new(options: Options, counts: Counts) -> Result<Self, TrainerError> {
        if counts.tokens == 0 {
            return Err(TrainerError::NoTokens);
        }
        let sums = Sums {
            policy: 0.0,
            kl: None,
            approx_kl: 0.0,
            ratio: 0.0,
            ratio_min: f64::INFINITY,
            ratio_max: f64::NEG_INFINITY,
            clipped_low: 0,
            clipped_high: 0,
            importance: 0.0,
            importance_max: f64::NEG_INFINITY,
            capped: 0,
        };
        Ok(Self { options, counts, seen: Counts::default(), advantages: Vec::new(), sums })
    }

    /// The gradient of the minibatch's loss in `chunk.new`, 0 where nothing is selected.
    ///
    /// # Errors
    /// [`TrainerError::NonFiniteLoss`] when a selected token has a non-finite input. Overflow of
    /// finite inputs is kept: it reaches the gradient's norm, where the step is refused.
    pub fn add(&mut self, chunk: &Chunk) -> Result<Vec<f64>, TrainerError> {
        chunk.check(&self.options);
        let mut gradient = vec![0.0; chunk.new.len()];
        for (sequence, span) in chunk.spans.iter().enumerate() {
            let selected = count(&chunk.mask[span.clone()]);
            if selected == 0 {
                continue;
            }
            let share = match self.options.aggregation {
                LossAggregation::TokenMean => 1.0 / self.counts.tokens as f64,
                LossAggregation::SequenceMean => {
                    1.0 / (self.counts.sequences as f64 * selected as f64)
                }
            };
            for index in span.clone().filter(|&index| chunk.mask[index]) {
                let token = chunk.token(sequence, index, share, &self.options)?;
                gradient[index] = self.sums.add(&token, &self.options);
            }
            self.seen.add(&chunk.mask[span.clone()]);
            self.advantages.push(chunk.advantages[sequence]);
        }
        Ok(gradient)
    }

    /// The terms of two parts of one minibatch; those of `after` are added behind this part's.
    #[must_use]
    pub fn and(mut self, after: Self) -> Self {
        assert_eq!(self.counts, after.counts, "two parts of one minibatch");
        self.seen.tokens += after.seen.tokens;
        self.seen.sequences += after.seen.sequences;
        self.advantages.extend(after.advantages);
        self.sums.add_sums(&after.sums);
        self
    }

    /// All that was summed, once every sequence has been added.
    #[must_use]
    pub fn finish(self) -> Terms {
        assert_eq!(self.seen, self.counts, "the chunks must add up to the counted minibatch");
        let Self { options, counts, advantages, sums, .. } = self;
        let per_token = |sum: f64| sum / counts.tokens as f64;
        let sequences = counts.sequences as f64;
        let advantage_mean = advantages.iter().sum::<f64>() / sequences;
        let squares = advantages.iter().map(|a| (a - advantage_mean).powi(2)).sum::<f64>();
        Terms {
            counts,
            loss: sums.policy + sums.kl.map_or(0.0, |kl| scaled(options.kl_coef, kl)),
            policy_loss: sums.policy,
            kl: sums.kl,
            approx_kl: per_token(sums.approx_kl),
            ratio_mean: per_token(sums.ratio),
            ratio_min: sums.ratio_min,
            ratio_max: sums.ratio_max,
            clip_fraction_low: per_token(sums.clipped_low as f64),
            clip_fraction_high: per_token(sums.clipped_high as f64),
            importance: options.importance_cap.map(|_| ImportanceTerms {
                mean: per_token(sums.importance),
                uncapped_max: sums.importance_max,
                fraction_capped: per_token(sums.capped as f64),
            }),
            advantage_mean,
            advantage_std: (squares / sequences).sqrt(),
        }
    }
}

impl Sums {
    fn add_sums(&mut self, after: &Self) {
        self.policy += after.policy;
        self.kl = match (self.kl, after.kl) {
            (Some(kl), Some(more)) => Some(kl + more),
            (one, other) => one.or(other),
        };
        self.approx_kl += after.approx_kl;
        self.ratio += after.ratio;
        self.ratio_min = self.ratio_min.min(after.ratio_min);
        self.ratio_max = self.ratio_max.max(after.ratio_max);
        self.clipped_low += after.clipped_low;
        self.clipped_high += after.clipped_high;
        self.importance += after.importance;
        self.importance_max = self.importance_max.max(after.importance_max);
        self.capped += after.capped;
    }

    /// Adds one token and returns the gradient of its share of the loss in `token.new`.
    fn add(&mut self, token: &Token, options: &Options) -> f64 {
        let log_ratio = token.new - token.old;
        let ratio = log_ratio.exp();
        self.ratio += ratio;
        self.ratio_min = self.ratio_min.min(ratio);
        self.ratio_max = self.ratio_max.max(ratio);
        self.approx_kl += log_ratio.exp_m1() - log_ratio;

        let weight = self.importance_weight(token, options);
        let clipped_low = token.advantage < 0.0 && ratio < 1.0 - options.clip_low;
        let clipped_high = token.advantage > 0.0 && ratio > 1.0 + options.clip_high;
        self.clipped_low += usize::from(clipped_low);
        self.clipped_high += usize::from(clipped_high);
        let used = match (clipped_low, clipped_high) {
            (true, _) => 1.0 - options.clip_low,
            (_, true) => 1.0 + options.clip_high,
            _ => ratio,
        };
        let policy = -token.share * weight * scaled(token.advantage, used);
        self.policy += policy;
        // The ratio is its own derivative in `new`; a clipped one is constant.
        let mut gradient = if clipped_low || clipped_high { 0.0 } else { policy };

        if let Some(reference) = token.reference {
            let away = reference - token.new;
            let k3 = away.exp_m1() - away;
            self.kl = Some(self.kl.unwrap_or(0.0) + token.share * k3);
            gradient -= token.share * scaled(options.kl_coef, away.exp_m1());
        }
        gradient
    }

    fn importance_weight(&mut self, token: &Token, options: &Options) -> f64 {
        let (Some(cap), Some(rollout)) = (options.importance_cap, token.rollout) else {
            return 1.0;
        };
        let uncapped = (token.old - rollout).exp();
        let weight = uncapped.min(cap);
        self.importance += weight;
        self.importance_max = self.importance_max.max(uncapped);
        self.capped += usize::from(uncapped > cap);
        weight
    }
}

impl Chunk<'_> {
    /// Programmer errors: the arrays are built together, from one list of sequences.
    fn check(&self, options: &Options) {
        let n = self.new.len();
        assert_eq!(self.old.len(), n, "old must have one number a token");
        assert_eq!(self.mask.len(), n, "the mask must have one entry a token");
        assert_eq!(self.advantages.len(), self.spans.len(), "one advantage a sequence");
        for (name, values) in [("reference", self.reference), ("rollout", self.rollout)] {
            assert!(values.is_none_or(|v| v.len() == n), "{name} must have one number a token");
        }
        assert!(options.kl_coef == 0.0 || self.reference.is_some(), "a KL needs a reference");
        assert!(options.importance_cap.is_none() || self.rollout.is_some(), "a cap needs rollout");
        let mut end = 0;
        for span in self.spans {
            assert!(
                end <= span.start && span.start <= span.end && span.end <= n,
                "{span:?} of {n}"
            );
            end = span.end;
        }
    }

    fn token(
        &self,
        sequence: usize,
        index: usize,
        share: f64,
        options: &Options,
    ) -> Result<Token, TrainerError> {
        let token = index - self.spans[sequence].start;
        let finite = |which, value: f64| match value.is_finite() {
            true => Ok(value),
            false => Err(TrainerError::NonFiniteLoss { which, sequence, token, value }),
        };
        let optional = |which, values: Option<&[f64]>| {
            values.map(|values| finite(which, values[index])).transpose()
        };
        // Without a cap the engine's numbers play no part, whatever they are.
        let rollout = self.rollout.filter(|_| options.importance_cap.is_some());
        Ok(Token {
            advantage: finite("advantage", self.advantages[sequence])?,
            new: finite("new log-probability", self.new[index])?,
            old: finite("old log-probability", self.old[index])?,
            reference: optional("reference log-probability", self.reference)?,
            rollout: optional("rollout log-probability", rollout)?,
            share,
        })
    }
}

fn count(mask: &[bool]) -> usize {
    mask.iter().filter(|&&selected| selected).count()
}

/// `coefficient * value`, where a coefficient of 0 switches the term off even if it overflowed.
fn scaled(coefficient: f64, value: f64) -> f64 {
    if coefficient == 0.0 {
        0.0
    } else {
        coefficient * value
    }
}

#[cfg(test)]
mod tests;
