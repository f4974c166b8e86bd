//! Readers meet bytes that nobody wrote: valid files, mutated. Any answer will do but a panic.
//!
//! Every test runs a few thousand inputs, always the same ones. `GAPSCOPE_FUZZ_SECONDS=900` goes on
//! for as long with each reader, from `GAPSCOPE_FUZZ_SEED` on:
//! `GAPSCOPE_FUZZ_SECONDS=900 cargo test --release --test fuzz -- --nocapture --test-threads 1`.
//! An input that ends badly stays in `target/fuzz`.

#[path = "../common/mod.rs"]
mod common;
mod mutate;
#[path = "../gguf/tiny.rs"]
#[allow(dead_code)] // Here it is only written.
mod tiny;

use std::fs;
use std::io::Write;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use common::run::Run;
use common::{fixture, MODELS};
use gapscope::base::{Step, Stream};
use gapscope::config::{self, Dtype};
use gapscope::model::{load_master, save_folder, save_gguf, HfConfig, Plan, Preset};
use gapscope::report::parquet::{read_rollouts, read_tokens};
use gapscope::report::read_rows;
use gapscope::run::{audit, Audit, ScoreOptions};
use mutate::Corpus;

/// Inputs of a test, without a time to fill.
const INPUTS: u64 = 2000;

/// How long, and from where on.
struct Campaign {
    seconds: Option<Duration>,
    seed: u64,
}

impl Campaign {
    fn of_environment() -> Self {
        let number = |name: &str| -> Option<u64> {
            let text = std::env::var(name).ok()?;
            Some(text.parse().unwrap_or_else(|_| panic!("{name} = {text:?} is no number")))
        };
        Self {
            seconds: number("GAPSCOPE_FUZZ_SECONDS").map(Duration::from_secs),
            seed: number("GAPSCOPE_FUZZ_SEED").unwrap_or(1),
        }
    }

    /// Reads mutations of the corpus. `read` says whether an input was accepted.
    fn run(&self, reader: &str, corpus: &Corpus, read: impl Fn(&[u8]) -> bool) {
        let (started, mut accepted, mut slowest) = (Instant::now(), 0, Duration::ZERO);
        // What was not mutated is read, or the fuzzer mutates what no reader takes.
        corpus.inputs.iter().for_each(|whole| assert!(read(whole), "{reader}: a whole file"));
        let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/fuzz");
        fs::create_dir_all(&kept).expect("a folder");
        let kept = kept.join(format!("{reader}-{}", self.seed));
        let mut inputs = 0;
        while self.seconds.map_or(inputs < INPUTS, |seconds| started.elapsed() < seconds) {
            let bytes = corpus.mutated(&mut Stream::new(self.seed, reader, inputs));
            // Before it is read: an abort leaves no other trace.
            fs::write(&kept, &bytes).expect("written");
            let began = Instant::now();
            match catch_unwind(AssertUnwindSafe(|| read(&bytes))) {
                Ok(whole) => accepted += u64::from(whole),
                Err(_) => panic!("{reader}: input {inputs} panics and is {}", kept.display()),
            }
            slowest = slowest.max(began.elapsed());
            inputs += 1;
        }
        fs::remove_file(&kept).expect("removed");
        assert!(accepted < inputs, "{reader}: no mutation is ever refused");
        if self.seconds.is_some() {
            let counts = format!("{inputs} inputs, {accepted} accepted");
            let (seed, slowest_ms) = (self.seed, slowest.as_millis());
            let line = format!("{reader}: seed {seed}, {counts}, slowest {slowest_ms} ms");
            writeln!(std::io::stderr(), "{line}").expect("stderr");
        }
    }
}

fn read(path: &Path) -> Vec<u8> {
    fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn with_ending(folder: &str, ending: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let entries = fs::read_dir(folder).expect("a folder");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("an entry").path()).collect();
    paths.retain(|path| path.to_string_lossy().ends_with(ending));
    paths.sort();
    paths.iter().map(|path| read(path)).collect()
}

#[test]
fn experiment_files() {
    let mut files = with_ending("experiments", ".toml");
    files.extend(with_ending("tests/fixtures", ".toml"));
    files.push(config::defaults_text().into_bytes());
    Campaign::of_environment().run("experiment", &Corpus::text(files), |bytes| {
        let parsed = config::parse(&String::from_utf8_lossy(bytes), "fuzz.toml", &[]);
        let points = |config: &config::Config| match &config.sweep {
            Some(sweep) => sweep.settings().is_ok(),
            None => !config.to_json().is_empty(),
        };
        parsed.is_ok_and(|config| points(&config))
    });
}

/// `config.json`, and the plan that follows from it.
#[test]
fn model_configs() {
    let texts = MODELS.iter().flat_map(|model| {
        ["config.json", "config.v4.json"].map(|name| read(&fixture(model).join(name)))
    });
    Campaign::of_environment().run("model-config", &Corpus::text(texts.collect()), |bytes| {
        let parsed = HfConfig::parse(&String::from_utf8_lossy(bytes), Path::new("config.json"));
        parsed.is_ok_and(|config| Plan::new(config).num_parameters() > 0)
    });
}

/// A folder of a tiny model, to write one of its files anew.
fn tiny_folder() -> (tempfile::TempDir, PathBuf) {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let folder = parent.path().join("model");
    let tiny = Preset::TinyJamba.config();
    let narrow = HfConfig {
        vocab_size: 256,
        hidden_size: 8,
        attention: tiny.attention.clone().map(|shape| gapscope::model::AttentionShape {
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            ..shape
        }),
        mamba: tiny.mamba.clone().map(|shape| gapscope::model::MambaShape { d_inner: 16, ..shape }),
        feed_forward: tiny
            .feed_forward
            .clone()
            .map(|shape| gapscope::model::FeedForwardShape { intermediate_size: 8, ..shape }),
        ..tiny
    };
    let plan = Plan::new(narrow);
    save_folder(&folder, &plan, &Preset::weights(&plan, 1), Dtype::F32).expect("saved");
    (parent, folder)
}

/// The index of shards and the shard, whose header is most of it.
#[test]
fn safetensors_and_their_index() {
    let (_parent, folder) = tiny_folder();
    let single = folder.join("model.safetensors");
    let (shard, whole) = (folder.join("model-00001-of-00001.safetensors"), read(&single));
    let campaign = Campaign::of_environment();
    let half = Campaign { seconds: campaign.seconds.map(|whole| whole / 2), ..campaign };
    half.run("safetensors", &Corpus::binary(vec![whole.clone()]), |bytes| {
        fs::write(&single, bytes).expect("written");
        load_master(&folder).is_ok()
    });
    fs::remove_file(&single).expect("removed");
    fs::write(&shard, &whole).expect("written");
    let names = load_names(&whole);
    let map: serde_json::Map<String, serde_json::Value> =
        names.into_iter().map(|name| (name, "model-00001-of-00001.safetensors".into())).collect();
    let index = serde_json::json!({ "metadata": { "total_size": 1 }, "weight_map": map });
    let corpus = Corpus::text(vec![format!("{index:#}").into_bytes(), index.to_string().into()]);
    half.run("safetensors-index", &corpus, |bytes| {
        fs::write(folder.join("model.safetensors.index.json"), bytes).expect("written");
        load_master(&folder).is_ok()
    });
}

fn load_names(bytes: &[u8]) -> Vec<String> {
    let file = safetensors::SafeTensors::deserialize(bytes).expect("a file");
    file.names().into_iter().map(str::to_owned).collect()
}

#[test]
fn gguf_files() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let (file, folder) = (parent.path().join("fuzz.gguf"), parent.path().join("model"));
    let corpus = Corpus::binary(vec![tiny::Tiny::new(true).bytes()]);
    Campaign::of_environment().run("gguf", &corpus, |bytes| {
        fs::write(&file, bytes).expect("written");
        let done = save_gguf(&folder, &file, Dtype::F32).is_ok();
        let _ = fs::remove_dir_all(&folder);
        done
    });
}

/// Dumps, through all that an audit makes of them; then a run's own rows.
#[test]
fn json_lines() {
    let parent = tempfile::tempdir().expect("a temporary folder");
    let campaign = Campaign::of_environment();
    let part = Campaign { seconds: campaign.seconds.map(|whole| whole / 5), ..campaign };
    for (reader, record) in [("nemo-rl", NEMO_RL), ("prime-rl", PRIME_RL)] {
        let file = parent.path().join(format!("{reader}.jsonl"));
        let lines = |count: usize| (0..count).map(|n| record.replace("NUMBER", &n.to_string()));
        let corpus = [1, 3].map(|count| lines(count).collect::<String>().into_bytes());
        part.run(reader, &Corpus::text(corpus.to_vec()), |bytes| {
            fs::write(&file, bytes).expect("written");
            audited(std::slice::from_ref(&file), None)
        });
    }
    let run = Run::small(&[]);
    let corpus = vec![read(&run.folder.steps()), read(&run.folder.timing())];
    let file = parent.path().join("steps.jsonl");
    part.run("steps", &Corpus::text(corpus), |bytes| {
        fs::write(&file, bytes).expect("written");
        read_rows(&file).is_ok_and(|mut rows| rows.all(|row| row.is_ok()))
    });
    token_lines(&part, parent.path());
    rescored_lines(&part, parent.path());
}

/// A model that takes ids up to 255 and only scores.
fn tiny_model() -> (tempfile::TempDir, config::Config) {
    let (parent, model) = tiny_folder();
    let text = format!("name = \"score\"\nmodel.path = {:?}\ntrainer.update = \"none\"\n", model);
    (parent, common::config(&text))
}

/// Dumps that a model is to say something of.
fn rescored_lines(campaign: &Campaign, parent: &Path) {
    let (_folder, config) = tiny_model();
    let file = parent.join("rescored.jsonl");
    let lines = [0, 1].map(|n| PRIME_RL.replace("NUMBER", &n.to_string())).concat();
    // The tiny model has no experts.
    let without = lines.replace("routed_", "other_");
    campaign.run("rescored", &Corpus::text(vec![without.into_bytes()]), |bytes| {
        fs::write(&file, bytes).expect("written");
        audited(std::slice::from_ref(&file), Some(&config))
    });
}

/// The input of `score`, to its numbers.
fn token_lines(campaign: &Campaign, parent: &Path) {
    let (_folder, config) = tiny_model();
    let (input, output) = (parent.join("tokens.jsonl"), parent.join("scores.jsonl"));
    let options = ScoreOptions {
        input: input.clone(),
        output: Some(output),
        leg: config::Leg::Trainer,
        temperature: 1.0,
    };
    campaign.run("score", &Corpus::text(vec![TOKENS.as_bytes().to_vec()]), |bytes| {
        fs::write(&input, bytes).expect("written");
        gapscope::run::score(&config, &options).is_ok()
    });
}

fn audited(rollouts: &[PathBuf], model: Option<&config::Config>) -> bool {
    let (format, fail_on, floor, out) = (None, &[][..], None, None);
    audit(&Audit { rollouts, format, fail_on, allow_unlike: false, floor, model, out }).is_ok()
}

/// A run's two tables, alone and through an audit.
#[test]
fn parquet_files() {
    let run = Run::small(&["steps=1"]);
    let (rollouts, tokens) = (run.folder.rollouts(Step::new(1)), run.folder.tokens(Step::new(1)));
    let campaign = Campaign::of_environment();
    let half = Campaign { seconds: campaign.seconds.map(|whole| whole / 2), ..campaign };
    for (reader, file) in [("rollouts", &rollouts), ("tokens", &tokens)] {
        let whole = read(file);
        half.run(reader, &Corpus::binary(vec![whole.clone()]), |bytes| {
            fs::write(file, bytes).expect("written");
            let alone = match reader {
                "tokens" => read_tokens(file).is_ok(),
                _ => read_rollouts(file).is_ok(),
            };
            audited(&[run.root().to_owned()], None) && alone
        });
        fs::write(file, whole).expect("written back");
    }
}

const NEMO_RL: &str = "{\"content\": [\"NaN and \\\"Infinity\\\" are words here\"], \"rewards\": \
    [1.0], \"input_lengths\": [5], \"token_ids\": [[7, 8, 9, 10, 11, 0]], \"token_loss_mask\": \
    [[0, 0, 1, 1, 1, 0]], \"sample_loss_mask\": [1.0], \"advantages\": [[0.5]], \
    \"generation_logprobs\": [[0.0, 0.0, -0.5, -1.25, NaN, 0.0]], \"prev_logprobs\": [[0.0, 0.0, \
    -0.5, -1.5, -Infinity, 0.0]], \"idx\": NUMBER}\n";

const PRIME_RL: &str = "{\"schema_version\": 1, \"step\": 3, \"rank\": 0, \"micro_step\": 0, \
    \"micro_sequence_idx\": 0, \"export_sequence_idx\": NUMBER, \"env_name\": \"math\", \
    \"token_ids\": [7, 8, 9, 10], \"loss_mask\": [false, true, true, true], \
    \"inference_logprobs\": [0.0, -0.5, null, -9999.0], \"trainer_logprobs\": [0.0, -0.25, -1.5, \
    -2.0], \"inference_temperature\": 0.5, \"inference_top_p\": 0.9, \"inference_top_k\": 4, \
    \"trainer_temperature\": 0.5, \"trainer_top_p\": 0.9, \"trainer_top_k\": 4, \
    \"routed_experts\": [null, [[0, 1]], [[1, 2]], [[0, 2]]], \"routed_weights\": [null, \
    [[0.5, 0.3]], [[0.4, 0.4]], null], \"trainer_routed_experts\": [[[0, 1]], [[0, 1]], null, \
    [[1, 2]]], \"entropy\": null}\n";

const TOKENS: &str = "{\"id\":\"a\",\"token_ids\":[1,2,3,255,7]}\n\n\
    {\"id\":7,\"token_ids\":[4,5,6],\"prompt_len\":2}\n{\"id\":\"b\",\"token_ids\":[9,3]}\n";
