//! What a checkpoint keeps of a trainer. One that only scores has nothing to keep: its weights are
//! the model's own.

use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::base::WeightVersion;
use crate::config::Dtype;

/// The counts; [`Trainer::arrays`] are the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerSnapshot {
    pub version: WeightVersion,
    /// Of the optimizer, which a warm start's end sets back to 0.
    pub updates: u64,
}

/// The arrays of a unit's shard, in the order of `ShardedUnits::shards`.
const NAMES: [&str; 3] = ["master", "adamw_m", "adamw_v"];

impl Trainer {
    #[must_use]
    pub fn snapshot(&self) -> TrainerSnapshot {
        TrainerSnapshot { version: self.version, updates: self.units.updates }
    }

    /// Every array that updates read, by name: f32 master weights and moments of each unit, and the
    /// frozen reference in the compute dtype where a KL is asked for. Little-endian.
    #[must_use]
    pub fn arrays(&self) -> Vec<(String, Dtype, &[u8])> {
        let mut arrays = Vec::new();
        for (name, units) in NAMES.iter().zip(self.units.shards().into_iter().flatten()) {
            for (spec, shard) in self.plan.units.iter().zip(units) {
                let name = format!("{name}.{}", spec.name);
                arrays.push((name, Dtype::F32, bytemuck::cast_slice(shard)));
            }
        }
        if let Some(frozen) = self.frozen.as_ref().filter(|_| !arrays.is_empty()) {
            for (spec, unit) in self.plan.units.iter().zip(&frozen.0) {
                arrays.push((format!("frozen.{}", spec.name), self.num.dtype, unit.bytes()));
            }
        }
        arrays
    }

    /// The same, to write to, before [`Self::restore`].
    pub fn arrays_mut(&mut self) -> Vec<(String, &mut [u8])> {
        let mut arrays = Vec::new();
        for (name, units) in NAMES.iter().zip(self.units.shards_mut().into_iter().flatten()) {
            for (spec, shard) in self.plan.units.iter().zip(units) {
                let name = format!("{name}.{}", spec.name);
                arrays.push((name, bytemuck::cast_slice_mut(shard)));
            }
        }
        if let Some(frozen) = self.frozen.as_mut().filter(|_| !arrays.is_empty()) {
            for (spec, unit) in self.plan.units.iter().zip(&mut frozen.0) {
                arrays.push((format!("frozen.{}", spec.name), unit.bytes_mut()));
            }
        }
        arrays
    }

    pub fn restore(&mut self, snapshot: TrainerSnapshot) {
        self.version = snapshot.version;
        self.units.updates = snapshot.updates;
    }
}
