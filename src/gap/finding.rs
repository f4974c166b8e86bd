//! A named culprit with its evidence.

use serde::{Deserialize, Serialize};

use super::pair::{Leg, Legs, PairError};
use crate::base::{BlockId, CompletionIndex, EngineIndex, RequestId, Step, TokenId};

/// The closed set of culprits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FindingKind {
    /// A first chunk read a block that another request had left.
    StaleState,
    /// The gap by block id changes at one id.
    AddressWrap,
    BlockShared,
    PaddingWrite,
    StateKeptOnPreempt,
    StalePrefixCache,
    /// The two sides' weight fingerprints differ.
    WeightsNotSynced,
    /// Temperature or filters on one side only.
    LogprobMode,
    TokenMismatch,
    MaskOrShift,
    PositionOffset,
    /// The trainer's pass over a sequence takes in something of its neighbours, or of padding.
    PackingLeak,
    /// The order of a sum follows what is computed beside it.
    BatchDependentReduction,
    /// The trainer's two passes over one batch differ.
    NotRepeatable,
    /// The engine's decode rows compute something else than its prefill rows.
    DecodePath,
    /// The same experts with other weights.
    GateWeights,
    /// A token that ends a completion on one side only.
    EndToken,
    /// Within a measured floor.
    Precision,
    /// Never a guess.
    Unexplained,
}

impl FindingKind {
    /// As written in records.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::StaleState => "stale_state",
            Self::AddressWrap => "address_wrap",
            Self::BlockShared => "block_shared",
            Self::PaddingWrite => "padding_write",
            Self::StateKeptOnPreempt => "state_kept_on_preempt",
            Self::StalePrefixCache => "stale_prefix_cache",
            Self::WeightsNotSynced => "weights_not_synced",
            Self::LogprobMode => "logprob_mode",
            Self::TokenMismatch => "token_mismatch",
            Self::MaskOrShift => "mask_or_shift",
            Self::PositionOffset => "position_offset",
            Self::PackingLeak => "packing_leak",
            Self::BatchDependentReduction => "batch_dependent_reduction",
            Self::NotRepeatable => "not_repeatable",
            Self::DecodePath => "decode_path",
            Self::GateWeights => "gate_weights",
            Self::EndToken => "end_token",
            Self::Precision => "precision",
            Self::Unexplained => "unexplained",
        }
    }

    /// What would confirm it.
    #[must_use]
    pub const fn confirmed_by(self) -> &'static str {
        match self {
            Self::StaleState => "the gap vanishes if the first chunk runs as a prefill row",
            Self::AddressWrap => "the block id is 2^bits / stride, and wider addresses end the gap",
            Self::BlockShared => "the block has two owners in one engine step",
            Self::PaddingWrite => "the gap vanishes at batch sizes without padding rows",
            Self::StateKeptOnPreempt => "requests that were never preempted have no gap",
            Self::StalePrefixCache => "the gap vanishes with the prefix cache off or flushed",
            Self::WeightsNotSynced => "equal fingerprints end the gap",
            Self::LogprobMode => "the gap vanishes at temperature 1 without filters",
            Self::TokenMismatch => "the two sides' token ids differ",
            Self::MaskOrShift => "the gap vanishes if one side is moved by the shift",
            Self::PositionOffset => "the gap vanishes if one side's positions are moved",
            Self::PackingLeak => "the gap vanishes with one sequence a pass",
            Self::BatchDependentReduction => "the gap vanishes at a batch of 1",
            Self::NotRepeatable => "two passes over one batch agree once nothing random is in them",
            Self::DecodePath => "the gap vanishes if every row runs as a prefill row",
            Self::GateWeights => "replaying the experts' weights with their ids ends the gap",
            Self::EndToken => "the two sides' lists of end ids differ",
            Self::Precision => "the gap shrinks by orders of magnitude in f32",
            Self::Unexplained => "nothing yet: the evidence at hand names no culprit",
        }
    }
}

/// A culprit of one step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub kind: FindingKind,
    pub leg: Legs,
    pub step: Step,
    /// Where several engines sampled the step: the one whose requests these are; absent where they
    /// are of more than one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<EngineIndex>,
    /// The requests it explains, at most [`Finding::LISTED_MAX`] of `requests_total`.
    pub requests: Vec<RequestId>,
    pub requests_total: u64,
    /// The blocks it names, in ascending order, bounded like the requests.
    pub blocks: Vec<BlockId>,
    /// The lowest completion index over the floor among all its requests.
    pub first_bad_position: Option<CompletionIndex>,
    /// Of an address wrap: how wide the state index is, if the records leave one width alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index_bits: Option<u32>,
    pub message: String,
}

impl Finding {
    /// So many requests or blocks are listed; the rest is only counted.
    pub const LISTED_MAX: usize = 32;
}

/// The finding of a step whose legs could not be set side by side.
impl From<&PairError> for Finding {
    fn from(error: &PairError) -> Self {
        let (kind, leg) = match error {
            PairError::LegLength { leg: Leg::Prefill, .. } => {
                (FindingKind::TokenMismatch, Legs::DecodePrefill)
            }
            PairError::LegLength { leg: Leg::Reference, .. } => {
                (FindingKind::TokenMismatch, Legs::TrainerReference)
            }
            PairError::LegLength { .. } => (FindingKind::TokenMismatch, Legs::DecodeTrainer),
            PairError::MaskLength { .. } => (FindingKind::MaskOrShift, Legs::DecodeTrainer),
        };
        Self { leg, ..of_request(kind, error.request(), None, error.to_string()) }
    }
}

/// Compares the token ids that each side computed over; ids come before any log-probability.
#[must_use]
pub fn token_mismatch(
    request: RequestId,
    engine: &[TokenId],
    trainer: &[TokenId],
) -> Option<Finding> {
    let common = std::iter::zip(engine, trainer).take_while(|(engine, trainer)| engine == trainer);
    let at = common.count();
    if at == engine.len() && at == trainer.len() {
        return None;
    }
    let message = format!(
        "request {request}: the engine's and the trainer's token ids differ: lengths {} and {}, \
         first difference at {at}: engine {}, trainer {}; hand token ids on, never text",
        engine.len(),
        trainer.len(),
        around(engine, at),
        around(trainer, at),
    );
    let first = u32::try_from(at).expect("a completion is shorter than 2^32 tokens");
    let first = CompletionIndex::new(first);
    Some(of_request(FindingKind::TokenMismatch, request, Some(first), message))
}

/// Up to two ids on each side of `at`, and the one there in brackets.
fn around(ids: &[TokenId], at: usize) -> String {
    let from = at.saturating_sub(2);
    let shown = (from..=at + 2).map(|place| match ids.get(place) {
        Some(id) if place == at => format!("[{id}]"),
        Some(id) => id.to_string(),
        None if place == at => "[end]".to_owned(),
        None => String::new(),
    });
    shown.filter(|text| !text.is_empty()).collect::<Vec<_>>().join(" ")
}

fn of_request(
    kind: FindingKind,
    request: RequestId,
    first_bad_position: Option<CompletionIndex>,
    message: String,
) -> Finding {
    Finding {
        kind,
        leg: Legs::default(),
        step: request.step,
        engine: None,
        requests: vec![request],
        requests_total: 1,
        blocks: Vec::new(),
        first_bad_position,
        index_bits: None,
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_records_are_the_names_in_code() {
        for kind in [
            FindingKind::StaleState,
            FindingKind::AddressWrap,
            FindingKind::BlockShared,
            FindingKind::PaddingWrite,
            FindingKind::StateKeptOnPreempt,
            FindingKind::StalePrefixCache,
            FindingKind::WeightsNotSynced,
            FindingKind::LogprobMode,
            FindingKind::TokenMismatch,
            FindingKind::MaskOrShift,
            FindingKind::PositionOffset,
            FindingKind::PackingLeak,
            FindingKind::BatchDependentReduction,
            FindingKind::NotRepeatable,
            FindingKind::DecodePath,
            FindingKind::GateWeights,
            FindingKind::EndToken,
            FindingKind::Precision,
            FindingKind::Unexplained,
        ] {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }

    #[test]
    fn legs_that_do_not_pair_are_a_finding() {
        let request = RequestId::new(2, 0, 1);
        for (error, kind, leg) in [
            (
                PairError::LegLength { request, leg: Leg::Trainer, tokens: 2, found: 1 },
                FindingKind::TokenMismatch,
                Legs::DecodeTrainer,
            ),
            (
                PairError::LegLength { request, leg: Leg::Prefill, tokens: 2, found: 3 },
                FindingKind::TokenMismatch,
                Legs::DecodePrefill,
            ),
            (
                PairError::MaskLength { request, tokens: 2, found: 3 },
                FindingKind::MaskOrShift,
                Legs::DecodeTrainer,
            ),
        ] {
            let finding = Finding::from(&error);
            assert_eq!((finding.kind, finding.leg, finding.step), (kind, leg, request.step));
            assert_eq!(finding.message, error.to_string());
        }
    }

    #[test]
    fn the_first_differing_id_is_shown() {
        let ids = |ids: &[u32]| ids.iter().map(|&id| TokenId::new(id)).collect::<Vec<_>>();
        let request = RequestId::new(2, 0, 1);
        for (engine, trainer, expected) in [
            (
                &[5, 6][..],
                &[9][..],
                "lengths 2 and 1, first difference at 0: engine [5] 6, trainer [9]",
            ),
            (
                &[5, 6],
                &[5],
                "lengths 2 and 1, first difference at 1: engine 5 [6], trainer 5 [end]",
            ),
            (
                &[1, 2, 3, 4, 5, 6],
                &[1, 2, 3, 9, 5, 6],
                "first difference at 3: engine 2 3 [4] 5 6, trainer 2 3 [9] 5 6",
            ),
        ] {
            let finding = token_mismatch(request, &ids(engine), &ids(trainer)).unwrap();
            assert_eq!(finding.kind, FindingKind::TokenMismatch);
            assert!(finding.message.contains(expected), "{}", finding.message);
        }
        assert_eq!(token_mismatch(request, &ids(&[5, 6]), &ids(&[5, 6])), None);
    }
}
