//! Two legs of the same rollouts, token beside token.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::base::{BlockId, CompletionIndex, EngineIndex, LogProb, RequestId, TokenId};
use crate::rollout::{LegLogProbs, Rollout};

/// Sets two legs side by side. Masked-out tokens are dropped, tokens that a leg lacks are counted
/// as missing, and non-finite log-probabilities are kept as they are.
///
/// # Errors
/// A leg or mask whose length is not the completion's: the two sides were not computed for the same
/// tokens.
pub fn pair(rollouts: &[Rollout], legs: Legs) -> Result<Pairs, PairError> {
    let sequences =
        rollouts.iter().map(|rollout| pair_one(rollout, legs)).collect::<Result<_, _>>()?;
    Ok(Pairs { legs, sequences })
}

fn pair_one(rollout: &Rollout, legs: Legs) -> Result<Sequence, PairError> {
    let completion = &rollout.completion;
    let request = completion.id;
    let expected = completion.tokens.len();
    if rollout.loss_mask.len() != expected {
        let found = rollout.loss_mask.len();
        return Err(PairError::MaskLength { request, tokens: expected, found });
    }
    let infer = leg_of(rollout, legs.infer())?;
    let train = leg_of(rollout, legs.train())?;

    let mut sequence = Sequence {
        request,
        engine: completion.engine,
        slot: completion.state_blocks().first().map(|held| held.block),
        tokens: Vec::with_capacity(expected),
        missing: 0,
    };
    for (at, sampled) in
        completion.tokens.iter().enumerate().filter(|&(at, _)| rollout.loss_mask[at])
    {
        let side = |leg: &Option<LegLogProbs>| leg.as_ref().and_then(|values| values[at]);
        match (side(&infer), side(&train)) {
            (Some(infer), Some(train)) => {
                let index = u32::try_from(at).expect("a completion is shorter than 2^32 tokens");
                let index = CompletionIndex::new(index);
                sequence.tokens.push(PairedToken { index, token: sampled.token, infer, train });
            }
            _ => sequence.missing += 1,
        }
    }
    Ok(sequence)
}

fn leg_of(rollout: &Rollout, leg: Leg) -> Result<Option<LegLogProbs>, PairError> {
    let values = match leg {
        Leg::Decode => Some(rollout.decode()),
        Leg::Prefill => rollout.prefill.clone(),
        Leg::Trainer => rollout.trainer.clone(),
        Leg::Reference => rollout.reference.clone(),
    };
    let tokens = rollout.completion.tokens.len();
    match &values {
        Some(found) if found.len() != tokens => Err(PairError::LegLength {
            request: rollout.completion.id,
            leg,
            tokens,
            found: found.len(),
        }),
        _ => Ok(values),
    }
}

/// One way of getting the log-probability of a sampled token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    /// As sampled.
    Decode,
    /// One forced prefill over prompt and completion, on the same engine and weights.
    Prefill,
    /// The trainer's forward.
    Trainer,
    /// An independent forward: of a run a plain one in f32 that shares no kernel with the rest, of
    /// a dump that of a model at hand.
    Reference,
}

impl Leg {
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Trainer => "trainer",
            Self::Reference => "reference",
        }
    }
}

/// The two legs of a comparison, infer side first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Legs {
    /// The whole gap.
    #[default]
    DecodeTrainer,
    /// The engine against itself: state, cache, scheduling.
    DecodePrefill,
    /// Weights, tokens, semantics.
    PrefillTrainer,
    /// The trainer's arithmetic.
    TrainerReference,
    /// The engine against an independent forward.
    DecodeReference,
}

impl Legs {
    /// The subtrahend of d.
    #[must_use]
    pub const fn infer(self) -> Leg {
        match self {
            Self::DecodeTrainer | Self::DecodePrefill | Self::DecodeReference => Leg::Decode,
            Self::PrefillTrainer => Leg::Prefill,
            Self::TrainerReference => Leg::Trainer,
        }
    }

    /// The minuend of d.
    #[must_use]
    pub const fn train(self) -> Leg {
        match self {
            Self::DecodeTrainer | Self::PrefillTrainer => Leg::Trainer,
            Self::DecodePrefill => Leg::Prefill,
            Self::TrainerReference | Self::DecodeReference => Leg::Reference,
        }
    }

    /// As written in records and tags.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::DecodeTrainer => "decode_trainer",
            Self::DecodePrefill => "decode_prefill",
            Self::PrefillTrainer => "prefill_trainer",
            Self::TrainerReference => "trainer_reference",
            Self::DecodeReference => "decode_reference",
        }
    }
}

/// One sampled token with both of its log-probabilities.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PairedToken {
    pub index: CompletionIndex,
    pub token: TokenId,
    pub infer: LogProb,
    pub train: LogProb,
}

impl PairedToken {
    /// d in nats; meaningful only where [`Self::is_finite`].
    #[must_use]
    pub fn d(&self) -> f64 {
        f64::from(self.train.get()) - f64::from(self.infer.get())
    }

    #[must_use]
    pub fn is_finite(&self) -> bool {
        self.infer.is_finite() && self.train.is_finite()
    }

    /// |d|, and infinity where a side is not finite, so that such a token is over every floor.
    #[must_use]
    pub fn gap(&self) -> f64 {
        if self.is_finite() {
            self.d().abs()
        } else {
            f64::INFINITY
        }
    }

    /// Whether both sides have the same f32 bits.
    #[must_use]
    pub fn is_bitwise_equal(&self) -> bool {
        self.infer.get().to_bits() == self.train.get().to_bits()
    }
}

/// The paired tokens of one rollout, in completion order.
#[derive(Clone, Debug, PartialEq)]
pub struct Sequence {
    pub request: RequestId,
    /// That sampled it.
    pub engine: EngineIndex,
    /// The first state block the request held; `None` without recurrent state.
    pub slot: Option<BlockId>,
    /// Tokens under the loss mask for which both legs have a value, finite or not.
    pub tokens: Vec<PairedToken>,
    /// Tokens under the loss mask for which at least one leg has none.
    pub missing: u64,
}

impl Sequence {
    /// Tokens that enter the statistics.
    pub fn finite(&self) -> impl Iterator<Item = &PairedToken> + Clone {
        self.tokens.iter().filter(|token| token.is_finite())
    }

    /// The largest [`PairedToken::gap`]; `None` where nothing was compared.
    #[must_use]
    pub fn gap(&self) -> Option<f64> {
        self.tokens.iter().map(PairedToken::gap).reduce(f64::max)
    }

    /// Whether any token is over the floor.
    #[must_use]
    pub fn is_bad(&self, floor: f64) -> bool {
        self.gap().is_some_and(|gap| gap > floor)
    }

    /// Itself with no more of its tokens than a verdict asks for: the first that differs at all,
    /// the first over the floor, and the worst.
    #[must_use]
    pub fn landmarks(&self, floor: f64) -> Self {
        let gaps = || self.tokens.iter().map(PairedToken::gap);
        let worst = self.gap();
        let kept = [0.0, floor].map(|floor| gaps().position(|gap| gap > floor));
        let kept = kept.into_iter().flatten().chain(gaps().position(|gap| Some(gap) == worst));
        let kept: BTreeSet<usize> = kept.collect();
        let tokens = kept.into_iter().map(|at| self.tokens[at]).collect();
        Self { tokens, ..*self }
    }

    /// The first token over the floor.
    #[must_use]
    pub fn first_bad(&self, floor: f64) -> Option<CompletionIndex> {
        self.tokens.iter().find(|token| token.gap() > floor).map(|token| token.index)
    }
}

/// One step's comparison of two legs, sequences in record order.
#[derive(Clone, Debug, PartialEq)]
pub struct Pairs {
    pub legs: Legs,
    pub sequences: Vec<Sequence>,
}

impl Pairs {
    /// Sequences with a token over the floor.
    pub fn bad(&self, floor: f64) -> impl Iterator<Item = &Sequence> {
        self.sequences.iter().filter(move |sequence| sequence.is_bad(floor))
    }

    /// Every paired token, finite or not.
    pub fn tokens(&self) -> impl Iterator<Item = &PairedToken> + Clone {
        self.sequences.iter().flat_map(|sequence| &sequence.tokens)
    }

    /// Tokens that enter the statistics.
    pub fn finite(&self) -> impl Iterator<Item = &PairedToken> + Clone {
        self.tokens().filter(|token| token.is_finite())
    }
}

/// Legs that cannot be set side by side.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PairError {
    #[error(
        "request {request}: the {} leg has {found} log-probabilities for {tokens} sampled tokens; \
         compute both sides over the same token ids, and leave a missing value missing",
        leg.name()
    )]
    LegLength { request: RequestId, leg: Leg, tokens: usize, found: usize },
    #[error(
        "request {request}: the loss mask has {found} entries for {tokens} sampled tokens; \
         give one entry a sampled token"
    )]
    MaskLength { request: RequestId, tokens: usize, found: usize },
}

impl PairError {
    #[must_use]
    pub const fn request(&self) -> RequestId {
        match self {
            Self::LegLength { request, .. } | Self::MaskLength { request, .. } => *request,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gap::testing::rollout;

    #[test]
    fn mask_missing_and_non_finite_each_have_their_place() {
        let mut record =
            rollout(0, &[-0.5, f32::NAN, -9.0, -1.0, -0.25], &[-0.5, -0.7, -12.0, -1.0, -0.3]);
        record.loss_mask[2] = false;
        record.trainer.as_mut().unwrap()[4] = None;
        let pairs = pair(&[record], Legs::DecodeTrainer).unwrap();
        let sequence = &pairs.sequences[0];
        let indices: Vec<u32> = sequence.tokens.iter().map(|token| token.index.get()).collect();
        assert_eq!(indices, [0, 1, 3]);
        assert_eq!(sequence.missing, 1);
        assert_eq!(sequence.finite().count(), 2);
        assert_eq!(sequence.gap(), Some(f64::INFINITY));
        assert_eq!(sequence.first_bad(0.0), Some(CompletionIndex::new(1)));
    }

    #[test]
    fn landmarks_keep_what_a_verdict_asks_for() {
        for (trainer, floor, expected) in [
            (&[-1.0, -1.5, -3.0, -1.25, -9.0, -2.0][..], 1.0, &[1, 2, 4][..]),
            (&[-1.0, -2.0, -9.0, -9.0, -1.0, -1.0], 0.0, &[1, 2]),
            (&[-1.0, -1.0, -1.0, -1.0, f32::NAN, f32::NAN], 0.5, &[4]),
            (&[-1.0; 6], 0.0, &[0]),
        ] {
            let pairs = pair(&[rollout(0, &[-1.0; 6], trainer)], Legs::DecodeTrainer).unwrap();
            let (whole, kept) = (&pairs.sequences[0], pairs.sequences[0].landmarks(floor));
            let indices: Vec<u32> = kept.tokens.iter().map(|token| token.index.get()).collect();
            assert_eq!(indices, expected);
            for floor in [0.0, floor] {
                assert_eq!(kept.first_bad(floor), whole.first_bad(floor));
            }
            assert_eq!(kept.gap(), whole.gap());
        }
    }

    #[test]
    fn an_absent_leg_is_missing_and_not_zero() {
        let record = rollout(0, &[-0.5, -0.25], &[-0.5, -0.25]);
        let pairs = pair(&[record], Legs::DecodePrefill).unwrap();
        assert_eq!(pairs.tokens().count(), 0);
        assert_eq!(pairs.sequences[0].missing, 2);
        assert_eq!(pairs.sequences[0].gap(), None);
    }

    #[test]
    fn unequal_lengths_are_an_error_that_names_the_leg() {
        let mut record = rollout(0, &[-0.5, -0.25], &[-0.5, -0.25]);
        record.trainer = Some(vec![Some(LogProb::new(-0.5))]);
        let request = record.completion.id;
        let expected = PairError::LegLength { request, leg: Leg::Trainer, tokens: 2, found: 1 };
        assert_eq!(pair(&[record.clone()], Legs::DecodeTrainer), Err(expected));
        // The other legs of the same record still compare.
        assert!(pair(&[record.clone()], Legs::DecodePrefill).is_ok());
        record.loss_mask.push(true);
        let expected = PairError::MaskLength { request, tokens: 2, found: 3 };
        assert_eq!(pair(&[record], Legs::DecodePrefill), Err(expected));
    }

    #[test]
    fn d_is_train_minus_infer_for_every_pair_of_legs() {
        let mut record = rollout(0, &[-1.0], &[-3.0]);
        record.prefill = Some(vec![Some(LogProb::new(-2.0))]);
        record.reference = Some(vec![Some(LogProb::new(-7.0))]);
        for (legs, d) in [
            (Legs::DecodeTrainer, -2.0),
            (Legs::DecodePrefill, -1.0),
            (Legs::PrefillTrainer, -1.0),
            (Legs::TrainerReference, -4.0),
            (Legs::DecodeReference, -6.0),
        ] {
            let pairs = pair(std::slice::from_ref(&record), legs).unwrap();
            assert_eq!(pairs.sequences[0].tokens[0].d(), d, "{}", legs.name());
            assert_eq!(legs.name(), format!("{}_{}", legs.infer().name(), legs.train().name()));
            assert_eq!(serde_json::to_value(legs).unwrap(), legs.name());
        }
    }
}
