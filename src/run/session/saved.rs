//! What of a session a checkpoint keeps: all that a later step may depend on.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::Session;
use crate::config::{Config, Update};
use crate::engine::{Engine, SchedulerSnapshot};
use crate::gap::{Floor, WeightsOf};
use crate::model::combine_fingerprints;
use crate::report::{SavedArray, SavedCheckpoint};
use crate::rollout::Source;
use crate::run::launch::Launched;
use crate::trainer::TrainerSnapshot;

/// The small part; [`Session::arrays`] are the large one.
#[derive(Serialize, Deserialize)]
pub struct SessionState {
    /// Of the embedded engine.
    scheduler: Option<SchedulerSnapshot>,
    trainer: TrainerSnapshot,
    index_bits: Option<u32>,
    floor: Option<Floor>,
    versions: Vec<WeightsOf>,
    /// Fingerprint of the weights that the embedded engine has.
    weights: Option<u64>,
}

impl Session {
    /// Between two steps.
    #[must_use]
    pub fn snapshot(&self) -> SessionState {
        SessionState {
            scheduler: self.source.embedded().map(Engine::snapshot),
            trainer: self.trainer.snapshot(),
            index_bits: self.index_bits,
            floor: self.floor,
            versions: self.weights.clone(),
            weights: self.weights_held(),
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
            let pages = self.source.embedded().map(Engine::pages).unwrap_or_default();
            for (index, bytes) in pages.into_iter().enumerate() {
                arrays.push(SavedArray { name: pool(index), dtype: None, bytes });
            }
        }
        arrays
    }

    /// A session as it was when the checkpoint was made.
    ///
    /// # Errors
    /// As [`Self::open`], and a checkpoint of another model or pool.
    pub(in crate::run) fn reopen(
        config: &Config,
        launched: Option<Launched>,
        state: SessionState,
        saved: &SavedCheckpoint,
    ) -> Result<Self> {
        let blocks = state.scheduler.as_ref().map(|scheduler| scheduler.pool.blocks.len());
        let num_blocks = blocks.map(u32::try_from).transpose()?;
        let mut session = Self::open_with(config, launched, num_blocks)?;
        session.restore(state, saved)?;
        Ok(session)
    }

    fn restore(&mut self, mut state: SessionState, saved: &SavedCheckpoint) -> Result<()> {
        if self.config.trainer.kl_coef > 0.0 {
            self.trainer.freeze_reference()?;
        }
        self.trainer.restore_arrays(|name, bytes| saved.copy(name, bytes))?;
        self.trainer.restore(state.trainer);
        let keeps_pool_bytes = self.keeps_pool_bytes();
        if let (Source::Embedded(engine), Some(mut scheduler)) =
            (&mut self.source, state.scheduler.take())
        {
            if keeps_pool_bytes {
                engine.restore_pages(|index, bytes| saved.copy(&pool(index), bytes))?;
            } else {
                // What is not there must not be found.
                scheduler.pool.cache.clear();
            }
            engine.restore(scheduler)?;
        }
        self.index_bits = state.index_bits;
        self.floor = state.floor;
        self.weights = state.versions;
        // Of weights that were never updated the engine has this version already.
        let has = match self.source.embedded() {
            Some(engine) => engine.version(),
            // A server that learns is given what the checkpoint holds.
            None if self.config.trainer.update == Update::None => Some(self.trainer.version()),
            None => None,
        };
        if has != Some(self.trainer.version()) {
            self.hand_over()?;
        }
        if self.weights_held() != state.weights {
            let found = "the model's weights are not those that the run had: put them back, or \
                run the experiment again with another --out";
            return Err(saved.bad(found.to_owned()).into());
        }
        Ok(())
    }

    /// Whether a run that goes on from any of its checkpoints ends byte-equal to one that was never
    /// interrupted: no policy of this configuration may read bytes that it has not written, or the
    /// checkpoints hold the pool's bytes. It tells of the configuration, so that a run says the
    /// same whether it was resumed or not. Servers draw their own noise.
    #[must_use]
    pub fn resume_exact(&self) -> bool {
        self.source.embedded().is_some_and(|engine| !engine.may_read_stale())
            || self.keeps_pool_bytes()
    }

    fn weights_held(&self) -> Option<u64> {
        self.source.embedded().map(|engine| combine_fingerprints(engine.fingerprints()))
    }

    /// Nobody misses bytes that nobody reads.
    fn keeps_pool_bytes(&self) -> bool {
        self.source.embedded().is_some_and(|engine| {
            engine.may_read_stale() && engine.page_bytes() <= self.config.checkpoint.pool_bytes_max
        })
    }
}

fn pool(buffer: usize) -> String {
    format!("pool.{buffer}")
}
