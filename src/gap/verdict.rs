//! From evidence to culprits. A rule speaks only where the records show its cause; what no rule
//! explains stays so.

mod by_engine;
mod company;
mod decode_path;
mod end_token;
mod gate;
mod inside;
mod kept_state;
mod lived;
mod looked;
mod overwrite;
mod padding;
mod precision;
mod prefix;
mod repeatable;
mod shared;
mod split;
mod stale;
mod weights;
mod wrap;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use self::by_engine::{of_each_engine, Scope};
use self::company::company;
use self::decode_path::decode_path;
use self::end_token::end_token;
use self::gate::gate_weights;
use self::inside::inside;
use self::kept_state::state_kept_on_preempt;
use self::looked::second_look;
use self::padding::padding_write;
use self::precision::precision;
use self::prefix::stale_prefix_cache;
use self::repeatable::not_repeatable;
use self::shared::block_shared;
use self::stale::stale_state;
use self::weights::weights_not_synced;
use self::wrap::address_wrap;
use super::blame::{self, blame_requests};
use super::finding::{Finding, FindingKind};
use super::floor::worst;
use super::layers::FirstDifference;
use super::pair::{Legs, Pairs, Sequence};
use super::place::LagScore;
use super::probes::{Probe, Probes};
use crate::base::{BlockId, EngineIndex, RequestId, Step, WeightVersion};
use crate::ops::pages::StateView;
use crate::rollout::Rollout;

/// A pattern is believed from this many requests on each side of it.
const SIDE_MIN: usize = 3;

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
    /// Of what fingerprint each version of the trainer's weights was; may be empty.
    pub weights: &'a [WeightsOf],
    /// Whether its gap is one to speak of; without it only what the records say all the same is.
    pub spike: bool,
    /// A second look at a few of the requests.
    pub probes: Option<&'a Probes>,
    /// Of several engines the one that is looked at; `None` looks at all of them.
    pub engine: Option<EngineIndex>,
}

impl<'a> Evidence<'a> {
    /// What every step has; the rest is not known.
    #[must_use]
    pub fn new(step: Step, rollouts: &'a [Rollout], pairs: &'a Pairs, floor: f64) -> Self {
        Self {
            step,
            rollouts,
            pairs,
            shift: None,
            floor,
            tensors: &[],
            state: None,
            index_bits: None,
            mode: None,
            layers: None,
            weights: &[],
            spike: true,
            probes: None,
            engine: None,
        }
    }

    /// Whether its requests were sampled by several engines.
    fn is_of_several_engines(&self) -> bool {
        let mut engines = self.rollouts.iter().map(|rollout| rollout.completion.engine);
        engines.next().is_some_and(|first| engines.any(|other| other != first))
    }
}

/// One version of the trainer's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightsOf {
    pub version: WeightVersion,
    /// As [`Rollout::trainer_fingerprint`].
    pub fingerprint: u64,
}

/// Log-probabilities of another contract than their records state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnlikeMode {
    /// Of which, and how that is known.
    pub message: String,
    /// Whose gap it explains.
    pub requests: BTreeSet<RequestId>,
}

/// Both sides' fingerprint of one weight tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorFingerprint {
    pub name: String,
    pub engine: u64,
    pub trainer: u64,
}

/// A rule: what it explains of the given cases.
type Rule = for<'a> fn(&Evidence<'a>, &[Case<'a>]) -> Option<Culprit<'a>>;

/// Each names a cause that the records themselves show. A request may have several.
const EXACT: [(Rule, Scope); 9] = [
    (mask_or_shift, Scope::Step),
    (logprob_mode, Scope::Step),
    (weights_not_synced, Scope::Step),
    (stale_state, Scope::Pool),
    (stale_prefix_cache, Scope::Pool),
    (block_shared, Scope::Pool),
    (address_wrap, Scope::Pool),
    (state_kept_on_preempt, Scope::Pool),
    (padding_write, Scope::Pool),
];

/// Each goes by how a second look comes out, so that it is asked of what no exact rule explains.
/// In order: a trainer that does not repeat itself says nothing about company.
const BY_LOOKS: [Rule; 5] = [not_repeatable, company, decode_path, gate_weights, precision];

/// The culprits of a step: at least one with a spike; without one none, or what the records say
/// all the same. A request may have several.
#[must_use]
pub fn verdict(evidence: &Evidence) -> Vec<Finding> {
    let mut culprits: Vec<Culprit> = end_token(evidence).into_iter().collect();
    let is_bad = |case: &Case| evidence.spike && case.sequence.is_bad(evidence.floor);
    let bad: Vec<Case> = cases(evidence).filter(is_bad).collect();
    let first = culprits.len();
    if !bad.is_empty() {
        culprits.extend(EXACT.iter().flat_map(|&(rule, scope)| match scope {
            Scope::Step => Vec::from_iter(rule(evidence, &bad)),
            Scope::Pool => of_each_engine(rule, evidence, &bad),
        }));
    }
    let mut rest = unclaimed(&bad, &culprits[first..]);
    for rule in BY_LOOKS {
        if let Some(culprit) = rule(evidence, &rest) {
            rest = unclaimed(&rest, std::slice::from_ref(&culprit));
            culprits.push(culprit);
        }
    }
    if !rest.is_empty() {
        culprits.push(unexplained(evidence, rest));
    }
    culprits.into_iter().map(|culprit| culprit.finding(evidence)).collect()
}

fn unclaimed<'a>(cases: &[Case<'a>], culprits: &[Culprit<'a>]) -> Vec<Case<'a>> {
    let claimed = culprits.iter().flat_map(|culprit| &culprit.cases).map(Case::request);
    let claimed: HashSet<RequestId> = claimed.collect();
    cases.iter().filter(|case| !claimed.contains(&case.request())).copied().collect()
}

/// One rollout and its comparison.
#[derive(Clone, Copy)]
struct Case<'a> {
    rollout: &'a Rollout,
    sequence: &'a Sequence,
    probe: Option<&'a Probe>,
}

impl Case<'_> {
    fn request(&self) -> RequestId {
        self.sequence.request
    }

    fn engine(&self) -> EngineIndex {
        self.sequence.engine
    }
}

/// Those of the engine that is looked at.
fn cases<'a>(evidence: &Evidence<'a>) -> impl Iterator<Item = Case<'a>> {
    let (rollouts, sequences) = (evidence.rollouts, &evidence.pairs.sequences);
    let (probes, engine) = (evidence.probes, evidence.engine);
    assert_eq!(rollouts.len(), sequences.len(), "pairs and rollouts are of one step");
    let all = std::iter::zip(rollouts, sequences).map(move |(rollout, sequence)| {
        assert_eq!(rollout.completion.id, sequence.request, "pairs and rollouts are in one order");
        let probe = probes.and_then(|probes| probes.of(sequence.request));
        Case { rollout, sequence, probe }
    });
    all.filter(move |case| engine.is_none_or(|engine| case.engine() == engine))
}

/// The one whose request has the largest gap; the first of equals.
fn worst_of<'a: 'c, 'c, T>(
    found: impl Iterator<Item = T>,
    case: impl Fn(&T) -> &'c Case<'a>,
) -> Option<T> {
    let gap = |one: &T| case(one).sequence.gap().unwrap_or(0.0);
    found.reduce(|worst, next| if gap(&next) > gap(&worst) { next } else { worst })
}

/// How many requests more than the one told of there are, and what they did; nothing of none.
fn others(count: usize, did: &str) -> String {
    match count {
        0 => String::new(),
        1 => format!("; 1 other request {did} the same way"),
        _ => format!("; {count} other requests {did} the same way"),
    }
}

/// What a rule found, before lists are cut to their bounds.
struct Culprit<'a> {
    kind: FindingKind,
    cases: Vec<Case<'a>>,
    blocks: BTreeSet<BlockId>,
    index_bits: Option<u32>,
    message: String,
}

impl<'a> Culprit<'a> {
    /// Without blocks.
    fn new(kind: FindingKind, cases: Vec<Case<'a>>, message: String) -> Self {
        Self { kind, cases, blocks: BTreeSet::new(), index_bits: None, message }
    }

    fn finding(self, evidence: &Evidence) -> Finding {
        let first_bad =
            self.cases.iter().filter_map(|case| case.sequence.first_bad(evidence.floor));
        let requests = self.cases.iter().map(Case::request);
        let engine = self.engine().filter(|_| evidence.is_of_several_engines());
        let of_engine = engine.map_or(String::new(), |engine| format!("engine {engine}: "));
        let message = of_engine + &self.message + &self.three_way(evidence) + &inside(&self);
        Finding {
            kind: self.kind,
            leg: evidence.pairs.legs,
            step: evidence.step,
            engine,
            first_bad_position: first_bad.min(),
            requests_total: self.cases.len() as u64,
            requests: requests.take(Finding::LISTED_MAX).collect(),
            blocks: self.blocks.into_iter().take(Finding::LISTED_MAX).collect(),
            index_bits: self.index_bits,
            message,
        }
    }

    /// The engine of all its requests, if that is one.
    fn engine(&self) -> Option<EngineIndex> {
        let first = self.cases.first()?.engine();
        self.cases.iter().all(|case| case.engine() == first).then_some(first)
    }

    /// The gaps of its worst request whose three legs are known, with what they say.
    fn three_way(&self, evidence: &Evidence) -> String {
        if evidence.pairs.legs == Legs::TrainerReference {
            return String::new();
        }
        let complete = self.cases.iter().filter(|case| case.rollout.prefill.is_some());
        let worst = worst_of(complete, |case| case);
        let told = worst
            .and_then(|case| Some((case.request(), blame::told(case.rollout, evidence.floor)?)));
        told.map_or(String::new(), |(request, told)| format!("; its worst, {request}: {told}"))
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
    Some(Culprit::new(FindingKind::MaskOrShift, bad.to_vec(), message))
}

/// One side's log-probabilities are of another distribution than the record says. Other weights
/// may look like another temperature, and are known for what they are.
fn logprob_mode<'a>(evidence: &Evidence<'a>, bad: &[Case<'a>]) -> Option<Culprit<'a>> {
    let mode = evidence.mode?;
    let same_weights = |case: &&Case| {
        let engine = case.rollout.completion.engine_fingerprint;
        let trainer = case.rollout.trainer_fingerprint;
        engine.zip(trainer).is_none_or(|(engine, trainer)| engine == trainer)
    };
    let cases = bad.iter().filter(|case| mode.requests.contains(&case.request()));
    let cases: Vec<Case> = cases.filter(same_weights).copied().collect();
    let message = mode.message.clone();
    (!cases.is_empty()).then(|| Culprit::new(FindingKind::LogprobMode, cases, message))
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
    message += &second_look(evidence, &rest);
    let alike = rest.iter().all(|case| case.engine() == rest[0].engine());
    // Of several pools a number says nothing.
    let blocks = rest.iter().filter(|_| alike).filter_map(|case| case.sequence.slot).collect();
    Culprit { kind: FindingKind::Unexplained, cases: rest, blocks, index_bits: None, message }
}

#[cfg(test)]
mod looks_tests;
#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
