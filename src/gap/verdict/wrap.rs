//! A state address that is cut to too few bits (vllm-project/vllm#35275).
//!
//! A prefill row stores the scan state of block s at element s * stride, cut to some bits; a decode
//! row reads it at the whole address. So from one block on, a request is right as long as its
//! prefill row samples and wrong as soon as a decode row does. And what was stored lies low in the
//! buffer, in another block's page: a live request that holds that block is wrong too. The width
//! need not be known: it is the one under which every record makes sense.

use std::collections::{BTreeSet, HashSet};

use super::lived::Lived;
use super::overwrite::{Hit, Stores};
use super::{cases, split, Case, Culprit, Evidence, SIDE_MIN};
use crate::base::{BlockId, RequestId};
use crate::gap::finding::FindingKind;
use crate::gap::pair::Leg;
use crate::ops::pages::StateView;

/// Widths that are tried; 64 bits cut nothing.
const BITS: std::ops::Range<u32> = 8..64;
/// So many overwritten blocks are named; the rest is only counted.
const OVERWRITTEN_NAMED_MAX: usize = 8;

/// The requests from one state block on are bad, and so is whoever held what they overwrote.
pub(super) fn address_wrap<'a>(evidence: &Evidence<'a>, bad: &[Case<'a>]) -> Option<Culprit<'a>> {
    if evidence.pairs.legs.infer() != Leg::Decode {
        return None;
    }
    let Some(state) = evidence.state else { return split::by_block(evidence, bad) };
    let witness = |case: Case<'a>| Witness {
        case,
        lives: Lived::of(&case, evidence.floor),
        is_bad: case.sequence.is_bad(evidence.floor),
    };
    let witnesses: Vec<Witness> = cases(evidence).map(witness).collect();
    let highest = lives(&witnesses).filter_map(|(_, lived)| lived.highest_state_block()).max()?;
    let widths = match evidence.index_bits {
        Some(known) => known..known + 1,
        None => BITS,
    };
    let mut found: Vec<Wrap> = widths
        .take_while(|&bits| first_wrapped(&state, bits) <= u64::from(highest.get()))
        .filter_map(|bits| Wrap::explaining(&witnesses, &state, bits))
        .filter(|wrap| evidence.index_bits.is_some() || wrap.is_proven())
        .collect();
    // Several fit where no good request holds a block between them. The widest claims the least.
    let widest = found.pop()?;
    let narrower: Vec<(u32, BlockId)> = found.iter().map(|wrap| (wrap.bits, wrap.first)).collect();
    Some(widest.culprit(&state, &narrower))
}

/// The lowest block whose product slot * stride leaves the width.
fn first_wrapped(state: &StateView, bits: u32) -> u64 {
    (1_u64 << bits).div_ceil(state.ssm_stride)
}

/// One request and its lives.
struct Witness<'a> {
    case: Case<'a>,
    lives: Vec<Lived<'a>>,
    is_bad: bool,
}

/// Every life of the step, and whose it is.
fn lives<'a>(witnesses: &'a [Witness<'a>]) -> impl Iterator<Item = (RequestId, &'a Lived<'a>)> {
    let of = |one: &'a Witness<'a>| one.lives.iter().map(|lived| (one.case.request(), lived));
    witnesses.iter().flat_map(of)
}

/// Why a request is bad.
#[derive(Default)]
struct Reasons {
    /// A life read its own state back from where it was not stored ...
    wrapped: bool,
    /// ... and showed it as a decode row after a prefill row.
    shown: bool,
    /// One for each life that another's store damaged.
    hits: Vec<Hit>,
}

impl Witness<'_> {
    fn held(&self, first: BlockId) -> bool {
        self.lives.iter().any(|lived| lived.holds(first))
    }

    /// `None` where some life is bad for no reason at hand. A stale first chunk is one, but not of
    /// this culprit.
    fn reasons(&self, first: BlockId, stores: &Stores) -> Option<Reasons> {
        // Else a bad token may be of no life on record.
        self.lives.first().filter(|lived| lived.life.sampled_before == 0)?;
        let mut reasons = Reasons::default();
        for lived in self.lives.iter().filter(|lived| !lived.began_stale()) {
            let Some(bad) = lived.first_bad().map(|token| token.engine_step) else { continue };
            if lived.holds(first) && lived.first_read_back().is_some_and(|step| step <= bad) {
                reasons.wrapped = true;
                reasons.shown |= lived.handed_over_bad() == Some(true);
            } else {
                reasons.hits.push(stores.hit(self.case.request(), lived, bad)?);
            }
        }
        Some(reasons)
    }
}

/// A width that explains every record of the step.
struct Wrap<'a> {
    bits: u32,
    first: BlockId,
    /// Bad, with a state block from the first wrapped one on.
    victims: Vec<Case<'a>>,
    /// Of those, the ones that a decode row shows, reading what a prefill row had stored.
    shown: usize,
    /// Good, though a decode row read what a prefill row had stored: with all state blocks below.
    /// The highest block of each.
    good: Vec<BlockId>,
    /// Good all the same: nothing they sampled could show it.
    silent: usize,
    overwritten: Vec<(Case<'a>, Hit)>,
}

impl<'a> Wrap<'a> {
    fn explaining(witnesses: &[Witness<'a>], state: &StateView, bits: u32) -> Option<Self> {
        let first = BlockId::new(u32::try_from(first_wrapped(state, bits)).ok()?);
        let came_back = |lived: &Lived| lived.handed_over_bad() == Some(false);
        if lives(witnesses).any(|(_, lived)| lived.holds(first) && came_back(lived)) {
            return None;
        }
        let stores = Stores::new(lives(witnesses), state, first, bits);
        let (mut victims, mut shown, mut overwritten) = (Vec::new(), 0, Vec::new());
        for witness in witnesses.iter().filter(|witness| witness.is_bad) {
            let reasons = witness.reasons(first, &stores)?;
            victims.extend(reasons.wrapped.then_some(witness.case));
            shown += usize::from(reasons.shown);
            overwritten.extend(reasons.hits.into_iter().map(|hit| (witness.case, hit)));
        }
        let (high, low): (Vec<&Witness>, Vec<&Witness>) =
            witnesses.iter().filter(|one| !one.is_bad).partition(|one| one.held(first));
        let highest = |one: &Witness| one.lives.iter().filter_map(Lived::highest_state_block).max();
        let tested = low.into_iter().filter(|one| one.lives.iter().any(came_back));
        let (good, silent) = (tested.filter_map(highest).collect(), high.len());
        let found = Self { bits, first, victims, shown, good, silent, overwritten };
        let says_something = !found.victims.is_empty() || !found.overwritten.is_empty();
        says_something.then_some(found)
    }

    /// Whether this step alone says so: where all are bad, every block that they have in common
    /// would do.
    fn is_proven(&self) -> bool {
        self.shown >= SIDE_MIN && self.good.len() >= SIDE_MIN
    }

    fn culprit(self, state: &StateView, narrower: &[(u32, BlockId)]) -> Culprit<'a> {
        let message = self.message(state, narrower);
        let mut blocks = BTreeSet::from([self.first]);
        blocks.extend(narrower.iter().map(|&(_, first)| first));
        blocks.extend(self.overwritten.iter().map(|(_, hit)| hit.block));
        let mut listed = HashSet::new();
        let all = self.victims.into_iter().chain(self.overwritten.into_iter().map(|one| one.0));
        let cases = all.filter(|case| listed.insert(case.request())).collect();
        let index_bits = narrower.is_empty().then_some(self.bits);
        Culprit { kind: FindingKind::AddressWrap, cases, blocks, index_bits, message }
    }

    fn message(&self, state: &StateView, narrower: &[(u32, BlockId)]) -> String {
        let Self { bits, first, victims, good, silent, overwritten, .. } = self;
        let stride = state.ssm_stride;
        let mut message = format!(
            "block {first} is the first whose state address wraps, at 2^{bits} / {stride}: the \
             state index is {bits} bits wide"
        );
        for (bits, first) in narrower {
            message += &format!(", or {bits} (block {first}, which nothing here rules out)");
        }
        message += &format!(
            "; {} requests with a state block there or above are bad, {} below are good",
            victims.len(),
            good.len(),
        );
        if let Some(highest) = good.iter().max() {
            message += &format!(" (up to block {highest})");
        }
        if *silent > 0 {
            message += &format!(", {silent} there or above sampled nothing that could show it");
        }
        for (_, hit) in overwritten.iter().take(OVERWRITTEN_NAMED_MAX) {
            message += &format!("; {hit}");
        }
        if let Some(more @ 1..) = overwritten.len().checked_sub(OVERWRITTEN_NAMED_MAX) {
            message += &format!("; and {more} more were overwritten");
        }
        message
    }
}

#[cfg(test)]
mod tests;
