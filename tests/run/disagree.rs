//! Every way of breaking the agreement shows, where it should and nowhere else.

use std::collections::BTreeSet;

use gapscope::base::Step;
use gapscope::report::parquet::RolloutRow;
use serde_json::json;

use crate::common::run::{Run, SUMS};
use crate::{findings, spikes, SCORE_ONLY};

#[test]
fn one_ulp_on_either_side_is_a_gap_and_names_its_tensor() {
    for fault in
        ["engine.faults=[\"engine_weight_ulp\"]", "trainer.faults=[\"trainer_weight_ulp\"]"]
    {
        for dtype in ["model.dtype=f32", "model.dtype=bf16"] {
            let run = Run::small(&[fault, dtype, SCORE_ONLY]);
            let gaps = run.metric("gap/logp_abs_diff_max");
            assert!(gaps.iter().all(|&gap| gap > 0.0), "{fault} {dtype}: {gaps:?}");
            assert_eq!(spikes(&run), [1, 2, 3], "{fault} {dtype}");
            let found = findings(&run, "weights_not_synced");
            assert_eq!(found.len(), 3);
            for finding in found {
                let message = finding["message"].as_str().expect("a message");
                let expected = "; 1 of 63 tensors differ: model.final_layernorm.weight";
                assert!(message.ends_with(expected), "{message}");
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
        .map(|rows| (rows[0].engine_fingerprint, rows[0].trainer_fingerprint.expect("scored")))
        .collect();
    assert!(sides.iter().all(|(engine, trainer)| engine != trainer), "{sides:x?}");
    assert!(sides.windows(2).all(|pair| pair[1].0 == pair[0].1), "{sides:x?}");
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
    let named: BTreeSet<String> =
        serde_json::from_value(first["requests"].clone()).expect("request ids");
    let rows = wrapped.rollouts();
    let reached = rows[2].iter().filter(|row| high(row)).map(|row| row.request.to_string());
    assert_eq!(named, reached.collect());

    with(&["engine.state_index_bits=64"]).assert_clean();
    // A stack hands out the same low blocks again and again.
    with(&["engine.state_index_bits=19", "engine.free_list=lifo"]).assert_clean();
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
