//! Padding rows without a block of their own (NVIDIA/TensorRT-LLM#13151).

use super::lived::Lived;
use super::{cases, Case, Culprit, Evidence};
use crate::base::{BlockId, EngineStep};
use crate::gap::finding::FindingKind;
use crate::gap::pair::Leg;

/// What a state leaves that others were written over is not this small, nats. A gap that nowhere
/// reaches it may be rounding, and whoever stands in the first row often stands there by chance.
const WRITTEN_OVER_NATS: f64 = 0.01;
/// After every engine step.
const LAST: EngineStep = EngineStep::new(u64::MAX);

/// Whoever stood in the first row of a batch with padding rows is bad from the next token on, and
/// nobody else is: the padding wrote its state to the first row's block.
pub(super) fn padding_write<'a>(evidence: &Evidence<'a>, bad: &[Case<'a>]) -> Option<Culprit<'a>> {
    if evidence.pairs.legs.infer() != Leg::Decode {
        return None;
    }
    let of = |case: &Case<'a>| Some((*case, victims(case, evidence.floor)?));
    let found: Vec<(Case, Vec<Victim>)> = bad.iter().filter_map(of).collect();
    let (first, lives) = found.first()?;
    if cases(evidence).any(|case| came_through(&case, evidence.floor)) {
        return None;
    }
    let spared = cases(evidence).filter(|case| stood_behind(case, evidence.floor)).count();
    if spared == 0 {
        return None;
    }
    let Victim { step, blocks } = &lives[0];
    let blocks: Vec<String> = blocks.iter().map(BlockId::to_string).collect();
    let mut message = format!(
        "request {}: from the token after engine step {step} on, in which it stood in the first \
         row of a batch with padding rows: they wrote their state to its block {}; {spared} \
         requests in other rows of such batches are good",
        first.request(),
        blocks.join(", "),
    );
    match found.len() - 1 {
        0 => {}
        1 => message += "; 1 other request was hit the same way",
        others => message += &format!("; {others} other requests were hit the same way"),
    }
    let blocks = found.iter().flat_map(|(_, lives)| lives).flat_map(|life| life.blocks.clone());
    let blocks = blocks.collect();
    let cases = found.iter().map(|(case, _)| *case).collect();
    Some(Culprit { blocks, ..Culprit::new(FindingKind::PaddingWrite, cases, message) })
}

/// A life that padding damaged.
struct Victim {
    /// In which it was.
    step: EngineStep,
    blocks: Vec<BlockId>,
}

/// The bad lives of a request, if padding had struck each of them right before its first bad token:
/// a state that was written over shows in the next token.
fn victims(case: &Case, floor: f64) -> Option<Vec<Victim>> {
    if case.sequence.gap().is_none_or(|gap| gap < WRITTEN_OVER_NATS) {
        return None;
    }
    let mut found = Vec::new();
    for lived in Lived::of(case, floor) {
        let Some(bad) = lived.first_bad() else { continue };
        let step = lived.first_before_padding().filter(|&step| step < bad.engine_step)?;
        if lived.tells_between(step, bad.engine_step) {
            return None;
        }
        let blocks = lived.life.state_blocks.iter().map(|held| held.block).collect();
        found.push(Victim { step, blocks });
    }
    (!found.is_empty()).then_some(found)
}

/// Whether a life was struck as a victim's is, and shows nothing of it.
fn came_through(case: &Case, floor: f64) -> bool {
    let good = |lived: &Lived| {
        let step = lived.first_before_padding();
        lived.first_bad().is_none() && step.is_some_and(|step| lived.tells_between(step, LAST))
    };
    Lived::of(case, floor).iter().any(good)
}

/// Whether a good request was in such a batch, and never in its first row.
fn stood_behind(case: &Case, floor: f64) -> bool {
    let tokens = &case.rollout.completion.tokens;
    let padded = || tokens.iter().filter(|token| token.padding_rows > 0);
    let is_good = !case.sequence.is_bad(floor) && !case.sequence.tokens.is_empty();
    is_good && padded().next().is_some() && padded().all(|token| token.batch_row != 0)
}
