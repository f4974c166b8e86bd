//! What the whole-product tests share.
#![allow(dead_code)] // Each test binary uses its own part.

pub mod run;

use std::path::{Path, PathBuf};

use gapscope::base::{Contract, TokenId};
use gapscope::config::{Config, Dtype};
use gapscope::model::{load_master, Plan};
use gapscope::trainer::Trainer;

/// A file or folder under `tests/fixtures`.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// transformers' own numbers for `tiny-jamba`.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    pub fn tiny_jamba() -> Self {
        let path = fixture("tiny-jamba/reference.safetensors");
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

/// A trainer over a model folder, f32.
pub fn trainer(folder: &Path, config: &Config) -> (Plan, Trainer) {
    let (plan, master) = load_master(folder).expect("a model folder");
    let num = plan.numerics(config.model.dtype, config.engine.mamba_ssm_cache_dtype);
    (plan.clone(), Trainer::new(plan, num, config.trainer.clone(), &master))
}

pub const PLAIN: Contract = Contract::PLAIN;
pub const F32: Dtype = Dtype::F32;
