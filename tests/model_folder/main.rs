//! Model folders: what is written comes back, both releases' configs are one model, and whatever is
//! wrong with a folder is said by name.

#[path = "../common/mod.rs"]
mod common;

mod older_names;
mod shards;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use common::shapes::odd_shapes;
use common::{config, device, fixture, random_weights, Golden};
use gapscope::config::Dtype;
use gapscope::model::{load_master, save_folder, Family, HfConfig, Plan, Preset};
use gapscope::trainer::{Sequence, Trainer};
use safetensors::tensor::{Dtype as FileDtype, TensorView};
use safetensors::SafeTensors;
use tempfile::TempDir;

/// Name to dtype, shape and bytes.
type Tensors = BTreeMap<String, (FileDtype, Vec<usize>, Vec<u8>)>;

fn read(folder: &Path) -> Tensors {
    let bytes = fs::read(folder.join("model.safetensors")).expect("weights");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let own = |(name, view): (String, TensorView<'_>)| {
        (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()))
    };
    file.tensors().into_iter().map(own).collect()
}

fn write(folder: &Path, tensors: &Tensors) {
    write_to(&folder.join("model.safetensors"), tensors);
}

fn write_to(path: &Path, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.as_str(), TensorView::new(*dtype, shape.clone(), bytes).expect("a whole tensor"))
    });
    let bytes = safetensors::serialize(views, None).expect("a file");
    fs::write(path, bytes).expect("written");
}

fn edit_json(folder: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    edit(&folder.join("config.json"), change);
}

fn edit(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let mut json = serde_json::from_slice(&fs::read(path).expect("a file")).expect("JSON");
    change(&mut json);
    fs::write(path, json.to_string()).expect("written");
}

/// A copy of the fixture to spoil.
fn copy() -> (TempDir, PathBuf) {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("model");
    fs::create_dir(&folder).expect("a folder");
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(fixture("tiny-jamba").join(name), folder.join(name)).expect("copied");
    }
    (parent, folder)
}

fn tied_plan() -> Plan {
    Plan::new(HfConfig { tie_word_embeddings: true, ..Preset::TinyJamba.config() })
}

/// A folder that [`save_folder`] wrote of a tied tiny model.
fn tied() -> (TempDir, PathBuf) {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("model");
    let plan = tied_plan();
    save_folder(&folder, &plan, &random_weights(&plan, 1), Dtype::F32).expect("saved");
    (parent, folder)
}

fn bits(units: &[Vec<f32>]) -> Vec<u32> {
    units.iter().flatten().map(|w| w.to_bits()).collect()
}

fn logits(folder: &Path) -> Vec<u32> {
    let (plan, units) = load_master(folder).expect("a model folder");
    let config = config("name = \"folder\"\nmodel.preset = \"tiny-jamba\"\n");
    let num = plan.numerics(Dtype::F32, Dtype::F32);
    let trainer = Trainer::new(&device(), plan, num, config.trainer, &units).expect("few threads");
    let sequence = |tokens| Sequence { tokens, prompt_len: 1 };
    let sequences: Vec<_> = Golden::tiny_jamba().rows().into_iter().map(sequence).collect();
    let seen = trainer.inspect(&sequences).expect("inspect");
    seen.iter().flat_map(|one| &one.logits).map(|x| x.to_bits()).collect()
}

#[test]
fn both_releases_configs_give_the_same_model_and_logits() {
    let (_parent, folder) = copy();
    let (five, want) = (load_master(&folder).expect("5.x"), logits(&folder));
    fs::copy(fixture("tiny-jamba/config.v4.json"), folder.join("config.json")).expect("copied");
    let four = load_master(&folder).expect("4.x");
    assert_eq!((four.0, bits(&four.1)), (five.0, bits(&five.1)));
    assert_eq!(logits(&folder), want);
}

#[test]
fn what_is_saved_comes_back() {
    let parent = tempfile::tempdir().expect("a folder");
    let shapes = odd_shapes().into_iter().chain([("tied", tied_plan().config)]);
    for (name, config) in shapes {
        let plan = Plan::new(config);
        let units = random_weights(&plan, 2);
        let rounded: Vec<Vec<f32>> = units
            .iter()
            .map(|unit| unit.iter().map(|&w| half::bf16::from_f32(w).to_f32()).collect())
            .collect();
        for (dtype, want) in [(Dtype::F32, &units), (Dtype::Bf16, &rounded)] {
            let folder = parent.path().join(format!("{name} {dtype:?}"));
            save_folder(&folder, &plan, &units, dtype).expect("saved");
            let (loaded, found) = load_master(&folder).expect("loaded");
            assert_eq!(loaded, plan, "{name}, {dtype:?}");
            assert_eq!(bits(&found), bits(want), "{name}, {dtype:?}");
            let mut names: Vec<_> = fs::read_dir(&folder)
                .expect("a folder")
                .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
                .collect();
            names.sort();
            assert_eq!(names, ["config.json", "generation_config.json", "model.safetensors"]);
            // vLLM's Jamba looks for the head whether or not it is tied.
            let tensors = read(&folder);
            let (tied, family) = (plan.config.tie_word_embeddings, plan.config.family);
            let head = tensors.get("lm_head.weight");
            assert_eq!(head.is_some(), !tied || family == Family::Jamba, "{name}");
            let embedding = tensors.get(&plan.units[0].tensors[0].name);
            assert_eq!(head.is_none() || head == embedding, tied, "{name}");
        }
    }
}

#[test]
fn a_rank_of_auto_is_the_hidden_size_over_16_rounded_up() {
    let parent = tempfile::tempdir().expect("a folder");
    let folder = parent.path().join("model");
    let plan = Plan::new(odd_shapes().swap_remove(1).1);
    let rank = plan.config.mamba.as_ref().map(|shape| shape.dt_rank);
    assert_eq!((plan.config.hidden_size, rank), (40, Some(3)));
    save_folder(&folder, &plan, &random_weights(&plan, 3), Dtype::F32).expect("saved");
    edit_json(&folder, |config| config["mamba_dt_rank"] = "auto".into());
    assert_eq!(load_master(&folder).expect("loaded").0, plan);
}

#[test]
fn nothing_is_overwritten() {
    let (_parent, folder) = copy();
    let plan = tied_plan();
    let error = save_folder(&folder, &plan, &random_weights(&plan, 1), Dtype::F32);
    let want = format!("{} already exists; name a folder that does not", folder.display());
    assert_eq!(error.expect_err("refused").to_string(), want);
}

#[test]
fn files_beside_the_weights_change_nothing() {
    let (_parent, folder) = copy();
    let want = logits(&folder);
    let mut other = read(&folder);
    other.values_mut().for_each(|(_, _, bytes)| bytes.iter_mut().for_each(|b| *b = 0));
    write(&folder, &other);
    let zeros = fs::read(folder.join("model.safetensors")).expect("zeros");
    fs::copy(fixture("tiny-jamba/model.safetensors"), folder.join("model.safetensors"))
        .expect("copied");
    for name in [
        "model-00001.safetensors",
        "model-00001-of-00002.safetensors",
        "adapter_model.safetensors",
        "pytorch_model.bin",
        "a.safetensors",
    ] {
        fs::write(folder.join(name), &zeros).expect("written");
    }
    assert_eq!(logits(&folder), want);
    // And a shard is no stand-in for the file that is asked for.
    fs::remove_file(folder.join("model.safetensors")).expect("removed");
    let path = folder.join("model.safetensors");
    let want = format!("cannot read {}: No such file or directory (os error 2)", path.display());
    assert_eq!(load_master(&folder).expect_err("refused").to_string(), want);
}

/// What is done to a folder.
type Spoil = Box<dyn Fn(&Path)>;

fn tensors(change: impl Fn(&mut Tensors) + 'static) -> Spoil {
    Box::new(move |folder| {
        let mut all = read(folder);
        change(&mut all);
        write(folder, &all);
    })
}

fn bytes(change: impl Fn(&mut Vec<u8>) + 'static) -> Spoil {
    Box::new(move |folder| {
        let path = folder.join("model.safetensors");
        let mut all = fs::read(&path).expect("weights");
        change(&mut all);
        fs::write(path, all).expect("written");
    })
}

fn json(change: impl Fn(&mut serde_json::Value) + 'static) -> Spoil {
    Box::new(move |folder| edit_json(folder, &change))
}

/// `{}` stands for the folder.
fn check(make: fn() -> (TempDir, PathBuf), spoil: &dyn Fn(&Path), want: &str) {
    let (_parent, folder) = make();
    load_master(&folder).expect("a good folder before");
    spoil(&folder);
    let found = load_master(&folder).expect_err(want).to_string();
    assert_eq!(found, want.replace("{}", &folder.display().to_string()));
}

const D: &str = "model.layers.1.mamba.D";

#[test]
fn spoiled_weights_are_named() {
    let set = |at: usize, value: f32| {
        tensors(move |all| {
            let (_, _, bytes) = all.get_mut(D).expect("the fixture has it");
            bytes[4 * at..][..4].copy_from_slice(&value.to_le_bytes());
        })
    };
    let cases: Vec<(Spoil, &str)> = vec![
        (
            tensors(|all| drop(all.remove(D))),
            "{}/model.safetensors: tensor model.layers.1.mamba.D: is missing",
        ),
        (
            tensors(|all| drop(all.remove("lm_head.weight"))),
            "{}/model.safetensors: tensor lm_head.weight: is missing, and config.json says \
             tie_word_embeddings = false",
        ),
        (
            tensors(|all| {
                let copy = all[D].clone();
                all.insert("model.layers.4.mamba.D".into(), copy);
            }),
            "{}/model.safetensors: tensor model.layers.4.mamba.D: config.json has no place for it",
        ),
        (
            tensors(|all| all.get_mut(D).expect("there").1 = vec![64, 2]),
            "{}/model.safetensors: tensor model.layers.1.mamba.D: has shape [64, 2]; config.json \
             gives [128]",
        ),
        (
            tensors(|all| all.get_mut(D).expect("there").0 = FileDtype::I32),
            "{}/model.safetensors: tensor model.layers.1.mamba.D: has dtype \"I32\"; F32, BF16 and \
             F16 are read",
        ),
        (
            set(5, f32::NAN),
            "{}/model.safetensors: tensor model.layers.1.mamba.D: element 5 is NaN; weights must \
             be finite",
        ),
        (
            set(127, f32::NEG_INFINITY),
            "{}/model.safetensors: tensor model.layers.1.mamba.D: element 127 is -inf; weights \
             must be finite",
        ),
    ];
    for (spoil, want) in cases {
        check(copy, &spoil, want);
    }
}

#[test]
fn a_config_that_asks_for_other_tensors_is_refused() {
    let cases: Vec<(Spoil, &str)> = vec![
        (
            json(|config| config["tie_word_embeddings"] = true.into()),
            "{}/model.safetensors: tensor lm_head.weight: differs from model.embed_tokens.weight \
             by up to 2.024068, though tie_word_embeddings is true",
        ),
        (
            json(|config| config["mamba_proj_bias"] = true.into()),
            "{}/model.safetensors: tensor model.layers.0.mamba.in_proj.bias: is missing",
        ),
        (
            json(|config| config["mamba_conv_bias"] = false.into()),
            "{}/model.safetensors: tensor model.layers.0.mamba.conv1d.bias: config.json has no \
             place for it",
        ),
    ];
    for (spoil, want) in cases {
        check(copy, &spoil, want);
    }
}

#[test]
fn k28_a_tied_folder_carries_its_embedding_as_head_or_none() {
    let (_parent, folder) = tied();
    let want = bits(&load_master(&folder).expect("with a head").1);
    tensors(|all| drop(all.remove("lm_head.weight")))(&folder);
    assert_eq!(bits(&load_master(&folder).expect("without a head").1), want);
    let moved = tensors(|all| all.get_mut("lm_head.weight").expect("there").2[0] ^= 1);
    check(
        tied,
        &moved,
        "{}/model.safetensors: tensor lm_head.weight: differs from model.embed_tokens.weight by up \
         to 0.0000000018626451, though tie_word_embeddings is true",
    );
}

#[test]
fn broken_files_are_named() {
    let whole = fs::metadata(fixture("tiny-jamba/model.safetensors")).expect("fixture").len();
    let broken = |len: u64, reason: &str| {
        format!(
            "{{}}/model.safetensors holds {len} bytes that are no whole safetensors file \
             ({reason}): copy or download it again"
        )
    };
    let uncovered = |len| broken(len, "incomplete metadata, file not fully covered");
    let not_a_folder = |found: &str| {
        format!(
            "{{}} is not a model folder: {found}; name a folder that holds config.json and \
             model.safetensors, or a preset: tiny-jamba, tiny-jamba-moe, tiny-mamba, \
             tiny-llama, small-jamba, jamba-3b-shape"
        )
    };
    let cases: Vec<(Spoil, String)> = vec![
        (bytes(|all| all.truncate(all.len() - 1)), uncovered(whole - 1)),
        (bytes(|all| all.push(0)), uncovered(whole + 1)),
        (bytes(|all| all.truncate(100)), broken(100, "invalid header length")),
        (bytes(|all| all.truncate(5)), broken(5, "header too small")),
        (bytes(Vec::clear), broken(0, "header too small")),
        (
            Box::new(|folder| fs::remove_file(folder.join("config.json")).expect("removed")),
            "cannot read {}/config.json: No such file or directory (os error 2)".into(),
        ),
        (
            Box::new(|folder| fs::write(folder.join("config.json"), "{").expect("written")),
            "{}/config.json: not JSON: EOF while parsing an object at line 1 column 1".into(),
        ),
        (
            Box::new(|folder| {
                fs::remove_dir_all(folder).expect("removed");
                fs::write(folder, "").expect("written");
            }),
            not_a_folder("it is a file"),
        ),
        (
            Box::new(|folder| fs::remove_dir_all(folder).expect("removed")),
            not_a_folder("it does not exist"),
        ),
    ];
    for (spoil, want) in cases {
        check(copy, &spoil, &want);
    }
}

/// huggingface/trl#7039: turns end with any of several tokens, and only one is in `config.json`.
#[test]
fn k18_end_tokens_of_both_configs_are_merged() {
    let (_parent, folder) = copy();
    let ends = |ids: serde_json::Value| {
        edit(&folder.join("generation_config.json"), |json| json["eos_token_id"] = ids.clone());
        let found = load_master(&folder).expect("loaded").0.config.eos_token_ids;
        found.iter().map(|id| id.get()).collect::<Vec<_>>()
    };
    assert_eq!(ends(7.into()), [2, 7]);
    assert_eq!(ends(serde_json::json!([7, 2, 9])), [2, 7, 9]);
    assert_eq!(ends(serde_json::Value::Null), [2]);
    fs::write(folder.join("generation_config.json"), "{").expect("written");
    let found = load_master(&folder).expect_err("refused").to_string();
    assert!(found.contains("generation_config.json: not JSON: EOF"), "{found}");
    fs::remove_file(folder.join("generation_config.json")).expect("removed");
    assert_eq!(load_master(&folder).expect("loaded").0.config.eos_token_ids.len(), 1);
}
