//! An end of sequence that one side alone takes for one (huggingface/trl#7039).

use std::collections::BTreeMap;

use super::{cases, Case, Culprit, Evidence};
use crate::base::TokenId;
use crate::engine::FinishReason;
use crate::gap::finding::FindingKind;

/// The engine stopped at a token, and the trainer's side leaves out every completion that ends in
/// it, as it does with truncated ones. There need be no gap: what is left out is not compared.
pub(super) fn end_token<'a>(evidence: &Evidence<'a>) -> Option<Culprit<'a>> {
    // By the token that ended them: how many are counted, and those left out.
    let mut ends: BTreeMap<TokenId, (usize, Vec<Case<'a>>)> = BTreeMap::new();
    for case in cases(evidence) {
        let completion = &case.rollout.completion;
        let Some(last) = completion.tokens.last() else { continue };
        if completion.finish_reason != FinishReason::Stop {
            continue;
        }
        let end = ends.entry(last.token).or_default();
        match case.rollout.loss_mask.iter().any(|&counts| counts) {
            false => end.1.push(case),
            true => end.0 += 1,
        }
    }
    let unknown =
        ends.into_iter().filter(|(_, (counted, left_out))| *counted == 0 && !left_out.is_empty());
    let unknown: Vec<(TokenId, Vec<Case>)> =
        unknown.map(|(token, (_, left_out))| (token, left_out)).collect();
    if unknown.is_empty() {
        return None;
    }
    let told: Vec<String> = unknown
        .iter()
        .map(|(token, left_out)| format!("{token} ended {} completions", left_out.len()))
        .collect();
    let message = format!(
        "an end id on one side only: for the engine token {}, and the trainer's side masks every \
         one of them as truncated; hand on the whole list of end ids, or the finish reason",
        told.join(", token "),
    );
    let cases = unknown.into_iter().flat_map(|(_, left_out)| left_out).collect();
    Some(Culprit::new(FindingKind::EndToken, cases, message))
}
