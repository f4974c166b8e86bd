//! FSDP units, scoring, GRPO loss, AdamW and the candle reference.

pub mod adamw;
pub mod collective;
mod error;
pub mod grpo;
pub mod reference;

pub use error::TrainerError;
