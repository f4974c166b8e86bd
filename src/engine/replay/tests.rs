//! Cases small enough to follow by hand.
//!
//! The layout of `engine::testing` has one raw buffer. A page of 512 bytes is 16 tokens of K and V,
//! or a convolution state of 12 bytes and a scan state of 64. A request holds one block of each of
//! two Mamba groups and one attention block every 16 tokens. The stride is 128 elements, so with 10
//! bits block 8 is the first to wrap, and block `8 + b` wraps to the scan state of block `b`.

use super::*;
use crate::config::{self, BatchSplit};
use crate::engine::testing::{layout, request};

/// 10 bits, one request at a time, unless a case says otherwise.
fn engine_config() -> EngineConfig {
    let text = "name = \"replay\"\nmodel.preset = \"tiny-jamba\"\n\
        engine.max_num_batched_tokens = 64\nengine.max_num_seqs = 1\nengine.max_model_len = 96\n\
        engine.state_index_bits = 10\n";
    config::parse(text, "test.toml", &[]).expect("a valid config").engine
}

/// `rollout sampled`, where it goes wrong, and each cause with what was found.
fn describe(forecast: &Forecast) -> String {
    let Forecast { id, sampled, first_wrong, misreads, .. } = forecast;
    let from = first_wrong.map_or("right".to_owned(), |first| format!("wrong from {first}"));
    let cause = |one: &Misread| {
        let found = one.found.map_or("zeros".to_owned(), |Source { request, block }| {
            format!("r{}'s {block}", request.rollout_idx)
        });
        format!("; {:?} {}: {found}", one.cause, one.block)
    };
    let causes: String = misreads.iter().map(cause).collect();
    format!("r{} of {sampled}: {from}{causes}", id.rollout_idx)
}

/// Requests as (prompt, new tokens), rollout after rollout.
fn check(config: &EngineConfig, num_blocks: u32, requests: &[(u32, u32)], expected: &[&str]) {
    let mut replay = Replay::new(layout(), num_blocks, config);
    let requests =
        (0..).zip(requests).map(|(rollout, &(prompt, new))| request(rollout, prompt, new));
    let forecasts = replay.generate(requests.collect()).expect("requests that fit");
    let found: Vec<String> = forecasts.iter().map(describe).collect();
    assert_eq!(found, expected);
}

#[test]
fn a_wrapped_state_is_lost_from_the_second_token_on() {
    let config = engine_config();
    let requests = [(5, 3), (5, 3), (5, 3), (5, 1), (5, 3), (5, 3), (5, 3), (5, 3)];
    check(&config, 14, &requests, &[]);
}
