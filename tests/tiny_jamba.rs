//! The trainer against transformers' outputs for the same weights (`tests/fixtures/tiny-jamba`).
//!
//! Tolerances: the f64 forward differs from transformers' f32 logits by 5.5e-6, so 2e-5 is what a
//! correct f32 implementation keeps.

mod common;

use std::collections::BTreeMap;

use common::{assert_close, config, fixture, trainer, Golden};
use gapscope::trainer::{Sequence, Trainer};

const TOML: &str = "name = \"fixture\"\nmodel.preset = \"tiny-jamba\"\n";

fn setup() -> (Golden, Trainer, Vec<Sequence>) {
    let (_, trainer) = trainer(&fixture("tiny-jamba"), &config(TOML));
    let golden = Golden::tiny_jamba();
    let sequence = |tokens| Sequence { tokens, prompt_len: 1 };
    let sequences = golden.rows().into_iter().map(sequence).collect();
    (golden, trainer, sequences)
}

#[test]
fn trainer_logits_and_hidden_states() {
    let (golden, trainer, sequences) = setup();
    let seen = trainer.inspect(&sequences).expect("inspect");
    let logits: Vec<f32> = seen.iter().flat_map(|one| one.logits.clone()).collect();
    assert_close("logits", &logits, &golden.f32("logits"), 2e-5);
    for layer in 0..=4 {
        let hidden: Vec<f32> = seen.iter().flat_map(|one| one.hidden[layer].clone()).collect();
        let name = format!("hidden.{layer}");
        assert_close(&name, &hidden, &golden.f32(&name), 2e-5);
    }
}

#[test]
fn trainer_target_logprobs() {
    let (golden, trainer, sequences) = setup();
    let scores = trainer.score(&sequences, &common::PLAIN).expect("score");
    let got: Vec<f32> = scores.iter().flat_map(|s| s.contract.iter().map(|l| l.get())).collect();
    assert_close("target_logprobs", &got, &golden.f32("target_logprobs"), 2e-5);
}

#[test]
fn trainer_greedy_continuation() {
    let (golden, trainer, _) = setup();
    let want = golden.tokens("greedy_ids");
    let mut tokens = want[..11].to_vec();
    while tokens.len() < want.len() {
        let sequence = Sequence { tokens: tokens.clone(), prompt_len: 1 };
        let seen = trainer.inspect(&[sequence]).expect("inspect").remove(0);
        let last = &seen.logits[(tokens.len() - 1) * 256..];
        tokens.push(gapscope::ops::sampling::argmax(last));
    }
    assert_eq!(tokens, want);
}

#[test]
fn trainer_loss_and_every_gradient_norm() {
    let (golden, trainer, sequences) = setup();
    let (loss, norms) = trainer.supervised_grad_norms(&sequences).expect("gradient");
    let want = f64::from(golden.f32("loss")[0]);
    assert!((loss - want).abs() < 1e-5, "loss {loss} against {want}");
    let text = std::fs::read_to_string(fixture("tiny-jamba/grad_norms.json")).expect("fixture");
    let want: BTreeMap<String, f64> = serde_json::from_str(&text).expect("fixture");
    assert_eq!(norms.len(), want.len(), "every parameter has a norm");
    for (name, got) in norms {
        let want = want[&name];
        let error = (got - want).abs();
        assert!(error <= 2e-4 * want + 1e-7, "{name}: {got} against {want}");
    }
}
