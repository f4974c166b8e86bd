//! The three-way check: the same tokens as decoded, as one forced prefill, and as the trainer
//! scores them.

use std::fmt;

use serde::Serialize;

use super::pair::{pair, Legs, PairError};
use super::probes::apart;
use crate::base::RequestId;
use crate::rollout::{LegLogProbs, Rollout};

/// Whose fault it is, from the largest |d| of each pair of legs, in nats. Small is at most the
/// threshold; an infinite or undefined gap is large.
#[must_use]
pub fn three_way(
    decode_prefill: f64,
    prefill_trainer: f64,
    decode_trainer: f64,
    threshold: f64,
) -> Blame {
    let large = |gap: f64| gap.is_nan() || gap > threshold;
    match (large(decode_prefill), large(prefill_trainer), large(decode_trainer)) {
        (false, false, false) => Blame::Clean,
        (true, false, true) => Blame::Engine,
        (false, true, true) => Blame::BeyondEngine,
        (true, true, true) => Blame::MoreThanOne,
        (true, true, false) => Blame::Prefill,
        (true, false, false) | (false, true, false) | (false, false, true) => {
            Blame::Inconsistent { decode_prefill, prefill_trainer, decode_trainer }
        }
    }
}

/// The check of each rollout for which all three legs have a value for the same tokens; others are
/// left out.
///
/// # Errors
/// As [`pair`].
pub fn blame_requests(
    rollouts: &[Rollout],
    threshold: f64,
) -> Result<Vec<(RequestId, Blame)>, PairError> {
    let mut found = Vec::new();
    let decode_prefill = pair(rollouts, Legs::DecodePrefill)?.sequences;
    let prefill_trainer = pair(rollouts, Legs::PrefillTrainer)?.sequences;
    let decode_trainer = pair(rollouts, Legs::DecodeTrainer)?.sequences;
    for ((first, second), third) in decode_prefill.iter().zip(&prefill_trainer).zip(&decode_trainer)
    {
        let complete = [first, second, third].iter().all(|sequence| sequence.missing == 0);
        if let (true, Some(first), Some(second), Some(gap)) =
            (complete, first.gap(), second.gap(), third.gap())
        {
            found.push((third.request, three_way(first, second, gap, threshold)));
        }
    }
    Ok(found)
}

/// One rollout's three gaps with what they say, and the fourth where there is a reference; `None`
/// where a leg is missing.
pub(super) fn told(rollout: &Rollout, threshold: f64) -> Option<String> {
    let decode = rollout.decode();
    let gap = |a: &LegLogProbs, b: &Option<LegLogProbs>| apart(rollout, Some(a), b.as_ref());
    let decode_prefill = gap(&decode, &rollout.prefill)?;
    let prefill_trainer = gap(rollout.prefill.as_ref()?, &rollout.trainer)?;
    let decode_trainer = gap(&decode, &rollout.trainer)?;
    let blame = three_way(decode_prefill, prefill_trainer, decode_trainer, threshold);
    let reference = rollout.trainer.as_ref().and_then(|one| gap(one, &rollout.reference));
    // Of two f32 a difference needs no more digits than one has.
    let told = |gap: f64| format!("{:e}", gap as f32);
    let reference = reference.map(|gap| format!(", trainer/reference {}", told(gap)));
    let reference = reference.unwrap_or_default();
    let [decode_prefill, prefill_trainer, decode_trainer] =
        [decode_prefill, prefill_trainer, decode_trainer].map(told);
    Some(format!(
        "decode/prefill {decode_prefill}, prefill/trainer {prefill_trainer}, decode/trainer \
         {decode_trainer}{reference}: {blame}"
    ))
}

/// What the three-way check says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Blame {
    Clean,
    Engine,
    BeyondEngine,
    MoreThanOne,
    Prefill,
    /// Equality within a threshold is not quite transitive, so that this can happen near it.
    Inconsistent {
        decode_prefill: f64,
        prefill_trainer: f64,
        decode_trainer: f64,
    },
}

impl fmt::Display for Blame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Clean => "clean",
            Self::Engine => {
                "rollout engine disagrees with itself: decode path, cache or scheduling"
            }
            Self::BeyondEngine => {
                "rollout engine is self-consistent: weights, semantics, tokens, positions or \
                 trainer forward"
            }
            Self::MoreThanOne => {
                "more than one fault, or forced prefill is itself wrong; no single culprit"
            }
            Self::Prefill => {
                "forced-prefill scoring is the odd one out (its logprob mode, cache or token \
                 alignment)"
            }
            Self::Inconsistent { decode_prefill, prefill_trainer, decode_trainer } => {
                return write!(
                    f,
                    "thresholds inconsistent: decode/prefill {decode_prefill:e}, \
                     prefill/trainer {prefill_trainer:e}, decode/trainer {decode_trainer:e}; \
                     no verdict"
                );
            }
        })
    }
}

/// What an independent forward says of a record's two sides, from the largest |d| of each pair, in
/// nats, as [`three_way`].
#[must_use]
pub fn second_opinion(
    decode_trainer: f64,
    decode_reference: f64,
    trainer_reference: f64,
    threshold: f64,
) -> Opinion {
    let large = |gap: f64| gap.is_nan() || gap > threshold;
    match (large(decode_trainer), large(decode_reference), large(trainer_reference)) {
        (false, false, false) => Opinion::AllAgree,
        (true, false, true) => Opinion::TrainerIsOdd,
        (true, true, false) => Opinion::DecodeIsOdd,
        (false, true, true) => Opinion::ModelIsOdd,
        (true, true, true) => Opinion::NoneAgree,
        (true, false, false) | (false, true, false) | (false, false, true) => Opinion::Inconsistent,
    }
}

/// Which of a record's two sides an independent forward agrees with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Opinion {
    AllAgree,
    DecodeIsOdd,
    TrainerIsOdd,
    ModelIsOdd,
    NoneAgree,
    /// Equality within a threshold is not quite transitive.
    Inconsistent,
}

impl fmt::Display for Opinion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllAgree => "both sides and the model agree",
            Self::DecodeIsOdd => {
                "the model agrees with the trainer side, not with the rollout side"
            }
            Self::TrainerIsOdd => {
                "the model agrees with the rollout side, not with the trainer side"
            }
            Self::ModelIsOdd => {
                "both sides agree with each other and not with the model: is it the one they ran?"
            }
            Self::NoneAgree => "no two agree; no single culprit",
            Self::Inconsistent => "thresholds inconsistent; no verdict",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::LogProb;
    use crate::gap::testing::rollout;

    #[test]
    fn the_table_of_blame() {
        let (s, l, nan) = (0.1, 0.3, f64::NAN);
        let odd = |decode_prefill, prefill_trainer, decode_trainer| Blame::Inconsistent {
            decode_prefill,
            prefill_trainer,
            decode_trainer,
        };
        for (gaps, expected) in [
            ([s, s, s], Blame::Clean),
            ([l, s, l], Blame::Engine),
            ([s, l, l], Blame::BeyondEngine),
            ([l, l, l], Blame::MoreThanOne),
            ([l, l, s], Blame::Prefill),
            ([l, s, s], odd(l, s, s)),
            ([s, l, s], odd(s, l, s)),
            ([s, s, l], odd(s, s, l)),
            ([nan, s, f64::INFINITY], Blame::Engine),
        ] {
            assert_eq!(three_way(gaps[0], gaps[1], gaps[2], 0.1), expected, "{gaps:?}");
        }
        let text = odd(l, s, s).to_string();
        assert!(text.contains("thresholds inconsistent: decode/prefill 3e-1"), "{text}");
    }

    #[test]
    fn the_table_of_opinions() {
        let (s, l) = (0.1, f64::INFINITY);
        for (gaps, expected) in [
            ([s, s, s], Opinion::AllAgree),
            ([l, s, l], Opinion::TrainerIsOdd),
            ([l, l, s], Opinion::DecodeIsOdd),
            ([s, l, l], Opinion::ModelIsOdd),
            ([l, l, l], Opinion::NoneAgree),
            ([l, s, s], Opinion::Inconsistent),
            ([s, l, s], Opinion::Inconsistent),
            ([s, s, f64::NAN], Opinion::Inconsistent),
        ] {
            assert_eq!(second_opinion(gaps[0], gaps[1], gaps[2], 0.1), expected, "{gaps:?}");
        }
    }

    #[test]
    fn a_request_is_told_with_its_numbers() {
        let mut record = rollout(0, &[-0.5, -1.0], &[-0.5, -1.25]);
        assert_eq!(told(&record, 0.0), None);
        record.prefill = record.trainer.clone();
        let engine = "decode/prefill 2.5e-1, prefill/trainer 0e0, decode/trainer 2.5e-1: rollout \
                      engine disagrees with itself: decode path, cache or scheduling";
        assert_eq!(told(&record, 0.0).unwrap(), engine);
        record.reference = record.trainer.clone();
        assert!(told(&record, 0.0).unwrap().contains(", trainer/reference 0e0: rollout engine"));
        assert!(told(&record, 0.5).unwrap().ends_with(": clean"));
    }

    /// Sixty-four sequences, ten of which an engine decoded unlike its own prefill
    /// (NVIDIA-NeMo/RL#2100).
    #[test]
    fn k07_exactly_the_outliers_are_blamed_on_the_engine() {
        let outlier = |index: u32| index % 6 == 3 && index < 60;
        let mut records: Vec<Rollout> = (0..64)
            .map(|index| {
                let decode = if outlier(index) { [-0.1, -0.2] } else { [-0.1, -6.0] };
                let mut record = rollout(index, &decode, &[-0.1, -6.0]);
                record.prefill = record.trainer.clone();
                record
            })
            .collect();
        let blamed = blame_requests(&records, 0.0).unwrap();
        assert_eq!(blamed.len(), 64);
        let listed: Vec<u32> = blamed
            .iter()
            .filter(|(_, blame)| *blame == Blame::Engine)
            .map(|(request, _)| request.rollout_idx)
            .collect();
        assert_eq!(listed, (0..64).filter(|&index| outlier(index)).collect::<Vec<_>>());
        assert_eq!(listed.len(), 10);
        assert!(blamed.iter().all(|(_, blame)| matches!(blame, Blame::Engine | Blame::Clean)));

        // Without all three values of every token there is no verdict.
        records[0].prefill = None;
        records[1].trainer.as_mut().unwrap()[1] = None;
        records[2].prefill.as_mut().unwrap()[0] = Some(LogProb::new(f32::NAN));
        let blamed = blame_requests(&records[..3], 0.0).unwrap();
        assert_eq!(blamed, [(records[2].completion.id, Blame::Prefill)]);
    }
}
