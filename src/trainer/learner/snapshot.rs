//! What a checkpoint keeps of a trainer. One that only scores has nothing to keep: its weights are
//! the model's own.
//!
//! Every rank's shards are arrays of their own, `rank-1.master.layers.0`: f32 master weights and
//! moments of each unit, and the frozen reference in the compute dtype where a KL is asked for, all
//! with their padding, little-endian.

use std::borrow::Cow;
use std::convert::Infallible;

use serde::{Deserialize, Serialize};

use super::Trainer;
use crate::base::{Rank, WeightVersion};
use crate::config::{Dtype, Update};
use crate::ops::shards::{cut, shard_len};
use crate::ops::weights::Weights;
use crate::trainer::collective::ranks;
use crate::trainer::worker::Worker;
use crate::trainer::world::World;
use crate::trainer::TrainerError;

/// The counts; [`Trainer::arrays`] are the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerSnapshot {
    pub version: WeightVersion,
    /// Of the optimizer, which a warm start's end sets back to 0.
    pub updates: u64,
    /// Scoring passes.
    pub passes: u64,
    /// That the arrays are sharded over.
    pub ranks: usize,
}

/// Of a unit: those of `ShardedUnits::shards` in their order, then the frozen reference.
const KINDS: [&str; 4] = ["master", "adamw_m", "adamw_v", "frozen"];
const FROZEN: usize = 3;

/// A name, what its elements are, and their bytes.
pub type SavedShard<'a> = (String, Dtype, Cow<'a, [u8]>);

fn name(rank: Rank, kind: &str, unit: &str) -> String {
    format!("rank-{rank}.{kind}.{unit}")
}

impl Trainer {
    #[must_use]
    pub fn snapshot(&self) -> TrainerSnapshot {
        let (version, updates) = (self.version, self.updates);
        TrainerSnapshot { version, updates, passes: self.passes.get(), ranks: self.world.size() }
    }

    /// Every array that updates read, by name.
    ///
    /// # Errors
    /// Those of a rank.
    pub fn arrays(&self) -> Result<Vec<SavedShard<'_>>, TrainerError> {
        if let World::One(worker) = &self.world {
            return Ok(worker.arrays());
        }
        let owned = |(name, dtype, bytes): SavedShard<'_>| -> SavedShard<'static> {
            (name, dtype, Cow::Owned(bytes.into_owned()))
        };
        let of_rank =
            move |worker: &Worker| Ok(worker.arrays().into_iter().map(owned).collect::<Vec<_>>());
        Ok(self.world.each(of_rank)?.into_iter().flatten().collect())
    }

    /// Puts back what a trainer of this model had at `snapshot`, over however many ranks it was
    /// sharded: `read` fills the array of a name.
    ///
    /// # Errors
    /// Those of `read` and of a rank.
    pub fn restore<E: From<TrainerError>>(
        &mut self,
        snapshot: TrainerSnapshot,
        mut read: impl FnMut(&str, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let kinds = match (self.config.update, self.is_frozen) {
            (Update::None, _) => 0..0,
            (Update::Adamw, false) => 0..FROZEN,
            (Update::Adamw, true) => 0..KINDS.len(),
        };
        for kind in kinds {
            self.restore_kind(kind, snapshot.ranks, &mut read)?;
        }
        self.version = snapshot.version;
        self.updates = snapshot.updates;
        self.passes.set(snapshot.passes);
        Ok(())
    }

    /// Joins what `saved` ranks had of each unit, and cuts it for the ranks of today.
    fn restore_kind<E: From<TrainerError>>(
        &mut self,
        kind: usize,
        saved: usize,
        read: &mut impl FnMut(&str, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let dtype = if kind == FROZEN { self.dtype } else { Dtype::F32 };
        let (plan, width, world) = (self.plan.clone(), dtype.bytes() as usize, self.world.size());
        for (unit, spec) in plan.units.iter().enumerate() {
            let shard = shard_len(spec.len(), saved) * width;
            let mut whole = vec![0; shard * saved];
            for (rank, bytes) in ranks(saved).zip(whole.chunks_exact_mut(shard)) {
                read(&name(rank, KINDS[kind], &spec.name), bytes)?;
            }
            let (whole, _padding) = whole.split_at(spec.len() * width);
            let shards: Vec<_> = (0..world).map(|rank| cut(whole, width, rank, world)).collect();
            self.on_all(move |worker| worker.put(kind, unit, &shards[worker.index()]))?;
        }
        Ok(())
    }
}

impl Worker {
    fn arrays(&self) -> Vec<SavedShard<'_>> {
        let (rank, specs) = (self.units.rank(), &self.plan.units);
        let mut arrays = Vec::new();
        for (kind, shards) in KINDS.iter().zip(self.units.shards().into_iter().flatten()) {
            for (spec, shard) in specs.iter().zip(shards) {
                arrays.push((name(rank, kind, &spec.name), Dtype::F32, shard.to_bytes()));
            }
        }
        if let Some(frozen) = self.frozen.as_ref().filter(|_| !arrays.is_empty()) {
            for (spec, shard) in specs.iter().zip(frozen) {
                let bytes = Cow::Owned(shard.to_bytes());
                arrays.push((name(rank, KINDS[FROZEN], &spec.name), self.num.dtype, bytes));
            }
        }
        arrays
    }

    fn put(&mut self, kind: usize, unit: usize, bytes: &[u8]) {
        if kind == FROZEN {
            let frozen = self.frozen.as_mut().expect("the reference was frozen before");
            frozen[unit] = Weights::open(bytes, self.num.dtype, &self.device);
            return;
        }
        let shards = self.units.shards_mut().expect("a trainer that updates");
        let read = |own: &mut [u8]| {
            own.copy_from_slice(bytes);
            Ok::<(), Infallible>(())
        };
        let Ok(()) = shards[kind][unit].restore(read);
    }
}
