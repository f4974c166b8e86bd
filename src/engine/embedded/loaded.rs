//! The weights that an engine has, and how it takes new ones.

use super::{Engine, EngineError};
use crate::base::WeightVersion;
use crate::config::Fault;
use crate::engine::captured::Captured;
use crate::engine::Runner;
use crate::model::{combine_fingerprints, Block, Model};
use crate::ops::weights::Weights;

/// The weights as they are now.
#[derive(Debug)]
pub(super) struct Loaded {
    pub runner: Runner,
    /// Its decode batches, where the device records them.
    pub captured: Captured,
    pub version: WeightVersion,
    /// A tensor each, in the plan's order.
    fingerprints: Vec<u64>,
    /// Of a tied head that is a copy and no longer the embedding.
    head_fingerprint: Option<u64>,
    pub fingerprint: u64,
}

impl Engine {
    /// Takes new weights, between steps only, and shares their memory where it can. Pool and pages
    /// stay as they are; what the prefix cache has of other weights is not found any more.
    ///
    /// # Errors
    /// A version that is not newer than that of the weights it has, which then stay.
    pub fn load(
        &mut self,
        version: WeightVersion,
        mut units: Vec<Weights>,
    ) -> Result<(), EngineError> {
        assert!(!self.scheduler.has_unfinished(), "weights change between steps, not within one");
        if let Some(has) = self.version.filter(|has| version <= *has) {
            return Err(EngineError::WeightsNotNewer { found: version, has });
        }
        self.drop_weights();
        self.hand_over.receive(&self.plan, &mut units);
        let each = self.plan.units.iter().zip(&units);
        let fingerprints: Vec<u64> =
            each.flat_map(|(spec, unit)| spec.fingerprints(unit)).collect();
        let copied_head = self.hand_over.copy_head(&self.plan, &mut units);
        let head_fingerprint = copied_head.as_ref().map(|head| head.fingerprint);
        let head_fingerprint = head_fingerprint.filter(|head| *head != fingerprints[0]);
        self.scheduler.new_weights(version);
        let plan = copied_head.as_ref().map_or(&self.plan, |head| &head.plan);
        let mut model = Model::load(plan, &self.num, &units);
        if self.config.faults.contains(&Fault::GateRenormalised) {
            model.blocks.iter_mut().for_each(Block::renormalise_gate);
        }
        let (bits, layout) = (self.config.scan_index_bits(), self.scheduler.layout());
        let runner = Runner::new(self.num, layout, model, bits).with_faults(&self.config.faults);
        let all: Vec<u64> = fingerprints.iter().copied().chain(head_fingerprint).collect();
        let fingerprint = combine_fingerprints(&all);
        self.loaded = Some(Loaded {
            runner,
            captured: Captured::default(),
            version,
            fingerprints,
            head_fingerprint,
            fingerprint,
        });
        self.version = Some(version);
        Ok(())
    }

    /// Frees the memory of the weights before newer ones are made: a device need not hold both.
    pub fn drop_weights(&mut self) {
        self.loaded = None;
    }

    /// Of the newest weights that were loaded.
    #[must_use]
    pub fn version(&self) -> Option<WeightVersion> {
        self.version
    }

    pub(super) fn loaded(&self) -> &Loaded {
        self.loaded.as_ref().expect("weights are loaded before the first step")
    }

    /// The loaded model.
    #[must_use]
    pub fn runner(&self) -> &Runner {
        &self.loaded().runner
    }

    /// The fingerprint of every loaded tensor, in the plan's order.
    #[must_use]
    pub fn fingerprints(&self) -> &[u64] {
        &self.loaded().fingerprints
    }

    /// Of a tied head that is a copy and no longer the embedding.
    #[must_use]
    pub fn head_fingerprint(&self) -> Option<u64> {
        self.loaded().head_fingerprint
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Contract;
    use crate::config;
    use crate::model::{Plan, Preset};
    use crate::ops::array::{Array, Device};

    #[test]
    fn only_newer_weights_are_taken() {
        let text = "name = \"x\"\nmodel.preset = \"tiny-mamba\"\n";
        let config = config::parse(text, "test.toml", &[]).expect("a valid config");
        let plan = Plan::new(Preset::TinyMamba.config());
        let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
        let weights = |seed| -> Vec<Weights> {
            let master = Preset::weights(&plan, seed).into_iter();
            master.map(|flat| Weights::of_master(&Array::Cpu(flat), num.dtype)).collect()
        };
        let mut engine =
            Engine::new(&Device::Cpu, plan.clone(), num, config.engine, Contract::PLAIN, 0)
                .expect("an engine");
        let mut load = |version: u64| {
            let loaded = engine.load(WeightVersion::new(version), weights(version));
            (loaded.map_err(|error| error.to_string()), engine.fingerprints().to_vec())
        };
        // The first ones may be of any version.
        let (first, of_five) = load(5);
        first.expect("the first weights");
        for old in [5, 4, 0] {
            let expected = format!(
                "weights of version {old} were handed over to an engine that has version 5: hand \
                 over newer ones, each version once"
            );
            assert_eq!(load(old), (Err(expected), of_five.clone()));
        }
        let (newer, of_seven) = load(7);
        newer.expect("newer weights");
        assert_ne!(of_seven, of_five);
    }
}
