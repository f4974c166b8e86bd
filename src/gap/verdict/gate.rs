//! Experts that one side weighs otherwise (radixark/miles#2722).

use std::collections::BTreeSet;

use super::looked::{Column, Looked};
use super::{Case, Culprit, Evidence};
use crate::gap::finding::FindingKind;
use crate::gap::routes::LayerRoutes;
use crate::model::PartKind;

/// The engine agrees with itself and has the trainer's weights; yet in every request looked into,
/// its prefill parts from the trainer's pass first in a layer with experts, where the same tokens go
/// to the same experts with other weights. Without the two routers' choices nothing is said: a wrong
/// product within an expert looks the same.
pub(super) fn gate_weights<'a>(evidence: &Evidence<'a>, rest: &[Case<'a>]) -> Option<Culprit<'a>> {
    let of_meaning = |case: &&Case<'a>| {
        let looked = Looked::at(case, evidence);
        let done = &case.rollout.completion;
        looked.agree(Column::Decode, Column::Prefill) == Some(true)
            && looked.agree(Column::Prefill, Column::Trainer) == Some(false)
            && case.rollout.trainer_fingerprint == Some(done.engine_fingerprint)
    };
    let cases: Vec<Case> = rest.iter().filter(of_meaning).copied().collect();
    let (mut parts, mut sums, mut seen) = (BTreeSet::new(), LayerRoutes::default(), 0);
    // Good requests are looked at, too, but not into; these cases are all bad.
    for probe in cases.iter().filter_map(|case| case.probe) {
        let part = probe.prefill_trainer.filter(|first| first.part.kind == PartKind::Moe)?.part;
        let routes = probe.routes?;
        if routes.agreeing < routes.tokens || routes.weight_diff_max == 0.0 {
            return None;
        }
        parts.insert((part.layer, part.to_string()));
        sums.merge(&routes);
        seen += 1;
    }
    if seen == 0 {
        return None;
    }
    let parts: Vec<String> = parts.into_iter().map(|(_, told)| told).collect();
    let message = format!(
        "the two sides weigh their experts unlike: with equal weights the engine's prefill of all \
         {seen} of {} bad requests looked into parts from the trainer's pass first in {}; of the {} \
         tokens that come to it alike the experts agree on 100 %, and their gate weights differ by \
         {:.3e} on average, by {:.3e} at most",
        cases.len(),
        parts.join(" or "),
        sums.tokens,
        sums.weight_diff_sum / sums.weighed as f64,
        sums.weight_diff_max,
    );
    Some(Culprit::new(FindingKind::GateWeights, cases, message))
}
