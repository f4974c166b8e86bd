//! One block in the hands of two requests that have no prefix in common
//! (vllm-project/vllm#37076).

use std::collections::{BTreeSet, HashMap, HashSet};

use super::lived::Lived;
use super::{cases, Case, Culprit, Evidence};
use crate::base::{BlockId, EngineStep, RequestId};
use crate::gap::finding::FindingKind;
use crate::gap::pair::Leg;

/// So many blocks are named with their holders; the rest is only counted.
const NAMED_MAX: usize = 8;

/// A block while a request held it.
#[derive(Clone, Copy)]
struct Hold {
    block: BlockId,
    by: RequestId,
    /// Whose tokens it holds, as far as this request knows.
    filled_by: RequestId,
    is_cached: bool,
    /// In all of these it certainly held it.
    steps: (EngineStep, EngineStep),
}

/// A block of which two holders think differently.
struct Conflict<'a> {
    victim: Case<'a>,
    hold: Hold,
    other: Hold,
}

/// Two requests held a block in one engine step, and it is not a prefix that one found and the
/// other, or a third one, had filled.
pub(super) fn block_shared<'a>(evidence: &Evidence<'a>, bad: &[Case<'a>]) -> Option<Culprit<'a>> {
    if evidence.pairs.legs.infer() != Leg::Decode {
        return None;
    }
    let suspects: HashSet<BlockId> =
        bad.iter().flat_map(|case| holds(case, evidence.floor)).map(|hold| hold.block).collect();
    let mut of_block: HashMap<BlockId, Vec<Hold>> = HashMap::new();
    for hold in cases(evidence).flat_map(|case| holds(&case, evidence.floor)) {
        if suspects.contains(&hold.block) {
            of_block.entry(hold.block).or_default().push(hold);
        }
    }
    let found: Vec<Conflict> = bad
        .iter()
        .filter_map(|&victim| {
            holds(&victim, evidence.floor).find_map(|hold| {
                let other = *of_block[&hold.block].iter().find(|other| hold.disagrees(other))?;
                Some(Conflict { victim, hold, other })
            })
        })
        .collect();
    if found.is_empty() {
        return None;
    }
    let blocks: BTreeSet<BlockId> = found.iter().map(|conflict| conflict.hold.block).collect();
    let message = message(&found);
    let cases = found.into_iter().map(|conflict| conflict.victim).collect();
    Some(Culprit { kind: FindingKind::BlockShared, cases, blocks, index_bits: None, message })
}

/// Every block that a request held, life after life: those that it found from its life's beginning
/// on, those that it took from then on.
fn holds<'a>(case: &Case<'a>, floor: f64) -> impl Iterator<Item = Hold> + use<'a> {
    let by = case.request();
    Lived::of(case, floor).into_iter().flat_map(move |lived| {
        let steps @ (_, last) = lived.certain_steps();
        let cached = lived.life.cached.iter().map(move |found| Hold {
            block: found.block,
            by,
            filled_by: found.filled_by,
            is_cached: true,
            steps,
        });
        let taken = lived.life.taken.iter().map(move |taken| Hold {
            block: taken.block,
            by,
            filled_by: by,
            is_cached: false,
            steps: (taken.engine_step, last.max(taken.engine_step)),
        });
        cached.chain(taken)
    })
}

impl Hold {
    fn disagrees(&self, other: &Self) -> bool {
        let is_same = (self.by, self.is_cached) == (other.by, other.is_cached);
        let at_once = self.steps.0 <= other.steps.1 && other.steps.0 <= self.steps.1;
        // A request that takes for itself what it has found overwrites it, whoever filled it.
        let alike = self.filled_by == other.filled_by && self.by != other.by;
        !is_same && at_once && !alike
    }
}

fn message(found: &[Conflict]) -> String {
    let how = |hold: &Hold| match hold.is_cached {
        true => format!("request {} found it as cached, filled by {}", hold.by, hold.filled_by),
        false => format!("request {} took it in engine step {}", hold.by, hold.steps.0),
    };
    let one = |Conflict { hold, other, .. }: &Conflict| {
        format!("block {} has two owners at once: {}, {}", hold.block, how(hold), how(other))
    };
    let named: Vec<String> = found.iter().take(NAMED_MAX).map(one).collect();
    let mut message = named.join("; ");
    if found.len() > NAMED_MAX {
        message += &format!("; and {} more", found.len() - NAMED_MAX);
    }
    message
}

#[cfg(test)]
mod tests {
    use super::super::{verdict, Evidence};
    use super::*;
    use crate::base::{EngineIndex, Step, WeightVersion};
    use crate::engine::{CachedBlock, TakenBlock};
    use crate::gap::pair::{pair, Legs};
    use crate::gap::testing::rollout;
    use crate::gap::Finding;
    use crate::rollout::Rollout;

    const FILLER: RequestId = RequestId::new(3, 0, 2);

    /// Rollout 0 is bad from its first token on and found block 9, which [`FILLER`] had filled;
    /// both live in the engine steps 1 to 4.
    fn victim() -> Rollout {
        let mut record = rollout(0, &[-0.5, -0.125, -0.25, -0.0625], &[-0.75, -6.5, -3.25, -8.0]);
        record.completion.lives[0].cached = vec![CachedBlock {
            block: BlockId::new(9),
            filled_by: FILLER,
            weight_version: WeightVersion::new(0),
            tokens: 16,
        }];
        record
    }

    fn good(index: u32) -> Rollout {
        rollout(index, &[-0.5, -0.125, -0.25, -0.5], &[-0.5, -0.125, -0.25, -0.5])
    }

    fn taken(index: u32, block: u32, engine_step: u64) -> Rollout {
        let mut record = good(index);
        let (block, engine_step) = (BlockId::new(block), EngineStep::new(engine_step));
        record.completion.lives[0].taken = vec![TakenBlock { block, engine_step }];
        record
    }

    fn judge(records: &[Rollout]) -> Finding {
        let pairs = pair(records, Legs::DecodeTrainer).unwrap();
        let mut findings = verdict(&Evidence::new(Step::new(1), records, &pairs, 0.0));
        assert_eq!(findings.len(), 1, "{findings:?}");
        findings.remove(0)
    }

    #[test]
    fn k10_two_owners_at_once_are_named_with_their_block() {
        let finding = judge(&[victim(), taken(1, 9, 2)]);
        assert_eq!(finding.kind, FindingKind::BlockShared);
        assert_eq!(finding.blocks, [BlockId::new(9)]);
        assert_eq!(
            finding.message,
            "block 9 has two owners at once: request s1.p0.r0 found it as cached, filled by \
             s3.p0.r2, request s1.p0.r1 took it in engine step 2"
        );
    }

    #[test]
    fn a_block_of_another_engine_is_another_block() {
        let mut elsewhere = taken(1, 9, 2);
        elsewhere.completion.engine = EngineIndex::new(1);
        assert_eq!(judge(&[victim(), elsewhere]).kind, FindingKind::Unexplained);
    }

    #[test]
    fn what_is_shared_rightly_or_at_different_times_is_no_culprit() {
        // Another request found the same block.
        let mut sharer = good(1);
        sharer.completion.lives[0].cached = victim().completion.lives[0].cached.clone();
        assert_eq!(judge(&[victim(), sharer]).kind, FindingKind::Unexplained);
        // It was taken when the victim was done, which is after step 4.
        assert_eq!(judge(&[victim(), taken(1, 9, 5)]).kind, FindingKind::Unexplained);
        assert_eq!(judge(&[victim(), taken(1, 8, 2)]).kind, FindingKind::Unexplained);
        // Whoever filled it still holds it.
        let mut found = victim();
        found.completion.lives[0].cached[0].filled_by = RequestId::new(1, 0, 1);
        assert_eq!(judge(&[found, taken(1, 9, 1)]).kind, FindingKind::Unexplained);
    }
}
