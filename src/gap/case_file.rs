//! The evidence of one step as a file: all that a verdict is drawn from, and nothing else. Whoever
//! judges it knows no settings.

use serde::{Deserialize, Serialize};

use super::finding::Finding;
use super::pair::{pair, Legs, PairError};
use super::place::shift;
use super::probes::Probes;
use super::verdict::{verdict, Evidence, TensorFingerprint, UnlikeMode, WeightsOf};
use crate::base::{float, Step};
use crate::ops::pages::StateView;
use crate::rollout::Rollout;

/// An owned [`Evidence`] of the decode and trainer legs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseFile {
    pub step: Step,
    /// Nats.
    #[serde(with = "float")]
    pub floor: f64,
    pub spike: bool,
    pub rollouts: Vec<Rollout>,
    pub tensors: Vec<TensorFingerprint>,
    pub weights: Vec<WeightsOf>,
    pub state: Option<StateView>,
    pub index_bits: Option<u32>,
    pub mode: Option<UnlikeMode>,
    pub probes: Option<Probes>,
}

impl CaseFile {
    /// A copy, without the texts, which prove nothing.
    ///
    /// # Panics
    /// If the evidence is of other legs.
    #[must_use]
    pub fn of(evidence: &Evidence<'_>) -> Self {
        assert_eq!(evidence.pairs.legs, Legs::DecodeTrainer, "a case is of these legs");
        let without_text = |rollout: &Rollout| Rollout {
            prompt_text: String::new(),
            completion_text: String::new(),
            ..rollout.clone()
        };
        Self {
            step: evidence.step,
            floor: evidence.floor,
            spike: evidence.spike,
            rollouts: evidence.rollouts.iter().map(without_text).collect(),
            tensors: evidence.tensors.to_vec(),
            weights: evidence.weights.to_vec(),
            state: evidence.state,
            index_bits: evidence.index_bits,
            mode: evidence.mode.cloned(),
            probes: evidence.probes.cloned(),
        }
    }

    /// The verdict on it.
    ///
    /// # Errors
    /// As [`pair`].
    pub fn judge(&self) -> Result<Vec<Finding>, PairError> {
        let pairs = pair(&self.rollouts, Legs::DecodeTrainer)?;
        Ok(verdict(&Evidence {
            shift: shift(pairs.bad(self.floor), self.floor),
            tensors: &self.tensors,
            weights: &self.weights,
            state: self.state,
            index_bits: self.index_bits,
            mode: self.mode.as_ref(),
            probes: self.probes.as_ref(),
            spike: self.spike,
            ..Evidence::new(self.step, &self.rollouts, &pairs, self.floor)
        }))
    }
}
