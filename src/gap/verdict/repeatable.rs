//! A trainer that does not repeat itself, as with dropout left on (huggingface/trl#3234).

use super::looked::{Column, Looked};
use super::{Case, Culprit, Evidence};
use crate::gap::finding::FindingKind;

/// A spread explains a gap that is at most so many times as large.
const EXPLAINS: f64 = 10.0;

/// The same batch scored twice gives two answers, about as far apart as the gap is large, while the
/// engine agrees with itself.
pub(super) fn not_repeatable<'a>(
    evidence: &Evidence<'a>,
    rest: &[Case<'a>],
) -> Option<Culprit<'a>> {
    let looked = |case: &Case<'a>| Looked::at(case, evidence);
    let spread = |case: &Case<'a>| looked(case).apart(Column::Trainer, Column::TrainerAgain);
    let gap = |case: &Case| case.sequence.gap().unwrap_or(0.0);
    let (mut seen, mut noisy, mut widest, mut largest) = (0, 0, 0.0_f64, 0.0_f64);
    for case in rest {
        let Some(spread) = spread(case) else { continue };
        seen += 1;
        noisy += usize::from(spread > evidence.floor);
        (widest, largest) = (widest.max(spread), largest.max(gap(case)));
    }
    if seen == 0 || noisy < seen || widest * EXPLAINS < largest {
        return None;
    }
    let cases: Vec<Case> =
        rest.iter().filter(|case| looked(case).engine_is_consistent()).copied().collect();
    let message = format!(
        "the trainer is not repeatable: the same batch scored twice differs by up to {widest:e} \
         in all {seen} requests looked at again, where the gap is up to {largest:e}; the \
         engine agrees with its own prefill"
    );
    (!cases.is_empty()).then(|| Culprit::new(FindingKind::NotRepeatable, cases, message))
}
