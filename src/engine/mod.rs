//! The embedded engine: a faithful small vLLM V1.
//!
//! [`Engine`] is what the loop sees; its [`Runner`] moves tensors, everything else is counts. The
//! host side is pure: [`Scheduler`] turns limits and queues into a [`StepPlan`],
//! [`PersistentBatch`] turns the plan into the rows of one forward pass, [`BlockPool`] and
//! [`Layout`] say which page of which buffer a row reads and writes.

mod batch;
mod captured;
mod completion;
mod embedded;
mod engines;
mod error;
mod faults;
mod forced;
mod layout;
mod moment;
mod plan;
mod pool;
mod prefix;
mod prepared;
mod profile;
mod replay;
mod request;
mod runner;
mod scheduler;
mod scratch;
pub mod split;
#[cfg(test)]
mod testing;
mod trace;

pub use batch::{PersistentBatch, Row, StepBatch};
pub use completion::{
    CachedBlock, Completion, FinishReason, GenerationRequest, Life, Phase, SampledToken,
    StateBlock, TakenBlock,
};
pub use embedded::{block_memory, layout, Engine};
pub use engines::{deal, dealt_to, Engines, Placement, Tell};
pub use error::EngineError;
pub use forced::Forced;
pub use layout::{
    BlockMemory, CacheKind, CacheSpec, CacheView, Group, LayerCache, LayerPlace, Layout,
};
pub use moment::Moment;
pub use plan::{Admission, Scheduled, StepPlan};
pub use pool::{BlockPool, BlockRecord, PoolSnapshot, NULL_BLOCK};
pub use prefix::{Filled, Hit, Origin, PrefixCache, PrefixHash};
pub use profile::measured_memory;
pub use replay::{Cause, Forecast, Misread, Replay, Source};
pub use request::{Finished, Request};
pub use runner::{Observer, Runner, Seen};
pub use scheduler::{Limits, Scheduler, SchedulerSnapshot, Statistics};
pub use scratch::{Feed, Scratch};
pub use trace::{Trace, TracedRow, TracedStep, WatchList};
