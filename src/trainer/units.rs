//! The sharded weights: each rank holds its part of every unit's flat f32 master and of the
//! optimizer's moments, and gathers a unit in the compute dtype when it needs it.

use std::cell::RefCell;

use super::adamw;
use super::collective::Collective;
use super::TrainerError;
use crate::base::Rank;
use crate::config::Dtype;
use crate::model::{Plan, UnitSpec};
use crate::ops::array::{Array, Device};
use crate::ops::shards::{cut, shard_len, Arriving};
use crate::ops::weights::Weights;

/// One rank's part of a model.
pub(super) struct ShardedUnits {
    collective: Box<dyn Collective>,
    dtype: Dtype,
    /// A unit's elements, before padding to whole shards.
    lens: Vec<usize>,
    held: Held,
}

/// A shard a unit.
enum Held {
    /// Of weights that nothing changes: in the compute dtype, all that a forward reads.
    Fixed(Vec<Weights>),
    Trained([Vec<Array>; 3]),
}

/// Places in [`ShardedUnits::shards`].
const MASTER: usize = 0;

impl ShardedUnits {
    /// Takes this rank's shard of each unit's flat master weights. Optimizer state is allocated
    /// only where there will be updates.
    pub(super) fn new(
        collective: Box<dyn Collective>,
        device: &Device,
        dtype: Dtype,
        master: &[Vec<f32>],
        trains: bool,
    ) -> Self {
        let (rank, world) = (collective.rank().index(), collective.world_size());
        let lens = master.iter().map(Vec::len).collect();
        let shards = master.iter().map(|flat| device.upload(cut(flat, 1, rank, world)));
        let held = if trains {
            let master: Vec<Array> = shards.collect();
            let zeros = || master.iter().map(Array::zeros_like).collect();
            let (m, v) = (zeros(), zeros());
            Held::Trained([master, m, v])
        } else {
            Held::Fixed(shards.map(|shard| Weights::of_master(&shard, dtype)).collect())
        };
        Self { collective, dtype, lens, held }
    }

    pub(super) fn rank(&self) -> Rank {
        self.collective.rank()
    }

    pub(super) fn world_size(&self) -> usize {
        self.collective.world_size()
    }

    /// Master weights and both moments, a shard a unit; `None` where there are no updates, which
    /// leave nothing to remember.
    pub(super) fn shards(&self) -> Option<&[Vec<Array>; 3]> {
        match &self.held {
            Held::Fixed(_) => None,
            Held::Trained(shards) => Some(shards),
        }
    }

    /// The same, to write to.
    pub(super) fn shards_mut(&mut self) -> Option<&mut [Vec<Array>; 3]> {
        match &mut self.held {
            Held::Fixed(_) => None,
            Held::Trained(shards) => Some(shards),
        }
    }

    /// Forgets the optimizer's past, as at the start.
    pub(super) fn reset_optimizer(&mut self) {
        if let Some([_, m, v]) = self.shards_mut() {
            m.iter_mut().chain(v).for_each(|shard| *shard = shard.zeros_like());
        }
    }

    /// This rank's part of the weights as they are, in the compute dtype.
    pub(super) fn weights(&self) -> Vec<Weights> {
        (0..self.lens.len()).map(|unit| self.shard(unit)).collect()
    }

    fn shard(&self, unit: usize) -> Weights {
        match &self.held {
            Held::Fixed(shards) => shards[unit].clone(),
            Held::Trained(shards) => Weights::of_master(&shards[MASTER][unit], self.dtype),
        }
    }

    /// A unit's whole f32 master, gathered from all ranks; rounded to the compute dtype where
    /// nothing changes it.
    pub(super) fn gather_master(&self, unit: usize) -> Result<Array, TrainerError> {
        match &self.held {
            Held::Fixed(shards) => self.gather(unit, &shards[unit]),
            Held::Trained(shards) => self.gather_f32(unit, &shards[MASTER][unit]),
        }
    }

    /// From every rank's f32 shard of something as long as a unit, all of it.
    pub(super) fn gather_f32(&self, unit: usize, shard: &Array) -> Result<Array, TrainerError> {
        self.gather(unit, &Weights::of_master(shard, Dtype::F32))
    }

    fn gather(&self, unit: usize, shard: &Weights) -> Result<Array, TrainerError> {
        let whole = self.collective.all_gather(shard, self.lens[unit])?.settle();
        Ok(whole.whole().to_array())
    }

    /// This rank's shard of a unit's gradient, summed over all ranks.
    pub(super) fn reduce(&self, unit: usize, flat: Array) -> Result<Array, TrainerError> {
        assert_eq!(flat.len(), self.lens[unit], "a gradient of another unit");
        self.collective.reduce_scatter(flat)
    }

    /// `mine`, once no rank has an error.
    ///
    /// # Errors
    /// This rank's own, or that another has one.
    pub(super) fn agree<T>(&self, mine: Result<T, TrainerError>) -> Result<T, TrainerError> {
        let mut refusals = vec![0.0; self.collective.world_size()];
        refusals[self.rank().index()] = f64::from(u8::from(mine.is_err()));
        let refusals = self.collective.all_reduce(&refusals)?;
        let mine = mine?;
        match (0..).map(Rank::new).zip(refusals).find(|(_, refused)| *refused > 0.0) {
            Some((rank, _)) => Err(TrainerError::RankRefused { rank }),
            None => Ok(mine),
        }
    }

    /// One AdamW step, counted from 1, on this rank's shards of the gradient, one a unit. Returns
    /// the norm of all of it, before clipping.
    ///
    /// # Errors
    /// A gradient that is not finite: on every rank, and no weight has been changed on any.
    pub(super) fn update(
        &mut self,
        specs: &[UnitSpec],
        options: &adamw::Options,
        step: u64,
        gradient: &[Array],
    ) -> Result<f64, TrainerError> {
        let squares: Vec<f64> = gradient.iter().map(Array::squared_norm).collect();
        let squares = self.collective.all_reduce(&squares)?;
        let names = specs.iter().map(|spec| spec.name.as_str());
        let norm = adamw::global_norm(names.zip(squares))?;
        let step = options.step(step, options.clip_scale(norm));
        let [master, m, v] = self.shards_mut().expect("this trainer was built to update");
        let moments = m.iter_mut().zip(v);
        for ((master, (m, v)), gradient) in master.iter_mut().zip(moments).zip(gradient) {
            master.adamw(&step, gradient, m, v);
        }
        Ok(norm)
    }
}

/// Where a pass gets its units' weights from, one after another.
pub(super) struct Supply<'a> {
    units: &'a ShardedUnits,
    /// In place of the units' own.
    frozen: Option<&'a [Weights]>,
    /// An element of the root that is off by the smallest difference there is.
    ulp: Option<usize>,
    /// The next unit, where it is on its way.
    ahead: RefCell<Option<(usize, Arriving)>>,
}

impl<'a> Supply<'a> {
    pub(super) fn of(units: &'a ShardedUnits) -> Self {
        Self { units, frozen: None, ulp: None, ahead: RefCell::default() }
    }

    /// Of this rank's shards of other weights.
    pub(super) fn of_frozen(units: &'a ShardedUnits, shards: &'a [Weights]) -> Self {
        Self { frozen: Some(shards), ..Self::of(units) }
    }

    /// With one element of the final norm moved to the next value of its dtype.
    pub(super) fn with_ulp(self, plan: &Plan) -> Self {
        Self { ulp: Some(plan.units[0].tensors[0].len()), ..self }
    }

    /// The weights of unit `index` of the plan, and after it comes `next`. Every rank asks in the
    /// same order.
    pub(super) fn gather(
        &self,
        index: usize,
        next: Option<usize>,
    ) -> Result<Weights, TrainerError> {
        let arriving = match self.ahead.take() {
            Some((ahead, arriving)) => {
                assert_eq!(ahead, index, "the unit that was said to be next");
                arriving
            }
            None => self.start(index)?,
        };
        if let Some(next) = next.filter(|_| self.units.collective.runs_ahead()) {
            self.ahead.replace(Some((next, self.start(next)?)));
        }
        let weights = arriving.settle();
        Ok(match self.ulp {
            Some(element) if index == 0 => weights.with_ulp(element),
            _ => weights,
        })
    }

    fn start(&self, index: usize) -> Result<Arriving, TrainerError> {
        let units = self.units;
        let shard = match self.frozen {
            Some(shards) => shards[index].clone(),
            None => units.shard(index),
        };
        let (len, world) = (units.lens[index], units.collective.world_size());
        assert_eq!(shard.len(), shard_len(len, world), "a shard has its padding");
        units.collective.all_gather(&shard, len)
    }
}
