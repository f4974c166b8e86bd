//! Records, tasks and rewards.

mod record;

pub use record::{LegLogProbs, Rollout};
