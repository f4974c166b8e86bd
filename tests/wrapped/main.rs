//! What the replay foresees is what the engine does: who has a gap, from which token on, and why.

mod addresses;
mod case;
#[path = "../common/mod.rs"]
mod common;

use std::collections::{BTreeMap, BTreeSet};

use gapscope::base::RequestId;
use gapscope::engine::{Cause, Completion, Forecast};

use addresses::Addresses;
use case::{run, Kind, Outcome};

#[derive(Debug, Default)]
struct Totals {
    requests: u64,
    wrong: u64,
    clean_cases: u64,
    preempted_cases: u64,
    /// Requests that went wrong by this cause, of one cause alone.
    stale: u64,
    wrapped: u64,
    overwritten: u64,
    collateral: u64,
    /// A preempted request that sampled right tokens after wrong ones.
    recovered: u64,
    /// A preempted request whose later life went wrong.
    relapsed: u64,
}

#[test]
fn the_replay_is_exact_in_both_directions() {
    let mut totals = Totals::default();
    for seed in 0..160 {
        let kind = [Kind::Plain, Kind::Splits, Kind::Plain, Kind::Pressed, Kind::Plain];
        let outcome = run(seed, kind[seed as usize % kind.len()]);
        check(&outcome);
        totals.add(&outcome);
    }
    println!("{totals:?}");
}

fn check(outcome: &Outcome) {
    let Outcome { text, completions, forecasts, measured, .. } = outcome;
    for ((done, forecast), measured) in completions.iter().zip(forecasts).zip(measured) {
        let foreseen = forecast.first_wrong.map(|first| first.get());
        assert_eq!((done.id, &done.lives), (forecast.id, &forecast.lives), "{text}");
        assert_eq!(done.tokens.len(), forecast.sampled as usize, "{}, {text}", done.id);
        if *measured != foreseen {
            println!("REPLAY {}: {measured:?} {forecast:?}, {text}", done.id);
        }
    }
    if outcome.kind == Kind::Plain {
        assert_eq!(outcome.preemptions, 0, "{text}");
        let addresses = Addresses::new(outcome);
        let collateral = addresses.collateral();
        for (done, measured) in completions.iter().zip(measured) {
            let wrapped = is_wrapped(outcome, done).then_some(1);
            let first = [collateral.get(&done.id).copied(), wrapped].into_iter().flatten().min();
            if *measured != first {
                println!("ADDR {}: {measured:?} {first:?}, {text}", done.id);
            }
        }
    }
}

/// Whether a state block is past the index's reach, and a token is sampled after the prefill's.
fn is_wrapped(outcome: &Outcome, done: &Completion) -> bool {
    let first = outcome.layout.first_wrapped_block(outcome.bits);
    let is_past = |first| done.state_blocks().iter().any(|held| held.block >= first);
    first.is_some_and(is_past) && done.tokens.len() >= 2
}

impl Totals {
    fn add(&mut self, outcome: &Outcome) {
        let Outcome { forecasts, .. } = outcome;
        self.requests += forecasts.len() as u64;
        self.preempted_cases += u64::from(outcome.preemptions > 0);
        self.clean_cases += u64::from(forecasts.iter().all(|one| one.first_wrong.is_none()));
        for forecast in forecasts.iter().filter(|one| one.first_wrong.is_some()) {
            self.wrong += 1;
            let only = |cause| forecast.misreads.iter().all(|one| one.cause == cause);
            self.stale += u64::from(only(Cause::StaleState));
            self.wrapped += u64::from(only(Cause::Wrapped));
            self.overwritten += u64::from(only(Cause::Overwritten));
        }
    }
}
