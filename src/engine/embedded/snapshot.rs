//! What a checkpoint keeps of an idle engine. Weights come from the trainer again; the batch keeps
//! nothing from a step whose requests are all done.

use std::borrow::Cow;

use super::{Engine, EngineError};
use crate::config::{BatchSplit, Sleep};
use crate::engine::SchedulerSnapshot;

impl Engine {
    /// Free list, owners, generations, counts and what the prefix cache finds; not the bytes of
    /// pages.
    #[must_use]
    pub fn snapshot(&self) -> SchedulerSnapshot {
        self.scheduler.snapshot()
    }

    /// Goes on from a snapshot; the pages' bytes stay as they are.
    ///
    /// # Errors
    /// A pool of another size or a damaged one; the engine is then as it was.
    pub fn restore(&mut self, snapshot: SchedulerSnapshot) -> Result<(), EngineError> {
        let engine_steps = snapshot.engine_steps;
        self.scheduler.restore(snapshot)?;
        self.strike.go_on_after(engine_steps);
        Ok(())
    }

    /// The bytes of all pages, a buffer at a time.
    #[must_use]
    pub fn pages(&self) -> Vec<Cow<'_, [u8]>> {
        self.pages.to_host()
    }

    /// How many they are, over all buffers.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.pages.len_bytes()
    }

    /// Puts back what [`Self::pages`] gave: `read` fills each buffer in turn.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn restore_pages<E>(
        &mut self,
        read: impl FnMut(usize, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        self.pages.restore(read)
    }

    /// Whether a request may read bytes of an earlier step of the loop, so that what it computes
    /// depends on what the pages hold. A prefix cache is there for that. False only of policies
    /// that are known to write before they read, and of a pool that no step leaves to the next.
    #[must_use]
    pub fn may_read_stale(&self) -> bool {
        let config = &self.config;
        let wraps = |block: crate::base::BlockId| block.get() < self.pool().num_blocks();
        let reads_stale = config.batch_split != BatchSplit::IsPrefilling
            || config.enable_prefix_caching
            || self.layout().first_wrapped_block(config.scan_index_bits()).is_some_and(wraps)
            || !config.faults.is_empty();
        reads_stale && config.sleep != Sleep::DropPool
    }
}
