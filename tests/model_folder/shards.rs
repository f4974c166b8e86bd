//! Weights in several files, the index that names them, and headers.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use gapscope::model::load_master;
use safetensors::tensor::Dtype as FileDtype;
use tempfile::TempDir;

use crate::common::fixture;
use crate::{bits, bytes, check, copy, edit, read, write_to, Spoil, Tensors, D};

/// The fixture in two shards of mixed dtypes, layer by layer, and its index.
fn sharded() -> (TempDir, PathBuf) {
    let (parent, folder) = copy();
    let (mut shards, mut map) = ([Tensors::new(), Tensors::new()], BTreeMap::new());
    for (name, mut tensor) in read(&folder) {
        let second = name.contains("layers.2") || name.contains("layers.3");
        if second {
            let words = tensor.2.chunks_exact(4);
            let wide = words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            let f16 = name.contains("layers.3");
            let narrow = |x: f32| match f16 {
                true => half::f16::from_f32(x).to_le_bytes(),
                false => half::bf16::from_f32(x).to_le_bytes(),
            };
            tensor.2 = wide.flat_map(narrow).collect();
            tensor.0 = if f16 { FileDtype::F16 } else { FileDtype::BF16 };
        }
        map.insert(name.clone(), SHARDS[usize::from(second)]);
        shards[usize::from(second)].insert(name, tensor);
    }
    fs::remove_file(folder.join("model.safetensors")).expect("removed");
    for (file, tensors) in SHARDS.into_iter().zip(&shards) {
        write_to(&folder.join(file), tensors);
    }
    let index = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("written");
    (parent, folder)
}

const SHARDS: [&str; 2] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

fn index(change: impl Fn(&mut serde_json::Value) + 'static) -> Spoil {
    Box::new(move |folder| edit(&folder.join("model.safetensors.index.json"), &change))
}

#[test]
fn k28_shards_of_mixed_dtypes_are_one_model() {
    let (_parent, folder) = sharded();
    let (plan, units) = load_master(&folder).expect("loaded");
    let (want_plan, want) = load_master(&fixture("tiny-jamba")).expect("the fixture");
    assert_eq!(plan, want_plan);
    let same = |unit: usize| bits(&units[unit..=unit]) == bits(&want[unit..=unit]);
    assert!(same(0) && same(1) && same(2));
    for (unit, round) in [
        (3, (|w| half::bf16::from_f32(w).to_f32()) as fn(f32) -> f32),
        (4, |w| half::f16::from_f32(w).to_f32()),
    ] {
        let rounded: Vec<f32> = want[unit].iter().map(|&w| round(w)).collect();
        assert_eq!(bits(&units[unit..=unit]), bits(&[rounded]), "unit {unit}");
    }
}

#[test]
fn k28_spoiled_shards_are_named() {
    let cases: Vec<(Spoil, &str)> = vec![
        (
            Box::new(|folder| fs::remove_file(folder.join(SHARDS[1])).expect("removed")),
            "{}/model.safetensors.index.json: tensor model.layers.2.feed_forward.down_proj.weight \
             is in the shard model-00002-of-00002.safetensors, which cannot be read: No such file \
             or directory (os error 2); copy or download it again",
        ),
        (
            index(|index| index["weight_map"][D] = "../weights.safetensors".into()),
            "{}/model.safetensors.index.json: tensor model.layers.1.mamba.D is in the shard \
             ../weights.safetensors, which cannot be read: a shard lies in the index's own folder; \
             copy or download it again",
        ),
        (
            // pytorch/torchtitan#3764: an entry of a tensor that was never saved.
            index(|index| index["weight_map"][D] = SHARDS[1].into()),
            "{}/model-00002-of-00002.safetensors: tensor model.layers.1.mamba.D: is missing, \
             though model.safetensors.index.json says it is here",
        ),
        (
            index(|index| drop(index["weight_map"].as_object_mut().expect("a map").remove(D))),
            "{}/model.safetensors.index.json: tensor model.layers.1.mamba.D: is missing",
        ),
        (
            index(|index| {
                index["weight_map"].as_object_mut().expect("a map").remove("lm_head.weight");
            }),
            "{}/model.safetensors.index.json: tensor lm_head.weight: is missing, and config.json \
             says tie_word_embeddings = false",
        ),
        (
            index(|index| *index = serde_json::json!({})),
            "{}/model.safetensors.index.json: not JSON: missing field `weight_map` at line 1 \
             column 2",
        ),
    ];
    for (spoil, want) in cases {
        check(sharded, &spoil, want);
    }
}

/// A header edited in place: its length stays.
fn header(from: &'static str, to: &'static str) -> Spoil {
    assert_eq!(from.len(), to.len());
    bytes(move |all| {
        let at = all.windows(from.len()).position(|part| part == from.as_bytes());
        all[at.expect("the header has it")..][..to.len()].copy_from_slice(to.as_bytes());
    })
}

#[test]
fn k28_spoiled_headers_are_named() {
    let weights = "{}/model.safetensors";
    let lm_head = "tensor lm_head.weight:";
    let whole = fs::metadata(fixture("tiny-jamba/model.safetensors")).expect("fixture").len();
    let broken = |reason: &str| {
        format!(
            "{weights} holds {whole} bytes that are no whole safetensors file ({reason}): copy or \
             download it again"
        )
    };
    let cases: Vec<(Spoil, String)> = vec![
        (
            header(
                "\"lm_head.weight\":{\"dtype\":\"F32\"",
                "\"lm_head.weight\":{\"dtype\":\"\"   ",
            ),
            format!("{weights}: {lm_head} has dtype \"\"; F32, BF16 and F16 are read"),
        ),
        (
            header(
                "\"lm_head.weight\":{\"dtype\":\"F32\"",
                "\"lm_head.weight\":{\"dtypo\":\"F32\"",
            ),
            broken("tensor lm_head.weight: missing field `dtype`"),
        ),
        (
            header("\"data_offsets\":[0,", "\"data_offsets\":[1,"),
            broken("tensors leave or share bytes at 0"),
        ),
        (
            bytes(|all| all[..8].copy_from_slice(&u64::MAX.to_le_bytes())),
            broken("invalid header length"),
        ),
    ];
    for (spoil, want) in cases {
        check(copy, &spoil, &want);
    }
}
