//! What can go wrong in the trainer's room.

use crate::base::Rank;

/// A refusal of the trainer. Nothing was updated when one is returned.
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

    #[error("rank {rank} left while the others waited for it: see the error of its own thread")]
    RankLeft { rank: Rank },

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
