//! A result that depends on what is computed beside it, and how: what leaks from a neighbour, or
//! from padding, spares those that have none; an order of sums that follows the batch spares
//! nobody.

use std::collections::{HashMap, HashSet};

use super::looked::{Column, Looked};
use super::{cases, Case, Culprit, Evidence, SIDE_MIN};
use crate::base::RequestId;
use crate::gap::finding::FindingKind;
use crate::gap::stats;

/// What moved positions may do to rotary ones, which know differences alone, in f32, nats.
const ROTARY_MAX: f64 = 1e-5;

/// Of a trainer that repeats itself and is right about each sequence alone; or of an engine whose
/// replay is right alone and wrong in company.
pub(super) fn company<'a>(evidence: &Evidence<'a>, rest: &[Case<'a>]) -> Option<Culprit<'a>> {
    trainer(evidence, rest).or_else(|| engine(evidence, rest))
}

fn trainer<'a>(evidence: &Evidence<'a>, rest: &[Case<'a>]) -> Option<Culprit<'a>> {
    let of_trainer = |case: &&Case<'a>| Looked::at(case, evidence).engine_is_consistent();
    let cases: Vec<Case> = rest.iter().filter(of_trainer).copied().collect();
    let looked = || cases.iter().filter(|case| case.probe.is_some());
    let right = |case: &Case| Looked::at(case, evidence).trainer_is_right_alone();
    if looked().next().is_none() || !looked().all(right) {
        return None;
    }
    let proof = format!(
        "scored alone the trainer agrees with the engine on all of {} bad requests looked at \
         again, and the same batch again repeats its log-probabilities",
        looked().count()
    );
    let packs = Packs::of(evidence, &cases);
    let has_state = evidence.state.is_some() || cases.iter().any(|one| one.sequence.slot.is_some());
    let (leaks, pads) = (packs.firsts.parts(), packs.longest.parts());
    let (kind, how) = match (leaks, pads) {
        (_, true) if !has_state && !leaks => {
            let gaps = cases.iter().filter_map(|case| case.sequence.gap());
            let gaps: Vec<f64> = gaps.collect();
            if stats::mean(&gaps)? <= ROTARY_MAX {
                return None;
            }
            (FindingKind::PositionOffset, packs.longest.told("the longest of their pack"))
        }
        (false, false) if packs.spares_nobody() => {
            (FindingKind::BatchDependentReduction, spread_of(&cases))
        }
        (false, false) => return None,
        (true, _) => (FindingKind::PackingLeak, packs.firsts.told("the first of their pack")),
        (false, true) => (FindingKind::PackingLeak, packs.longest.told("the longest of theirs")),
    };
    Some(Culprit::new(kind, cases, format!("batch composition: {proof}; {how}")))
}

fn spread_of(cases: &[Case]) -> String {
    let tokens = cases.iter().flat_map(|case| case.sequence.finite());
    let ratios: Vec<f64> = tokens.map(|token| token.d().exp()).collect();
    let out = stats::fraction(ratios.into_iter(), |ratio| !(0.9..=1.1).contains(&ratio));
    format!(
        "first and last, longest and shortest of a pack are bad alike: the order of a sum follows \
         the batch; {:.2} % of their tokens have a probability ratio outside [0.9, 1.1]",
        100.0 * out.unwrap_or(0.0)
    )
}

fn engine<'a>(evidence: &Evidence<'a>, rest: &[Case<'a>]) -> Option<Culprit<'a>> {
    let looked = |case: &Case<'a>| Looked::at(case, evidence);
    let of_engine = |case: &&Case<'a>| !looked(case).engine_is_consistent();
    let cases: Vec<Case> = rest.iter().filter(of_engine).copied().collect();
    let by_company = |case: &Case<'a>| {
        looked(case).replay_is_right()
            && looked(case).agree(Column::DecodeAgain, Column::DecodeTogether) == Some(false)
    };
    let probed = cases.iter().filter(|case| case.probe.is_some());
    let (count, all) = probed.fold((0, true), |(n, all), one| (n + 1, all && by_company(one)));
    (count > 0 && all).then(|| {
        let message = format!(
            "batch composition: decoded again alone in a fresh pool, {count} of {count} bad \
             requests looked at again agree with prefill and trainer; decoded side by side in a \
             fresh pool they do not, so that neither cache nor scheduling has a part in it"
        );
        Culprit::new(FindingKind::BatchDependentReduction, cases, message)
    })
}

/// How the members of packs fare that would be spared by one cause, and the others.
#[derive(Default)]
struct Sides {
    spared_good: usize,
    spared_bad: usize,
    others_good: usize,
    others_bad: usize,
}

impl Sides {
    fn add(&mut self, spared: bool, bad: bool) {
        *match (spared, bad) {
            (true, false) => &mut self.spared_good,
            (true, true) => &mut self.spared_bad,
            (false, false) => &mut self.others_good,
            (false, true) => &mut self.others_bad,
        } += 1;
    }

    /// Whether the bad are all among the others, and most of these are bad.
    fn parts(&self) -> bool {
        self.spared_bad == 0
            && self.spared_good > 0
            && self.others_bad >= SIDE_MIN
            && self.others_bad >= self.others_good
    }

    fn told(&self, who: &str) -> String {
        format!(
            "all {} that are {who} are good, {} of the {} others are bad",
            self.spared_good,
            self.others_bad,
            self.others_bad + self.others_good,
        )
    }
}

/// Packs of more than one sequence.
#[derive(Default)]
struct Packs {
    /// Nothing stands before these.
    firsts: Sides,
    /// No padding goes to these.
    longest: Sides,
}

impl Packs {
    fn of(evidence: &Evidence, bad: &[Case]) -> Self {
        let bad: HashSet<RequestId> = bad.iter().map(Case::request).collect();
        // Bad for another reason, or not compared: these show nothing of their pack.
        let is_silent = |case: &Case| {
            case.sequence.gap().is_none()
                || (case.sequence.is_bad(evidence.floor) && !bad.contains(&case.request()))
        };
        let silent: HashSet<RequestId> =
            cases(evidence).filter(is_silent).map(|case| case.request()).collect();
        let lengths: HashMap<RequestId, usize> = evidence
            .rollouts
            .iter()
            .map(|one| &one.completion)
            .map(|done| (done.id, done.prompt.len() + done.tokens.len()))
            .collect();
        let mut found = Self::default();
        let packs = evidence.probes.map_or(&[][..], |probes| &probes.packs);
        for pack in packs.iter().filter(|pack| pack.len() > 1) {
            let length = |request: &RequestId| lengths.get(request).copied().unwrap_or(0);
            let longest = pack.iter().map(length).max().unwrap_or(0);
            for (at, request) in pack.iter().enumerate() {
                if silent.contains(request) {
                    continue;
                }
                let is_bad = bad.contains(request);
                found.firsts.add(at == 0, is_bad);
                found.longest.add(length(request) == longest, is_bad);
            }
        }
        found
    }

    fn spares_nobody(&self) -> bool {
        let bad = self.firsts.spared_bad + self.firsts.others_bad;
        self.firsts.spared_bad > 0 && self.longest.spared_bad > 0 && bad >= SIDE_MIN
    }
}
