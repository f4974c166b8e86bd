//! What can go wrong in the trainer's room.

use std::time::Duration;

use crate::base::Rank;
#[cfg(feature = "cuda")]
use crate::ops::cuda::DeviceError;

/// A refusal of the trainer. The minibatch that it came in has changed nothing; but after
/// `RankLeft`, `RankMissing`, `RankFailed` or `Device` ranks may differ, and the trainer is not
/// used again.
#[derive(Debug, thiserror::Error)]
pub enum TrainerError {
    #[error("the minibatch has no token under its loss mask, so that no loss is defined")]
    NoTokens,

    #[error(
        "the {which} of token {token} in sequence {sequence} of its chunk is {value}: the loss \
         needs finite numbers; look for the step's non-finite tokens in its record"
    )]
    NonFiniteLoss { which: &'static str, sequence: usize, token: usize, value: f64 },

    #[error(
        "the gradient of {unit} has the squared norm {squares}: the step was refused and no weight \
         was changed"
    )]
    NonFiniteGradient { unit: String, squares: f64 },

    #[error(
        "trainer.ranks = {ranks} is as many threads, and the machine starts none for rank {rank}: \
         {source}; lower trainer.ranks, or allow more processes and memory (ulimit -u and -v, a \
         container's pids limit)"
    )]
    NoThread { rank: Rank, ranks: usize, source: std::io::Error },

    #[error("rank {rank} left while the others waited for it: see the error of its own thread")]
    RankLeft { rank: Rank },

    #[error(
        "{who} did not come within {} s to where the others wait: look at what holds it up (a GPU \
         that hangs, a process that is stopped), and resume the run",
        waited.as_secs_f64()
    )]
    RankMissing { who: String, waited: Duration },

    #[error("rank {rank} refused the step, so that no rank has changed a weight")]
    RankRefused { rank: Rank },

    #[error("rank {rank} of the trainer has failed: {message}")]
    RankFailed { rank: Rank, message: String },

    #[cfg(feature = "cuda")]
    #[error("rank {rank} of the trainer: {source}")]
    Device { rank: Rank, source: DeviceError },

    #[cfg(feature = "cuda")]
    #[error("the trainer's ranks cannot be connected: {0}")]
    NoLink(DeviceError),

    #[error("the reference model needs the tensor {name} of shape {expected:?}, found {found}")]
    ReferenceWeight { name: String, expected: Vec<usize>, found: String },

    #[error("the reference model has no place for the tensor {name}")]
    ReferenceExtraWeight { name: String },

    #[error("token {id} at position {position} is outside the vocabulary of {vocab}")]
    OutsideVocabulary { id: u32, position: usize, vocab: usize },

    #[error("{asked} needs at least {needed} tokens, found {found}")]
    SequenceTooShort { asked: &'static str, needed: usize, found: usize },

    #[error("candle, in the reference model: {0}")]
    Candle(#[from] candle_core::Error),
}

impl TrainerError {
    pub(super) fn missing(ranks: &[Rank], waited: Duration) -> Self {
        let names: Vec<_> = ranks.iter().map(ToString::to_string).collect();
        let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
        Self::RankMissing { who: format!("{noun} {}", names.join(", ")), waited }
    }

    /// Whether this rank says only that something was wrong with another.
    pub(super) fn is_of_another(&self) -> bool {
        matches!(self, Self::RankLeft { .. } | Self::RankMissing { .. } | Self::RankRefused { .. })
    }
}
