//! Ranks that fail, and ranks that never come.

use std::cell::Cell;

use super::*;
use crate::base::{Rank, TokenId};
use crate::config::{self, Config};
use crate::model::Preset;
use crate::ops::array::Array;
use crate::ops::shards::Arriving;
use crate::ops::weights::Weights;

#[derive(Clone, Copy, Debug)]
enum How {
    Panics,
    Hangs,
}

/// A rank whose call number `at` goes wrong.
struct Bad {
    end: SharedMemory,
    calls: Cell<u32>,
    at: u32,
    how: How,
}

impl Bad {
    fn count(&self) -> &SharedMemory {
        let call = self.calls.replace(self.calls.get() + 1);
        match self.how {
            How::Panics => assert!(call != self.at, "planted in call {call}"),
            How::Hangs if call == self.at => loop {
                std::thread::park();
            },
            How::Hangs => {}
        }
        &self.end
    }
}

impl Collective for Bad {
    fn rank(&self) -> Rank {
        self.end.rank()
    }

    fn world_size(&self) -> usize {
        self.end.world_size()
    }

    fn all_gather(&self, shard: &Weights, len: usize) -> Result<Arriving, TrainerError> {
        self.count().all_gather(shard, len)
    }

    fn reduce_scatter(&self, whole: Array) -> Result<Array, TrainerError> {
        self.count().reduce_scatter(whole)
    }

    fn all_reduce(&self, numbers: &[f64]) -> Result<Vec<f64>, TrainerError> {
        self.count().all_reduce(numbers)
    }
}

/// Far longer than a healthy rank takes for a sequence of six tokens.
const SHORT: Duration = Duration::from_secs(2);

fn trainer(ranks: usize, bad: usize, at: u32, how: How) -> Trainer {
    let text = "name = \"x\"\nmodel.preset = \"tiny-jamba\"\n";
    let sets = [format!("trainer.ranks={ranks}")];
    let config: Config = config::parse(text, "test.toml", &sets).expect("a valid config");
    let plan = Plan::new(Preset::TinyJamba.config());
    let (num, master) = (plan.numerics_of(&config), Preset::weights(&plan, 1));
    let end = |end: SharedMemory| -> (Box<dyn Collective>, Device) {
        let is_bad = end.rank().index() == bad;
        match is_bad {
            true => (Box::new(Bad { end, calls: Cell::new(0), at, how }), Device::Cpu),
            false => (Box::new(end), Device::Cpu),
        }
    };
    let ends = SharedMemory::patient_world(ranks, SHORT).into_iter().map(end).collect();
    Trainer::over(ends, (plan, num), config.trainer, &master, SHORT).expect("few threads")
}

fn sequence() -> Vec<Sequence> {
    vec![Sequence { tokens: [3, 4, 5, 6, 7, 8].map(TokenId::new).to_vec(), prompt_len: 2 }]
}

/// A step of the tiny model calls 5 units forward, once to agree, 5 units and 5 sums backward, and
/// once for the norm.
fn check(ranks: usize, bad: usize, at: u32, how: How, wanted: &str) {
    let mut trainer = trainer(ranks, bad, at, how);
    let case = format!("{ranks} ranks, rank {bad} {how:?} in call {at}");
    let error = trainer.warm_step(&sequence()).expect_err("it has gone wrong").to_string();
    assert!(error.starts_with(wanted), "{case}: {error}");
    let later = trainer.score(&sequence(), &Contract::PLAIN).expect_err("a rank is gone");
    assert!(later.is_of_another(), "{case}: {later}");
}

#[test]
fn a_rank_that_panics_is_named_with_its_words() {
    for (ranks, bad, at) in [(2, 0, 0), (2, 1, 5), (3, 2, 6), (4, 1, 11), (3, 0, 16)] {
        let wanted = format!("rank {bad} of the trainer has failed: planted in call {at}");
        check(ranks, bad, at, How::Panics, &wanted);
    }
}

#[test]
fn a_rank_that_hangs_is_named_within_a_bound() {
    for (ranks, bad, at) in [(2, 0, 3), (3, 2, 16)] {
        let wanted = format!("rank {bad} did not come within 2 s");
        check(ranks, bad, at, How::Hangs, &wanted);
    }
}

/// Nothing is waited for that comes after the ranks' last meeting, but for so long.
#[test]
fn a_rank_that_hangs_on_its_own_is_named_too() {
    let trainer = trainer(2, 1, 5, How::Hangs);
    trainer.score(&sequence(), &Contract::PLAIN).expect("five calls");
    let alone = trainer.world.each(|worker| match worker.index() {
        0 => Ok(()),
        _ => loop {
            std::thread::park();
        },
    });
    let error = alone.expect_err("it never ends").to_string();
    assert!(error.starts_with("rank 1 did not come within 2 s"), "{error}");
}
