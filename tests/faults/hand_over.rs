//! Weights that do not arrive as they were sent.

use std::collections::BTreeSet;

use super::*;
use crate::common::{random_tokens, PLAIN};
use gapscope::base::{RequestId, TokenId, WeightVersion};
use gapscope::config::Dtype;
use gapscope::engine::{Engine, Feed, Phase};
use gapscope::gap::FindingKind;
use gapscope::model::{Plan, Preset};
use gapscope::ops::array::{Array, Device};
use gapscope::ops::weights::Weights;

/// Three steps that learn.
const LEARNS: [&str; 4] =
    ["steps=3", "trainer.update=adamw", "trainer.learning_rate=1e-2", "task.kind=jsonl"];
/// Some completions of random weights earn something here and some do not.
const LETTERS: [&str; 3] = [
    "task.path=tests/fixtures/letters.jsonl",
    "task.reward=regex",
    "task.reward_pattern=^[^A-Za-z]*[A-M]",
];

/// As [`LEARNS`], of a model without a line on the task.
fn learned(model: &str, sets: &[&str]) -> Played {
    let text = SMALL.replace(PRESET, model).replace("[task]\nprompt_tokens = 5\n", "");
    let sets = [&LEARNS[..], &LETTERS, &["rollout.prompts_per_step=3"], sets].concat();
    Played::new(&experiment(&text, &sets))
}

/// (reported version, engine's fingerprint, trainer's) of each step.
fn weights(run: &Played) -> Vec<(u64, u64, u64)> {
    let of_step = |step: &PlayedStep| {
        let rollout = &step.rollouts[0];
        let trainer = rollout.trainer_fingerprint.expect("scored");
        let done = &rollout.completion;
        (done.weight_version.get(), done.engine_fingerprint.expect("known"), trainer)
    };
    run.steps.iter().map(of_step).collect()
}

/// Every finding is of weights; the names of the tensors that it lists, step by step.
fn tensors_named(run: &Played) -> Vec<BTreeSet<String>> {
    let of_finding = |found: &gapscope::gap::Finding| {
        assert_eq!(found.kind, FindingKind::WeightsNotSynced, "{found:?}");
        let (_, names) = found.message.split_once("differ: ").expect("tensors are named");
        let (names, _) = names.split_once("; its worst, ").expect("the three gaps come last");
        names.split(", ").map(str::to_owned).collect()
    };
    run.findings.iter().map(of_finding).collect()
}

#[test]
fn k11_the_engine_wakes_with_its_first_weights() {
    let fault = "engine.faults=[\"old_weights_on_wake\"]";
    let run = learned(PRESET, &[fault]);
    assert_eq!(run.spikes(), [2, 3]);
    for step in &run.steps[1..] {
        assert_eq!(bad(step), all(step));
    }
    let found = weights(&run);
    let first = found[0].1;
    assert_eq!(found[0], (0, first, first));
    for (step, &(version, engine, trainer)) in found.iter().enumerate() {
        assert_eq!((version, engine), (step as u64, first), "it says it is new and is not");
        assert_eq!(trainer == first, step == 0);
    }
    // Without a step there is nothing to lose.
    assert_eq!(learned(PRESET, &[fault, "trainer.learning_rate=0"]).spikes(), [0_u64; 0]);
    assert_eq!(learned(PRESET, &[]).spikes(), [0_u64; 0]);
}

#[test]
fn k12_the_copied_head_is_the_one_tensor_that_differs() {
    let tied = "model.preset = \"tiny-mamba\"";
    let fault = "engine.faults=[\"head_not_refreshed\"]";
    let run = learned(tied, &[fault]);
    assert_eq!(run.spikes(), [2, 3]);
    let head = BTreeSet::from(["lm_head.weight".to_owned()]);
    assert_eq!(tensors_named(&run), [head.clone(), head]);
    assert!(weights(&run)[1..].iter().all(|(_, engine, trainer)| engine != trainer));
    let (_, engine, trainer) = weights(&run)[0];
    assert_eq!(engine, trainer);
    assert_eq!(learned(tied, &[fault, "trainer.learning_rate=0"]).spikes(), [0_u64; 0]);
    assert_eq!(learned(tied, &[]).spikes(), [0_u64; 0]);
}

/// Last hidden states and logits `[T, V]` of a prompt.
fn inspect(engine: &Engine, prompt: &[TokenId]) -> (Vec<f32>, Vec<f32>) {
    let feed = Feed { sequence: 0, phase: Phase::Prefill, tokens: prompt };
    let x_th = engine.scratch(1).feed(engine.runner(), &[feed], None);
    let runner = engine.runner();
    (runner.norm(&x_th).to_host(), runner.logits(&x_th).to_host())
}

/// The embedding of one token moves by +1, and the copy that is the head does not.
#[test]
fn k12_hidden_states_agree_and_that_tokens_logit_does_not() {
    let text = "name = \"head\"\nmodel.preset = \"tiny-mamba\"\n";
    let plan = Plan::new(Preset::TinyMamba.config());
    let (h, v) = (plan.config.hidden_size, plan.config.vocab_size);
    let changed = 77;
    let mut master = Preset::weights(&plan, 3);
    let weights = |master: &[Vec<f32>]| -> Vec<Weights> {
        let one = |unit: &Vec<f32>| Weights::of_master(&Array::Cpu(unit.clone()), Dtype::F32);
        master.iter().map(one).collect()
    };
    let before = weights(&master);
    master[0][changed * h..][..h].iter_mut().for_each(|w| *w += 1.0);
    let after = weights(&master);
    let engine = |faults: &str, hand_overs: &[&[Weights]]| {
        let config = experiment(text, &[faults]);
        let num = plan.numerics(Dtype::F32, Dtype::F32);
        let mut engine =
            Engine::new(&Device::Cpu, plan.clone(), num, config.engine, PLAIN, 0).expect("one");
        for (version, units) in (0..).map(WeightVersion::new).zip(hand_overs) {
            engine.load(version, units.to_vec()).expect("newer weights");
        }
        engine
    };
    let fresh = engine("engine.faults=[]", &[&before, &after]);
    let stale = engine("engine.faults=[\"head_not_refreshed\"]", &[&before, &after]);
    let retied = engine("engine.faults=[\"head_not_refreshed\"]", &[&after, &after]);
    assert_eq!(fresh.fingerprints(), stale.fingerprints());
    assert_ne!(stale.head_fingerprint().expect("a copy that is old"), stale.fingerprints()[0]);
    assert_eq!((fresh.head_fingerprint(), retied.head_fingerprint()), (None, None));

    let prompt: Vec<TokenId> = random_tokens(&plan.config, 12, 5)
        .into_iter()
        .filter(|token| token.index() != changed)
        .collect();
    let (hidden, logits) = inspect(&fresh, &prompt);
    let (stale_hidden, stale_logits) = inspect(&stale, &prompt);
    assert_eq!(hidden, stale_hidden);
    for (at, (fresh, stale)) in logits.iter().zip(&stale_logits).enumerate() {
        assert_eq!(fresh != stale, at % v == changed, "logit {} of row {}", at % v, at / v);
    }
    assert_eq!(inspect(&retied, &prompt), (hidden, logits));
}

#[test]
fn a_stale_expert_is_named_by_its_tensors() {
    let model = "model.path = \"tests/fixtures/tiny-jamba-moe\"";
    let run = learned(model, &["engine.faults=[\"stale_expert\"]"]);
    assert_eq!(run.spikes(), [2, 3]);
    // The first layer with experts is the second, and the last of its four is the fourth.
    let names = ["gate_proj", "up_proj", "down_proj"];
    let expert = names.map(|name| format!("model.layers.1.feed_forward.experts.3.{name}.weight"));
    assert_eq!(tensors_named(&run), [BTreeSet::from(expert.clone()), BTreeSet::from(expert)]);
    for finding in &run.findings {
        let told = "parts from the trainer's pass first in layer 1 (moe) at position ";
        assert!(finding.message.contains(told), "{}", finding.message);
    }
    let some: BTreeSet<RequestId> = bad(&run.steps[1]);
    assert!(!some.is_empty());
}
