//! A fault that a model has no place for is refused by its name.

use super::*;
use gapscope::run::Session;

#[test]
fn faults_without_a_place_are_refused() {
    let mamba = "model.preset = \"tiny-mamba\"";
    let llama = "model.preset = \"tiny-llama\"";
    for (model, fault, missing) in [
        (llama, "keep_state_on_preempt", "the model has no Mamba layer, and so no state"),
        (llama, "padding_writes", "the model has no Mamba layer, and so no state"),
        (llama, "decode_update_differs", "the model has no Mamba layer, and so no state"),
        (llama, "state_bit_flip", "the model has no Mamba layer, and so no state"),
        (mamba, "kv_page_zeroed", "the model has no attention layer"),
        (PRESET, "head_not_refreshed", "the model's head is a tensor of its own"),
        (PRESET, "gate_renormalised", "the model has no layer with experts"),
        (PRESET, "stale_expert", "the model has no layer with experts"),
    ] {
        let text = SMALL.replace(PRESET, model);
        let config = experiment(&text, &[&format!("engine.faults=[\"{fault}\"]")]);
        let error = Session::open(&config).err().expect("no place for it").to_string();
        let expected = format!(
            "engine.faults has \"{fault}\", which has no place here: {missing}; leave it out"
        );
        assert_eq!(error, expected);
    }
}
