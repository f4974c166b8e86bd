//! What of a session a checkpoint keeps: all that a later step may depend on.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::Session;
use crate::config::Config;
use crate::engine::SchedulerSnapshot;
use crate::gap::{Floor, WeightsOf};
use crate::model::combine_fingerprints;
use crate::report::{SavedArray, SavedCheckpoint};
use crate::trainer::TrainerSnapshot;

/// The small part; [`Session::arrays`] are the large one.
#[derive(Serialize, Deserialize)]
pub struct SessionState {
    scheduler: SchedulerSnapshot,
    trainer: TrainerSnapshot,
    index_bits: Option<u32>,
    floor: Option<Floor>,
    versions: Vec<WeightsOf>,
    /// Fingerprint of the weights that the engine has.
    weights: u64,
}

impl Session {
    /// Between two steps.
    #[must_use]
    pub fn snapshot(&self) -> SessionState {
        SessionState {
            scheduler: self.engine.snapshot(),
            trainer: self.trainer.snapshot(),
            index_bits: self.index_bits,
            floor: self.floor,
            versions: self.weights.clone(),
            weights: combine_fingerprints(self.engine.fingerprints()),
        }
    }

    /// The trainer's arrays, and the pool's bytes where they are to be kept.
    #[must_use]
    pub fn arrays(&self) -> Vec<SavedArray<'_>> {
        let mut arrays = Vec::new();
        for (name, dtype, bytes) in self.trainer.arrays() {
            arrays.push(SavedArray { name, dtype: Some(dtype), bytes });
        }
        if self.keeps_pool_bytes() {
            for (index, bytes) in self.engine.pages().into_iter().enumerate() {
                arrays.push(SavedArray { name: pool(index), dtype: None, bytes });
            }
        }
        arrays
    }

    /// A session as it was when the checkpoint was made.
    ///
    /// # Errors
    /// As [`Self::open`], and a checkpoint of another model or pool.
    pub fn reopen(config: &Config, state: SessionState, saved: &SavedCheckpoint) -> Result<Self> {
        let num_blocks = u32::try_from(state.scheduler.pool.blocks.len())?;
        let mut session = Self::open_with(config, Some(num_blocks))?;
        session.restore(state, saved)?;
        Ok(session)
    }

    fn restore(&mut self, mut state: SessionState, saved: &SavedCheckpoint) -> Result<()> {
        if self.config.trainer.kl_coef > 0.0 {
            self.trainer.freeze_reference()?;
        }
        self.trainer.restore_arrays(|name, bytes| saved.copy(name, bytes))?;
        self.trainer.restore(state.trainer);
        if self.keeps_pool_bytes() {
            self.engine.restore_pages(|index, bytes| saved.copy(&pool(index), bytes))?;
        } else {
            // What is not there must not be found.
            state.scheduler.pool.cache.clear();
        }
        self.engine.restore(state.scheduler)?;
        self.index_bits = state.index_bits;
        self.floor = state.floor;
        self.weights = state.versions;
        // Of weights that were never updated the engine has this version already.
        if self.engine.version() != Some(self.trainer.version()) {
            self.hand_over()?;
        }
        if combine_fingerprints(self.engine.fingerprints()) != state.weights {
            let found = "the model's weights are not those that the run had: put them back, or \
                run the experiment again with another --out";
            return Err(saved.bad(found.to_owned()).into());
        }
        Ok(())
    }

    /// Whether a run that goes on from any of its checkpoints ends byte-equal to one that was never
    /// interrupted: no policy of this configuration may read bytes that it has not written, or the
    /// checkpoints hold the pool's bytes. It tells of the configuration, so that a run says the
    /// same whether it was resumed or not.
    #[must_use]
    pub fn resume_exact(&self) -> bool {
        !self.engine.may_read_stale() || self.keeps_pool_bytes()
    }

    /// Nobody misses bytes that nobody reads.
    fn keeps_pool_bytes(&self) -> bool {
        let bytes = self.engine.page_bytes();
        self.engine.may_read_stale() && bytes <= self.config.checkpoint.pool_bytes_max
    }
}

fn pool(buffer: usize) -> String {
    format!("pool.{buffer}")
}
