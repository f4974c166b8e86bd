//! Where in the model the forwards of a finding's requests part, as the end of its message.

use super::{worst_of, Culprit};
use crate::gap::finding::FindingKind;
use crate::gap::layers::FirstDifference;
use crate::gap::probes::Probe;

/// Of the worst of its requests that was looked into. A shift and another contract are of what was
/// done with a forward's numbers, not of the forward; gate weights have told of the layer already.
pub(super) fn inside(culprit: &Culprit) -> String {
    let told_otherwise =
        [FindingKind::MaskOrShift, FindingKind::LogprobMode, FindingKind::GateWeights];
    if told_otherwise.contains(&culprit.kind) {
        return String::new();
    }
    let first = |of: fn(&Probe) -> Option<FirstDifference>| {
        let found = culprit.cases.iter().filter_map(move |case| Some((case, of(case.probe?)?)));
        worst_of(found, |(case, _)| case)
    };
    let mut text = String::new();
    if let Some((case, first)) = first(|probe| probe.decode_prefill) {
        let request = case.request();
        text += &format!("; decoded again {request} parts from its own prefill first in {first}");
    }
    if let Some((case, first)) = first(|probe| probe.prefill_trainer) {
        let request = case.request();
        text +=
            &format!("; the prefill of {request} parts from the trainer's pass first in {first}");
    }
    text
}
