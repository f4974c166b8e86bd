//! What a checkpoint keeps of a trainer. One that only scores has nothing to keep: its weights are
//! the model's own.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::base::WeightVersion;
use crate::config::Dtype;
use crate::ops::weights::Weights;

/// The counts; [`Trainer::arrays`] are the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerSnapshot {
    pub version: WeightVersion,
    /// Of the optimizer, which a warm start's end sets back to 0.
    pub updates: u64,
    /// Scoring passes.
    pub passes: u64,
}

/// The arrays of a unit's shard, in the order of `ShardedUnits::shards`.
const NAMES: [&str; 3] = ["master", "adamw_m", "adamw_v"];

impl Trainer {
    #[must_use]
    pub fn snapshot(&self) -> TrainerSnapshot {
        let (version, updates) = (self.version, self.units.updates);
        TrainerSnapshot { version, updates, passes: self.passes.get() }
    }

    /// Every array that updates read, by name: f32 master weights and moments of each unit, and the
    /// frozen reference in the compute dtype where a KL is asked for. Little-endian.
    #[must_use]
    pub fn arrays(&self) -> Vec<(String, Dtype, Cow<'_, [u8]>)> {
        let mut arrays = Vec::new();
        for (name, units) in NAMES.iter().zip(self.units.shards().into_iter().flatten()) {
            for (spec, shard) in self.plan.units.iter().zip(units) {
                arrays.push((format!("{name}.{}", spec.name), Dtype::F32, shard.to_bytes()));
            }
        }
        if let Some(frozen) = self.frozen.as_ref().filter(|_| !arrays.is_empty()) {
            for (spec, unit) in self.plan.units.iter().zip(&frozen.0) {
                let bytes = Cow::Owned(unit.to_bytes());
                arrays.push((format!("frozen.{}", spec.name), self.num.dtype, bytes));
            }
        }
        arrays
    }

    /// Puts back what [`Self::arrays`] gave, before [`Self::restore`]: `read` fills the array of a
    /// name.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn restore_arrays<E>(
        &mut self,
        mut read: impl FnMut(&str, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let trains = self.units.shards().is_some();
        for (name, units) in NAMES.iter().zip(self.units.shards_mut().into_iter().flatten()) {
            for (spec, shard) in self.plan.units.iter().zip(units) {
                shard.restore(|bytes| read(&format!("{name}.{}", spec.name), bytes))?;
            }
        }
        if let Some(frozen) = self.frozen.as_mut().filter(|_| trains) {
            for (spec, unit) in self.plan.units.iter().zip(&mut frozen.0) {
                let mut bytes = vec![0; unit.len() * unit.dtype().bytes() as usize];
                read(&format!("frozen.{}", spec.name), &mut bytes)?;
                *unit = Weights::open(&bytes, unit.dtype(), &self.device);
            }
        }
        Ok(())
    }

    pub fn restore(&mut self, snapshot: TrainerSnapshot) {
        self.version = snapshot.version;
        self.units.updates = snapshot.updates;
        self.passes.set(snapshot.passes);
    }
}
