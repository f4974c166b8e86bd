//! One type for each index, so that a block cannot be passed where a position is meant.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

macro_rules! index_newtype {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[derive(Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name($inner);

        impl $name {
            #[must_use]
            pub const fn new(value: $inner) -> Self {
                Self(value)
            }

            /// The bare number, for records and messages.
            #[must_use]
            pub const fn get(self) -> $inner {
                self.0
            }

            /// For slicing memory at hand; offsets into files and pools are made from [`Self::get`]
            /// in u64.
            #[must_use]
            pub const fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

index_newtype!(
    /// One page of the engine's single pool. Block 0 is the null block and is never handed out.
    BlockId(u32)
);
index_newtype!(
    /// How many times a block has been handed out before, plus one; 0 means never.
    Generation(u32)
);
index_newtype!(
    /// One KV-cache group: layers that share a block table (vLLM's `kv_cache_groups`).
    GroupId(u16)
);
index_newtype!(
    /// A decoder layer, counted from 0.
    LayerId(u16)
);
index_newtype!(
    /// A token's place in prompt + completion, counted from 0.
    Position(u32)
);
index_newtype!(
    /// A sampled token's place in its completion, counted from 0; its [`Position`] is the prompt's
    /// length further on.
    CompletionIndex(u32)
);
index_newtype!(
    /// A vocabulary entry.
    TokenId(u32)
);
index_newtype!(
    /// One turn of the loop, counted from 1: generate, score, compare, update.
    Step(u64)
);
index_newtype!(
    /// One forward pass of the engine, counted from 1 over the engine's whole life.
    EngineStep(u64)
);
index_newtype!(
    /// A prompt within a step, counted from 0.
    PromptId(u32)
);
index_newtype!(
    /// The number of optimizer updates the weights have had.
    WeightVersion(u64)
);
index_newtype!(
    /// A trainer rank.
    Rank(u32)
);
index_newtype!(
    /// One of the engines that generate side by side, or of the servers in the order of their
    /// addresses; counted from 0. Block ids and engine steps are those of one engine.
    EngineIndex(u32)
);

/// One rollout's identity. Never an arrival counter: the same rollout has the same id in every
/// order of arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId {
    pub step: Step,
    pub prompt_id: PromptId,
    /// Which of the group's N rollouts, counted from 0.
    pub rollout_idx: u32,
}

impl RequestId {
    #[must_use]
    pub const fn new(step: u64, prompt_id: u32, rollout_idx: u32) -> Self {
        Self { step: Step::new(step), prompt_id: PromptId::new(prompt_id), rollout_idx }
    }
}

/// Written `s12.p3.r7`.
impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "s{}.p{}.r{}", self.step, self.prompt_id, self.rollout_idx)
    }
}

/// A request id that does not read `s<step>.p<prompt>.r<rollout>`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("request id {found:?} does not read s<step>.p<prompt>.r<rollout>, such as s12.p3.r7")]
pub struct ParseRequestIdError {
    found: String,
}

impl FromStr for RequestId {
    type Err = ParseRequestIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let mut parts = text.split('.');
            let step = parts.next()?.strip_prefix('s')?.parse().ok()?;
            let prompt = parts.next()?.strip_prefix('p')?.parse().ok()?;
            let rollout = parts.next()?.strip_prefix('r')?.parse().ok()?;
            parts.next().is_none().then(|| Self::new(step, prompt, rollout))
        };
        parse().ok_or_else(|| ParseRequestIdError { found: text.to_owned() })
    }
}

impl Serialize for RequestId {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for RequestId {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_ids_read_back() {
        for id in [
            RequestId::new(0, 0, 0),
            RequestId::new(48, 3, 127),
            RequestId::new(u64::MAX, u32::MAX, u32::MAX),
        ] {
            assert_eq!(id.to_string().parse::<RequestId>(), Ok(id));
        }
        for bad in ["", "s1", "s1.p2", "s1.p2.r3.x", "1.2.3", "s1.p-2.r3", "s1.p2.rx"] {
            assert!(bad.parse::<RequestId>().is_err(), "{bad}");
        }
    }
}
