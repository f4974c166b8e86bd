//! The folders that we write, loaded by transformers.
//!
//! `GAPSCOPE_TRANSFORMERS_PYTHON` names an interpreter that has torch and transformers. Where it is
//! unset these tests say so and check nothing.

mod common;

use std::io::Write;
use std::path::Path;
use std::process::Command;

use assert_cmd::cargo::CommandCargoExt;
use common::{assert_close, config, random_tokens, random_weights};
use gapscope::base::TokenId;
use gapscope::config::Dtype;
use gapscope::model::{load_master, save_folder, HfConfig, Plan, Preset};
use gapscope::trainer::{Sequence, Trainer};
use serde_json::{json, Value};

/// What the script prints, an entry a folder; `None` where there is no interpreter.
fn transformers(first: &str, folders: &[&Path]) -> Option<Vec<Value>> {
    let Some(python) = std::env::var_os("GAPSCOPE_TRANSFORMERS_PYTHON") else {
        // Not eprintln, which the harness keeps to itself.
        let mut stderr = std::io::stderr();
        writeln!(stderr, "GAPSCOPE_TRANSFORMERS_PYTHON is not set: nothing is loaded").unwrap();
        return None;
    };
    let script =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/readers").join("load_transformers.py");
    let output = Command::new(&python).arg(script).arg(first).args(folders).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", python.display()));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(serde_json::from_slice(&output.stdout).expect("JSON"))
}

fn model_init(preset: &str, folder: &Path) {
    let mut command = Command::cargo_bin("gapscope").expect("the binary");
    let output = command.args(["model", "init", preset]).arg(folder).output().expect("a run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn our_logits(folder: &Path, rows: &[Vec<TokenId>]) -> Vec<Vec<f32>> {
    let (plan, units) = load_master(folder).expect("a model folder");
    let config = config("name = \"folder\"\nmodel.preset = \"tiny-jamba\"\n");
    let num = plan.numerics(Dtype::F32, Dtype::F32);
    let trainer = Trainer::new(plan, num, config.trainer, &units);
    let sequence = |row: &Vec<TokenId>| Sequence { tokens: row.clone(), prompt_len: 1 };
    let seen = trainer.inspect(&rows.iter().map(sequence).collect::<Vec<_>>()).expect("inspect");
    seen.into_iter().map(|one| one.logits).collect()
}

#[test]
fn folders_load_without_a_missing_or_unexpected_key_and_give_our_logits() {
    let parent = tempfile::tempdir().expect("a folder");
    let at = |name: &str| parent.path().join(name);
    let (init, tied, biased, bf16) = (at("init"), at("tied"), at("biased"), at("bf16"));
    let tiny = Preset::TinyJamba.config();
    let shape = HfConfig { tie_word_embeddings: true, ..tiny.clone() };
    let biases = HfConfig { mamba_proj_bias: true, mamba_conv_bias: false, ..tiny.clone() };
    model_init("tiny-jamba", &init);
    for (folder, config, dtype) in [
        (&tied, shape, Dtype::F32),
        (&biased, biases, Dtype::F32),
        (&bf16, tiny.clone(), Dtype::Bf16),
    ] {
        let plan = Plan::new(config);
        save_folder(folder, &plan, &random_weights(&plan, 6), dtype).expect("saved");
    }
    let rows: Vec<_> = [1, 33, 8].map(|len| random_tokens(&tiny, len, 1)).to_vec();
    let ids: Vec<Vec<u32>> =
        rows.iter().map(|row| row.iter().map(|id| id.get()).collect()).collect();
    let folders = [init.as_path(), &tied, &biased, &bf16];
    let Some(found) = transformers(&json!(ids).to_string(), &folders) else { return };
    for (folder, found) in folders.iter().zip(&found) {
        let name = folder.file_name().expect("a name").to_string_lossy();
        assert_eq!(found["class"], "JambaForCausalLM", "{name}");
        assert_eq!(found["trouble"], json!({}), "{name}");
        assert_eq!(found["tied"], json!(name == "tied"), "{name}");
        assert_eq!(found["eos"], 2, "{name}");
        let dtype = if name == "bf16" { "torch.bfloat16" } else { "torch.float32" };
        assert_eq!(found["dtype"], dtype, "{name}");
        if name == "bf16" {
            // The bytes are read as what they are; how far two bf16 forwards lie apart is another
            // question.
            continue;
        }
        let theirs: Vec<Vec<Vec<f32>>> =
            serde_json::from_value(found["logits"].clone()).expect("logits");
        for (ours, theirs) in our_logits(folder, &rows).iter().zip(theirs) {
            assert_close(&name, ours, &theirs.concat(), 2e-5);
        }
    }
}

#[test]
fn the_config_of_the_3b_shape_is_the_published_one() {
    let parent = tempfile::tempdir().expect("a folder");
    let json = Preset::Jamba3bShape.config().to_json("bfloat16");
    std::fs::write(parent.path().join("config.json"), json.to_string()).expect("written");
    let Some(found) = transformers("--config", &[parent.path()]) else { return };
    let want = json!({
        "class": "JambaConfig", "mamba": 26, "attention": [7, 21], "experts": 1, "dt_rank": 160,
        "tied": true,
    });
    assert_eq!(found, [want]);
}
