//! An engine that sleeps between steps.

use gapscope::base::WeightVersion;
use gapscope::run;

use super::{IMPOSTER, WRAP};
use crate::common::play::{experiment, Played};

const SLEEPS: [&str; 3] = ["engine.sleep=off", "engine.sleep=keep_pool", "engine.sleep=drop_pool"];

/// New weights reach an engine that sleeps, and what is sampled with them does not depend on the
/// pool that it wakes with.
#[test]
fn a_clean_run_that_learns_is_the_same_however_the_engine_sleeps() {
    let runs = SLEEPS.map(|sleep| {
        let learns = ["trainer.update=adamw", "trainer.learning_rate=1e-3", "steps=3"];
        let sets = [&learns[..], &["engine.state_index_bits=64", sleep]].concat();
        let run = Played::new(&experiment(WRAP, &sets));
        run.assert_exact(sleep);
        assert_eq!(run.session.engine().version(), Some(WeightVersion::new(3)));
        run
    });
    let [off, kept, dropped] = &runs;
    for (step, awake) in off.steps.iter().enumerate() {
        assert_eq!(awake.rollouts, kept.steps[step].rollouts, "step {step}");
        for (awake, slept) in awake.rollouts.iter().zip(&dropped.steps[step].rollouts) {
            let (a, b) = (&awake.completion, &slept.completion);
            assert_eq!((a.id, &a.tokens), (b.id, &b.tokens), "step {step}");
            assert_eq!(a.engine_fingerprint, b.engine_fingerprint);
            assert_eq!(awake.trainer, slept.trainer);
        }
    }
    let is_virgin = |run: &Played| {
        let rollouts = run.steps[2].rollouts.iter();
        let mut blocks = rollouts.flat_map(|one| one.completion.state_blocks());
        blocks.all(|block| block.previous_owner.is_none())
    };
    assert_eq!((is_virgin(kept), is_virgin(dropped)), (false, true), "blocks of the last step");
}

/// What is foretold knows of the sleep.
#[test]
fn a_dry_run_foretells_what_a_dropped_pool_hides() {
    for (text, spikes) in [(WRAP, "2, 4"), (IMPOSTER, "3-4")] {
        for (sleep, expected) in SLEEPS.into_iter().zip([spikes, spikes, "none"]) {
            let said = run::dry_run(&experiment(text, &[sleep])).expect("an experiment");
            let line = said.lines().find_map(|line| line.strip_prefix("spike steps       "));
            let line = line.expect("spikes are foretold");
            assert!(line.starts_with(expected), "{sleep}: {line}");
        }
    }
}
