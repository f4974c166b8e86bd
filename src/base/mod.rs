//! The words every room shares: index newtypes, log-probabilities, the scoring contract,
//! counter-based noise, floats as JSON has them.
//!
//! Nothing here knows a model, an engine or a file.

mod contract;
pub mod float;
mod ids;
mod logprob;
mod rng;

pub use contract::{Contract, LogprobsMode};
pub use float::JsonFloat;
pub use ids::{
    BlockId, CompletionIndex, EngineIndex, EngineStep, Generation, GroupId, LayerId,
    ParseRequestIdError, Position, PromptId, Rank, RequestId, Step, TokenId, WeightVersion,
};
pub use logprob::LogProb;
pub use rng::{Noise, Stream};
