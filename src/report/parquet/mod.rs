//! `rollouts/step-NNNNN.parquet` and `tokens/step-NNNNN.parquet`.
//!
//! One row group, Snappy, no clock and no host in the file: the same rows give the same bytes.

mod column;
mod guard;
mod rollouts;
mod table;
#[cfg(test)]
mod tests;
mod tokens;

pub use rollouts::{read_rollouts, write_rollouts, RolloutRow};
pub use tokens::{read_tokens, write_tokens, TokenRow};
