//! Records, tasks and rewards.

mod advantage;
mod arithmetic;
mod command;
mod decimal;
mod error;
pub mod import;
mod jsonl;
mod record;
mod reward;
mod task;
mod text;

pub use advantage::advantages;
pub use error::{CommandFailure, LineProblem, RolloutError};
pub use record::{LegLogProbs, Rollout};
pub use task::{Attempt, Draw, Problem, Task};
pub use text::{Codec, SpecialTokens};
