//! What the engine does wrong at every step.

use std::collections::{BTreeSet, HashSet};

use super::*;
use gapscope::base::RequestId;
use gapscope::engine::{Completion, Phase};
use gapscope::gap::FindingKind;

/// Two prompts and more tokens than one block of 48 holds, in a pool that runs out of blocks when
/// the first of them cross into their second.
const PREEMPTS: [&str; 4] = [
    "engine.num_gpu_blocks_override=19",
    "rollout.rollouts_per_prompt=4",
    "rollout.max_new_tokens=20",
    "task.prompt_tokens=40",
];

#[test]
fn k03_only_who_was_preempted_is_wrong_and_only_from_there_on() {
    let fault = "engine.faults=[\"keep_state_on_preempt\"]";
    let run = played(&[&PREEMPTS[..], &[fault]].concat());
    let mut preempted = 0;
    for rollout in &run.steps[0].rollouts {
        let Completion { lives, preemptions, .. } = &rollout.completion;
        let differs = differs(rollout);
        if *preemptions == 0 {
            assert!(differs.iter().all(|one| !one), "{}", rollout.completion.id);
            continue;
        }
        preempted += 1;
        let resumed = lives[1].sampled_before as usize;
        assert!(resumed > 0 && differs[..resumed].iter().all(|one| !one), "{differs:?}");
        assert!(differs[resumed], "{differs:?}");
        // The record shows the same blocks, never given back, in a life that begins at once as a
        // prefill.
        assert_eq!(lives[1].state_blocks, lives[0].state_blocks);
        assert_eq!(lives[1].phase, Phase::Prefill);
        assert_ne!(lives[1].attn_blocks, lives[0].attn_blocks);
    }
    assert!(preempted > 0 && preempted < 4, "{preempted} of 4 were preempted");

    let clean = played(&PREEMPTS);
    assert_eq!(clean.spikes(), [0_u64; 0]);
    let preempted = clean.steps[0].rollouts.iter().filter(|one| one.completion.preemptions > 0);
    for rollout in preempted {
        let lives = &rollout.completion.lives;
        assert_ne!(lives[1].state_blocks, lives[0].state_blocks);
    }
    let enough = [&PREEMPTS[..], &[fault, "engine.num_gpu_blocks_override=100"]].concat();
    assert_eq!(played(&enough).spikes(), [0_u64; 0]);
}

/// Where the kept states fill the pool, they are given up, so that every run comes to its end.
#[test]
fn k03_kept_states_never_stop_the_engine() {
    for blocks in 6..14 {
        for budget in ["64", "256"] {
            let run = played(&[
                "engine.faults=[\"keep_state_on_preempt\"]",
                &format!("engine.num_gpu_blocks_override={blocks}"),
                &format!("engine.max_num_batched_tokens={budget}"),
                "rollout.max_new_tokens=30",
                "task.prompt_tokens=40",
            ]);
            let pool = run.session.engine().pool();
            pool.check().expect("no block is lost");
            assert_eq!(pool.free_blocks().len(), blocks - 1);
        }
    }
}

/// Completions without what padding alone may change.
fn without_padding(step: &PlayedStep) -> Vec<Completion> {
    let mut all: Vec<Completion> =
        step.rollouts.iter().map(|rollout| rollout.completion.clone()).collect();
    all.iter_mut().flat_map(|one| &mut one.tokens).for_each(|token| token.padding_rows = 0);
    all
}

fn padding(step: &PlayedStep) -> HashSet<(Phase, u32)> {
    let tokens = step.rollouts.iter().flat_map(|rollout| &rollout.completion.tokens);
    tokens.map(|token| (token.phase, token.padding_rows)).collect()
}

/// Who stood in the first row when a token was sampled in a padded batch.
fn first_row(step: &PlayedStep) -> BTreeSet<RequestId> {
    let in_first = |rollout: &&Rollout| {
        let tokens = &rollout.completion.tokens;
        tokens.iter().any(|token| token.padding_rows > 0 && token.batch_row == 0)
    };
    step.rollouts.iter().filter(in_first).map(|rollout| rollout.completion.id).collect()
}

#[test]
fn k05_padding_rows_hit_the_owner_of_the_first_rows_block_alone() {
    for (live, padded) in [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8)] {
        let rows = format!("rollout.rollouts_per_prompt={live}");
        let captured = "engine.enforce_eager=false";
        let eager = played(&[&rows]);
        let clean = played(&[&rows, captured]);
        assert_eq!(clean.spikes(), [0_u64; 0], "{live}");
        let found = without_padding(&clean.steps[0]);
        assert_eq!(found, without_padding(&eager.steps[0]), "{live}");
        let expected = [(Phase::Prefill, 0), (Phase::Decode, padded - live)];
        assert_eq!(padding(&clean.steps[0]), HashSet::from(expected), "{live}");
        assert!(padding(&eager.steps[0]).iter().all(|(_, rows)| *rows == 0), "{live}");

        let fault = "engine.faults=[\"padding_writes\"]";
        let run = played(&[&rows, captured, fault]);
        let victims = first_row(&run.steps[0]);
        assert_eq!(victims.len(), usize::from(padded > live), "{live}");
        assert_eq!(bad(&run.steps[0]), victims, "{live}");
        // The first padded step reads a state that is right, and leaves one that is not.
        assert!(run.steps[0].bad().all(|(_, first)| first == 2), "{live}");
        assert_eq!(played(&[&rows, fault]).spikes(), [0_u64; 0], "eager, {live}");
    }
}

/// Prefills beside decodes are never padded, nor is what no captured size holds.
#[test]
fn k05_only_decode_batches_that_a_captured_size_holds_are_padded() {
    let run = played(&[
        "engine.enforce_eager=false",
        "engine.max_num_seqs=7",
        "engine.max_num_batched_tokens=9",
        "rollout.max_new_tokens=3",
    ]);
    assert_eq!(run.spikes(), [0_u64; 0]);
    let all: Vec<_> =
        run.steps[0].rollouts.iter().flat_map(|rollout| &rollout.completion.tokens).collect();
    for token in &all {
        let mates = all.iter().filter(|other| other.engine_step == token.engine_step);
        let decodes = mates.filter(|other| other.phase == Phase::Decode).count() as u32;
        let only_decodes = decodes == token.batch_rows;
        let expected = if only_decodes && decodes == 3 { 1 } else { 0 };
        assert_eq!(token.padding_rows, expected, "{token:?}");
    }
    assert!(all.iter().any(|token| token.padding_rows == 1));
}

#[test]
fn k07_decode_disagrees_with_the_engines_own_prefill_for_some_sequences() {
    let run = played(&["engine.faults=[\"decode_update_differs\"]"]);
    let step = &run.steps[0];
    // The last token is never decoded, and the one after a token that is hit shows it.
    let hit = |rollout: &Rollout| {
        let (_, decoded) = rollout.completion.tokens.split_last().expect("tokens");
        decoded.iter().position(|token| token.token.get() % 11 == 0)
    };
    let expected = step.rollouts.iter().filter_map(|one| Some((one.completion.id, hit(one)? + 1)));
    let expected: Vec<(RequestId, usize)> = expected.collect();
    assert!(!expected.is_empty() && expected.len() < step.rollouts.len(), "{expected:?}");
    let found = step.bad().map(|(rollout, first)| (rollout.completion.id, first));
    assert_eq!(found.collect::<Vec<_>>(), expected);
    assert!(step.bad().all(|(rollout, _)| rollout.prefill == rollout.trainer));
    let [finding] = &run.findings[..] else { panic!("{:#?}", run.findings) };
    assert_eq!(finding.kind, FindingKind::DecodePath);
    assert_eq!(finding.requests, expected.iter().map(|hit| hit.0).collect::<Vec<_>>());
    let told = "parts from its own prefill first in layer 0 (mamba) at position ";
    assert!(finding.message.contains(told), "{}", finding.message);
    let forced = ["engine.faults=[\"decode_update_differs\"]", "engine.force_prefill=true"];
    assert_eq!(played(&forced).spikes(), [0_u64; 0]);
}

#[test]
fn k25_other_gate_weights_for_the_same_experts_hit_every_request() {
    let run = with_experts(&["engine.faults=[\"gate_renormalised\"]"]);
    let step = &run.steps[0];
    assert_eq!(bad(step), all(step));
    for (rollout, first) in step.bad() {
        assert_eq!(first, 0);
        // The engine is of one mind, and its weights are the trainer's.
        let decode: Vec<_> = rollout.completion.tokens.iter().map(|one| Some(one.logp)).collect();
        assert_eq!(rollout.prefill.as_ref(), Some(&decode));
        assert_eq!(rollout.trainer_fingerprint, rollout.completion.engine_fingerprint);
    }
    let [finding] = &run.findings[..] else { panic!("{:#?}", run.findings) };
    assert_eq!((finding.kind, finding.requests_total), (FindingKind::GateWeights, 8));
    // The second layer is the first with experts; four requests of seventeen tokens were looked at.
    let told =
        "first in layer 1 (moe); of the 68 tokens that come to it alike the experts agree on \
                100 %";
    assert!(finding.message.contains(told), "{}", finding.message);
    assert!(with_experts(&[]).findings.is_empty());
}
