//! Cached blocks that outlived the weights that filled them (NVIDIA-NeMo/RL#4018).

use super::lived::Lived;
use super::{others, worst_of, Case, Culprit, Evidence};
use crate::base::{RequestId, WeightVersion};
use crate::engine::CachedBlock;
use crate::gap::finding::FindingKind;
use crate::gap::pair::Leg;

/// A life began behind a cached prefix that older weights had computed, and is bad from the first
/// token that it sampled.
pub(super) fn stale_prefix_cache<'a>(
    evidence: &Evidence<'a>,
    bad: &[Case<'a>],
) -> Option<Culprit<'a>> {
    if evidence.pairs.legs.infer() != Leg::Decode {
        return None;
    }
    let of = |case: &Case<'a>| Some((*case, stale_lives(case, evidence.floor)?));
    let found: Vec<(Case, Vec<Lived>)> = bad.iter().filter_map(of).collect();
    let (worst, lives) = worst_of(found.iter(), |one| &one.0)?;
    let version = worst.rollout.completion.weight_version;
    let message = message(worst.request(), version, &lives[0], found.len() - 1);
    let blocks = found.iter().flat_map(|(case, lives)| {
        let version = case.rollout.completion.weight_version;
        lives.iter().flat_map(move |lived| older(lived, version)).map(|cached| cached.block)
    });
    let (kind, blocks) = (FindingKind::StalePrefixCache, blocks.collect());
    let cases = found.into_iter().map(|(case, _)| case).collect();
    Some(Culprit { kind, cases, blocks, index_bits: None, message })
}

/// The lives in which a request sampled bad tokens, if each of them began so.
fn stale_lives<'a>(case: &Case<'a>, floor: f64) -> Option<Vec<Lived<'a>>> {
    let version = case.rollout.completion.weight_version;
    let lives = Lived::of(case, floor).into_iter();
    let bad: Vec<Lived> = lives.filter(|lived| lived.first_bad().is_some()).collect();
    let began_so = |lived: &Lived| {
        older(lived, version).next().is_some() && lived.first_bad() == lived.first_telling()
    };
    (!bad.is_empty() && bad.iter().all(began_so)).then_some(bad)
}

/// The cached blocks of a life that were filled under weights before these.
fn older<'a>(
    lived: &Lived<'a>,
    version: WeightVersion,
) -> impl Iterator<Item = &'a CachedBlock> + use<'a> {
    lived.life.cached.iter().filter(move |cached| cached.weight_version < version)
}

fn message(request: RequestId, version: WeightVersion, lived: &Lived, more: usize) -> String {
    let mut stale: Vec<&CachedBlock> = older(lived, version).collect();
    stale.sort_by_key(|cached| cached.weight_version);
    let oldest = stale[0];
    let resumed = if lived.resumed { ", resumed after preemption" } else { "" };
    let message = format!(
        "request {request}{resumed}: its first {} tokens came from the prefix cache, and from the \
         first token behind them on it is bad: {} of {} cached blocks were filled under older \
         weights, block {} by {} under version {} while the engine sampled with version {version}",
        lived.life.cached_tokens(),
        stale.len(),
        lived.life.cached.len(),
        oldest.block,
        oldest.filled_by,
        oldest.weight_version,
    );
    message + &others(more, "began")
}

#[cfg(test)]
mod tests {
    use super::super::{verdict, Evidence};
    use super::*;
    use crate::base::{BlockId, Step};
    use crate::gap::pair::{pair, Legs};
    use crate::gap::testing::rollout;
    use crate::gap::Finding;
    use crate::rollout::Rollout;

    /// Under version 5, behind a block that another request filled under `filled_under`.
    fn cached(trainer: &[f32], filled_under: u64) -> Rollout {
        let mut record = rollout(1, &[-0.5, -0.125, -0.25, -0.0625], trainer);
        record.completion.weight_version = WeightVersion::new(5);
        record.completion.lives[0].cached = vec![CachedBlock {
            block: BlockId::new(9),
            filled_by: RequestId::new(3, 0, 2),
            weight_version: WeightVersion::new(filled_under),
            tokens: 16,
        }];
        record
    }

    fn judge(record: Rollout) -> Finding {
        let records = [rollout(0, &[-0.5], &[-0.5]), record];
        let pairs = pair(&records, Legs::DecodeTrainer).unwrap();
        let mut findings = verdict(&Evidence::new(Step::new(1), &records, &pairs, 0.0));
        assert_eq!(findings.len(), 1, "{findings:?}");
        findings.remove(0)
    }

    #[test]
    fn k09_older_weights_and_a_bad_first_token_name_it() {
        let bad = [-0.75, -6.5, -3.25, -8.0];
        let finding = judge(cached(&bad, 3));
        assert_eq!(finding.kind, FindingKind::StalePrefixCache);
        assert_eq!(finding.blocks, [BlockId::new(9)]);
        assert_eq!(
            finding.message,
            "request s1.p0.r1: its first 16 tokens came from the prefix cache, and from the first \
             token behind them on it is bad: 1 of 1 cached blocks were filled under older weights, \
             block 9 by s3.p0.r2 under version 3 while the engine sampled with version 5"
        );
        // The blocks are as new as the weights: something else is wrong.
        assert_eq!(judge(cached(&bad, 5)).kind, FindingKind::Unexplained);
        // A stale prefix is wrong at once, not from the third token on.
        let late = [-0.5, -0.125, -3.25, -8.0];
        assert_eq!(judge(cached(&late, 3)).kind, FindingKind::Unexplained);
    }
}
