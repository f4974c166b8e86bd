//! A first chunk that ran as a decode row over a used block (vllm-project/vllm#32118).

use super::lived::Lived;
use super::{others, worst_of, Case, Culprit, Evidence};
use crate::base::{BlockId, RequestId};
use crate::gap::finding::FindingKind;
use crate::gap::pair::Leg;

/// A life's first row was a decode row, which reads its state unconditionally, and a state block
/// held another's.
pub(super) fn stale_state<'a>(evidence: &Evidence<'a>, bad: &[Case<'a>]) -> Option<Culprit<'a>> {
    if evidence.pairs.legs.infer() != Leg::Decode {
        return None;
    }
    let of = |case: &Case<'a>| Some((*case, stale_lives(case, evidence.floor)?));
    let found: Vec<(Case, Vec<Lived>)> = bad.iter().filter_map(of).collect();
    let (worst, lives) = worst_of(found.iter(), |one| &one.0)?;
    let message = message(worst.request(), &lives[0], found.len() - 1);
    let blocks = found.iter().flat_map(|(_, lives)| lives).flat_map(used).map(|(block, _)| block);
    let blocks = blocks.collect();
    let cases = found.into_iter().map(|(case, _)| case).collect();
    Some(Culprit { kind: FindingKind::StaleState, cases, blocks, index_bits: None, message })
}

/// Whether all that is bad of a request began so.
pub(super) fn is_stale(case: &Case, floor: f64) -> bool {
    stale_lives(case, floor).is_some()
}

/// The lives in which a request sampled bad tokens, if each of them began stale.
fn stale_lives<'a>(case: &Case<'a>, floor: f64) -> Option<Vec<Lived<'a>>> {
    let lives = Lived::of(case, floor).into_iter();
    let bad: Vec<Lived> = lives.filter(|lived| lived.first_bad().is_some()).collect();
    (!bad.is_empty() && bad.iter().all(Lived::began_stale)).then_some(bad)
}

/// State blocks that another request had held, and who.
fn used<'a>(lived: &'a Lived) -> impl Iterator<Item = (BlockId, RequestId)> + 'a {
    lived.life.state_blocks.iter().filter_map(|held| Some((held.block, held.previous_owner?)))
}

fn message(request: RequestId, lived: &Lived, more: usize) -> String {
    let left: Vec<String> =
        used(lived).map(|(block, owner)| format!("block {block} left by {owner}")).collect();
    let resumed = if lived.resumed { ", resumed after preemption" } else { "" };
    let message = format!(
        "request {request}{resumed}: its first chunk, {} scheduled with 0 computed tokens, ran as \
         a decode row in engine step {} and read {}",
        lived.life.scheduled_tokens,
        lived.life.engine_step,
        left.join(", "),
    );
    message + &others(more, "began")
}
