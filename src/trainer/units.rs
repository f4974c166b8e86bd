//! The sharded weights: each rank holds its part of every unit's flat f32 master and of the
//! optimizer's moments, and gathers a unit in the compute dtype when it needs it.

use std::borrow::Cow;

use super::adamw;
use super::collective::{shard_len, Collective};
use super::pass::{Gradient, Units};
use super::TrainerError;
use crate::config::Dtype;
use crate::model::Plan;
use crate::ops::array::{Array, Device};
use crate::ops::weights::Weights;

/// One rank's part of a model.
pub(super) struct ShardedUnits {
    collective: Box<dyn Collective>,
    device: Device,
    dtype: Dtype,
    /// A unit's elements, before padding to whole shards.
    lens: Vec<usize>,
    /// None where nothing changes the weights and this rank is all of them.
    master: Vec<Array>,
    moments: Option<Moments>,
    /// In place of the master.
    fixed: Option<Fixed>,
    /// Optimizer updates done.
    pub updates: u64,
}

/// What every gather would give.
struct Fixed {
    units: Vec<Weights>,
    /// Of every tensor, in the plan's order.
    fingerprints: Vec<u64>,
}

impl Fixed {
    fn new(device: &Device, dtype: Dtype, plan: &Plan, master: &[Vec<f32>]) -> Self {
        let round = |flat: &Vec<f32>| Weights::of_master(&device.upload(flat.clone()), dtype);
        let units: Vec<Weights> = master.iter().map(round).collect();
        let each = plan.units.iter().zip(&units);
        let fingerprints = each.flat_map(|(spec, unit)| spec.fingerprints(unit)).collect();
        Self { units, fingerprints }
    }
}

struct Moments {
    m: Vec<Array>,
    v: Vec<Array>,
}

impl ShardedUnits {
    /// Takes this rank's shard of each unit's flat master weights. Optimizer state is allocated
    /// only where there will be updates.
    pub(super) fn new(
        collective: Box<dyn Collective>,
        device: &Device,
        dtype: Dtype,
        (plan, master): (&Plan, &[Vec<f32>]),
        trains: bool,
    ) -> Self {
        let (rank, world) = (collective.rank().index(), collective.world_size());
        let lens = master.iter().map(Vec::len).collect();
        let fixed = (!trains && world == 1).then(|| Fixed::new(device, dtype, plan, master));
        let shard = |flat: &Vec<f32>| {
            let len = shard_len(flat.len(), world);
            let mut own =
                flat[(rank * len).min(flat.len())..((rank + 1) * len).min(flat.len())].to_vec();
            own.resize(len, 0.0);
            device.upload(own)
        };
        let sharded = if fixed.is_some() { &[] } else { master };
        let shards: Vec<Array> = sharded.iter().map(shard).collect();
        let zeros = || shards.iter().map(Array::zeros_like).collect();
        let moments = trains.then(|| Moments { m: zeros(), v: zeros() });
        let device = device.clone();
        Self { collective, device, dtype, lens, master: shards, moments, fixed, updates: 0 }
    }

    /// The fingerprint of every tensor in the compute dtype, in the plan's order.
    pub(super) fn fingerprints(&self, plan: &Plan) -> Result<Vec<u64>, TrainerError> {
        if let Some(fixed) = &self.fixed {
            return Ok(fixed.fingerprints.clone());
        }
        let mut all = Vec::new();
        for (unit, spec) in plan.units.iter().enumerate() {
            all.extend(spec.fingerprints(&self.gather(unit)?));
        }
        Ok(all)
    }

    /// A unit's whole f32 master, gathered from all ranks; where this rank is all of them, its own.
    fn gather_master(&self, unit: usize) -> Result<Cow<'_, Array>, TrainerError> {
        let (shard, world) = (&self.master[unit], self.collective.world_size());
        if world == 1 {
            return Ok(Cow::Borrowed(shard));
        }
        let mut flat = vec![0.0; shard.len() * world];
        self.collective.all_gather(&shard.on_host(), &mut flat)?;
        flat.truncate(self.lens[unit]);
        Ok(Cow::Owned(shard.device().upload(flat)))
    }

    /// The same on the host, as a copy; rounded to the compute dtype where nothing changes it.
    pub(super) fn copy_master(&self, unit: usize) -> Result<Vec<f32>, TrainerError> {
        match &self.fixed {
            Some(fixed) => Ok(fixed.units[unit].whole().to_array().into_host()),
            None => Ok(self.gather_master(unit)?.to_host()),
        }
    }

    /// Master weights and both moments, a shard a unit; `None` where there are no updates, which
    /// leave nothing to remember.
    pub(super) fn shards(&self) -> Option<[&[Array]; 3]> {
        let moments = self.moments.as_ref()?;
        Some([&self.master, &moments.m, &moments.v])
    }

    /// The same, to write to.
    pub(super) fn shards_mut(&mut self) -> Option<[&mut [Array]; 3]> {
        let moments = self.moments.as_mut()?;
        Some([&mut self.master, &mut moments.m, &mut moments.v])
    }

    /// Forgets the optimizer's past, as at the start.
    pub(super) fn reset_optimizer(&mut self) {
        if let Some(moments) = &mut self.moments {
            let shards = moments.m.iter_mut().chain(&mut moments.v);
            shards.for_each(|shard| *shard = shard.zeros_like());
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
        let mut shards = Vec::with_capacity(gradient.len());
        let mut squares = Vec::with_capacity(gradient.len());
        for (unit, (spec, flat)) in plan.units.iter().zip(gradient).enumerate() {
            let shard = self.reduce(unit, flat)?;
            squares.push((spec.name.as_str(), self.collective.all_reduce(shard.squared_norm())?));
            shards.push(shard);
        }
        let norm = adamw::global_norm(squares)?;
        self.updates += 1;
        let step = options.step(self.updates, options.clip_scale(norm));
        let moments = self.moments.as_mut().expect("this trainer was built to update");
        let moments = moments.m.iter_mut().zip(moments.v.iter_mut());
        for ((master, (m, v)), gradient) in self.master.iter_mut().zip(moments).zip(&shards) {
            master.adamw(&step, gradient, m, v);
        }
        Ok(norm)
    }

    /// This rank's shard of a unit's gradient, summed over all ranks.
    fn reduce(&self, unit: usize, flat: Array) -> Result<Array, TrainerError> {
        let world = self.collective.world_size();
        if world == 1 {
            return Ok(flat);
        }
        let mut shard = vec![0.0; self.master[unit].len()];
        let mut flat = flat.into_host();
        flat.resize(shard.len() * world, 0.0);
        self.collective.reduce_scatter(&flat, &mut shard)?;
        Ok(self.device.upload(shard))
    }
}

impl Units for ShardedUnits {
    fn gather(&self, unit: usize) -> Result<Weights, TrainerError> {
        match &self.fixed {
            Some(fixed) => Ok(fixed.units[unit].clone()),
            None => Ok(Weights::of_master(&*self.gather_master(unit)?, self.dtype)),
        }
    }
}
