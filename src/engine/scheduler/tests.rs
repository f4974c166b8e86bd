use super::*;
use crate::base::{BlockId, Contract, Generation, TokenId, WeightVersion};
use crate::config::BatchSplit;
use crate::engine::testing::{id, numbers, request, scheduler, shares, step, update, EOS, LIMITS};
use crate::engine::{FinishReason, StateBlock};
use crate::engine::{PersistentBatch, Phase};

/// Requests 0, 1, 2, … with these (prompt, new tokens), all waiting.
fn with_requests(limits: Limits, num_blocks: u32, requests: &[(u32, u32)]) -> Scheduler {
    let mut scheduler = scheduler(limits, num_blocks);
    for (rollout, &(prompt, new)) in requests.iter().enumerate() {
        scheduler.add(request(rollout as u32, prompt, new)).unwrap();
    }
    scheduler
}

fn held(scheduler: &Scheduler, running: usize) -> (Vec<u32>, Vec<u32>) {
    let request = &scheduler.running()[running];
    let state = numbers(request.state_blocks().iter().map(|state| state.block));
    (state, numbers(request.attn_blocks().concat()))
}

#[test]
fn the_budget_goes_to_running_rows_first_and_no_chunk_is_too_short() {
    let limits = Limits { max_num_batched_tokens: 10, ..LIMITS };
    let mut scheduler = with_requests(limits, 64, &[(9, 4), (12, 2), (3, 1)]);
    // The second request gets the one token that is left; it samples nothing until its prompt is
    // through.
    assert_eq!(step(&mut scheduler), [(0, 0, 9), (1, 0, 1)]);
    assert_eq!(scheduler.running()[1].sampled().len(), 0);
    assert_eq!(step(&mut scheduler), [(0, 9, 1), (1, 1, 9)]);
    assert_eq!(step(&mut scheduler), [(0, 10, 1), (1, 10, 2), (2, 0, 3)]);
    assert_eq!(step(&mut scheduler), [(0, 11, 1), (1, 12, 1)]);
    assert_eq!(scheduler.schedule(), None);
    assert_eq!(
        scheduler.statistics(),
        Statistics { engine_steps: 4, preemptions: 0, scheduled_tokens: 28, blocks_taken: 9 }
    );
}

#[test]
fn running_rows_beyond_the_budget_wait_without_leaving() {
    let limits = Limits { max_num_batched_tokens: 2, ..LIMITS };
    let mut scheduler = with_requests(limits, 64, &[(1, 3), (1, 3), (1, 3)]);
    assert_eq!(step(&mut scheduler), [(0, 0, 1), (1, 0, 1)]);
    assert_eq!(step(&mut scheduler), [(0, 1, 1), (1, 1, 1)]);
    assert_eq!(step(&mut scheduler), [(0, 2, 1), (1, 2, 1)]);
    assert_eq!(step(&mut scheduler), [(2, 0, 1)]);
}

#[test]
fn admission_stops_at_max_num_seqs() {
    let limits = Limits { max_num_seqs: 2, ..LIMITS };
    let mut scheduler = with_requests(limits, 64, &[(1, 1), (1, 2), (1, 1)]);
    assert_eq!(step(&mut scheduler), [(0, 0, 1), (1, 0, 1)]);
    assert_eq!(step(&mut scheduler), [(1, 1, 1), (2, 0, 1)]);
}

#[test]
fn without_chunked_prefill_a_head_that_does_not_fit_holds_back_the_rest() {
    for (enable_chunked_prefill, second) in [(true, vec![(1, 0, 4)]), (false, vec![])] {
        let limits = Limits { max_num_batched_tokens: 10, enable_chunked_prefill, ..LIMITS };
        let mut scheduler = with_requests(limits, 64, &[(6, 2), (5, 2), (1, 2)]);
        let expected: Vec<_> = [(0, 0, 6)].into_iter().chain(second).collect();
        assert_eq!(step(&mut scheduler), expected);
    }
}

#[test]
fn blocks_are_taken_and_given_back_in_group_order() {
    let mut scheduler = with_requests(LIMITS, 64, &[(40, 1), (17, 20)]);
    let plan = scheduler.schedule().unwrap();
    // State first, then the attention blocks of 40 tokens; the second request follows.
    assert_eq!(held(&scheduler, 0), (vec![1, 2], vec![3, 4, 5]));
    assert_eq!(held(&scheduler, 1), (vec![6, 7], vec![8, 9]));
    let finished = update(&mut scheduler, &plan, 9);
    assert_eq!(finished.len(), 1);
    // The free list ends with the state in group order and the attention blocks from their end.
    let free = numbers(scheduler.pool().free_blocks());
    assert_eq!(free[free.len() - 5..], [1, 2, 5, 4, 3]);
    // Block 10 comes with the token at position 32, and not before: the state blocks stay for the
    // whole life.
    for _ in 0..15 {
        assert_eq!(held(&scheduler, 0), (vec![6, 7], vec![8, 9]));
        step(&mut scheduler);
    }
    step(&mut scheduler);
    assert_eq!(held(&scheduler, 0), (vec![6, 7], vec![8, 9, 10]));
}

#[test]
fn the_last_running_request_is_preempted_and_starts_again() {
    // Two requests of 2 + 1 blocks fill the pool of 6; the first one's 17th token finds no block.
    let mut scheduler = with_requests(LIMITS, 7, &[(15, 4), (14, 4), (1, 1)]);
    assert_eq!(step(&mut scheduler), [(0, 0, 15), (1, 0, 14)]);
    assert_eq!(step(&mut scheduler), [(0, 15, 1), (1, 14, 1)]);
    let plan = scheduler.schedule().unwrap();
    assert_eq!(plan.preempted, [id(1)]);
    // Nobody is admitted in the step of a preemption, though blocks are free.
    assert_eq!(shares(&plan), [(0, 16, 1)]);
    let waiting: Vec<_> = scheduler.waiting().map(Request::id).collect();
    assert_eq!(waiting, [id(1), id(2)]);
    assert_eq!(held(&scheduler, 0), (vec![1, 2], vec![3, 4]));
    assert_eq!(numbers(scheduler.pool().free_blocks()), [5, 6]);
    update(&mut scheduler, &plan, 9);

    // It needs three blocks and two are free: it waits, and holds back the one behind it.
    let plan = scheduler.schedule().unwrap();
    assert_eq!((shares(&plan), &plan.preempted), (vec![(0, 17, 1)], &vec![]));
    assert_eq!(update(&mut scheduler, &plan, 9).len(), 1);

    // Prompt and sampled tokens are computed again in one chunk, on other blocks, whose last owner
    // is known.
    let plan = scheduler.schedule().unwrap();
    assert_eq!(shares(&plan), [(1, 0, 16), (2, 0, 1)]);
    assert_eq!(plan.scheduled[0].admission, Admission::Resumed);
    assert_eq!(plan.scheduled[1].admission, Admission::New);
    let resumed = &scheduler.running()[0];
    let last_life = StateBlock {
        block: BlockId::new(1),
        generation: Generation::new(2),
        previous_owner: Some(id(0)),
    };
    assert_eq!((resumed.preemptions(), resumed.state_blocks()[1].block), (1, BlockId::new(6)));
    assert_eq!(resumed.state_blocks()[0].previous_owner, Some(id(1)));
    assert_eq!(resumed.attn_blocks(), [vec![last_life.block]]);
    assert_eq!(scheduler.pool().record(last_life.block).generation, last_life.generation);
    assert_eq!(scheduler.pool().record(last_life.block).previous_owner, last_life.previous_owner);
    assert_eq!(scheduler.statistics().preemptions, 1);
}

#[test]
fn a_request_that_finds_no_block_and_is_last_preempts_itself() {
    let mut scheduler = with_requests(LIMITS, 7, &[(10, 9), (16, 4)]);
    step(&mut scheduler);
    let plan = scheduler.schedule().unwrap();
    assert_eq!((shares(&plan), &plan.preempted), (vec![(0, 10, 1)], &vec![id(1)]));
    update(&mut scheduler, &plan, 9);
    // All three of its blocks are free, but it has 17 tokens now and needs four.
    assert_eq!(step(&mut scheduler), [(0, 11, 1)]);
}

#[test]
fn completions_end_at_eos_and_at_both_lengths() {
    // (prompt, new tokens, the token sampled, sampled tokens, reason)
    let cases = [
        (5, 3, 9, 3, FinishReason::Length),
        (5, 3, EOS, 1, FinishReason::Stop),
        (5, 1, EOS, 1, FinishReason::Stop),
        (95, 3, 9, 1, FinishReason::Length),
        (93, 90, 9, 3, FinishReason::Length),
    ];
    for (prompt, new, token, sampled, reason) in cases {
        let mut scheduler = with_requests(LIMITS, 64, &[(prompt, new)]);
        let mut rows = PersistentBatch::new(BatchSplit::IsPrefilling, false);
        let mut finished = Vec::new();
        while let Some(plan) = scheduler.schedule() {
            let batch = rows.build(&plan, &scheduler);
            scheduler.note_rows(&plan, &batch.rows);
            finished.extend(update(&mut scheduler, &plan, token));
        }
        let done = finished.pop().unwrap();
        assert_eq!((done.request.sampled().len(), done.finish_reason), (sampled, reason));
        let completion = done.into_completion(Contract::PLAIN, WeightVersion::new(3), 7);
        assert_eq!(completion.token_ids().len(), sampled);
        let [first] = &completion.lives[..] else { panic!("one life") };
        assert_eq!((first.phase, first.sampled_before), (Phase::Prefill, 0));
        assert_eq!(first.scheduled_tokens, prompt.min(LIMITS.max_num_batched_tokens));
        assert_eq!(numbers(completion.attn_blocks().to_vec())[0], 3);
        assert_eq!(numbers(completion.state_blocks().iter().map(|state| state.block)), [1, 2]);
    }
    let mut ignores = request(0, 5, 2);
    ignores.ignore_eos = true;
    let mut scheduler = scheduler(LIMITS, 64);
    scheduler.add(ignores).unwrap();
    let plan = scheduler.schedule().unwrap();
    assert_eq!(update(&mut scheduler, &plan, EOS), []);
}

#[test]
fn aborted_requests_give_their_blocks_back() {
    let limits = Limits { max_num_seqs: 2, ..LIMITS };
    let mut scheduler = with_requests(limits, 64, &[(5, 3), (5, 3), (5, 3)]);
    step(&mut scheduler);
    assert!(scheduler.abort(id(0)) && scheduler.abort(id(2)));
    assert!(!scheduler.abort(id(0)) && !scheduler.abort(id(7)));
    assert_eq!(step(&mut scheduler), [(1, 5, 1)]);
    assert_eq!(scheduler.pool().free_blocks().len(), 60);
    scheduler.add(request(0, 5, 3)).unwrap();
    assert_eq!(step(&mut scheduler), [(1, 6, 1), (0, 0, 5)]);
}

#[test]
fn requests_that_could_never_finish_are_refused() {
    let unchunked = Limits { enable_chunked_prefill: false, ..LIMITS };
    let request_id = id(0);
    // (limits, blocks, prompt, new tokens, error)
    let cases = [
        (LIMITS, 64, 0, 4, EngineError::EmptyPrompt { request: request_id }),
        (LIMITS, 64, 4, 0, EngineError::NothingToGenerate { request: request_id }),
        (
            LIMITS,
            64,
            96,
            4,
            EngineError::PromptTooLong { request: request_id, prompt: 96, max_model_len: 96 },
        ),
        (
            LIMITS,
            5,
            30,
            4,
            EngineError::TooFewBlocks { request: request_id, tokens: 33, needed: 5, usable: 4 },
        ),
        (
            unchunked,
            64,
            60,
            6,
            EngineError::BudgetTooSmall { request: request_id, tokens: 65, budget: 64 },
        ),
    ];
    for (limits, num_blocks, prompt, new, error) in cases {
        let mut scheduler = scheduler(limits, num_blocks);
        assert_eq!(scheduler.add(request(0, prompt, new)), Err(error));
        assert!(!scheduler.has_unfinished());
    }
    let mut scheduler = with_requests(LIMITS, 5, &[(30, 3)]);
    let duplicate = EngineError::DuplicateRequest { request: request_id };
    assert_eq!(scheduler.add(request(0, 5, 1)), Err(duplicate));
    let text = EngineError::PromptTooLong { request: request_id, prompt: 96, max_model_len: 96 };
    assert_eq!(
        text.to_string(),
        "request s1.p0.r0 has a prompt of 96 tokens, but engine.max_model_len = 96 leaves room \
         for 95 and one new token: shorten the prompt or raise max_model_len to at least 97"
    );
}

#[test]
fn the_free_list_goes_on_over_a_snapshot() {
    let mut scheduler = with_requests(LIMITS, 9, &[(20, 3), (3, 5)]);
    while scheduler.has_unfinished() {
        step(&mut scheduler);
    }
    let text = serde_json::to_string(&scheduler.snapshot()).unwrap();
    let mut resumed = with_requests(LIMITS, 9, &[]);
    resumed.restore(serde_json::from_str(&text).unwrap()).unwrap();
    for scheduler in [&mut scheduler, &mut resumed] {
        scheduler.add(request(5, 3, 2)).unwrap();
        let plan = scheduler.schedule().unwrap();
        assert_eq!(plan.engine_step, EngineStep::new(6));
        assert_eq!(held(scheduler, 0), (vec![8, 1], vec![2]));
    }
    let other = resumed.running()[0].state_blocks();
    assert_eq!(scheduler.running()[0].state_blocks(), other);
}

#[test]
#[should_panic(expected = "the tokens of engine step 1 are not in yet")]
fn a_step_is_updated_before_the_next_is_planned() {
    let mut scheduler = with_requests(LIMITS, 9, &[(3, 3)]);
    scheduler.schedule();
    scheduler.schedule();
}

#[test]
fn a_sampled_token_is_read_back_by_position() {
    let mut scheduler = with_requests(LIMITS, 9, &[(2, 3)]);
    step(&mut scheduler);
    let plan = scheduler.schedule().unwrap();
    let request = scheduler.request(&plan.scheduled[0]);
    let tokens = [0, 1, 2].map(|position| request.token(position));
    assert_eq!(tokens, [0, 1, 9].map(TokenId::new));
}
