//! The sharded weights: each rank holds its part of every unit's flat f32 master and of the
//! optimizer's moments, and gathers a unit in the compute dtype when it needs it.

use super::adamw;
use super::collective::{shard_len, Collective};
use super::pass::{Gradient, Units};
use super::TrainerError;
use crate::config::Dtype;
use crate::model::{Plan, UnitBytes};

/// One rank's part of a model.
pub(super) struct ShardedUnits {
    collective: Box<dyn Collective>,
    dtype: Dtype,
    /// A unit's elements, before padding to whole shards.
    lens: Vec<usize>,
    master: Vec<Vec<f32>>,
    moments: Option<Moments>,
    /// Optimizer updates done.
    pub updates: u64,
}

struct Moments {
    m: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
}

impl ShardedUnits {
    /// Takes this rank's shard of each unit's flat master weights. Optimizer state is allocated
    /// only where there will be updates.
    pub(super) fn new(
        collective: Box<dyn Collective>,
        dtype: Dtype,
        master: &[Vec<f32>],
        trains: bool,
    ) -> Self {
        let (rank, world) = (collective.rank().index(), collective.world_size());
        let shard = |flat: &Vec<f32>| {
            let len = shard_len(flat.len(), world);
            let mut padded = flat.clone();
            padded.resize(len * world, 0.0);
            padded[rank * len..(rank + 1) * len].to_vec()
        };
        let lens = master.iter().map(Vec::len).collect();
        let shards: Vec<Vec<f32>> = master.iter().map(shard).collect();
        let zeros = || shards.iter().map(|shard| vec![0.0; shard.len()]).collect();
        let moments = trains.then(|| Moments { m: zeros(), v: zeros() });
        Self { collective, dtype, lens, master: shards, moments, updates: 0 }
    }

    /// A unit's whole f32 master, gathered from all ranks.
    pub(super) fn gather_master(&self, unit: usize) -> Result<Vec<f32>, TrainerError> {
        let shard = &self.master[unit];
        let mut flat = vec![0.0; shard.len() * self.collective.world_size()];
        self.collective.all_gather(shard, &mut flat)?;
        flat.truncate(self.lens[unit]);
        Ok(flat)
    }

    /// Master weights and both moments, a shard a unit; `None` where there are no updates, which
    /// leave nothing to remember.
    pub(super) fn shards(&self) -> Option<[&[Vec<f32>]; 3]> {
        let moments = self.moments.as_ref()?;
        Some([&self.master, &moments.m, &moments.v])
    }

    /// The same, to write to.
    pub(super) fn shards_mut(&mut self) -> Option<[&mut [Vec<f32>]; 3]> {
        let moments = self.moments.as_mut()?;
        Some([&mut self.master, &mut moments.m, &mut moments.v])
    }

    /// Forgets the optimizer's past, as at the start.
    pub(super) fn reset_optimizer(&mut self) {
        if let Some(moments) = &mut self.moments {
            moments.m.iter_mut().chain(&mut moments.v).for_each(|shard| shard.fill(0.0));
        }
        self.updates = 0;
    }

    /// One AdamW step on gradients that every rank has computed over its own data; they are summed
    /// over ranks in rank order. Returns the gradient's norm before clipping.
    pub(super) fn update(
        &mut self,
        plan: &Plan,
        options: &adamw::Options,
        gradient: Gradient,
    ) -> Result<f64, TrainerError> {
        let moments = self.moments.as_mut().expect("this trainer was built to update");
        let mut shards = Vec::with_capacity(gradient.len());
        let mut squares = Vec::with_capacity(gradient.len());
        for (spec, (flat, master)) in plan.units.iter().zip(gradient.into_iter().zip(&self.master))
        {
            let mut flat = flat.into_host();
            flat.resize(master.len() * self.collective.world_size(), 0.0);
            let mut shard = vec![0.0; master.len()];
            self.collective.reduce_scatter(&flat, &mut shard)?;
            let sum = self.collective.all_reduce(adamw::squared_norm(&shard))?;
            squares.push((spec.name.as_str(), sum));
            shards.push(shard);
        }
        let norm = adamw::global_norm(squares)?;
        let scale = options.clip_scale(norm);
        self.updates += 1;
        let moments = moments.m.iter_mut().zip(moments.v.iter_mut());
        for ((master, (m, v)), gradient) in self.master.iter_mut().zip(moments).zip(&shards) {
            adamw::update(options, self.updates, scale, gradient, adamw::Shard { master, m, v });
        }
        Ok(norm)
    }
}

impl Units for ShardedUnits {
    fn gather(&self, unit: usize) -> Result<UnitBytes, TrainerError> {
        Ok(UnitBytes::from_master(&self.gather_master(unit)?, self.dtype))
    }
}
