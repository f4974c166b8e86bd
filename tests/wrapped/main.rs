//! What the replay foresees is what the engine does: who has a gap, from which token on, and why.

mod addresses;
mod case;
#[path = "../common/mod.rs"]
mod common;
mod laps;

use gapscope::engine::{Cause, Completion, Forecast, Misread, StateBlock};

use addresses::Addresses;
use case::{first_gap, run, Kind, Outcome};

const CASES: u64 = 300;

/// How often what the cases are about has happened.
#[derive(Debug, Default)]
struct Totals {
    requests: u64,
    wrong: u64,
    /// Cases that wrap and whose gaps were foreseen from the completions too.
    plain_that_wrap: u64,
    clean: u64,
    /// Requests with misreads of one cause alone.
    stale: u64,
    wrapped: u64,
    overwritten: u64,
    /// In plain cases, requests whose first sampled token is wrong already: a second chunk found
    /// that the first one's state was overwritten.
    hit_between_chunks: u64,
    /// A request's own store for another of its groups had hit it.
    hit_by_itself: u64,
    /// Wrapped states that decode rows looked for among zeros, and among an earlier request's
    /// bytes.
    found_zeros: u64,
    found_previous: u64,
    /// Preempted requests with a gap, and of those the ones that were right again later.
    preempted: u64,
    recovered: u64,
    /// Right until a life that began after a preemption.
    relapsed: u64,
}

#[test]
fn the_replay_is_exact_in_both_directions() {
    let mut totals = Totals::default();
    for seed in 0..CASES {
        let kinds = [Kind::Plain, Kind::Splits, Kind::Plain, Kind::Pressed, Kind::Plain];
        let outcome = run(seed, kinds[seed as usize % kinds.len()]);
        the_replay_agrees(&outcome);
        if outcome.kind == Kind::Plain {
            the_addresses_agree(&outcome);
        }
        totals.add(&outcome);
    }
    // The alarm rings: everything that the cases are about has happened.
    println!("{totals:?}");
    let Totals { plain_that_wrap, clean, .. } = totals;
    assert!(plain_that_wrap >= 100 && clean >= 40, "{totals:?}");
    let Totals { stale, wrapped, overwritten, .. } = totals;
    assert!(stale > 20 && wrapped > 100 && overwritten > 20, "{totals:?}");
    let Totals { hit_between_chunks, hit_by_itself, .. } = totals;
    assert!(hit_between_chunks > 0 && hit_by_itself > 0, "{totals:?}");
    let Totals { found_zeros, found_previous, .. } = totals;
    assert!(found_zeros > 20 && found_previous > 20, "{totals:?}");
    let Totals { preempted, recovered, relapsed, .. } = totals;
    assert!(preempted > 10 && recovered > 0 && relapsed > 0, "{totals:?}");
}

/// Same lives, same victims, same first token.
fn the_replay_agrees(outcome: &Outcome) {
    let Outcome { text, completions, forecasts, gaps, .. } = outcome;
    for ((done, forecast), gaps) in completions.iter().zip(forecasts).zip(gaps) {
        assert_eq!((done.id, &done.lives), (forecast.id, &forecast.lives), "{text}");
        assert_eq!(done.tokens.len(), forecast.sampled as usize, "{}, {text}", done.id);
        let foreseen = forecast.first_wrong.map(|first| first.get());
        assert_eq!(first_gap(gaps), foreseen, "{forecast:?}, {text}");
        assert!(foreseen.is_none() || !forecast.misreads.is_empty(), "{forecast:?}, {text}");
    }
}

/// The victims are the requests with a state block past the threshold that sample a second token,
/// and those whose bytes were hit: nobody else, and from the very token.
fn the_addresses_agree(outcome: &Outcome) {
    let Outcome { text, completions, gaps, .. } = outcome;
    assert_eq!(outcome.preemptions, 0, "{text}");
    let collateral = Addresses::new(outcome).collateral();
    for (done, gaps) in completions.iter().zip(gaps) {
        let wrapped = (is_wrapped(outcome, done) && done.tokens.len() >= 2).then_some(1);
        let hit = collateral.get(&done.id).copied();
        let first = wrapped.into_iter().chain(hit).min();
        assert_eq!(first_gap(gaps), first, "{}, {text}", done.id);
        // A lost state is never found again.
        let from = first.map_or(gaps.len(), |first| first as usize);
        assert!(gaps[from..].iter().all(|gap| *gap), "{} {gaps:?}, {text}", done.id);
    }
}

/// Whether it holds a state block that the index does not reach.
fn is_wrapped(outcome: &Outcome, done: &Completion) -> bool {
    let first = outcome.layout.first_wrapped_block(outcome.bits);
    let is_past = |first| done.state_blocks().iter().any(|held| held.block >= first);
    first.is_some_and(is_past)
}

impl Totals {
    fn add(&mut self, outcome: &Outcome) {
        let Outcome { completions, forecasts, gaps, kind, .. } = outcome;
        let is_plain = *kind == Kind::Plain;
        let wraps = completions.iter().any(|done| is_wrapped(outcome, done));
        self.plain_that_wrap += u64::from(is_plain && wraps);
        self.clean += u64::from(forecasts.iter().all(|one| one.first_wrong.is_none()));
        for ((done, forecast), gaps) in completions.iter().zip(forecasts).zip(gaps) {
            self.requests += 1;
            if let Some(first) = first_gap(gaps) {
                self.wrong += 1;
                self.hit_between_chunks += u64::from(is_plain && first == 0);
                self.add_causes(done, forecast);
                self.add_lives(done, gaps, first);
            }
        }
    }

    fn add_causes(&mut self, done: &Completion, forecast: &Forecast) {
        let misreads = &forecast.misreads;
        let only = |cause| u64::from(misreads.iter().all(|one| one.cause == cause));
        self.stale += only(Cause::StaleState);
        self.wrapped += only(Cause::Wrapped);
        self.overwritten += only(Cause::Overwritten);
        let of = |one: &Misread| one.found.map(|found| found.request);
        let by_itself =
            |one: &&Misread| one.cause == Cause::Overwritten && of(one) == Some(done.id);
        self.hit_by_itself += misreads.iter().filter(by_itself).count() as u64;
        for one in misreads.iter().filter(|one| one.cause == Cause::Wrapped) {
            let held = done.lives.iter().flat_map(|life| &life.state_blocks);
            let mut before = held.filter(|held| held.block == one.block);
            let left_by =
                |held: &StateBlock| held.previous_owner.is_some_and(|id| of(one) == Some(id));
            self.found_previous += u64::from(before.clone().any(left_by));
            let is_virgin = |held: &StateBlock| held.previous_owner.is_none();
            self.found_zeros += u64::from(before.any(is_virgin) && one.found.is_none());
        }
    }

    fn add_lives(&mut self, done: &Completion, gaps: &[bool], first: u32) {
        let Some(second) = done.lives.get(1) else { return };
        self.preempted += 1;
        let later_lives = done.lives.iter().filter(|life| life.sampled_before > first);
        let right_again = later_lives.map(|life| life.sampled_before as usize);
        self.recovered +=
            u64::from(right_again.into_iter().any(|from| gaps.get(from) == Some(&false)));
        self.relapsed += u64::from(first >= second.sampled_before);
    }
}
