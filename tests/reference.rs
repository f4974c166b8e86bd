//! Odd shapes: the trainer against the candle reference on random weights, forward and backward.

mod common;

use common::shapes::odd_shapes;
use common::{assert_close, by_name, config, device, random_tokens, random_weights, PLAIN};
use gapscope::base::TokenId;
use gapscope::config::Dtype;
use gapscope::model::Plan;
use gapscope::trainer::reference::Reference;
use gapscope::trainer::{Sequence, Trainer};

fn reference(plan: &Plan, units: &[Vec<f32>]) -> Reference {
    Reference::new(plan, by_name(plan, units)).expect("a reference")
}

/// A chunk of 40 tokens holds several of them; one sequence has a single token to predict.
fn batch(plan: &Plan) -> Vec<Vec<TokenId>> {
    let of = |(i, &len): (usize, &usize)| random_tokens(&plan.config, len, i as u64);
    [17, 2, 9, 31, 5].iter().enumerate().map(of).collect()
}

fn trainer(plan: &Plan, units: &[Vec<f32>], dtype: Dtype) -> Trainer {
    let toml = "name = \"odd\"\nmodel.preset = \"tiny-jamba\"\ntrainer.max_tokens_per_chunk = 40\n";
    let num = plan.numerics(dtype, Dtype::F32);
    Trainer::new(&device(), plan.clone(), num, config(toml).trainer, units).expect("few threads")
}

fn sequences(batch: &[Vec<TokenId>]) -> Vec<Sequence> {
    batch.iter().map(|tokens| Sequence { tokens: tokens.clone(), prompt_len: 1 }).collect()
}

#[test]
fn logits_hidden_states_and_log_probs() {
    for (name, config) in odd_shapes() {
        let plan = Plan::new(config);
        let units = random_weights(&plan, 4);
        let (reference, trainer) = (reference(&plan, &units), trainer(&plan, &units, Dtype::F32));
        let batch = batch(&plan);
        let seen = trainer.inspect(&sequences(&batch)).expect("inspect");
        let mut contract = PLAIN;
        contract.temperature = 0.6;
        let scores = trainer.score(&sequences(&batch), &contract).expect("score");
        for ((tokens, seen), scores) in batch.iter().zip(&seen).zip(&scores) {
            let what = |part: &str| format!("{name}, {} tokens, {part}", tokens.len());
            let logits = reference.logits(tokens).expect("a forward").concat();
            assert_close(&what("logits"), &seen.logits, &logits, 2e-5);
            let hidden = reference.hidden_states(tokens).expect("a forward");
            assert_eq!(seen.hidden.len(), hidden.len());
            for (layer, (seen, want)) in seen.hidden.iter().zip(hidden).enumerate() {
                assert_close(&what(&format!("hidden {layer}")), seen, &want.concat(), 2e-5);
            }
            for (scored, temperature) in [(&scores.contract, 1.0), (&scores.ratio, 0.6)] {
                let found: Vec<f32> = scored.iter().map(|logp| logp.get()).collect();
                let want = reference.target_logprobs(tokens, temperature).expect("a forward");
                assert_close(&what(&format!("log p at {temperature}")), &found, &want, 2e-5);
            }
        }
    }
}

#[test]
fn loss_and_every_gradient_norm() {
    for (name, config) in odd_shapes() {
        let plan = Plan::new(config);
        let units = random_weights(&plan, 5);
        let batch = batch(&plan);
        let want = reference(&plan, &units).loss_and_grad_norms(&batch).expect("a backward");
        let trainer = trainer(&plan, &units, Dtype::F32);
        let (loss, norms) = trainer.supervised_grad_norms(&sequences(&batch)).expect("a gradient");
        assert!((loss - want.loss).abs() <= 1e-5, "{name}: {loss} against {}", want.loss);
        assert_eq!(norms.len(), want.grad_norms.len(), "{name}");
        for (tensor, got) in norms {
            let want = want.grad_norms[&tensor];
            let bound = f64::max(2e-4 * want, 1e-7);
            assert!((got - want).abs() <= bound, "{name}, {tensor}: {got} against {want}");
        }
    }
}
