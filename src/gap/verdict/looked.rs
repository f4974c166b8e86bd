//! Which columns of a request agree: its legs as recorded, and those of a second look.

use std::borrow::Cow;

use super::{Case, Evidence};
use crate::gap::probes::apart;
use crate::rollout::LegLogProbs;

/// One way of getting a request's log-probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Column {
    Decode,
    Prefill,
    Trainer,
    DecodeAgain,
    DecodeTogether,
    TrainerAgain,
    TrainerAlone,
}

/// A request under a second look.
pub(super) struct Looked<'a> {
    case: Case<'a>,
    floor: f64,
}

impl<'a> Looked<'a> {
    pub(super) fn at(case: &Case<'a>, evidence: &Evidence) -> Self {
        Self { case: *case, floor: evidence.floor }
    }

    fn column(&self, column: Column) -> Option<Cow<'a, LegLogProbs>> {
        let (rollout, probe) = (self.case.rollout, self.case.probe);
        let stored = match column {
            Column::Decode => return Some(Cow::Owned(rollout.decode())),
            Column::Prefill => rollout.prefill.as_ref(),
            Column::Trainer => rollout.trainer.as_ref(),
            Column::DecodeAgain => probe?.decode_again.as_ref(),
            Column::DecodeTogether => probe?.decode_together.as_ref(),
            Column::TrainerAgain => probe?.trainer_again.as_ref(),
            Column::TrainerAlone => probe?.trainer_alone.as_ref(),
        };
        stored.map(Cow::Borrowed)
    }

    /// The largest difference, nats; `None` where a column is not known.
    pub(super) fn apart(&self, a: Column, b: Column) -> Option<f64> {
        let (a, b) = (self.column(a)?, self.column(b)?);
        apart(self.case.rollout, Some(a.as_ref()), Some(b.as_ref()))
    }

    /// Whether two columns are within the floor of each other.
    pub(super) fn agree(&self, a: Column, b: Column) -> Option<bool> {
        self.apart(a, b).map(|apart| apart <= self.floor)
    }

    /// Whether the engine agrees with itself, as far as is known.
    pub(super) fn engine_is_consistent(&self) -> bool {
        self.agree(Column::Decode, Column::Prefill) != Some(false)
    }

    /// Whether a replay alone in a fresh pool ends the gap: the engine's arithmetic is right, and
    /// what it was given, or whom it ran beside, is not.
    pub(super) fn replay_is_right(&self) -> bool {
        self.agree(Column::Decode, Column::DecodeAgain) == Some(false)
            && self.agree(Column::DecodeAgain, Column::Prefill) == Some(true)
            && self.agree(Column::Prefill, Column::Trainer) == Some(true)
    }

    /// Whether the trainer, which repeats itself, agrees with the engine once the sequence is
    /// alone.
    pub(super) fn trainer_is_right_alone(&self) -> bool {
        self.engine_is_consistent()
            && self.agree(Column::Trainer, Column::TrainerAgain) == Some(true)
            && self.agree(Column::Trainer, Column::TrainerAlone) == Some(false)
            && self.agree(Column::TrainerAlone, Column::Decode) == Some(true)
    }
}

/// What a second look says of requests that no rule explains, as the end of a message.
pub(super) fn second_look(evidence: &Evidence, rest: &[Case]) -> String {
    let looked: Vec<Looked> = rest
        .iter()
        .filter(|case| case.probe.is_some())
        .map(|case| Looked::at(case, evidence))
        .collect();
    let mut text = String::new();
    for (count, says) in [
        (
            looked.iter().filter(|one| one.replay_is_right()).count(),
            "replayed alone in a fresh pool they decode right: cache, state or scheduling",
        ),
        (
            looked.iter().filter(|one| one.trainer_is_right_alone()).count(),
            "scored alone the trainer agrees with the engine: packing, padding or an order of \
             sums that follows the batch",
        ),
    ] {
        if count > 0 {
            text += &format!("; of {} looked at again {count}: {says}", looked.len());
        }
    }
    text
}
