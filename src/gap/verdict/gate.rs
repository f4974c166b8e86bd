//! Experts that one side weighs otherwise (radixark/miles#2722).

use std::collections::BTreeSet;

use super::looked::{Column, Looked};
use super::{Case, Culprit, Evidence};
use crate::gap::finding::FindingKind;
use crate::gap::routes::LayerRoutes;
use crate::model::PartKind;

/// The engine agrees with itself and has the trainer's weights; yet in every request looked into,
/// its prefill parts from the trainer's pass first in a layer with experts, where the same tokens
/// go to the same experts with other weights. Without the two routers' choices nothing is said: a
/// wrong product within an expert looks the same.
pub(super) fn gate_weights<'a>(evidence: &Evidence<'a>, rest: &[Case<'a>]) -> Option<Culprit<'a>> {
    let of_meaning = |case: &&Case<'a>| {
        let looked = Looked::at(case, evidence);
        let done = &case.rollout.completion;
        looked.agree(Column::Decode, Column::Prefill) == Some(true)
            && looked.agree(Column::Prefill, Column::Trainer) == Some(false)
            && done.engine_fingerprint.is_some()
            && case.rollout.trainer_fingerprint == done.engine_fingerprint
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
         {seen} of {} bad requests looked into parts from the trainer's pass first in {}; of the \
         {} tokens that come to it alike the experts agree on 100 %, and their gate weights \
         differ by {:.3e} on average, by {:.3e} at most",
        cases.len(),
        parts.join(" or "),
        sums.tokens,
        sums.weight_diff_sum / sums.weighed as f64,
        sums.weight_diff_max,
    );
    Some(Culprit::new(FindingKind::GateWeights, cases, message))
}

#[cfg(test)]
mod tests {
    use super::super::looks_tests::{off, Legs4, Scene, GOOD};
    use super::super::FindingKind::{GateWeights, Unexplained, WeightsNotSynced};
    use super::*;
    use crate::base::{LayerId, Position};
    use crate::gap::FirstDifference;
    use crate::model::Part;

    const RENORMALISED: LayerRoutes = LayerRoutes {
        tokens: 8,
        agreeing: 8,
        weighed: 16,
        weight_diff_sum: 1.6,
        weight_diff_max: 0.125,
    };

    /// Three requests, two of which a trainer that repeats itself does not agree with: they part
    /// in such a part, with such routes.
    fn scene(kind: PartKind, routes: Option<LayerRoutes>) -> Scene {
        let trainer = off(0.5);
        let bad = Legs4 { trainer, trainer_again: trainer, trainer_alone: trainer, ..GOOD };
        let mut scene = Scene::of(&[bad, GOOD, bad]);
        for at in [0, 2] {
            let part = Part { layer: Some(LayerId::new(1)), kind };
            let first = FirstDifference { position: Position::new(0), part };
            let probe = &mut scene.probes.requests[at];
            (probe.prefill_trainer, probe.routes) = (Some(first), routes);
        }
        scene
    }

    #[test]
    fn k25_the_same_experts_with_other_weights() {
        let found = scene(PartKind::Moe, Some(RENORMALISED)).check(&[GateWeights]);
        assert_eq!(found[0].requests_total, 2);
        for told in [
            "prefill of all 2 of 2 bad requests",
            "first in layer 1 (moe); of the 16 tokens",
            "agree on 100 %, and their gate weights differ by 1.000e-1 on average, by 1.250e-1",
        ] {
            assert!(found[0].message.contains(told), "{}", found[0].message);
        }
    }

    /// It is told where they part all the same.
    #[test]
    fn what_else_parts_in_a_layer_with_experts_is_not_theirs() {
        let elsewhere = Some(LayerRoutes { agreeing: 7, ..RENORMALISED });
        let alike =
            Some(LayerRoutes { weight_diff_sum: 0.0, weight_diff_max: 0.0, ..RENORMALISED });
        for (kind, routes, layer) in [
            (PartKind::Moe, elsewhere, "layer 1 (moe)"),
            (PartKind::Moe, alike, "layer 1 (moe)"),
            (PartKind::Moe, None, "layer 1 (moe)"),
            (PartKind::Mlp, None, "layer 1 (mlp)"),
        ] {
            let found = scene(kind, routes).check(&[Unexplained]);
            let told =
                format!("s1.p0.r0 parts from the trainer's pass first in {layer} at position 0");
            assert!(found[0].message.contains(&told), "{}", found[0].message);
        }
    }

    #[test]
    fn other_weights_or_another_request_that_parts_elsewhere_are_no_gates() {
        let mut stale = scene(PartKind::Moe, Some(RENORMALISED));
        for record in &mut stale.records {
            record.completion.engine_fingerprint = Some(5);
        }
        stale.check(&[WeightsNotSynced]);
        let mut unknown = scene(PartKind::Moe, Some(RENORMALISED));
        unknown.records.iter_mut().for_each(|record| record.trainer_fingerprint = None);
        unknown.check(&[Unexplained]);
        let mut one_elsewhere = scene(PartKind::Moe, Some(RENORMALISED));
        one_elsewhere.probes.requests[2].prefill_trainer = None;
        one_elsewhere.check(&[Unexplained]);
    }
}
