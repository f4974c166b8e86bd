//! Rules that go by one pool, where several engines sampled a step: a block of one has nothing to
//! do with the block of that number of another.

use std::collections::BTreeSet;
use std::iter::zip;

use super::{Case, Culprit, Evidence, Rule};
use crate::base::EngineIndex;

/// Of what a rule is asked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scope {
    /// Of all requests of the step.
    Step,
    /// Of each engine's requests by themselves: it goes by blocks or engine steps, which are those
    /// of one pool.
    Pool,
}

/// Asks a rule of each engine's requests by themselves. How wide a state index is, one engine may
/// show for all.
pub(super) fn of_each_engine<'a>(
    rule: Rule,
    evidence: &Evidence<'a>,
    bad: &[Case<'a>],
) -> Vec<Culprit<'a>> {
    let engines: BTreeSet<EngineIndex> = bad.iter().map(Case::engine).collect();
    let ask = |engine: EngineIndex, index_bits| {
        let own: Vec<Case> = bad.iter().filter(|case| case.engine() == engine).copied().collect();
        rule(&Evidence { engine: Some(engine), index_bits, ..*evidence }, &own)
    };
    let known = evidence.index_bits;
    let mut found: Vec<_> = engines.iter().map(|&engine| ask(engine, known)).collect();
    let shown = found.iter().flatten().find_map(|culprit| culprit.index_bits);
    if known.is_none() && shown.is_some() {
        for (&engine, found) in zip(&engines, &mut found) {
            *found = found.take().or_else(|| ask(engine, shown));
        }
    }
    found.into_iter().flatten().collect()
}
