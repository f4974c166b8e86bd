//! Trainer, engine and reference of every family against transformers' outputs for the same weights
//! (`tests/fixtures/tiny-*`).
//!
//! Tolerances: the f64 forward differs from transformers' f32 logits by 5.5e-6, so 2e-5 is what a
//! correct f32 implementation keeps.

mod common;

use std::collections::BTreeMap;

use common::{
    assert_close, by_name, config, engine, fixture, trainer, Golden, FIXTURE_TOML, MODELS,
};
use gapscope::base::{RequestId, Stream, TokenId};
use gapscope::engine::{Engine, Feed, GenerationRequest, Phase, Seen};
use gapscope::model::{load_master, HfConfig, MixerKind, Part, PartKind};
use gapscope::trainer::reference::Reference;
use gapscope::trainer::{Inspection, Sequence, Trainer};

struct Model {
    name: &'static str,
    golden: Golden,
    shape: HfConfig,
    trainer: Trainer,
    sequences: Vec<Sequence>,
}

fn models() -> impl Iterator<Item = Model> {
    MODELS.into_iter().map(|name| {
        let (plan, trainer) = trainer(&fixture(name), &config(FIXTURE_TOML));
        let golden = Golden::of(name);
        let sequence = |tokens| Sequence { tokens, prompt_len: 1 };
        let sequences = golden.rows().into_iter().map(sequence).collect();
        Model { name, golden, shape: plan.config, trainer, sequences }
    })
}

impl Model {
    /// Our hidden states, and what transformers calls each: for Mamba it does not report the
    /// embedding, but the last layer's output both before and after the final norm.
    fn hidden(&self) -> Vec<(usize, String)> {
        let layers = self.shape.num_hidden_layers;
        let mamba = self.shape.attention.is_none();
        let name = |ours: usize| match mamba && ours < layers {
            true => ours.checked_sub(1),
            false => Some(ours),
        };
        let named = |ours| name(ours).map(|theirs| (ours, format!("hidden.{theirs}")));
        (0..=layers).filter_map(named).collect()
    }

    fn reference(&self) -> Reference {
        let (plan, units) = load_master(&fixture(self.name)).expect("a model folder");
        Reference::new(&plan, by_name(&plan, &units)).expect("a reference")
    }

    fn check(&self, what: &str, got: &[f32]) {
        assert_close(&format!("{}: {what}", self.name), got, &self.golden.f32(what), 2e-5);
    }
}

#[test]
fn trainer_logits_hidden_states_and_router_logits() {
    for model in models() {
        let seen = model.trainer.inspect(&model.sequences).expect("inspect");
        let all = |part: &dyn Fn(&Inspection) -> Vec<f32>| -> Vec<f32> {
            seen.iter().flat_map(part).collect()
        };
        model.check("logits", &all(&|one| one.logits.clone()));
        for (layer, name) in model.hidden() {
            model.check(&name, &all(&|one| one.hidden[layer].clone()));
        }
        let routers = if model.name == "tiny-jamba-moe" { 2 } else { 0 };
        assert_eq!(seen[0].router_logits.len(), routers, "{}", model.name);
        for router in 0..routers {
            let name = format!("router_logits.{router}");
            model.check(&name, &all(&|one| one.router_logits[router].clone()));
        }
    }
}

#[test]
fn trainer_target_logprobs() {
    for model in models() {
        let scores = model.trainer.score(&model.sequences, &common::PLAIN).expect("score");
        let got: Vec<f32> =
            scores.iter().flat_map(|s| s.contract.iter().map(|l| l.get())).collect();
        model.check("target_logprobs", &got);
    }
}

#[test]
fn trainer_greedy_continuation() {
    for model in models() {
        let want = model.golden.tokens("greedy_ids");
        let mut tokens = want[..11].to_vec();
        while tokens.len() < want.len() {
            let sequence = Sequence { tokens: tokens.clone(), prompt_len: 1 };
            let seen = model.trainer.inspect(&[sequence]).expect("inspect").remove(0);
            let last = &seen.logits[(tokens.len() - 1) * 256..];
            tokens.push(gapscope::ops::sampling::argmax(last));
        }
        assert_eq!(tokens, want, "{}", model.name);
    }
}

/// transformers 5 holds a layer's experts in one tensor: gate and up together, and down.
fn fused(norms: impl IntoIterator<Item = (String, f64)>) -> BTreeMap<String, f64> {
    let mut squares: BTreeMap<String, f64> = BTreeMap::new();
    for (name, norm) in norms {
        let fused = name.split_once(".experts.").map(|(layer, rest)| {
            let part = if rest.contains("down") { "down_proj" } else { "gate_up_proj" };
            format!("{layer}.experts.{part}")
        });
        *squares.entry(fused.unwrap_or(name)).or_default() += norm * norm;
    }
    squares.into_iter().map(|(name, square)| (name, square.sqrt())).collect()
}

fn check_gradients(model: &Model, leg: &str, loss: f64, norms: BTreeMap<String, f64>) {
    let name = model.name;
    let want = f64::from(model.golden.f32("loss")[0]);
    assert!((loss - want).abs() < 1e-5, "{name}, {leg}: loss {loss} against {want}");
    let text = std::fs::read_to_string(fixture(name).join("grad_norms.json")).expect("fixture");
    let want: BTreeMap<String, f64> = serde_json::from_str(&text).expect("fixture");
    assert!(norms.keys().eq(want.keys()), "{name}: every parameter has a norm");
    for (tensor, got) in norms {
        let want = want[&tensor];
        let error = (got - want).abs();
        assert!(error <= 2e-4 * want + 1e-7, "{name}, {leg}, {tensor}: {got} against {want}");
    }
}

#[test]
fn trainer_loss_and_every_gradient_norm() {
    for model in models() {
        let (loss, norms) =
            model.trainer.supervised_grad_norms(&model.sequences).expect("gradient");
        check_gradients(&model, "trainer", loss, fused(norms));
    }
}

#[test]
fn reference_forward_and_gradients() {
    for model in models() {
        let (reference, rows) = (model.reference(), model.golden.rows());
        let logits: Vec<f32> = rows
            .iter()
            .flat_map(|ids| reference.logits(ids).expect("a forward").concat())
            .collect();
        model.check("logits", &logits);
        let hidden: Vec<_> =
            rows.iter().map(|ids| reference.hidden_states(ids).expect("a forward")).collect();
        for (layer, name) in model.hidden() {
            let found: Vec<f32> = hidden.iter().flat_map(|row| row[layer].concat()).collect();
            model.check(&name, &found);
        }
        let targets: Vec<f32> = rows
            .iter()
            .flat_map(|ids| reference.target_logprobs(ids, 1.0).expect("a forward"))
            .collect();
        model.check("target_logprobs", &targets);
        let found = reference.loss_and_grad_norms(&rows).expect("a backward");
        check_gradients(&model, "reference", found.loss, fused(found.grad_norms));
    }
}

#[test]
fn reference_greedy_continuation() {
    for model in models() {
        let (reference, want) = (model.reference(), model.golden.tokens("greedy_ids"));
        let mut ids = want[..11].to_vec();
        while ids.len() < want.len() {
            let logits = reference.logits(&ids).expect("a forward");
            let last = logits.last().expect("a token");
            let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b]));
            ids.push(TokenId::new(best.expect("a vocabulary") as u32));
        }
        assert_eq!(ids, want, "{}", model.name);
    }
}

/// Feeds a row in pieces and returns its logits and hidden states as transformers reports them.
fn fed(engine: &Engine, row: &[TokenId], pieces: &[usize], phase: Phase) -> Inspection {
    let mut scratch = engine.scratch(1);
    let mut seen = Inspection::default();
    // A layer's input is what the part before its mixer left.
    let is_mixer = |part: &Part| matches!(part.kind, PartKind::Mamba | PartKind::Attention);
    let parts = engine.plan().parts();
    let inputs: Vec<usize> =
        (1..parts.len()).filter(|&i| is_mixer(&parts[i])).map(|mixer| mixer - 1).collect();
    let (mut at, mut last) = (0, Vec::new());
    for (i, len) in pieces.iter().enumerate() {
        // The first piece has no state to go on from, so it is a prefill whatever follows.
        let phase = if i == 0 { Phase::Prefill } else { phase };
        let tokens = &row[at..at + len];
        let hidden = &mut seen.hidden;
        let mut observe = |seen: Seen<'_>| {
            let Seen::Stream { part, x_th } = seen else { return };
            if let Some(layer) = inputs.iter().position(|input| *input == part) {
                hidden.resize(hidden.len().max(layer + 1), Vec::new());
                hidden[layer].extend_from_slice(x_th);
            }
        };
        let feeds = [Feed { sequence: 0, phase, tokens }];
        let x_th = scratch.feed(engine.runner(), &feeds, Some(&mut observe));
        last.extend(engine.runner().norm(&x_th).into_host());
        seen.logits.extend(engine.runner().logits(&x_th).into_host());
        at += len;
    }
    assert_eq!(at, row.len(), "the pieces are the row");
    seen.hidden.push(last);
    seen
}

#[test]
fn engine_prefill_in_random_chunks_and_decode_token_by_token() {
    let step_by_step = [vec![11], vec![1; 13]].concat();
    let mut splits = vec![
        (vec![24], Phase::Prefill),
        (step_by_step.clone(), Phase::Decode),
        (vec![1; 24], Phase::Decode),
    ];
    let mut stream = Stream::new(1, "chunks", 0);
    for _ in 0..20 {
        let (mut left, mut pieces) = (24, Vec::new());
        while left > 0 {
            pieces.push(stream.integer(1, left.min(9)) as usize);
            left -= *pieces.last().expect("just pushed") as u64;
        }
        splits.push((pieces, Phase::Prefill));
    }
    for model in models() {
        let engine = engine(model.name, "");
        let whole = model.trainer.inspect(&model.sequences).expect("inspect");
        for (pieces, phase) in &splits {
            for (index, row) in model.golden.rows().iter().enumerate() {
                let seen = fed(&engine, row, pieces, *phase);
                // Bit for bit what the trainer computes, which is within 2e-5 of transformers.
                let case = format!("{}, row {index} in pieces {pieces:?}", model.name);
                assert_eq!(seen.logits, whole[index].logits, "{case}");
                assert_eq!(seen.hidden, whole[index].hidden, "{case}");
            }
        }
        let decoded = fed(&engine, &model.golden.rows()[0], &step_by_step, Phase::Decode);
        model.check("cached_logits", &decoded.logits);
    }
}

#[test]
fn engine_greedy_continuation() {
    for model in models() {
        let want = model.golden.tokens("greedy_ids");
        let request = GenerationRequest {
            id: RequestId::new(1, 0, 0),
            prompt: want[..11].to_vec(),
            max_new_tokens: 16,
            ignore_eos: true,
            eos_token_ids: Vec::new(),
        };
        let mut engine = engine(model.name, "rollout.temperature = 0.0\n");
        let done = engine.generate(vec![request]).expect("generate").remove(0);
        assert_eq!(done.token_ids().collect::<Vec<_>>(), want[11..], "{}", model.name);
    }
}

/// Attention alone has blocks of 16 tokens, Mamba alone a single group of states.
#[test]
fn engine_layouts() {
    for model in models() {
        let engine = engine(model.name, "engine.max_model_len = 96\n");
        let layout = engine.layout();
        let has = |kind| model.shape.layers().iter().any(|layer| layer.mixer == kind);
        let name = model.name;
        match (has(MixerKind::Mamba), has(MixerKind::Attention)) {
            (true, true) => assert!(layout.groups.len() > 1, "{name}"),
            (true, false) => {
                assert_eq!((layout.groups.len(), layout.num_mamba_groups), (1, 1), "{name}");
                assert_eq!((layout.block_tokens, layout.blocks_for(96)), (None, 1), "{name}");
            }
            (false, _) => {
                assert_eq!((layout.groups.len(), layout.num_mamba_groups), (1, 0), "{name}");
                assert_eq!((layout.block_tokens, layout.blocks_for(96)), (Some(16), 6), "{name}");
                assert_eq!(layout.state_stride, None, "{name}");
            }
        }
    }
}

#[test]
fn both_releases_configs_give_the_same_model() {
    for name in MODELS {
        let parent = tempfile::tempdir().expect("a folder");
        for file in ["generation_config.json", "model.safetensors"] {
            std::fs::copy(fixture(name).join(file), parent.path().join(file)).expect("copied");
        }
        let old = fixture(name).join("config.v4.json");
        std::fs::copy(old, parent.path().join("config.json")).expect("copied");
        let four = load_master(parent.path()).expect("4.x");
        assert!(four == load_master(&fixture(name)).expect("5.x"), "{name}");
    }
}
