//! What a step's comparison rests on, for whoever asks once more.

use std::collections::HashMap;

use anyhow::Result;

use super::Session;
use crate::base::{RequestId, Step};
use crate::gap::{self, Finding, FirstDifference, Pairs};
use crate::rollout::Rollout;

impl Session {
    /// The step's culprits; `index_bits` is what earlier steps have shown of them.
    pub(in crate::run) fn judge(
        &self,
        step: Step,
        rollouts: &[Rollout],
        pairs: &Pairs,
        index_bits: Option<u32>,
        layers: Option<&HashMap<RequestId, FirstDifference>>,
    ) -> Vec<Finding> {
        let floor = self.floor(pairs.tokens().count() as u64);
        let tensors = self.tensor_fingerprints();
        gap::verdict(&gap::Evidence {
            step,
            rollouts,
            pairs,
            shift: gap::shift(pairs.bad(floor), floor),
            floor,
            tensors: &tensors,
            state: self.engine.layout().layers.iter().find_map(|place| place.view.state()),
            index_bits,
            mode: None,
            layers,
        })
    }

    /// Scores some of the rollouts by the legs that a step without a spike does without.
    pub(in crate::run) fn score_all_legs(
        &self,
        rollouts: &mut [Rollout],
        which: &[usize],
    ) -> Result<()> {
        self.score_prefill(rollouts, which);
        self.score_reference(rollouts, which)
    }
}
