//! Records, tasks and rewards.

mod advantage;
mod arithmetic;
mod command;
mod decimal;
mod ending;
mod error;
pub mod http;
pub mod import;
mod jsonl;
mod record;
mod reward;
mod routes;
mod source;
mod task;
mod text;

pub use advantage::advantages;
pub use ending::mask_by_end;
pub use error::{CommandFailure, LineProblem, RolloutError};
pub use record::{LegLogProbs, Rollout};
pub use routes::{Routes, TokenRoutes};
pub use source::Source;
pub use task::{Attempt, Draw, Problem, Task};
pub use text::{Codec, SpecialTokens};
