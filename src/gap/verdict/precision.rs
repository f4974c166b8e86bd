//! Two healthy differences that add up to more than the floor.

use super::looked::{Column, Looked};
use super::{Case, Culprit, Evidence};
use crate::gap::finding::FindingKind;

/// Decode against prefill is within the floor and so is prefill against trainer; only the two
/// together are over it. A floor of 0 leaves nothing to healthy arithmetic.
pub(super) fn precision<'a>(evidence: &Evidence<'a>, rest: &[Case<'a>]) -> Option<Culprit<'a>> {
    if evidence.floor <= 0.0 {
        return None;
    }
    let both_within = |case: &&Case<'a>| {
        let looked = Looked::at(case, evidence);
        looked.agree(Column::Decode, Column::Prefill) == Some(true)
            && looked.agree(Column::Prefill, Column::Trainer) == Some(true)
    };
    let cases: Vec<Case> = rest.iter().filter(both_within).copied().collect();
    let largest = cases.iter().filter_map(|case| case.sequence.gap()).reduce(f64::max)?;
    let message = format!(
        "decode against prefill and prefill against trainer are each within the floor of {:?}; \
         together they come to {largest:e}",
        evidence.floor,
    );
    Some(Culprit::new(FindingKind::Precision, cases, message))
}
