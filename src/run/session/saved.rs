//! What of a session a checkpoint keeps: all that a later step may depend on.

use std::iter::zip;

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::Session;
use crate::base::EngineIndex;
use crate::config::{Config, Update};
use crate::engine::{Engine, Engines, SchedulerSnapshot};
use crate::gap::{Floor, WeightsOf};
use crate::model::combine_fingerprints;
use crate::report::{SavedArray, SavedCheckpoint};
use crate::rollout::http::ServerFacts;
use crate::rollout::Source;
use crate::run::launch::Launched;
use crate::trainer::TrainerSnapshot;

/// The small part; [`Session::arrays`] are the large one.
#[derive(Serialize, Deserialize)]
pub struct SessionState {
    /// What each server was; empty where engines are embedded.
    servers: Vec<ServerFacts>,
    /// Of each embedded engine.
    schedulers: Vec<SchedulerSnapshot>,
    trainer: TrainerSnapshot,
    /// Whether a trainer that learns went on at another number of ranks.
    ranks_changed: bool,
    index_bits: Option<u32>,
    floor: Option<Floor>,
    versions: Vec<WeightsOf>,
    /// Fingerprint of the weights that each embedded engine has.
    weights: Vec<u64>,
}

impl Session {
    /// Between two steps.
    #[must_use]
    pub fn snapshot(&self) -> SessionState {
        SessionState {
            servers: self.source.servers().map_or_else(Vec::new, |all| all.facts().to_vec()),
            schedulers: self.embedded().map(Engine::snapshot).collect(),
            trainer: self.trainer.snapshot(),
            ranks_changed: self.ranks_changed,
            index_bits: self.index_bits,
            floor: self.floor,
            versions: self.weights.clone(),
            weights: self.weights_held(),
        }
    }

    /// The trainer's arrays, and the pools' bytes where they are to be kept.
    ///
    /// # Errors
    /// Those of a rank of the trainer.
    pub fn arrays(&self) -> Result<Vec<SavedArray<'_>>> {
        let mut arrays = Vec::new();
        for (name, dtype, bytes) in self.trainer.arrays()? {
            arrays.push(SavedArray { name, dtype: Some(dtype), bytes });
        }
        if self.keeps_pool_bytes() {
            for (engine, index) in self.embedded().zip(0..) {
                let pages = engine.pages().into_iter().enumerate();
                arrays.extend(pages.map(|(buffer, bytes)| {
                    let name = pool(EngineIndex::new(index), buffer);
                    SavedArray { name, dtype: None, bytes }
                }));
            }
        }
        Ok(arrays)
    }

    /// A session as it was when the checkpoint was made.
    ///
    /// # Errors
    /// As [`Self::open`], a checkpoint of another model or pool, and servers that are not what they
    /// were.
    pub(in crate::run) fn reopen(
        config: &Config,
        launched: Option<Launched>,
        state: SessionState,
        saved: &SavedCheckpoint,
    ) -> Result<Self> {
        let blocks = state.schedulers.first().map(|scheduler| scheduler.pool.blocks.len());
        let num_blocks = blocks.map(u32::try_from).transpose()?;
        let mut session = Self::open_with(config, launched, num_blocks)?;
        session.restore(state, saved)?;
        Ok(session)
    }

    fn restore(&mut self, state: SessionState, saved: &SavedCheckpoint) -> Result<()> {
        if let Some(servers) = self.source.servers() {
            servers.check_unchanged(&state.servers)?;
        }
        if self.config.trainer.kl_coef > 0.0 {
            self.trainer.freeze_reference()?;
        }
        self.trainer.restore(state.trainer, |name, bytes| {
            saved.copy(name, bytes).map_err(anyhow::Error::from)
        })?;
        let keeps_pool_bytes = self.keeps_pool_bytes();
        if let Source::Embedded(engines) = &mut self.source {
            if state.schedulers.len() != engines.iter().len() {
                return Err(saved.bad(format!("of {} engines", state.schedulers.len())).into());
            }
            let each = zip(engines.iter_mut(), state.schedulers).zip((0..).map(EngineIndex::new));
            for ((engine, mut scheduler), index) in each {
                if keeps_pool_bytes {
                    engine
                        .restore_pages(|buffer, bytes| saved.copy(&pool(index, buffer), bytes))?;
                } else {
                    // What is not there must not be found.
                    scheduler.pool.cache.clear();
                }
                engine.restore(scheduler)?;
            }
        }
        self.index_bits = state.index_bits;
        self.floor = state.floor;
        self.weights = state.versions;
        let other = state.trainer.ranks != self.config.trainer.ranks as usize;
        let learns = self.config.trainer.update == Update::Adamw;
        self.ranks_changed = state.ranks_changed || learns && other;
        // Of weights that were never updated the engine has this version already.
        let has = match self.source.embedded() {
            Some(engines) => engines.first().version(),
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
    /// same whether it was resumed or not; but one that has learned at two numbers of ranks is like
    /// no other. Servers draw their own noise.
    #[must_use]
    pub fn resume_exact(&self) -> bool {
        let is_embedded = self.source.embedded().is_some();
        let reads_its_own = is_embedded && !self.embedded().any(Engine::may_read_stale);
        !self.ranks_changed && (reads_its_own || self.keeps_pool_bytes())
    }

    fn weights_held(&self) -> Vec<u64> {
        self.embedded().map(|engine| combine_fingerprints(engine.fingerprints())).collect()
    }

    /// Nobody misses bytes that nobody reads.
    fn keeps_pool_bytes(&self) -> bool {
        let bytes: u64 = self.embedded().map(Engine::page_bytes).sum();
        let is_missed = self.embedded().any(Engine::may_read_stale);
        is_missed && bytes <= self.config.checkpoint.pool_bytes_max
    }

    fn embedded(&self) -> impl Iterator<Item = &Engine> {
        self.source.embedded().into_iter().flat_map(Engines::iter)
    }
}

fn pool(engine: EngineIndex, buffer: usize) -> String {
    format!("pool.{engine}.{buffer}")
}
