//! What a step's comparison rests on, for whoever asks once more.

use std::collections::HashMap;

use anyhow::Result;

use super::second_look::Looks;
use super::Session;
use crate::base::{RequestId, Step};
use crate::engine::{Engine, Engines};
use crate::gap::{self, CaseFile, Finding, FirstDifference, Pairs};
use crate::ops::pages::StateView;
use crate::rollout::Rollout;

/// What is known of a step beside its records.
pub(in crate::run) struct Known<'a> {
    pub spike: bool,
    /// What earlier steps have shown.
    pub index_bits: Option<u32>,
    pub looks: &'a Looks,
    pub layers: Option<&'a HashMap<RequestId, FirstDifference>>,
}

impl Session {
    /// The step's culprits, and the evidence where it is asked for and there are any.
    pub(in crate::run) fn judge(
        &self,
        step: Step,
        rollouts: &[Rollout],
        pairs: &Pairs,
        known: &Known<'_>,
    ) -> (Vec<Finding>, Option<CaseFile>) {
        let floor = self.floor(pairs.tokens().count() as u64);
        let tensors = self.tensor_fingerprints();
        let evidence = gap::Evidence {
            shift: gap::shift(pairs.bad(floor), floor),
            tensors: &tensors,
            state: self.source.embedded().map(Engines::first).and_then(state_view),
            index_bits: known.index_bits,
            mode: known.looks.mode.as_ref(),
            layers: known.layers,
            weights: &self.weights,
            spike: known.spike,
            probes: known.looks.probes.as_ref(),
            ..gap::Evidence::new(step, rollouts, pairs, floor)
        };
        let findings = gap::verdict(&evidence);
        let kept = self.config.check.evidence && !findings.is_empty();
        let case = kept.then(|| CaseFile::of(&evidence));
        (findings, case)
    }

    /// Scores some of the rollouts by the legs that a step without a spike does without.
    pub(in crate::run) fn score_all_legs(
        &self,
        rollouts: &mut [Rollout],
        which: &[usize],
    ) -> Result<()> {
        self.score_prefill(rollouts, which)?;
        self.score_reference(rollouts, which)
    }
}

/// Where a block's recurrent state lies in an engine's pages.
fn state_view(engine: &Engine) -> Option<StateView> {
    engine.layout().layers.iter().find_map(|place| place.view.state())
}
