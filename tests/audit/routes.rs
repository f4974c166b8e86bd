//! Dumps that carry where a router sent their tokens.

use std::path::Path;

use gapscope::config::Dtype;
use gapscope::model::load_master;
use gapscope::ops::array::Device;
use gapscope::trainer::{Inspection, Sequence, Trainer};
use serde_json::{json, Value};

use super::common::{config, fixture, Golden};
use super::dump::{prime, write, Sides};
use super::{audited, outcome, path};

const SIDES: Sides = Sides { infer: &["-1.0", "-0.5"], train: &["-1.0", "-0.25"] };

/// A record of three tokens with these keys beside its own.
fn with(keys: &Value) -> String {
    let mut record: Value = serde_json::from_str(&prime(3, 0, &SIDES)).expect("a record");
    let own = record.as_object_mut().expect("an object");
    own.extend(keys.as_object().expect("keys").clone());
    format!("{record}\n")
}

fn routes_of(step: &Value) -> Vec<Value> {
    step["routes"].as_array().expect("routes").clone()
}

/// Gate probabilities 0.5, 0.3, 0.2, of which two are taken: by the engine as they are, by the
/// trainer renormalised (radixark/miles#2722).
#[test]
fn k25_route_agreement_and_weights_are_told_apart() {
    let folder = tempfile::tempdir().expect("a folder");
    let plain = json!([null, [[0, 1]], [[0, 1]]]);
    let (weights, renormalised) = (
        json!([null, [[0.5, 0.3]], [[0.5, 0.3]]]),
        json!([null, [[0.375, 0.625]], [[0.625, 0.375]]]),
    );
    for (keys, expected, said) in [
        (
            json!({"routed_experts": plain, "routed_weights": weights,
                "trainer_routed_experts": [[[2, 0]], [[1, 0]], [[0, 1]]],
                "trainer_routed_weights": [[[0.5, 0.3]], renormalised[1], renormalised[2]]}),
            (1.0, Some((0.1, 0.125))),
            "100.00 % of 2 tokens in 1 layer(s) go to the same experts; their weights differ by \
             0.1000 on average and by up to 0.1250; 1 token(s) not captured\n",
        ),
        (
            json!({"routed_experts": plain, "routed_weights": weights,
                "trainer_routed_experts": plain, "trainer_routed_weights": weights}),
            (1.0, Some((0.0, 0.0))),
            "100.00 % of 2 tokens in 1 layer(s) go to the same experts; their weights differ by \
             0.0000 on average and by up to 0.0000; 1 token(s) not captured\n",
        ),
        (
            json!({"routed_experts": plain, "trainer_routed_experts": [[[0, 1]], [[0, 2]], null]}),
            (0.0, None),
            "0.00 % of 1 tokens in 1 layer(s) go to the same experts; the first expert layer that \
             differs is 0, counted from 0; 2 token(s) not captured\n",
        ),
    ] {
        let dump = write(folder.path(), "step_3/rank_0.jsonl", &with(&keys));
        let (text, audit) = audited(&dump.with_extension(""), &["--rollouts", path(&dump)]);
        std::fs::remove_dir_all(dump.with_extension("")).expect("removed");
        let routes = routes_of(&audit["steps"][0]);
        assert_eq!((routes.len(), &routes[0]["between"]), (1, &json!("engine / trainer")));
        let (agreement, weights) = expected;
        assert_eq!(routes[0]["agreement"], json!(agreement));
        let found = ["weight_diff_mean", "weight_diff_max"].map(|key| routes[0][key].as_f64());
        match (found, weights) {
            ([Some(mean), Some(most)], Some((mean_expected, most_expected))) => {
                assert!((mean - mean_expected).abs() < 1e-7 && (most - most_expected).abs() < 1e-7);
            }
            (found, weights) => assert_eq!((found, weights), ([None, None], None)),
        }
        assert!(text.contains(&format!("routes    engine / trainer: {said}")), "{text}");
    }
}

/// The router's logits of the fixture's first row, by layer.
fn inspection(model: &Path, tokens: &[u32]) -> Inspection {
    let (plan, master) = load_master(model).expect("a model folder");
    let num = plan.numerics(Dtype::F32, Dtype::F32);
    let config = config("name = \"routes\"\nmodel.preset = \"tiny-jamba\"\n");
    let trainer =
        Trainer::new(&Device::Cpu, plan, num, config.trainer, &master).expect("few threads");
    let tokens = tokens.iter().map(|&id| gapscope::base::TokenId::new(id)).collect();
    trainer.inspect(&[Sequence { tokens, prompt_len: 1 }]).expect("inspected").remove(0)
}

/// A row's two likeliest experts and their probabilities, likeliest first.
fn two_of(logits: &[f32]) -> [(usize, f64); 2] {
    let total: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
    let p = logits.iter().map(|&x| f64::from(x).exp() / total);
    let mut all: Vec<(usize, f64)> = p.enumerate().collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    [all[0], all[1]]
}

#[test]
fn k25_an_engines_routes_are_held_against_the_models_own() {
    let (folder, model) = (tempfile::tempdir().expect("a folder"), fixture("tiny-jamba-moe"));
    let tokens: Vec<u32> =
        Golden::of("tiny-jamba-moe").rows()[0].iter().map(|token| token.get()).collect();
    let n = tokens.len();
    let layers = inspection(&model, &tokens).router_logits;
    let experts = layers[0].len() / n;
    let choice = |token: usize, layer: usize| two_of(&layers[layer][token * experts..][..experts]);
    let by_token = |of: &dyn Fn((usize, f64)) -> Value| -> Vec<Value> {
        let layer = |token, layer| Value::from(choice(token, layer).map(of).to_vec());
        (0..n).map(|t| (0..layers.len()).map(|l| layer(t, l)).collect()).collect()
    };
    let mut ids = by_token(&|(expert, _)| json!(expert));
    let weights = by_token(&|(_, weight)| json!(weight));
    let mut record = json!({"token_ids": tokens, "schema_version": 1, "step": 3});
    record["loss_mask"] = (0..n).map(|at| at > 4).collect();
    for side in ["inference_logprobs", "trainer_logprobs"] {
        record[side] = vec![-1.0; n].into();
    }
    record["routed_weights"] = weights.into();
    let mut check = |ids: &[Value], agreement: f64, first: Value, not_captured: u64| {
        record["routed_experts"] = ids.into();
        let dump = write(folder.path(), "step_3/rank_0.jsonl", &format!("{record}\n"));
        let out = folder.path().join(not_captured.to_string() + &first.to_string());
        let (text, audit) = audited(&out, &["--rollouts", path(&dump), "--model", path(&model)]);
        let routes = routes_of(&audit["steps"][0]);
        assert_eq!((routes.len(), &routes[0]["between"]), (1, &json!("engine / rescored")));
        assert_eq!(routes[0]["agreement"], json!(agreement), "{text}");
        assert_eq!(routes[0]["first_differing_layer"], first);
        assert_eq!(routes[0]["not_captured"], json!(not_captured));
        assert!(routes[0]["weight_diff_max"].as_f64().expect("weights") < 1e-5, "{text}");
    };
    check(&ids, 1.0, Value::Null, 0);
    // One token of the last layer goes elsewhere.
    let last = layers.len() - 1;
    let [(one, _), (other, _)] = choice(7, last);
    let third = (0..experts).find(|e| ![one, other].contains(e)).expect("a third expert");
    ids[7][last][1] = json!(third);
    let places = (n * layers.len()) as f64;
    check(&ids, (places - 1.0) / places, json!(last), 0);
    ids[7] = Value::Null;
    check(&ids, 1.0, Value::Null, 1);
}

#[test]
fn routes_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let moe = fixture("tiny-jamba-moe");
    let dense = fixture("tiny-jamba");
    let two = json!([[[0, 1], [1, 0]], null, [[0, 1], [0, 1]]]);
    for (keys, model, expected) in [
        (
            json!({"routed_experts": [null]}),
            None,
            "routed_experts has 1 entries for 3 tokens; null stands for none",
        ),
        (
            json!({"routed_experts": [[[0, 1]], [[0, 1], [0, 1]], null]}),
            None,
            "routed_experts[1] has 2 layers, others 1",
        ),
        (
            json!({"routed_experts": [[[0, 1]], null, null],
                "routed_weights": [[[0.5]], null, null]}),
            None,
            "routed_experts[0] has [2] experts by layer and [1] weights",
        ),
        (
            json!({"routed_experts": two, "trainer_routed_experts": [[[0, 1]], null, null]}),
            None,
            "routed_experts has 2 layers and trainer_routed_experts 1; both are of the layers with \
             experts, in order",
        ),
        (
            json!({"routed_experts": two}),
            Some(&dense),
            "record s3.p0.r0: the routes are of 2 layers with experts, the model has 0",
        ),
        (
            json!({"routed_experts": [[[0, 1], [1, 99]], null, null]}),
            Some(&moe),
            "record s3.p0.r0: token 0 is routed to expert 99, and the model has 4",
        ),
    ] {
        let dump = write(folder.path(), "step_3/rank_0.jsonl", &with(&keys));
        let mut args = vec!["--rollouts", path(&dump)];
        args.extend(model.into_iter().flat_map(|model| ["--model", path(model)]));
        let (code, text, error) = outcome(&args);
        let expected = format!("error: {}, line 1: {expected}\n", path(&dump));
        assert_eq!((code, text.as_str(), error), (Some(1), "", expected));
    }
}
