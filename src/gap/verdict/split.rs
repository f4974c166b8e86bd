//! What block ids alone can say, for records whose engine keeps its layout to itself.

use std::collections::BTreeSet;

use super::stale::is_stale;
use super::{cases, Case, Culprit, Evidence, SIDE_MIN};
use crate::base::BlockId;
use crate::gap::finding::FindingKind;

/// One block id parts the bad requests from the good ones without exception, those aside that a
/// stale first chunk explains.
pub(super) fn by_block<'a>(evidence: &Evidence<'a>, bad: &[Case<'a>]) -> Option<Culprit<'a>> {
    let stale = |case: &&Case| is_stale(case, evidence.floor);
    let bad: Vec<Case> = bad.iter().filter(|case| !stale(case)).copied().collect();
    // A bad request without state is no matter of state addresses.
    let bad_blocks = bad.iter().map(highest_state_block).collect::<Option<Vec<_>>>()?;
    let lowest_bad = *bad_blocks.iter().min()?;
    let good: Vec<BlockId> = cases(evidence)
        .filter(|case| case.sequence.gap().is_some_and(|gap| gap <= evidence.floor))
        .filter_map(|case| highest_state_block(&case))
        .collect();
    let highest_good = *good.iter().max()?;
    if bad.len() < SIDE_MIN || good.len() < SIDE_MIN || highest_good >= lowest_bad {
        return None;
    }
    let message = format!(
        "all {} requests whose highest state block is {lowest_bad} or above are bad, all {} below \
         are good (up to block {highest_good}): the address of a block wraps from some id in \
         {}..={lowest_bad} on",
        bad.len(),
        good.len(),
        highest_good.get() + 1,
    );
    let blocks = BTreeSet::from([lowest_bad]);
    Some(Culprit { kind: FindingKind::AddressWrap, cases: bad, blocks, index_bits: None, message })
}

/// Of the last life.
fn highest_state_block(case: &Case) -> Option<BlockId> {
    case.rollout.completion.state_blocks().iter().map(|held| held.block).max()
}
