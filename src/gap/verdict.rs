//! From evidence to culprits. A rule speaks only where the records show its cause; what no rule
//! explains stays so.

mod lived;
mod overwrite;
mod split;
mod stale;
mod wrap;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use self::stale::stale_state;
use self::wrap::address_wrap;
use super::blame::blame_requests;
use super::finding::{Finding, FindingKind};
use super::floor::worst;
use super::layers::FirstDifference;
use super::pair::{Leg, Legs, Pairs, Sequence};
use super::place::LagScore;
use crate::base::{BlockId, RequestId, Step};
use crate::ops::pages::StateView;
use crate::rollout::Rollout;

/// So many differing tensors are named; the rest is only counted.
const TENSORS_NAMED_MAX: usize = 8;

/// What is known of one step.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    pub step: Step,
    pub rollouts: &'a [Rollout],
    /// Of the same rollouts in the same order; of each sequence at least its
    /// [`Sequence::landmarks`].
    pub pairs: &'a Pairs,
    /// Of the whole sequences over the floor: [`super::shift`].
    pub shift: Option<LagScore>,
    /// The largest |d| that healthy arithmetic explains, nats.
    pub floor: f64,
    /// Where both sides' fingerprints are known tensor by tensor; may be empty.
    pub tensors: &'a [TensorFingerprint],
    /// Where a block's recurrent state lies in the engine's pages; `None` where the engine has no
    /// state or does not say.
    pub state: Option<StateView>,
    /// What an earlier step's finding says of the same engine: [`Finding::index_bits`].
    pub index_bits: Option<u32>,
    /// Where a model's logits were at hand to find it.
    pub mode: Option<&'a UnlikeMode>,
    /// Where the two sides' forwards part, of requests whose residual streams were traced.
    pub layers: Option<&'a HashMap<RequestId, FirstDifference>>,
}

/// Log-probabilities of another contract than their records state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnlikeMode {
    /// Of which, and how that is known.
    pub message: String,
    /// Whose gap it explains.
    pub requests: HashSet<RequestId>,
}

/// Both sides' fingerprint of one weight tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorFingerprint {
    pub name: String,
    pub engine: u64,
    pub trainer: u64,
}

/// The culprits of a step: none without a spike, at least one with one. A request may have several.
#[must_use]
pub fn verdict(evidence: &Evidence) -> Vec<Finding> {
    let bad: Vec<Case> =
        cases(evidence).filter(|case| case.sequence.is_bad(evidence.floor)).collect();
    if bad.is_empty() {
        return Vec::new();
    }
    let rules = [mask_or_shift, logprob_mode, weights_not_synced, stale_state, address_wrap];
    let mut culprits: Vec<Culprit> = rules.iter().filter_map(|rule| rule(evidence, &bad)).collect();
    let explained: HashSet<RequestId> =
        culprits.iter().flat_map(|culprit| &culprit.cases).map(|case| case.request()).collect();
    let rest: Vec<Case> =
        bad.iter().filter(|case| !explained.contains(&case.request())).copied().collect();
    if !rest.is_empty() {
        culprits.push(unexplained(evidence, rest));
    }
    culprits.into_iter().map(|culprit| culprit.finding(evidence)).collect()
}

/// One rollout and its comparison.
#[derive(Clone, Copy)]
struct Case<'a> {
    rollout: &'a Rollout,
    sequence: &'a Sequence,
}

impl Case<'_> {
    fn request(&self) -> RequestId {
        self.sequence.request
    }
}

fn cases<'a>(evidence: &Evidence<'a>) -> impl Iterator<Item = Case<'a>> {
    let (rollouts, sequences) = (evidence.rollouts, &evidence.pairs.sequences);
    assert_eq!(rollouts.len(), sequences.len(), "pairs and rollouts are of one step");
    std::iter::zip(rollouts, sequences).map(|(rollout, sequence)| {
        assert_eq!(rollout.completion.id, sequence.request, "pairs and rollouts are in one order");
        Case { rollout, sequence }
    })
}

/// What a rule found, before lists are cut to their bounds.
struct Culprit<'a> {
    kind: FindingKind,
    cases: Vec<Case<'a>>,
    blocks: BTreeSet<BlockId>,
    index_bits: Option<u32>,
    message: String,
}

impl Culprit<'_> {
    fn finding(self, evidence: &Evidence) -> Finding {
        let first_bad =
            self.cases.iter().filter_map(|case| case.sequence.first_bad(evidence.floor));
        let requests = self.cases.iter().map(Case::request);
        Finding {
            kind: self.kind,
            leg: evidence.pairs.legs,
            step: evidence.step,
            first_bad_position: first_bad.min(),
            requests_total: self.cases.len() as u64,
            requests: requests.take(Finding::LISTED_MAX).collect(),
            blocks: self.blocks.into_iter().take(Finding::LISTED_MAX).collect(),
            index_bits: self.index_bits,
            message: self.message,
        }
    }
}

/// The legs agree once one is moved against the other. No knob of an engine does that.
fn mask_or_shift<'a>(evidence: &Evidence<'a>, bad: &[Case<'a>]) -> Option<Culprit<'a>> {
    let found = evidence.shift?;
    let (infer, train) = (evidence.pairs.legs.infer().name(), evidence.pairs.legs.train().name());
    let by = match found.lag.unsigned_abs() {
        1 => "one".to_owned(),
        by => by.to_string(),
    };
    let side = if found.lag > 0 { "left" } else { "right" };
    let message = format!(
        "off by {by}: {infer}[i{:+}] against {train}[i] differs by {:e} on average over {} pairs, \
         unshifted the same tokens differ by {:e}; the {train} side's log-probabilities or mask \
         are moved to the {side}",
        found.lag, found.abs_diff_mean, found.pairs, found.unshifted_abs_diff_mean,
    );
    let kind = FindingKind::MaskOrShift;
    Some(Culprit { kind, cases: bad.to_vec(), blocks: BTreeSet::new(), index_bits: None, message })
}

/// One side's log-probabilities are of another distribution than the record says.
fn logprob_mode<'a>(evidence: &Evidence<'a>, bad: &[Case<'a>]) -> Option<Culprit<'a>> {
    let mode = evidence.mode?;
    let cases = bad.iter().filter(|case| mode.requests.contains(&case.request()));
    let cases: Vec<Case> = cases.copied().collect();
    let (kind, message) = (FindingKind::LogprobMode, mode.message.clone());
    (!cases.is_empty()).then(|| Culprit {
        kind,
        cases,
        blocks: BTreeSet::new(),
        index_bits: None,
        message,
    })
}

/// The engine sampled with other weights than the trainer scored with.
fn weights_not_synced<'a>(evidence: &Evidence<'a>, bad: &[Case<'a>]) -> Option<Culprit<'a>> {
    let legs = evidence.pairs.legs;
    if legs.infer() == Leg::Trainer || legs.train() != Leg::Trainer {
        return None;
    }
    let fingerprints = |case: &Case| {
        let engine = case.rollout.completion.engine_fingerprint;
        case.rollout.trainer_fingerprint.filter(|&trainer| trainer != engine).map(|t| (engine, t))
    };
    let cases: Vec<Case> =
        bad.iter().filter(|case| fingerprints(case).is_some()).copied().collect();
    let (engine, trainer) = fingerprints(cases.first()?)?;
    let version = cases[0].rollout.completion.weight_version;
    let mut message = format!(
        "the engine sampled with weights {engine:016x} (version {version}), the trainer scored \
         with {trainer:016x}"
    );
    let differing: Vec<&str> = evidence
        .tensors
        .iter()
        .filter(|tensor| tensor.engine != tensor.trainer)
        .map(|tensor| tensor.name.as_str())
        .collect();
    if !differing.is_empty() {
        let named = &differing[..differing.len().min(TENSORS_NAMED_MAX)];
        let (count, all) = (differing.len(), evidence.tensors.len());
        message += &format!("; {count} of {all} tensors differ: {}", named.join(", "));
        message += if named.len() < count { ", ..." } else { "" };
    }
    let kind = FindingKind::WeightsNotSynced;
    Some(Culprit { kind, cases, blocks: BTreeSet::new(), index_bits: None, message })
}

/// What is left, with its worst token and what the three-way check says of it.
fn unexplained<'a>(evidence: &Evidence<'a>, rest: Vec<Case<'a>>) -> Culprit<'a> {
    let legs = evidence.pairs.legs;
    let sequences = rest.iter().map(|case| case.sequence.clone()).collect();
    let worst = worst(&Pairs { legs, sequences }, 1)[0];
    let mut message = format!(
        "{} of {} requests have a gap over the floor of {:?}; the worst token is {} at completion \
         index {} of request {}: {} {}, {} {}",
        rest.len(),
        evidence.rollouts.len(),
        evidence.floor,
        worst.paired.token,
        worst.paired.index,
        worst.request,
        legs.infer().name(),
        worst.paired.infer.get(),
        legs.train().name(),
        worst.paired.train.get(),
    );
    if let Some(first) = evidence.layers.and_then(|layers| layers.get(&worst.request)) {
        message += &format!("; the two sides part in {first}");
    }
    // Records that cannot be paired three ways have been refused where they were paired.
    let blamed = match legs {
        Legs::TrainerReference => Vec::new(),
        _ => blame_requests(evidence.rollouts, evidence.floor).unwrap_or_default(),
    };
    let left: HashSet<RequestId> = rest.iter().map(Case::request).collect();
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for (_, blame) in blamed.iter().filter(|(request, _)| left.contains(request)) {
        *counts.entry(blame.to_string()).or_default() += 1;
    }
    for (blame, count) in counts {
        message += &format!("; three-way check of {count}: {blame}");
    }
    let blocks = rest.iter().filter_map(|case| case.sequence.slot).collect();
    Culprit { kind: FindingKind::Unexplained, cases: rest, blocks, index_bits: None, message }
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
