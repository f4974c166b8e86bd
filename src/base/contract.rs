//! What a recorded log-probability means. Two numbers may be compared only under one contract.

use serde::{Deserialize, Serialize};

/// vLLM's `logprobs_mode`: of what the log-softmax was taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogprobsMode {
    /// The model's logits, before temperature and filters (vLLM's default).
    #[default]
    RawLogprobs,
    /// After temperature, min-p, top-k and top-p, renormalised over what they keep.
    ProcessedLogprobs,
}

/// How a completion was sampled and what its log-probabilities are of.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contract {
    pub logprobs_mode: LogprobsMode,
    /// 0 is greedy; greedy log-probabilities are raw in either mode.
    pub temperature: f32,
    /// 1 keeps everything.
    pub top_p: f32,
    /// 0 keeps everything.
    pub top_k: u32,
    /// 0 keeps everything.
    pub min_p: f32,
}

impl Contract {
    /// Temperatures below this are greedy, as in vLLM's sampler.
    pub const GREEDY_BELOW: f32 = 1e-5;

    /// Log-probabilities of the model's own distribution: temperature 1, no filters.
    pub const PLAIN: Self = Self {
        logprobs_mode: LogprobsMode::RawLogprobs,
        temperature: 1.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
    };

    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature < Self::GREEDY_BELOW
    }

    /// Whether any filter can remove a token from the sampled distribution.
    #[must_use]
    pub fn has_filters(&self) -> bool {
        !self.is_greedy() && (self.top_p < 1.0 || self.top_k > 0 || self.min_p > 0.0)
    }

    /// Whether recorded log-probabilities are of the model's logits untouched.
    #[must_use]
    pub fn scores_raw_logits(&self) -> bool {
        self.logprobs_mode == LogprobsMode::RawLogprobs
            || self.is_greedy()
            || (self.temperature == 1.0 && !self.has_filters())
    }

    /// The distribution that GRPO's ratio and old log-probabilities use: logits / T, no filters.
    #[must_use]
    pub fn for_policy_ratio(&self) -> Self {
        if self.is_greedy() {
            return Self::PLAIN;
        }
        Self {
            logprobs_mode: LogprobsMode::ProcessedLogprobs,
            temperature: self.temperature,
            ..Self::PLAIN
        }
    }
}
