//! What a second look at a few requests of a spike says: the same tokens once more, alone and in
//! the same company, each in a place of its own.

use serde::{Deserialize, Serialize};

use super::layers::FirstDifference;
use super::routes::LayerRoutes;
use crate::base::{LogProb, RequestId};
use crate::rollout::{LegLogProbs, Rollout};

/// The second looks of one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Probes {
    /// The worst requests, then as many good ones.
    pub requests: Vec<Probe>,
    /// The requests that the trainer took together, in order; empty where it does not say.
    pub packs: Vec<Vec<RequestId>>,
}

/// One request's, a value a completion token; `None` is "not looked".
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probe {
    pub request: RequestId,
    /// Prompt as one prefill row, then its tokens as decode rows, alone in a fresh pool.
    pub decode_again: Option<LegLogProbs>,
    /// The same beside the other probed requests, in one fresh pool.
    pub decode_together: Option<LegLogProbs>,
    /// The same pack by the trainer once more.
    pub trainer_again: Option<LegLogProbs>,
    /// The trainer's pass over this sequence and no other.
    pub trainer_alone: Option<LegLogProbs>,
    /// Where the engine's prefill and the trainer's pass part, both alone; `None` where nothing
    /// parts, or nobody looked.
    pub prefill_trainer: Option<FirstDifference>,
    /// Where decode rows in a fresh pool and one prefill part; `None` as above.
    pub decode_prefill: Option<FirstDifference>,
    /// Where `prefill_trainer` is in a layer with experts: the choices that engine and trainer make
    /// there, of the tokens that come to it with the same bits.
    pub routes: Option<LayerRoutes>,
}

impl Probes {
    #[must_use]
    pub fn of(&self, request: RequestId) -> Option<&Probe> {
        self.requests.iter().find(|probe| probe.request == request)
    }
}

/// The largest |a - b| in nats over the tokens under a rollout's mask that both have; infinite
/// where one side alone is not finite, or both are in unlike ways. `None` where nothing was
/// compared, or the two are not of the same tokens.
#[must_use]
pub(super) fn apart(
    rollout: &Rollout,
    a: Option<&LegLogProbs>,
    b: Option<&LegLogProbs>,
) -> Option<f64> {
    let (a, b, mask) = (a?, b?, &rollout.loss_mask);
    if a.len() != mask.len() || b.len() != mask.len() {
        return None;
    }
    let counted = a.iter().zip(b).zip(mask).filter(|(_, &counted)| counted);
    counted.filter_map(|((a, b), _)| Some(difference((*a)?, (*b)?))).reduce(f64::max)
}

fn difference(a: LogProb, b: LogProb) -> f64 {
    match a.get().to_bits() == b.get().to_bits() {
        true => 0.0,
        false if a.is_finite() && b.is_finite() => (f64::from(a.get()) - f64::from(b.get())).abs(),
        false => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gap::testing::rollout;

    #[test]
    fn legs_are_apart_by_their_largest_difference() {
        let (nan, inf) = (f32::NAN, f32::NEG_INFINITY);
        for (a, b, expected) in [
            (&[-1.0, -2.0][..], &[-1.0, -2.5][..], Some(0.5)),
            (&[-1.0, -2.0], &[-1.0, -2.0], Some(0.0)),
            (&[nan, -2.0], &[nan, -2.0], Some(0.0)),
            (&[nan, -2.0], &[inf, -2.0], Some(f64::INFINITY)),
            (&[inf, -2.0], &[-1.0, -2.0], Some(f64::INFINITY)),
            (&[-1.0], &[-1.0, -2.0], None),
        ] {
            let leg = |values: &[f32]| -> LegLogProbs {
                values.iter().map(|&logp| Some(LogProb::new(logp))).collect()
            };
            let record = rollout(0, &[-1.0, -2.0], &[-1.0, -2.0]);
            assert_eq!(apart(&record, Some(&leg(a)), Some(&leg(b))), expected, "{a:?} {b:?}");
            assert_eq!(apart(&record, Some(&leg(a)), None), None);
        }
        let mut masked = rollout(0, &[-1.0, -2.0], &[-3.0, -2.5]);
        masked.loss_mask[0] = false;
        let (decode, trainer) = (masked.decode(), masked.trainer.clone());
        assert_eq!(apart(&masked, Some(&decode), trainer.as_ref()), Some(0.5));
    }
}
