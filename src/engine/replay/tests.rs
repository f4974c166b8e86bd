//! Cases small enough to follow by hand.
//!
//! The layout of `engine::testing` has one raw buffer and layers Mamba, attention, Mamba. A page of
//! 512 bytes is 16 tokens of K and V, or a convolution state of 12 bytes and a scan state of 64. A
//! request holds one block of each of two Mamba groups, then one attention block every 16 tokens.
//! The stride is 128 elements, so with 10 bits block 8 is the first to wrap, and block 8 + b wraps
//! to the scan state of block b; with 9 bits it is block 4.

use super::*;
use crate::config;
use crate::engine::testing::{id, layout, request};

fn engine_config(settings: &str) -> EngineConfig {
    let text = format!(
        "name = \"replay\"\nmodel.preset = \"tiny-jamba\"\nengine.max_model_len = 96\n{settings}"
    );
    config::parse(&text, "test.toml", &[]).expect("a valid config").engine
}

/// Request and tokens, where it goes wrong, and each cause with what was found.
fn describe(forecast: &Forecast) -> String {
    let Forecast { id, sampled, first_wrong, misreads, .. } = forecast;
    let from = first_wrong.map_or("right".to_owned(), |first| format!("wrong from {first}"));
    let cause = |one: &Misread| {
        let found = one.found.map_or("zeros".to_owned(), |Source { request, block }| {
            format!("r{}'s {block}", request.rollout_idx)
        });
        format!(", {:?} {} at {}: {found}", one.cause, one.block, one.engine_step)
    };
    let causes: String = misreads.iter().map(cause).collect();
    format!("r{} of {sampled} {from}{causes}", id.rollout_idx)
}

/// Requests as (prompt, new tokens), rollout after rollout, all at once.
fn check(settings: &str, num_blocks: u32, requests: &[(u32, u32)], expected: &[&str]) {
    let of = |(rollout, &(prompt, new)): (u32, &(u32, u32))| request(rollout, prompt, new);
    check_of(settings, num_blocks, (0..).zip(requests).map(of).collect(), expected);
}

fn check_of(settings: &str, num_blocks: u32, requests: Vec<GenerationRequest>, expected: &[&str]) {
    let mut replay = Replay::new(layout(), num_blocks, &engine_config(settings));
    let forecasts = replay.generate(requests).expect("requests that fit");
    let found: Vec<String> = forecasts.iter().map(describe).collect();
    assert_eq!(found, expected, "{settings}");
}

const ONE_BY_ONE: &str = "engine.max_num_seqs = 1\nengine.state_index_bits = 10\n";

/// Three blocks each, of thirteen: 1-3, 4-6, 7-9, 10-12, then 13 1 2, 3-5, 6-8, 9-11.
#[test]
fn a_wrapped_state_is_lost_from_the_second_token_on() {
    let requests = [(5, 3), (5, 3), (5, 3), (5, 1), (5, 3), (5, 3), (5, 3), (5, 3)];
    let expected = [
        "r0 of 3 right",
        "r1 of 3 right",
        "r2 of 3 wrong from 1, Wrapped 8 at 8: zeros",
        "r3 of 1 right",
        "r4 of 3 wrong from 1, Wrapped 13 at 12: zeros",
        "r5 of 3 right",
        // Block 8 has its keys and values: no state, no wrap.
        "r6 of 3 right",
        // Block 9 had keys and values of r2; block 10 a state of r3, which never decoded.
        "r7 of 3 wrong from 1, Wrapped 9 at 21: r2's 9, Wrapped 10 at 21: zeros",
    ];
    check(ONE_BY_ONE, 14, &requests, &expected);
    let right = ["r0 of 3 right", "r1 of 3 right", "r2 of 3 right", "r3 of 1 right"];
    check("engine.max_num_seqs = 1\n", 14, &requests[..4], &right);
    // Every row through the prefill kernels: the state is looked for where it was stored.
    let forced = format!("{ONE_BY_ONE}engine.force_prefill = true\n");
    check(&forced, 14, &requests[..4], &right);
}

/// Prompts of 4 + 1 tokens in blocks 1-3, 4-6, 7-9: the second chunk looks where the first one
/// stored, if it is a prefill row too.
#[test]
fn a_second_chunk_finds_a_wrapped_state_through_the_same_kernels_only() {
    let settings = format!("{ONE_BY_ONE}engine.max_num_batched_tokens = 4\n");
    let lost = "r2 of 3 wrong from 1, Wrapped 8 at 11: zeros";
    check(&settings, 14, &[(5, 3); 3], &["r0 of 3 right", "r1 of 3 right", lost]);
    let settings = format!("{settings}engine.batch_split = \"scheduled_tokens\"\n");
    let lost = "r2 of 3 wrong from 0, Wrapped 8 at 10: zeros";
    check(&settings, 14, &[(5, 3); 3], &["r0 of 3 right", "r1 of 3 right", lost]);
}

const TWO_AT_ONCE: &str = "engine.max_num_seqs = 2\nengine.state_index_bits = 9\n";

#[test]
fn a_wrapped_store_hits_whoever_owns_the_page() {
    // r0 has 1 2 | 3 and r1 has 4 5 | 6. The last layer's store for block 5 goes to block 1, which
    // the first layer has filled already.
    let expected = [
        "r0 of 6 wrong from 1, Overwritten 1 at 2: r1's 5",
        "r1 of 3 wrong from 1, Wrapped 4 at 2: zeros, Wrapped 5 at 2: zeros",
    ];
    check(TWO_AT_ONCE, 14, &[(5, 6), (5, 3)], &expected);
    // r0 has 1 2 | 3 4 5 and r1 has 6 7 | 8. The first layer's store for block 6 goes to block 2,
    // which the last layer has still to fill; the last layer's for block 7 to keys of block 3.
    let expected = [
        "r0 of 3 wrong from 1, Overwritten 3 at 2: r1's 7",
        "r1 of 3 wrong from 1, Wrapped 6 at 2: zeros, Wrapped 7 at 2: zeros",
    ];
    check(TWO_AT_ONCE, 14, &[(33, 3), (5, 3)], &expected);
    // What is hit and never read again does no harm.
    check(TWO_AT_ONCE, 14, &[(33, 1), (5, 3)], &["r0 of 1 right", expected[1]]);
    // r1 has 4 5 | 1, and hits its own keys.
    let own = "r1 of 3 wrong from 1, Wrapped 4 at 4: zeros, Overwritten 1 at 4: r1's 5, \
        Wrapped 5 at 4: zeros";
    let alone = "engine.max_num_seqs = 1\nengine.state_index_bits = 9\n";
    check(alone, 6, &[(5, 2), (5, 3)], &["r0 of 2 right", own]);
}

/// r0 has 1 2 | 3 4 and r1 has 5 6 | 7 8: its stores go to the scan states of blocks 1 and 2, in
/// the very layers that read them. After one and the same prompt these are the same bytes.
#[test]
fn equal_bytes_do_no_harm() {
    let lost = "r1 of 3 wrong from 1, Wrapped 5 at 2: zeros, Wrapped 6 at 2: zeros";
    let hit = "r0 of 3 wrong from 1, Overwritten 1 at 2: r1's 5, Overwritten 2 at 2: r1's 6";
    check(TWO_AT_ONCE, 14, &[(17, 3), (17, 3)], &[hit, lost]);
    let alike = GenerationRequest { id: id(1), ..request(0, 17, 3) };
    check_of(TWO_AT_ONCE, 14, vec![request(0, 17, 3), alike], &["r0 of 3 right", lost]);
}

/// With 6 tokens a step r1 begins with the one that r0 leaves, over virgin blocks 4 and 5; r2
/// with the one that r1 leaves, over 1 and 2, which r0 has left.
#[test]
fn a_life_that_begins_as_a_decode_row_needs_zeros() {
    let settings = "engine.max_num_batched_tokens = 6\nengine.max_num_seqs = 2\n";
    let requests = [(5, 1), (6, 1), (5, 2)];
    let right = ["r0 of 1 right", "r1 of 1 right", "r2 of 2 right"];
    check(settings, 7, &requests, &right);
    let stale = "r2 of 2 wrong from 0, StaleState 1 at 2: r0's 1, StaleState 2 at 2: r0's 2";
    let settings = format!("{settings}engine.batch_split = \"scheduled_tokens\"\n");
    check(&settings, 7, &requests, &[right[0], right[1], stale]);
}

/// r0, r1 and r2 have 1 2 | 3, 4 5 | 6 and 7 8 | 9. In step 3 r0 needs another block: r2 loses its
/// own, and in step 7 gets 8 9 | 1. It samples 0 right and 1 wrong, then 2 right and 3 wrong.
#[test]
fn a_preempted_request_starts_again_and_keeps_what_it_sampled() {
    let expected = [
        "r0 of 6 right",
        "r1 of 6 right",
        "r2 of 6 wrong from 1, Wrapped 8 at 2: zeros, Wrapped 8 at 8: r2's 8, \
            Overwritten 1 at 8: r2's 9, Wrapped 9 at 8: r2's 9",
    ];
    check("engine.state_index_bits = 10\n", 10, &[(15, 6), (5, 6), (5, 6)], &expected);
}

#[test]
fn requests_that_cannot_run_leave_no_trace() {
    let mut replay = Replay::new(layout(), 14, &engine_config(ONE_BY_ONE));
    let twice = vec![request(0, 5, 2), request(1, 5, 2), request(0, 5, 2)];
    let error = replay.generate(twice).expect_err("one id twice");
    assert_eq!(error, EngineError::DuplicateRequest { request: id(0) });
    assert_eq!(replay.statistics().engine_steps, 0);
    let forecasts = replay.generate(vec![request(0, 5, 2)]).expect("a request that fits");
    assert_eq!(forecasts.iter().map(describe).collect::<Vec<_>>(), ["r0 of 2 right"]);
    let Statistics { engine_steps, blocks_taken, .. } = replay.statistics();
    assert_eq!((engine_steps, blocks_taken), (2, 3));
}
