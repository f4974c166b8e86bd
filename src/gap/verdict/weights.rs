//! Weights that did not arrive.

use super::looked::{Column, Looked};
use super::{Case, Culprit, Evidence};
use crate::gap::finding::FindingKind;
use crate::gap::pair::Leg;

/// So many differing tensors are named; the rest is only counted.
const TENSORS_NAMED_MAX: usize = 8;

/// The engine sampled with other weights than the trainer scored with. A request whose engine does
/// not agree with itself has something else the matter with it, too.
pub(super) fn weights_not_synced<'a>(
    evidence: &Evidence<'a>,
    bad: &[Case<'a>],
) -> Option<Culprit<'a>> {
    let legs = evidence.pairs.legs;
    if legs.infer() == Leg::Trainer || legs.train() != Leg::Trainer {
        return None;
    }
    let fingerprints = |case: &Case| {
        let engine = case.rollout.completion.engine_fingerprint?;
        case.rollout.trainer_fingerprint.filter(|&trainer| trainer != engine).map(|t| (engine, t))
    };
    let consistent = |case: &&Case<'a>| {
        Looked::at(case, evidence).agree(Column::Decode, Column::Prefill) != Some(false)
    };
    let cases = bad.iter().filter(|case| fingerprints(case).is_some()).filter(consistent);
    let cases: Vec<Case> = cases.copied().collect();
    let (engine, trainer) = fingerprints(cases.first()?)?;
    let told = cases[0].rollout.completion.weight_version;
    let version = |fingerprint| {
        let same = |one: &&super::WeightsOf| one.fingerprint == fingerprint;
        evidence.weights.iter().find(same).map(|one| one.version)
    };
    let mut message = format!("the engine sampled with weights {engine:016x} (version {told}");
    match version(engine) {
        Some(found) if found != told => {
            message += &format!(" by its own account, in truth the trainer's version {found})");
        }
        _ => message += ")",
    }
    message += &format!(", the trainer scored with {trainer:016x}");
    if let Some(version) = version(trainer) {
        message += &format!(" (version {version})");
    }
    message += &tensors(evidence);
    Some(Culprit::new(FindingKind::WeightsNotSynced, cases, message))
}

/// Which ones differ, where that is known.
fn tensors(evidence: &Evidence) -> String {
    let differ = evidence.tensors.iter().filter(|tensor| tensor.engine != tensor.trainer);
    let differing: Vec<&str> = differ.map(|tensor| tensor.name.as_str()).collect();
    if differing.is_empty() {
        return String::new();
    }
    let named = &differing[..differing.len().min(TENSORS_NAMED_MAX)];
    let (count, all) = (differing.len(), evidence.tensors.len());
    let more = if named.len() < count { ", ..." } else { "" };
    format!("; {count} of {all} tensors differ: {}{more}", named.join(", "))
}
