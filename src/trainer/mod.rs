//! FSDP units, scoring, GRPO loss, AdamW and the candle reference.
//!
//! Invariant: nothing here knows the engine. A score is taken with the weights as they are; the
//! loop asks for it before any update.

pub mod adamw;
pub mod collective;
mod data;
mod deal;
mod error;
pub mod grpo;
mod head;
mod learner;
mod minibatch;
mod pass;
mod planted;
pub mod reference;
mod units;
mod worker;
mod world;

pub use data::{Experience, Inspection, Sequence, SequenceScores, UpdateReport, WeightSet};
pub use error::TrainerError;
pub use learner::{Prediction, Trainer, TrainerSnapshot};
