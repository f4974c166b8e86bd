//! Whole blocks and the whole trainer.

use gapscope::base::{LogProb, Position, TokenId};
use gapscope::config::{Arithmetic, Dtype};
use gapscope::model::{
    AttentionShape, Block, Family, HfConfig, MambaShape, Numerics, Plan, Preset, Residual, Span,
    Spans,
};
use gapscope::ops::array::Array;
use gapscope::trainer::{Experience, Sequence, Trainer};

use crate::common::dense::{flat, tensor, Dense};
use crate::common::shapes::odd_shapes;
use crate::common::{
    config, device, gradient_by_update, random_tokens, random_weights, GRADIENT_BY_UPDATE,
};
use crate::{check, opened, random};

/// A gradient that has come through a block: about 20 operations in a row, each at inputs that are
/// rounded already. The worst is 1e-5, of a norm's weight over rows of three elements.
const BLOCK: f64 = 3e-5;

fn plans() -> Vec<(&'static str, Plan)> {
    odd_shapes().into_iter().map(|(name, config)| (name, Plan::new(config))).collect()
}

#[test]
fn blocks_over_packed_documents() {
    let both = |plan: (&'static str, Plan)| {
        [Arithmetic::Invariant, Arithmetic::Fast].map(|arithmetic| (plan.clone(), arithmetic))
    };
    for ((name, plan), arithmetic) in plans().into_iter().flat_map(both) {
        let units = random_weights(&plan, 1);
        let num = Numerics { arithmetic, ..plan.numerics(Dtype::F32, Dtype::F32) };
        for lens in [[7, 1, 4].as_slice(), &[1], &[2, 9]] {
            for (layer, kind) in plan.layers.iter().enumerate() {
                let case = format!("{name}, {arithmetic:?}, layer {layer}, {kind:?}, {lens:?}");
                let (spec, weights) = (&plan.units[layer + 1], &units[layer + 1]);
                let block =
                    Block::load(&plan.config, *kind, spec, &opened(weights), num.purpose(true));
                let mut start = 0;
                let span = |&len: &usize| {
                    start += len;
                    Span { start: start - len, len, position: Position::new(0) }
                };
                let spans = Spans::new(&device(), lens.iter().map(span).collect());
                let (rows, h) = (start, plan.config.hidden_size);
                let (x, dy) = (random(rows * h, 80), random(rows * h, 81));
                let mut y = Residual::new(device().upload(x.clone()));
                let mut dx = device().upload(dy.clone());
                let mut grads = device().zeros(spec.len());
                block.forward(&num, &spans, &mut y);
                block.backward(
                    &num,
                    spec,
                    &spans,
                    &device().upload(x.clone()),
                    &mut dx,
                    &mut grads,
                );
                let [y, dx, grads] = [y.into_settled(&num), dx, grads].map(Array::into_host);

                let dense = Dense::new(&plan, &units, lens);
                let input = candle_core::Var::from_tensor(&tensor(&x, &[rows, h])).expect("x");
                let out = dense.block(layer, input.as_tensor()).expect("a block");
                check(&format!("{case}: y"), &y, &flat(&out), BLOCK);
                let loss = (out * tensor(&dy, &[rows, h])).and_then(|l| l.sum_all()).expect("loss");
                let want = dense.gradients(&loss);
                for (one, got) in spec.tensors.iter().zip(spec.parts(&grads)) {
                    check(&format!("{case}: {}", one.name), got, &want[&one.name], BLOCK);
                }
                let store = loss.backward().expect("a backward");
                let want = flat(store.get(input.as_tensor()).expect("x takes part"));
                check(&format!("{case}: dx"), &dx, &want, BLOCK);
            }
        }
    }
}

/// Prompt and completion lengths: packed two and three to a chunk of 24, one with an empty
/// completion, one of a single completion token.
const SEQUENCES: [(usize, usize); 6] = [(3, 6), (1, 9), (9, 0), (4, 1), (2, 17), (5, 5)];

fn sequences(config: &HfConfig) -> Vec<Sequence> {
    let of = |(i, &(prompt, completion)): (usize, &(usize, usize))| Sequence {
        tokens: random_tokens(config, prompt + completion, i as u64),
        prompt_len: prompt,
    };
    SEQUENCES.iter().enumerate().map(of).collect()
}

/// Σ weight · log p over every completion token, all sequences in one chunk of the oracle.
fn weighted_log_probs(
    dense: &Dense,
    sequences: &[Sequence],
    temperature: f32,
    weight: impl Fn(usize) -> f64,
) -> candle_core::Tensor {
    let tokens: Vec<TokenId> = sequences.iter().flat_map(|s| s.tokens.clone()).collect();
    let log_probs = dense.log_probs(&tokens, temperature).expect("a forward");
    let mut picked = vec![0.0; tokens.len() * log_probs.dims()[1]];
    let mut start = 0;
    for (index, sequence) in sequences.iter().enumerate() {
        for at in start + sequence.prompt_len..start + sequence.tokens.len() {
            picked[(at - 1) * log_probs.dims()[1] + tokens[at].index()] = weight(index);
        }
        start += sequence.tokens.len();
    }
    let picked = candle_core::Tensor::from_vec(picked, log_probs.dims(), log_probs.device());
    (log_probs * picked.expect("weights")).and_then(|one| one.sum_all()).expect("a loss")
}

fn trainer(plan: &Plan, units: &[Vec<f32>], extra: &str) -> Trainer {
    let toml = format!(
        "name = \"autograd\"\nmodel.preset = \"tiny-jamba\"\n{GRADIENT_BY_UPDATE}\
         trainer.max_tokens_per_chunk = 24\n{extra}"
    );
    let num = plan.numerics(Dtype::F32, Dtype::F32);
    Trainer::new(&device(), plan.clone(), num, config(&toml).trainer, units).expect("few threads")
}

/// Every element of the gradient that an update used, against the oracle's.
fn check_gradient(case: &str, plan: &Plan, before: &[Vec<f32>], after: &[Vec<f32>], want: &Want) {
    for ((spec, before), after) in plan.units.iter().zip(before).zip(after) {
        let parts = spec.tensors.iter().zip(spec.parts(before).zip(spec.parts(after)));
        for (tensor, (before, after)) in parts {
            let got = gradient_by_update(before, after);
            check(&format!("{case}: {}", tensor.name), &got, &want[&tensor.name], MODEL);
        }
    }
}

type Want = std::collections::BTreeMap<String, Vec<f64>>;

/// Four blocks deep, and read off weights whose last place is 6e-8 of them; the worst is 1.1e-5.
const MODEL: f64 = 4e-5;

/// Forward, packed backward, shards and AdamW at one rank: the whole trainer.
#[test]
fn a_supervised_update() {
    for (name, plan) in plans() {
        let units = random_weights(&plan, 2);
        let sequences = sequences(&plan.config);
        let mut trainer = trainer(&plan, &units, "");
        let loss = trainer.warm_step(&sequences).expect("a step");
        let lens: Vec<usize> = sequences.iter().map(|s| s.tokens.len()).collect();
        let dense = Dense::new(&plan, &units, &lens);
        let tokens = SEQUENCES.iter().map(|(_, completion)| completion).sum::<usize>() as f64;
        let want = weighted_log_probs(&dense, &sequences, 1.0, |_| -1.0 / tokens);
        let want_loss: f64 = want.to_scalar().expect("a scalar");
        assert!((loss - want_loss).abs() < 1e-5, "{name}: {loss} against {want_loss}");
        let after = trainer.master().expect("master");
        check_gradient(name, &plan, &units, &after, &dense.gradients(&want));
    }
}

/// With old = new the ratio is 1, so the gradient of the loss is -A / tokens by each log p at T.
#[test]
fn a_grpo_update_at_a_temperature() {
    for (name, plan) in plans() {
        let units = random_weights(&plan, 3);
        let sequences = sequences(&plan.config);
        let mut trainer = trainer(&plan, &units, "");
        let mut contract = crate::common::PLAIN;
        contract.temperature = 0.7;
        let scores = trainer.score(&sequences, &contract).expect("score");
        let advantage = |index: usize| [1.5, -0.5, 2.0, -1.0, 0.25, -0.75][index];
        let experience = |(index, sequence): (usize, &Sequence)| {
            let old: Vec<LogProb> = scores[index].ratio.clone();
            Experience {
                sequence: sequence.clone(),
                advantage: advantage(index),
                mask: vec![true; old.len()],
                d: vec![0.0; old.len()],
                old,
            }
        };
        let experiences: Vec<_> = sequences.iter().enumerate().map(experience).collect();
        let report = trainer.update(&experiences, &contract).expect("an update").remove(0);

        let lens: Vec<usize> = sequences.iter().map(|s| s.tokens.len()).collect();
        let dense = Dense::new(&plan, &units, &lens);
        let tokens = SEQUENCES.iter().map(|(_, completion)| completion).sum::<usize>() as f64;
        let loss = weighted_log_probs(&dense, &sequences, 0.7, |i| -advantage(i) / tokens);
        let want = dense.gradients(&loss);
        let norm = want.values().flatten().map(|g| g * g).sum::<f64>().sqrt();
        assert!((report.grad_norm - norm).abs() <= MODEL * norm, "{name}: {}", report.grad_norm);
        check_gradient(name, &plan, &units, &trainer.master().expect("master"), &want);
    }
}

#[test]
fn the_table_has_the_odd_shapes() {
    let all = odd_shapes();
    let has = |what: &dyn Fn(&HfConfig) -> bool| all.iter().any(|(_, config)| what(config));
    let mamba = |what: fn(&MambaShape) -> bool| has(&|c| c.mamba.as_ref().is_some_and(what));
    assert!(mamba(|m| m.proj_bias) && mamba(|m| !m.conv_bias) && mamba(|m| !m.dt_b_c_norms));
    assert!(mamba(|m| m.d_state == 8) && mamba(|m| m.d_state == 17) && mamba(|m| m.d_conv == 2));
    let attention =
        |what: fn(&AttentionShape) -> bool| has(&|c| c.attention.as_ref().is_some_and(what));
    assert!(attention(|a| a.kv_heads == 1) && attention(|a| a.qkv_bias && !a.o_bias));
    assert!(attention(|a| a.o_bias) && attention(|a| a.qk_norm));
    assert!(attention(|a| a.rope.is_some_and(|rope| rope.llama3.is_some())));
    assert!(has(&|c| c.tie_word_embeddings) && has(&|c| *c == Preset::TinyJamba.config()));
    for family in Family::ALL {
        assert!(has(&|c| c.family == family), "{family:?}");
    }
    // Of two choices and of one: a single weight still has a gradient, as it is not renormalised.
    let experts = |chosen| {
        has(&|c| {
            let shape = c.feed_forward.as_ref().and_then(|shape| shape.experts);
            shape.is_some_and(|experts| experts.per_token == chosen)
        })
    };
    assert!(experts(1) && experts(2));
}
