//! What the whole-product tests share.
#![allow(dead_code)] // Each test binary uses its own part.

pub mod dense;
pub mod play;
pub mod records;
pub mod run;
pub mod shapes;

use std::path::{Path, PathBuf};

use gapscope::base::{Contract, Stream, TokenId};
use gapscope::config::{Config, Dtype};
use gapscope::engine::Engine;
use gapscope::model::{load_master, HfConfig, Plan, Preset};
use gapscope::ops::array::Device;
use gapscope::trainer::reference::Weights;
use gapscope::trainer::Trainer;

/// A file or folder under `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The fixtures that are models: every family, and Jamba with and without experts.
pub const MODELS: [&str; 6] =
    ["tiny-jamba", "tiny-jamba-moe", "tiny-mamba", "tiny-llama", "tiny-qwen2", "tiny-qwen3"];

/// transformers' own numbers for a model.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    pub fn tiny_jamba() -> Self {
        Self::of("tiny-jamba")
    }

    pub fn of(model: &str) -> Self {
        let path = fixture(model).join("reference.safetensors");
        Self { bytes: std::fs::read(path).expect("fixture") }
    }

    pub fn f32(&self, name: &str) -> Vec<f32> {
        let file = safetensors::SafeTensors::deserialize(&self.bytes).expect("fixture");
        let tensor = file.tensor(name).expect("fixture");
        let (words, _) = tensor.data().as_chunks::<4>();
        words.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub fn tokens(&self, name: &str) -> Vec<TokenId> {
        let file = safetensors::SafeTensors::deserialize(&self.bytes).expect("fixture");
        let tensor = file.tensor(name).expect("fixture");
        let (words, _) = tensor.data().as_chunks::<8>();
        words.iter().map(|b| TokenId::new(i64::from_le_bytes(*b) as u32)).collect()
    }

    /// The two rows of 24 tokens that everything was computed on.
    pub fn rows(&self) -> Vec<Vec<TokenId>> {
        self.tokens("input_ids").chunks(24).map(<[TokenId]>::to_vec).collect()
    }
}

/// Every element within `tolerance · max(1, |want|)`.
pub fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}: lengths");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs();
        assert!(error <= tolerance * want.abs().max(1.0), "{what}[{i}]: {got} against {want}");
    }
}

/// A checked config from a few lines of TOML.
pub fn config(text: &str) -> Config {
    gapscope::config::parse(text, "test.toml", &[]).expect("a valid config")
}

/// The CPU; with GAPSCOPE_TEST_DEVICE=cuda in a build with CUDA the first GPU, which is held to the
/// same tables.
pub fn device() -> Device {
    let asked = std::env::var("GAPSCOPE_TEST_DEVICE").unwrap_or_else(|_| "cpu".to_owned());
    assert!(
        asked == "cpu" || asked == "cuda" && cfg!(feature = "cuda"),
        "GAPSCOPE_TEST_DEVICE={asked} is no device of this build"
    );
    #[cfg(feature = "cuda")]
    if asked == "cuda" {
        static GPU: std::sync::OnceLock<Device> = std::sync::OnceLock::new();
        let open = || {
            let gpu = gapscope::ops::cuda::Gpu::open(0).expect("GAPSCOPE_TEST_DEVICE asks for it");
            eprintln!("on {}", gpu.name());
            Device::Cuda(gpu)
        };
        return GPU.get_or_init(open).clone();
    }
    Device::Cpu
}

/// A trainer over a model folder, f32.
pub fn trainer(folder: &Path, config: &Config) -> (Plan, Trainer) {
    let (plan, master) = load_master(folder).expect("a model folder");
    let num = plan.numerics_of(config);
    let trainer = Trainer::new(&device(), plan.clone(), num, config.trainer.clone(), &master);
    (plan, trainer.expect("few threads"))
}

/// What every fixture's configuration begins with.
pub const FIXTURE_TOML: &str = "name = \"fixture\"\nmodel.preset = \"tiny-jamba\"\n";

/// An engine with a fixture's weights; `extra` goes on from [`FIXTURE_TOML`].
pub fn engine(name: &str, extra: &str) -> Engine {
    let config = config(&format!("{FIXTURE_TOML}{extra}"));
    let (plan, trainer) = trainer(&fixture(name), &config);
    let num = plan.numerics_of(&config);
    let (contract, seed) = (config.contract(), config.seed);
    let mut engine =
        Engine::new(&device(), plan, num, config.engine, contract, seed).expect("an engine");
    let weights = trainer.hand_over().expect("hand over");
    engine.load(weights.version, weights.units).expect("newer weights");
    engine
}

/// Each tensor's shape and values, as the reference takes them.
pub fn by_name(plan: &Plan, units: &[Vec<f32>]) -> Weights {
    let mut all = Weights::new();
    for (spec, flat) in plan.units.iter().zip(units) {
        for (tensor, part) in spec.tensors.iter().zip(spec.parts(flat)) {
            all.insert(tensor.name.clone(), (tensor.shape.clone(), part.to_vec()));
        }
    }
    all
}

pub const PLAIN: Contract = Contract::PLAIN;
pub const F32: Dtype = Dtype::F32;

pub fn tokens<const N: usize>(ids: [u32; N]) -> Vec<TokenId> {
    ids.map(TokenId::new).to_vec()
}

/// Seeded ids from all of a model's vocabulary.
pub fn random_tokens(config: &HfConfig, len: usize, seed: u64) -> Vec<TokenId> {
    let mut stream = Stream::new(seed, "tokens", len as u64);
    let last = config.vocab_size as u64 - 1;
    (0..len).map(|_| TokenId::new(stream.integer(0, last) as u32)).collect()
}

/// A preset's start values with noise on all of them, so that no norm weight is 1 and no bias 0.
pub fn random_weights(plan: &Plan, seed: u64) -> Vec<Vec<f32>> {
    let mut stream = Stream::new(seed, "noise", 0);
    let mut units = Preset::weights(plan, seed);
    units.iter_mut().flatten().for_each(|w| *w += (0.1 * stream.normal()) as f32);
    units
}

/// A first AdamW step moves a weight by -rate · g / (|g| + eps), whatever the betas. With a large
/// eps nothing is lost, and [`gradient_by_update`] reads every g off the weights.
pub const GRADIENT_BY_UPDATE: &str = "\
    trainer.learning_rate = 1000.0\n\
    trainer.warm_start.learning_rate = 1000.0\n\
    trainer.eps = 1.0\n\
    trainer.max_grad_norm = inf\n";

/// The gradient that a first step under [`GRADIENT_BY_UPDATE`] used.
pub fn gradient_by_update(before: &[f32], after: &[f32]) -> Vec<f32> {
    let one = |(&before, &after): (&f32, &f32)| {
        let moved = (f64::from(before) - f64::from(after)) / 1000.0;
        (moved / (1.0 - moved.abs())) as f32
    };
    before.iter().zip(after).map(one).collect()
}
