//! Runs within the test's own process, which leave records rather than files.

use std::collections::BTreeSet;

use gapscope::base::{RequestId, Step};
use gapscope::config::{self, Config};
use gapscope::gap::{Finding, Pairs, Tally, Totals};
use gapscope::rollout::Rollout;
use gapscope::run::Session;

/// An experiment's text with a few settings changed, each `KEY=VALUE`.
pub fn experiment(text: &str, sets: &[&str]) -> Config {
    let sets: Vec<String> = sets.iter().map(|&set| set.to_owned()).collect();
    config::parse(text, "experiment", &sets).unwrap_or_else(|e| panic!("{sets:?}: {e}"))
}

/// A step as it was compared.
pub struct PlayedStep {
    pub rollouts: Vec<Rollout>,
    pub pairs: Pairs,
}

impl PlayedStep {
    /// The rollouts with any gap at all, each with the index of its first bad token.
    pub fn bad(&self) -> impl Iterator<Item = (&Rollout, usize)> {
        let both = self.rollouts.iter().zip(&self.pairs.sequences);
        both.filter_map(|(rollout, pairs)| Some((rollout, pairs.first_bad(0.0)?.index())))
    }
}

/// A whole run, after its last step.
pub struct Played {
    pub session: Session,
    pub steps: Vec<PlayedStep>,
    pub totals: Totals,
    pub tally: Tally,
    pub findings: Vec<Finding>,
}

impl Played {
    pub fn new(config: &Config) -> Self {
        let mut session = Session::open(config).expect("the experiment can start");
        let (mut totals, mut tally) = (Totals::default(), Tally::default());
        let (mut steps, mut findings) = (Vec::new(), Vec::new());
        let first_wrapped = session.first_wrapped_block();
        for step in (1..=config.steps).map(Step::new) {
            let mut rollouts = session.generate(step).expect("requests that can run");
            session.score(&mut rollouts).expect("scores");
            let comparison = session.compare(step, &mut rollouts).expect("a comparison");
            session.update(&rollouts).expect("an update");
            totals.add(&comparison.gap);
            let floor = comparison.gap.floor;
            tally.add(&Tally::of(&rollouts, &comparison.pairs, floor, first_wrapped));
            findings.extend(comparison.findings);
            steps.push(PlayedStep { rollouts, pairs: comparison.pairs });
        }
        Self { session, steps, totals, tally, findings }
    }

    pub fn spikes(&self) -> Vec<u64> {
        self.totals.spike_steps.iter().map(|step| step.get()).collect()
    }

    /// Every request with any gap at all.
    pub fn bad(&self) -> BTreeSet<RequestId> {
        let bad = self.steps.iter().flat_map(PlayedStep::bad);
        bad.map(|(rollout, _)| rollout.completion.id).collect()
    }

    /// Blocks taken, in pools: above 1 some block has been used twice.
    pub fn laps(&self) -> f64 {
        let pool = self.session.engine().pool();
        pool.taken() as f64 / pool.num_usable() as f64
    }

    /// Every token was compared and is the same to the bit, and nothing is found.
    pub fn assert_exact(&self, what: &str) {
        let config = &self.session.config;
        let rollout = &config.rollout;
        assert!(rollout.ignore_eos, "lengths are known");
        let requests = u64::from(rollout.prompts_per_step * rollout.rollouts_per_prompt);
        let tokens = config.steps * requests * u64::from(rollout.max_new_tokens);
        assert_eq!((self.totals.n_tokens, self.totals.nonfinite), (tokens, 0), "{what}");
        assert_eq!(self.totals.gap_max, Some(0.0), "{what}");
        assert_eq!(self.totals.bitwise_equal, tokens, "{what}");
        assert!(self.findings.is_empty(), "{what}: {:#?}", self.findings);
    }
}
