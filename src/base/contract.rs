//! What a recorded log-probability means. Two numbers may be compared only under one contract.

use std::fmt;

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

    /// Whether log-probabilities under both are of one distribution.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let parts = |one: &Self| match one.scores_raw_logits() {
            true => Self::PLAIN,
            false => Self { logprobs_mode: LogprobsMode::ProcessedLogprobs, ..*one },
        };
        parts(self) == parts(other)
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

/// Of what the log-probabilities are: `raw (before temperature)`, or such as
/// `after temperature 0.5, top-p 0.8`. A precision is that of each number.
impl fmt::Display for Contract {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.scores_raw_logits() {
            return f.write_str("raw (before temperature)");
        }
        f.write_str("after temperature ")?;
        self.temperature.fmt(f)?;
        for (name, share, applies) in
            [("top-p", self.top_p, self.top_p < 1.0), ("min-p", self.min_p, self.min_p > 0.0)]
        {
            if applies {
                write!(f, ", {name} ")?;
                share.fmt(f)?;
            }
        }
        if self.top_k > 0 {
            write!(f, ", top-k {}", self.top_k)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contracts_are_alike_where_their_distributions_are() {
        let processed =
            Contract { logprobs_mode: LogprobsMode::ProcessedLogprobs, ..Contract::PLAIN };
        let cold = Contract { temperature: 0.5, ..processed };
        let raw_of_cold = Contract { logprobs_mode: LogprobsMode::RawLogprobs, ..cold };
        for (a, b, alike, shown) in [
            (processed, Contract::PLAIN, true, "raw (before temperature)"),
            (raw_of_cold, Contract::PLAIN, true, "raw (before temperature)"),
            (
                Contract { temperature: 0.0, ..cold },
                Contract::PLAIN,
                true,
                "raw (before temperature)",
            ),
            (cold, cold, true, "after temperature 0.50"),
            (cold, Contract::PLAIN, false, "after temperature 0.50"),
            (Contract { top_p: 0.8, ..cold }, cold, false, "after temperature 0.50, top-p 0.80"),
            (
                Contract { top_k: 3, ..processed },
                processed,
                false,
                "after temperature 1.00, top-k 3",
            ),
            (
                Contract { min_p: 0.1, ..cold },
                Contract { min_p: 0.2, ..cold },
                false,
                "after temperature 0.50, min-p 0.10",
            ),
        ] {
            assert_eq!((a.is_like(&b), b.is_like(&a)), (alike, alike), "{a} and {b}");
            assert_eq!(format!("{a:.2}"), shown);
        }
    }
}
