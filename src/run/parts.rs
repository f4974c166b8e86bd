//! From an experiment's words to its model and text.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};

use super::memory::MemoryPlan;
use crate::config::{Config, ModelSource};
use crate::model::{load_master, load_plan, HfConfig, Numerics, Plan, Preset};
use crate::ops::weights::Weights;
use crate::rollout::{Codec, SpecialTokens};
use crate::trainer::reference::Reference;

/// A model, loaded.
pub(super) struct Parts {
    pub plan: Plan,
    /// Each unit's flat f32 weights.
    pub master: Vec<Vec<f32>>,
    pub num: Numerics,
    pub codec: Arc<Codec>,
}

/// Devices that engine and trainer compute on have `free` bytes each.
pub(super) fn load(config: &Config, free: &[Option<u64>]) -> Result<Parts> {
    MemoryPlan::of(&plan(config)?, config, None).check(free)?;
    let (plan, master) = weights(config)?;
    let num = plan.numerics_of(config);
    let codec = Arc::new(codec(config, &plan.config)?);
    Ok(Parts { plan, master, num, codec })
}

/// The layer plan and each unit's flat f32 weights.
pub(super) fn weights(config: &Config) -> Result<(Plan, Vec<Vec<f32>>)> {
    Ok(match &config.model.source {
        ModelSource::Path(folder) => load_master(folder)?,
        ModelSource::Preset(name) => {
            let plan = Plan::new(Preset::from_name(name)?.config());
            let master = Preset::weights(&plan, config.seed);
            (plan, master)
        }
    })
}

/// The layer plan alone, without weights.
pub(super) fn plan(config: &Config) -> Result<Plan> {
    Ok(match &config.model.source {
        ModelSource::Path(folder) => load_plan(folder)?,
        ModelSource::Preset(name) => Plan::new(Preset::from_name(name)?.config()),
    })
}

/// candle's model of compute-dtype weights.
pub(super) fn reference(plan: &Plan, units: &[Weights]) -> Result<Reference> {
    let mut weights = BTreeMap::new();
    for (spec, unit) in plan.units.iter().zip(units) {
        let flat = unit.whole().to_array().into_host();
        for (tensor, part) in spec.tensors.iter().zip(spec.parts(&flat)) {
            weights.insert(tensor.name.clone(), (tensor.shape.clone(), part.to_vec()));
        }
    }
    Reference::new(plan, weights).context("the reference leg")
}

pub(super) fn codec(config: &Config, hf: &HfConfig) -> Result<Codec> {
    let vocab_size = u32::try_from(hf.vocab_size)?;
    let special =
        SpecialTokens { pad: hf.pad_token_id, bos: hf.bos_token_id, eos: hf.eos_token_ids.clone() };
    Ok(match &config.model.source {
        ModelSource::Path(folder) => Codec::open(Path::new(folder), vocab_size, special)?,
        ModelSource::Preset(_) => Codec::bytes(vocab_size, special)?,
    })
}
