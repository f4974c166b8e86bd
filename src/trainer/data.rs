//! What goes into the trainer and what comes out of it.

use super::grpo;
use crate::base::{LogProb, TokenId, WeightVersion};
use crate::ops::weights::Weights;

/// A sequence to score or to learn from.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    /// Prompt and completion.
    pub tokens: Vec<TokenId>,
    /// At least 1: the first token is never predicted.
    pub prompt_len: usize,
}

/// A sequence's completion tokens, scored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SequenceScores {
    /// Under the contract that was asked: what the gap compares.
    pub contract: Vec<LogProb>,
    /// Of logits / T without filters: what GRPO calls old.
    pub ratio: Vec<LogProb>,
}

/// A whole sequence seen from inside.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inspection {
    /// `[T, H]` each, as transformers reports them: the embedding, the output of each layer but
    /// the last, and the last after the final norm.
    pub hidden: Vec<Vec<f32>>,
    /// `[T, E]` each, one for every layer with experts.
    pub router_logits: Vec<Vec<f32>>,
    /// `[T, V]`.
    pub logits: Vec<f32>,
}

/// One rollout to learn from, beside its [`Sequence`]. All arrays are aligned with the completion.
#[derive(Clone, Debug, PartialEq)]
pub struct Experience {
    pub sequence: Sequence,
    pub advantage: f64,
    pub mask: Vec<bool>,
    /// By this trainer, before the step's first update.
    pub old: Vec<LogProb>,
    /// log p by this trainer minus log p by the engine, nats, both under the record's own contract:
    /// the logarithm of the importance weight. Exactly 0 where nothing is wrong.
    pub d: Vec<f64>,
}

/// Weights on their way to the engine: in the compute dtype, on the device that they were made on.
#[derive(Clone, Debug)]
pub struct WeightSet {
    pub version: WeightVersion,
    /// In the plan's order.
    pub units: Vec<Weights>,
}

/// What one minibatch's update did.
#[derive(Clone, Debug, PartialEq)]
pub struct UpdateReport {
    pub terms: grpo::Terms,
    /// Before clipping.
    pub grad_norm: f64,
    pub learning_rate: f64,
}
