//! A decode path whose arithmetic is not that of its prefill (NVIDIA-NeMo/RL#2100).

use super::looked::{Column, Looked};
use super::{Case, Culprit, Evidence};
use crate::engine::Phase;
use crate::gap::finding::FindingKind;

/// Decoded again alone, in a fresh pool, the tokens come out as before, and unlike one prefill over
/// them, which the trainer agrees with. Neither cache nor company has a part in it.
pub(super) fn decode_path<'a>(evidence: &Evidence<'a>, rest: &[Case<'a>]) -> Option<Culprit<'a>> {
    let looked = |case: &Case<'a>| Looked::at(case, evidence);
    let is_engine = |case: &&Case<'a>| {
        let looked = looked(case);
        looked.agree(Column::Decode, Column::Prefill) == Some(false)
            && looked.agree(Column::Prefill, Column::Trainer) == Some(true)
    };
    let cases: Vec<Case> = rest.iter().filter(is_engine).copied().collect();
    // A resumed request computed again by prefill what a replay decodes.
    let replays = |case: &Case<'a>| {
        let again = looked(case).agree(Column::Decode, Column::DecodeAgain);
        again.filter(|_| case.rollout.completion.preemptions == 0)
    };
    let replayed: Vec<bool> = cases.iter().filter_map(replays).collect();
    if replayed.is_empty() || replayed.contains(&false) {
        return None;
    }
    if !cases.iter().all(|case| begins_in_decode(case, evidence.floor)) {
        return None;
    }
    let message = format!(
        "the engine's decode path disagrees with its prefill: for each of {} requests one prefill \
         over the same tokens agrees with the trainer and the decode does not, from a decode row \
         on; {} of them, decoded again alone in a fresh pool, repeat their log-probabilities bit \
         for bit or within the floor{}",
        cases.len(),
        replayed.len(),
        if replayed.len() < cases.len() { ", the others were not looked at again" } else { "" },
    );
    Some(Culprit::new(FindingKind::DecodePath, cases, message))
}

fn begins_in_decode(case: &Case, floor: f64) -> bool {
    let first = case.sequence.first_bad(floor).expect("the case is bad");
    let sampled = case.rollout.completion.tokens.get(first.index());
    sampled.is_some_and(|sampled| sampled.phase == Phase::Decode)
}
