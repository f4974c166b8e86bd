//! Every fault that the engine or the hand-over can be given by name: it does what the catalogue
//! says of it, to whom the catalogue says, and nothing to anybody else.

#[path = "../common/mod.rs"]
mod common;
mod engine;
mod hand_over;
mod once;
mod refused;

use std::collections::BTreeSet;

use common::play::{experiment, Played, PlayedStep};
use gapscope::base::RequestId;
use gapscope::rollout::Rollout;

/// One prompt of five tokens, a hundred blocks, nobody preempted.
const SMALL: &str = r#"
name = "faults"
seed = 7
steps = 1
model.preset = "tiny-jamba"
trainer.update = "none"

[engine]
num_gpu_blocks_override = 100
max_num_batched_tokens = 256
max_num_seqs = 8
max_model_len = 96

[rollout]
prompts_per_step = 1
rollouts_per_prompt = 8
max_new_tokens = 12
ignore_eos = true

[task]
prompt_tokens = 5
"#;

const PRESET: &str = "model.preset = \"tiny-jamba\"";

fn played(sets: &[&str]) -> Played {
    Played::new(&experiment(SMALL, sets))
}

/// Of another model: `model` is a line of TOML.
fn of_model(model: &str, sets: &[&str]) -> Played {
    Played::new(&experiment(&SMALL.replace(PRESET, model), sets))
}

fn with_experts(sets: &[&str]) -> Played {
    of_model("model.path = \"tests/fixtures/tiny-jamba-moe\"", sets)
}

/// Whether engine and trainer give each token other bits.
fn differs(rollout: &Rollout) -> Vec<bool> {
    let trainer = rollout.trainer.as_ref().expect("scored");
    let tokens = rollout.completion.tokens.iter();
    tokens.zip(trainer).map(|(own, trainer)| Some(own.logp) != *trainer).collect()
}

fn bad(step: &PlayedStep) -> BTreeSet<RequestId> {
    step.bad().map(|(rollout, _)| rollout.completion.id).collect()
}

fn all(step: &PlayedStep) -> BTreeSet<RequestId> {
    step.rollouts.iter().map(|rollout| rollout.completion.id).collect()
}
