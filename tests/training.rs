//! The whole trainer against transformers' Jamba under torch's autograd (`oracles/train_torch.py`):
//! ten supervised AdamW steps, and the gradients of GRPO minibatches.

mod common;

use std::collections::BTreeMap;

use common::{config, fixture, gradient_by_update, trainer, GRADIENT_BY_UPDATE, PLAIN};
use gapscope::base::{LogProb, TokenId};
use gapscope::model::Plan;
use gapscope::trainer::{Experience, Trainer};
use serde::Deserialize;

#[derive(Deserialize)]
struct Goldens {
    supervised: Supervised,
    grpo: Vec<Grpo>,
}

#[derive(Deserialize)]
struct Sequence {
    prompt_len: usize,
    tokens: Vec<u32>,
}

#[derive(Deserialize)]
struct Supervised {
    options: serde_json::Value,
    sequences: Vec<Sequence>,
    losses: Vec<f64>,
    weight_norms: BTreeMap<String, f64>,
}

#[derive(Deserialize)]
struct Grpo {
    name: String,
    temperature: f32,
    sequences: Vec<Sequence>,
    advantages: Vec<f64>,
    masks: Vec<Vec<bool>>,
    old: Vec<Vec<f32>>,
    rollout: Vec<Vec<f32>>,
    clip: [f64; 2],
    importance_cap: Option<f64>,
    aggregation: String,
    loss: f64,
    grad_norms: BTreeMap<String, f64>,
}

fn goldens() -> Goldens {
    let text = std::fs::read_to_string(fixture("training/goldens.json")).expect("fixture");
    serde_json::from_str(&text).expect("fixture")
}

fn sequences(all: &[Sequence]) -> Vec<gapscope::trainer::Sequence> {
    let of = |one: &Sequence| gapscope::trainer::Sequence {
        tokens: one.tokens.iter().map(|&id| TokenId::new(id)).collect(),
        prompt_len: one.prompt_len,
    };
    all.iter().map(of).collect()
}

fn start(toml: &str) -> (Plan, Trainer) {
    let head = "name = \"training\"\nmodel.preset = \"tiny-jamba\"\n";
    trainer(&fixture("tiny-jamba"), &config(&format!("{head}{toml}")))
}

/// Each tensor's elements by name.
fn by_name<'a>(plan: &'a Plan, units: &'a [Vec<f32>]) -> BTreeMap<&'a str, &'a [f32]> {
    let names = |spec: &'a gapscope::model::UnitSpec| spec.tensors.iter().map(|t| t.name.as_str());
    let of = |(spec, flat): (&'a gapscope::model::UnitSpec, &'a Vec<f32>)| {
        names(spec).zip(spec.parts(flat))
    };
    plan.units.iter().zip(units).flat_map(of).collect()
}

fn norm(values: &[f32]) -> f64 {
    values.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Packed two to a chunk or all in one; torch runs each sequence alone.
const CHUNKS: [u32; 2] = [20, 1000];

#[test]
fn ten_supervised_steps() {
    let want = goldens().supervised;
    for chunk in CHUNKS {
        let option = |name: &str| want.options[name].clone();
        let toml = format!(
            "[trainer]\nbetas = {}\neps = {}\nweight_decay = {}\nmax_grad_norm = {}\n\
             warmup_steps = {}\nmax_tokens_per_chunk = {chunk}\nwarm_start.learning_rate = {}\n",
            option("betas"),
            option("eps"),
            option("weight_decay"),
            option("max_grad_norm"),
            option("warmup_steps"),
            option("learning_rate"),
        );
        let (plan, mut trainer) = start(&toml);
        let batch = sequences(&want.sequences);
        for (step, want) in want.losses.iter().enumerate() {
            let loss = trainer.warm_step(&batch).expect("a step");
            // Two f32 forwards differ by 3e-7; AdamW's first steps, which divide a gradient by its
            // own size, let that grow to 6e-6 and no further.
            assert!((loss - want).abs() <= 2e-5, "step {step}: {loss} against {want}");
        }
        let master = trainer.master().expect("master");
        let found = by_name(&plan, &master);
        assert_eq!(found.len(), want.weight_norms.len());
        for (name, want) in &want.weight_norms {
            let found = norm(found[name.as_str()]);
            assert!((found - want).abs() <= 5e-6 * want, "{name}: {found} against {want}");
        }
    }
}

#[test]
fn grpo_gradients() {
    for case in goldens().grpo {
        for chunk in CHUNKS {
            check_grpo(&case, chunk);
        }
    }
}

fn check_grpo(case: &Grpo, chunk: u32) {
    let cap = case
        .importance_cap
        .map_or(String::new(), |cap| format!("trainer.importance_cap = {cap}\n"));
    let (plan, mut trainer) = start(&format!(
        "{GRADIENT_BY_UPDATE}trainer.clip_ratio_low = {}\ntrainer.clip_ratio_high = {}\n\
         trainer.loss_agg = \"{}\"\ntrainer.max_tokens_per_chunk = {chunk}\n{cap}",
        case.clip[0], case.clip[1], case.aggregation
    ));
    let mut contract = PLAIN;
    contract.temperature = case.temperature;
    let batch = sequences(&case.sequences);
    let scores = trainer.score(&batch, &contract).expect("score");
    let logps = |all: &[f32]| all.iter().map(|&x| LogProb::new(x)).collect::<Vec<_>>();
    let differences = |old: &[f32], rollout: &[f32]| {
        old.iter().zip(rollout).map(|(&a, &b)| f64::from(a) - f64::from(b)).collect()
    };
    let experience = |(i, sequence): (usize, &gapscope::trainer::Sequence)| Experience {
        sequence: sequence.clone(),
        advantage: case.advantages[i],
        mask: case.masks[i].clone(),
        old: logps(&case.old[i]),
        d: differences(&case.old[i], &case.rollout[i]),
    };
    let experiences: Vec<_> = batch.iter().enumerate().map(experience).collect();
    if case.name.starts_with("old is") {
        for (scores, old) in scores.iter().zip(&case.old) {
            let ours: Vec<f32> = scores.ratio.iter().map(|logp| logp.get()).collect();
            common::assert_close("old", &ours, old, 2e-5);
        }
    }
    let before = trainer.master().expect("master");
    let report = trainer.update(&experiences, &contract).expect("an update").remove(0);
    let error = (report.terms.loss - case.loss).abs();
    assert!(error <= 1e-5, "{}: {} against {}", case.name, report.terms.loss, case.loss);
    let after = trainer.master().expect("master");
    let (before, after) = (by_name(&plan, &before), by_name(&plan, &after));
    assert_eq!(before.len(), case.grad_norms.len());
    for (name, want) in &case.grad_norms {
        let name = name.as_str();
        let found = norm(&gradient_by_update(before[name], after[name]));
        // The worst is 6e-6, of a norm's weight over rows of four elements.
        let bound = 3e-5 * want;
        assert!((found - want).abs() <= bound, "{}, {name}: {found} against {want}", case.name);
    }
}
