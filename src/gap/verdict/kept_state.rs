//! A state that was kept through a preemption (vllm-project/vllm-metal#488).

use super::lived::Lived;
use super::{others, Case, Culprit, Evidence};
use crate::base::{BlockId, EngineStep};
use crate::engine::{Phase, StateBlock};
use crate::gap::finding::FindingKind;
use crate::gap::pair::Leg;

/// All that is bad was sampled after a preemption, by lives that hold the very state blocks of the
/// life before: neither freed nor handed out anew, they still hold where that life had come to,
/// and the recomputation began from there.
pub(super) fn state_kept_on_preempt<'a>(
    evidence: &Evidence<'a>,
    bad: &[Case<'a>],
) -> Option<Culprit<'a>> {
    if evidence.pairs.legs.infer() != Leg::Decode {
        return None;
    }
    let of = |case: &Case<'a>| Some((*case, kept(case, evidence.floor)?));
    let found: Vec<(Case, Vec<Kept>)> = bad.iter().filter_map(of).collect();
    let (first, lives) = found.first()?;
    let blocks: Vec<String> = lives[0].blocks.iter().map(|held| held.block.to_string()).collect();
    let mut message = format!(
        "request {}: its life from engine step {} on, resumed after a preemption, holds block {} \
         as the life before did, not handed out anew: it began from the state that was left there; \
         what was sampled before the preemption is good",
        first.request(),
        lives[0].engine_step,
        blocks.join(", "),
    );
    message += &others(found.len() - 1, "resumed");
    let blocks = found.iter().flat_map(|(_, lives)| lives).flat_map(Kept::blocks).collect();
    let cases = found.iter().map(|(case, _)| *case).collect();
    Some(Culprit { blocks, ..Culprit::new(FindingKind::StateKeptOnPreempt, cases, message) })
}

/// A resumed life, and what it holds as the one before did.
struct Kept<'a> {
    engine_step: EngineStep,
    blocks: Vec<&'a StateBlock>,
}

impl Kept<'_> {
    fn blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        self.blocks.iter().map(|held| held.block)
    }
}

/// The bad lives of a request, if each of them kept its state.
fn kept<'a>(case: &Case<'a>, floor: f64) -> Option<Vec<Kept<'a>>> {
    let lives = Lived::of(case, floor);
    let mut found = Vec::new();
    for (at, lived) in lives.iter().enumerate().filter(|(_, lived)| lived.first_bad().is_some()) {
        let before = &lives[at.checked_sub(1)?].life.state_blocks;
        let same = |held: &&StateBlock| {
            let mut before = before.iter();
            before.any(|was| (was.block, was.generation) == (held.block, held.generation))
        };
        let blocks: Vec<&StateBlock> = lived.life.state_blocks.iter().filter(same).collect();
        // A decode row would have read it whoever had left it.
        if blocks.is_empty() || lived.life.phase != Phase::Prefill {
            return None;
        }
        found.push(Kept { engine_step: lived.life.engine_step, blocks });
    }
    (!found.is_empty()).then_some(found)
}
