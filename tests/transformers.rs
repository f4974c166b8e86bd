//! The folders that we write, loaded by transformers, and the completions of a run, scored by it.
//!
//! `GAPSCOPE_TRANSFORMERS_PYTHON` names an interpreter that has torch, transformers and polars.
//! Where it is unset these tests say so and check nothing.

mod common;
#[path = "gguf/tiny.rs"]
#[allow(dead_code)] // Here it is only written.
mod tiny;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use assert_cmd::cargo::CommandCargoExt;
use common::run::Run;
use common::shapes::odd_shapes;
use common::{assert_close, config, device, random_tokens, random_weights};
use gapscope::base::{Step, TokenId};
use gapscope::config::Dtype;
use gapscope::model::{load_master, save_folder, save_gguf, Plan, Preset};
use gapscope::trainer::{Sequence, Trainer};
use serde_json::{json, Value};

/// The interpreter; `None`, and a word about it, where there is none.
fn interpreter() -> Option<PathBuf> {
    let python = std::env::var_os("GAPSCOPE_TRANSFORMERS_PYTHON").filter(|path| !path.is_empty());
    let python = python.map(PathBuf::from);
    if python.is_none() {
        // Not eprintln, which the harness keeps to itself.
        let mut stderr = std::io::stderr();
        writeln!(stderr, "GAPSCOPE_TRANSFORMERS_PYTHON is not set: nothing is asked").unwrap();
    }
    python
}

/// A script of the repository, run in its root.
fn script(python: &Path, path: &str) -> Command {
    let mut command = Command::new(python);
    command.current_dir(env!("CARGO_MANIFEST_DIR")).arg(path);
    command
}

/// Exit code, standard output, standard error.
fn outcome(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// What the script prints, an entry a folder; `None` where there is no interpreter.
fn transformers(first: &str, folders: &[&Path]) -> Option<Vec<Value>> {
    let mut command = script(&interpreter()?, "tests/readers/load_transformers.py");
    let (code, stdout, stderr) = outcome(command.arg(first).args(folders));
    assert_eq!(code, Some(0), "{stderr}");
    Some(serde_json::from_str(&stdout).expect("JSON"))
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
    let trainer = Trainer::new(&device(), plan, num, config.trainer, &units).expect("few threads");
    let sequence = |row: &Vec<TokenId>| Sequence { tokens: row.clone(), prompt_len: 1 };
    let seen = trainer.inspect(&rows.iter().map(sequence).collect::<Vec<_>>()).expect("inspect");
    seen.into_iter().map(|one| one.logits).collect()
}

#[test]
fn folders_load_without_a_missing_or_unexpected_key_and_give_our_logits() {
    let parent = tempfile::tempdir().expect("a folder");
    let at = |name: &str| parent.path().join(name);
    let mut shapes = odd_shapes();
    // The smallest vocabulary bounds the ids that all of them take.
    let smallest =
        shapes.iter().min_by_key(|(_, shape)| shape.vocab_size).expect("shapes").1.clone();
    let tiny = Preset::TinyJamba.config();
    shapes.extend([("init", tiny.clone()), ("bf16", tiny)]);
    for (name, config) in &shapes {
        if *name == "init" {
            model_init("tiny-jamba", &at(name));
            continue;
        }
        let dtype = if *name == "bf16" { Dtype::Bf16 } else { Dtype::F32 };
        let plan = Plan::new(config.clone());
        save_folder(&at(name), &plan, &random_weights(&plan, 6), dtype).expect("saved");
    }
    let rows: Vec<_> = [1, 33, 8].map(|len| random_tokens(&smallest, len, 1)).to_vec();
    let ids: Vec<Vec<u32>> =
        rows.iter().map(|row| row.iter().map(|id| id.get()).collect()).collect();
    let folders: Vec<_> = shapes.iter().map(|(name, _)| at(name)).collect();
    let paths: Vec<_> = folders.iter().map(|folder| folder.as_path()).collect();
    let Some(found) = transformers(&json!(ids).to_string(), &paths) else { return };
    for ((folder, found), (name, shape)) in folders.iter().zip(&found).zip(&shapes) {
        assert_eq!(found["class"], shape.names().architecture, "{name}");
        assert_eq!(found["trouble"], json!({}), "{name}");
        assert_eq!(found["tied"], json!(shape.tie_word_embeddings), "{name}");
        assert_eq!(found["eos"], 2, "{name}");
        let dtype = if *name == "bf16" { "torch.bfloat16" } else { "torch.float32" };
        assert_eq!(found["dtype"], dtype, "{name}");
        if *name == "bf16" {
            // The bytes are read as what they are; how far two bf16 forwards lie apart is another
            // question.
            continue;
        }
        let theirs: Vec<Vec<Vec<f32>>> =
            serde_json::from_value(found["logits"].clone()).expect("logits");
        for (ours, theirs) in our_logits(folder, &rows).iter().zip(theirs) {
            assert_close(name, ours, &theirs.concat(), 2e-5);
        }
    }
}

#[test]
fn a_folder_from_gguf_loads_too() {
    let tiny = tiny::Tiny::new(false);
    let (parent, file) = tiny.file();
    let folder = parent.path().join("model");
    save_gguf(&folder, &file, Dtype::F32).expect("saved");
    let row = random_tokens(&tiny.plan.config, 40, 2);
    let ids: Vec<u32> = row.iter().map(|id| id.get()).collect();
    let Some(found) = transformers(&json!([ids]).to_string(), &[&folder]) else { return };
    assert_eq!(found[0]["class"], "LlamaForCausalLM");
    assert_eq!(found[0]["trouble"], json!({}));
    let theirs: Vec<Vec<Vec<f32>>> =
        serde_json::from_value(found[0]["logits"].clone()).expect("logits");
    assert_close("gguf", &our_logits(&folder, &[row])[0], &theirs[0].concat(), 2e-5);
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

/// Phase 2 of `experiments/two_phase.toml`.
fn verify(python: &Path, run: &Run) -> (Option<i32>, String, String) {
    let mut command = script(python, "experiments/peers/verify_with_transformers.py");
    // An interpreter that lacks a package shall not start to install six gigabytes.
    command.arg(run.root()).arg("--venv").arg(run.root().join("venv")).env("PIP_NO_INDEX", "1");
    outcome(&mut command)
}

fn victims(run: &Run) -> BTreeSet<String> {
    let differs = run.tokens().into_iter().filter(|row| row.logp_decode != row.logp_trainer);
    differs.map(|row| row.request.to_string()).collect()
}

#[test]
fn transformers_names_the_victims_and_sees_each_number_that_is_changed() {
    let Some(python) = interpreter() else { return };
    let run = Run::of("experiments/two_phase.toml", &["steps=2"]);
    let found = victims(&run);
    assert!(found.contains("s2.p7.r0") && !found.contains("s2.p0.r0"), "{found:?}");
    let (code, stdout, stderr) = verify(&python, &run);
    assert_eq!(code, Some(0), "{stdout}{stderr}");
    let n = found.len();
    let last = format!("transformers names {n}, gapscope names {n}: the same requests\n");
    assert!(stdout.ends_with(&last), "{stdout}");
    // The table's rows begin with the request.
    let named = stdout.lines().filter(|line| line.starts_with('s'));
    let named: BTreeSet<&str> = named.filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(named, found.iter().map(String::as_str).collect());

    let file = run.folder.tokens(Step::new(2));
    let original = fs::read(&file).expect("the tokens");
    for (request, changes, code, message) in [
        // A victim that gapscope would have missed.
        ("s2.p7.r0", &["logp_trainer=logp_decode"][..], 1, "named by transformers alone: s2.p7.r0"),
        // A gap of gapscope's own making.
        (
            "s2.p0.r0",
            &["logp_trainer=logp_trainer - 0.000001"],
            1,
            "named by gapscope alone: s2.p0.r0",
        ),
        // Both legs wrong alike.
        (
            "s2.p0.r0",
            &["logp_decode=logp_decode - 1", "logp_trainer=logp_trainer - 1"],
            1,
            "named by transformers alone: s2.p0.r0",
        ),
        (
            "s2.p0.r0",
            &["logp_decode=logp_decode - 0.01", "logp_trainer=logp_trainer - 0.01"],
            1,
            "too close to call: s2.p0.r0",
        ),
        ("s2.p0.r0", &["token_id=token_id + 1"], 2, "differ in s2.p0.r0"),
        ("s2.p0.r0", &["logp_decode=NULL"], 2, "s2.p0.r0 has a token without logp_decode"),
    ] {
        let mut command = script(&python, "tests/readers/change_tokens.py");
        let changed = outcome(command.arg(&file).arg(request).args(changes));
        assert_eq!(changed.0, Some(0), "{}", changed.2);
        let (found, stdout, stderr) = verify(&python, &run);
        assert_eq!(found, Some(code), "{changes:?}: {stdout}{stderr}");
        assert!(format!("{stdout}{stderr}").contains(message), "{changes:?}: {stdout}{stderr}");
        fs::write(&file, &original).expect("written back");
    }
}
