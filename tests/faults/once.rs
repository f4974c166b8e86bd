//! What strikes one request.

use super::*;

/// One request is wrong, from one place on, and the engine's own prefill of it is right.
fn strikes_one(fault: &str, sets: &[&str]) -> (RequestId, usize) {
    let fault = format!("engine.faults=[\"{fault}\"]");
    let sets = [&["steps=2", fault.as_str()], sets].concat();
    let run = played(&sets);
    let found: Vec<_> = run.steps.iter().flat_map(PlayedStep::bad).collect();
    assert_eq!(found.len(), 1, "{fault}");
    let (rollout, first) = found[0];
    assert_eq!(rollout.prefill, rollout.trainer, "{fault}");
    let forced = [&sets[..], &["engine.force_prefill=true"]].concat();
    assert_eq!(played(&forced).spikes(), [0_u64; 0], "{fault}");
    (rollout.completion.id, first)
}

/// Engine step 4 is the third decode, which samples the fourth token. Its last row is the last
/// request's.
#[test]
fn one_bit_of_one_state() {
    assert_eq!(strikes_one("state_bit_flip", &[]), (RequestId::new(1, 0, 7), 3));
    let (_, first) = strikes_one("state_bit_flip", &["engine.mamba_ssm_cache_dtype=bf16"]);
    assert_eq!(first, 3);
}

#[test]
fn one_page_of_keys_and_values() {
    assert_eq!(strikes_one("kv_page_zeroed", &[]), (RequestId::new(1, 0, 7), 3));
}

#[test]
fn one_ulp_in_one_layer_for_one_request_of_a_step() {
    for dtype in ["f32", "bf16"] {
        let model = format!("model.dtype={dtype}");
        let run = played(&["steps=2", "engine.faults=[\"layer_ulp\"]", &model]);
        for (step, n) in run.steps.iter().zip(1..) {
            assert_eq!(bad(step), BTreeSet::from([RequestId::new(n, 0, 0)]), "{dtype}");
            for (rollout, first) in step.bad() {
                assert!(first > 0, "the first token comes of a prefill");
                assert_eq!(rollout.prefill, rollout.trainer);
            }
        }
    }
}
