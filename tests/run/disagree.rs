//! Every way of breaking the agreement shows, where it should and nowhere else.

use std::collections::BTreeSet;

use gapscope::base::Step;
use gapscope::report::parquet::{RolloutRow, TokenRow};
use serde_json::json;

use crate::common::run::{Run, SUMS};
use crate::{findings, spikes, SCORE_ONLY};

#[test]
fn one_ulp_on_either_side_is_a_gap_and_names_its_tensor() {
    for fault in
        ["engine.faults=[\"engine_weight_ulp\"]", "trainer.faults=[\"trainer_weight_ulp\"]"]
    {
        for dtype in ["model.dtype=f32", "model.dtype=bf16"] {
            // Of so many tokens it shows in some, whatever the step.
            let run = Run::small(&[fault, dtype, SCORE_ONLY, "rollout.prompts_per_step=30"]);
            let gaps = run.metric("gap/logp_abs_diff_max");
            assert!(gaps.iter().all(|&gap| gap > 0.0), "{fault} {dtype}: {gaps:?}");
            assert_eq!(spikes(&run), [1, 2, 3], "{fault} {dtype}");
            let found = findings(&run, "weights_not_synced");
            assert_eq!(found.len(), 3);
            for finding in found {
                let message = finding["message"].as_str().expect("a message");
                let expected = "; 1 of 63 tensors differ: model.final_layernorm.weight; its worst";
                assert!(message.contains(expected), "{message}");
                assert!(message.contains("rollout engine is self-consistent"), "{message}");
            }
        }
    }
}

/// The engine sampled before the update, the trainer scores after it: the gap is the update itself,
/// from the first step on.
#[test]
fn scoring_after_the_update_is_a_gap_at_once() {
    let run = Run::small(&["trainer.faults=[\"score_after_update\"]"]);
    let gaps = run.metric("gap/logp_abs_diff_max");
    assert!(gaps.iter().all(|&gap| gap > 1e-6), "{gaps:?}");
    assert_eq!(spikes(&run), [1, 2, 3]);
    assert_eq!(findings(&run, "weights_not_synced").len(), 3);
    // Each step's rollouts came from the weights that the step before was scored with.
    let sides: Vec<_> = run
        .rollouts()
        .iter()
        .map(|rows| {
            [rows[0].engine_fingerprint, rows[0].trainer_fingerprint].map(|of| of.expect("known"))
        })
        .collect();
    assert!(sides.iter().all(|[engine, trainer]| engine != trainer), "{sides:x?}");
    assert!(sides.windows(2).all(|pair| pair[1][0] == pair[0][1]), "{sides:x?}");
}

/// A state index of 19 bits ends at block 171 of stride 3,072. Sixteen requests of four blocks take
/// 64 a step, in order: the third step is the first to get there.
#[test]
fn a_narrow_state_index_wraps_where_the_pool_reaches_it() {
    let pool = ["engine.num_gpu_blocks_override=200", "rollout.prompts_per_step=4", SCORE_ONLY];
    let with = |more: &[&str]| Run::small(&[&pool[..], &["steps=4"], more].concat());
    let wrapped = with(&["engine.state_index_bits=19"]);
    assert_eq!(wrapped.summary()["first_wrapped_block"], 171);
    assert_eq!(wrapped.summary()["first_spike_step"], 3);
    let first = &wrapped.summary()["findings"][0];
    assert_eq!((&first["kind"], &first["step"]), (&json!("address_wrap"), &json!(3)));
    let high = |row: &RolloutRow| row.state_blocks.iter().any(|block| block.get() >= 171);
    let named = request_ids(first);
    let rows = wrapped.rollouts();
    let reached = rows[2].iter().filter(|row| high(row)).map(|row| row.request.to_string());
    assert_eq!(named, reached.collect());

    with(&["engine.state_index_bits=64"]).assert_clean();
    // A stack hands out the same low blocks again and again.
    with(&["engine.state_index_bits=19", "engine.free_list=lifo"]).assert_clean();
}

/// A state index of 17 bits ends at block 43 of stride 3,072, where 43 * 3,072 - 2^17 = 1,024: the
/// state of block s lands in pages s - 43, behind its first 5,632 bytes, and s - 42, in its first
/// 1,536. Fifteen requests of five tokens fill the pool at once, three state blocks and one of keys
/// and values each: requests 0 to 4 hold blocks 1 to 20, requests 10 to 14 hold 41 to 60.
#[test]
fn a_wrapped_store_overwrites_who_holds_the_page_it_lands_in() {
    let run = Run::of(
        SUMS,
        &[
            "engine.num_gpu_blocks_override=64",
            "engine.max_num_batched_tokens=512",
            "engine.state_index_bits=17",
            "rollout.rollouts_per_prompt=8",
            "steps=3",
            SCORE_ONLY,
        ],
    );
    assert_eq!(run.summary()["first_wrapped_block"], 43);
    let found = findings(&run, "address_wrap");
    assert_eq!(found.len(), 3, "{found:#?}");
    let first: BTreeSet<String> = request_ids(&found[0]);
    for n in 0..15 {
        let named = first.contains(&format!("s1.p{}.r{}", n / 8, n % 8));
        assert_eq!(named, !(5..10).contains(&n), "request {n} of {first:?}");
    }
    let message = found[0]["message"].as_str().expect("a message");
    let start = "block 43 is the first whose state address wraps, at 2^17 / 3072: the state index \
        is 17 bits wide; ";
    assert!(message.starts_with(start), "{message}");
    let named = "block 1 of s1.p0.r0 was overwritten by block 43 of s1.p1.r2 in engine step 1";
    assert!(message.contains(named), "{message}");

    let tokens = run.tokens();
    for (found, rows) in found.iter().zip(run.rollouts()) {
        check_wrapped_at_43(&rows, &tokens, &request_ids(found));
    }
}

/// Whoever holds a block from 43 on is bad, whoever else is bad holds a page that such a block's
/// state landed in, and those named are the bad ones.
fn check_wrapped_at_43(rows: &[RolloutRow], tokens: &[TokenRow], named: &BTreeSet<String>) {
    let own = |row: &RolloutRow| {
        let request = row.request;
        tokens.iter().filter(move |token| token.request == request)
    };
    let steps = |row: &RolloutRow| -> Vec<u64> {
        own(row).map(|token| token.engine_step.expect("known").get()).collect()
    };
    let is_bad = |row: &&RolloutRow| own(row).any(|token| token.logp_decode != token.logp_trainer);
    let high = |row: &RolloutRow| row.state_blocks.iter().any(|block| block.get() >= 43);
    // Every prompt is one chunk: it is stored in the step of the first token.
    let stored = |row: &RolloutRow| {
        let step = steps(row)[0];
        row.state_blocks.iter().map(|block| (step, block.get())).collect::<Vec<_>>()
    };
    let stores: Vec<(u64, u32)> =
        rows.iter().flat_map(stored).filter(|&(_, block)| block >= 43).collect();
    let touched = |row: &RolloutRow| {
        let own = steps(row);
        stores.iter().any(|&(step, block)| {
            let mut held = row.state_blocks.iter().chain(&row.attn_blocks);
            let pages = [block - 43, block - 42];
            (own[0]..=own[own.len() - 1]).contains(&step)
                && held.any(|block| pages.contains(&block.get()))
        })
    };
    assert_eq!(rows.len(), 24);
    assert!(rows.iter().filter(|row| high(row)).all(|row| is_bad(&row)));
    assert!(rows.iter().filter(is_bad).all(|row| high(row) || touched(row)));
    let bad: BTreeSet<String> =
        rows.iter().filter(is_bad).map(|row| row.request.to_string()).collect();
    assert_eq!(*named, bad);
    assert!(bad.len() < rows.len());
}

fn request_ids(finding: &serde_json::Value) -> BTreeSet<String> {
    serde_json::from_value(finding["requests"].clone()).expect("request ids")
}

/// Sixteen tokens hold three prompts of five and leave one: the fourth request begins with a chunk
/// of one token, runs as a decode row and reads what its block's last owner left.
#[test]
fn a_first_chunk_of_one_token_reads_stale_state_under_the_old_split() {
    let pool = ["engine.num_gpu_blocks_override=80", "engine.max_num_batched_tokens=16"];
    let with = |more: &[&str]| Run::of(SUMS, &[&pool[..], &["steps=4", SCORE_ONLY], more].concat());
    let old = with(&["engine.batch_split=scheduled_tokens"]);
    // The pool starts zeroed, and a first lap reads zeros, which is what a new request needs. Of 79
    // blocks 48 go a step, and the fourth request of the second step still has new ones.
    assert_eq!(spikes(&old), [3, 4]);
    for finding in old.summary()["findings"].as_array().expect("a list") {
        let step = Step::new(finding["step"].as_u64().expect("a step"));
        assert_eq!(finding["requests"], json!([format!("s{step}.p0.r3")]));
        assert_eq!(finding["kind"], "stale_state");
        let message = finding["message"].as_str().expect("a message");
        assert!(message.contains("1 scheduled with 0 computed"), "{message}");
    }
    with(&["engine.batch_split=is_prefilling"]).assert_clean();
    with(&["engine.batch_split=computed_tokens"]).assert_clean();
    with(&["engine.batch_split=scheduled_tokens", "engine.max_num_batched_tokens=64"])
        .assert_clean();
}
