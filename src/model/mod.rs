//! Hugging Face folders, the layer plan, and the blocks: each block's sequence form, step form and
//! backward side by side.
//!
//! Invariant: nothing here knows a rank, a batch policy or a cache page. Blocks see packed rows,
//! spans and states.

mod attention;
mod block;
mod checkpoint;
mod config;
mod error;
mod gguf;
mod mamba;
mod mlp;
mod moe;
mod part;
mod preset;
mod residual;
mod root;
mod save;
mod shard;
mod unit;

pub use block::Block;
pub use checkpoint::{load_master, load_plan};
pub use config::{
    AttentionShape, Every, ExpertsShape, Family, FeedForwardKind, FeedForwardShape, HfConfig,
    LayerKind, MambaShape, MixerKind, Names, RopeShape,
};
pub use error::ModelError;
pub use gguf::save_gguf;
pub use part::{row_digests, Part, PartKind};
pub use preset::Preset;
pub use residual::Residual;
pub use root::{Root, HEAD};
pub use save::{save_folder, save_preset};
pub use unit::{combine_fingerprints, TensorSpec, UnitSpec};

use crate::config::{Arithmetic, Config, Dtype};
pub use crate::ops::spans::{Span, Spans};
use crate::ops::weights::{Purpose, Weights};

/// What fixes every rounding of a forward.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numerics {
    /// Weights and activations.
    pub dtype: Dtype,
    /// The recurrent state between rows: the dtype of the engine's cache, on both sides.
    pub state_dtype: Dtype,
    /// The residual stream between blocks.
    pub residual_dtype: Dtype,
    /// Of every RMS norm.
    pub eps: f32,
    /// How sums and recurrences are ordered. A layer's operations are chosen by it once, at load.
    pub arithmetic: Arithmetic,
}

impl Numerics {
    /// What a layer is loaded for under these numerics.
    #[must_use]
    pub fn purpose(&self, trains: bool) -> Purpose {
        Purpose { arithmetic: self.arithmetic, trains }
    }
}

/// A model's shape: its layers in order and its units. Unit 0 is the root (embedding, final norm
/// and head, so that tied weights are one unit); unit i + 1 is layer i.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub config: HfConfig,
    pub layers: Vec<LayerKind>,
    pub units: Vec<UnitSpec>,
}

impl Plan {
    #[must_use]
    pub fn new(config: HfConfig) -> Self {
        let layers = config.layers();
        let blocks =
            layers.iter().enumerate().map(|(index, kind)| block::unit(&config, *kind, index));
        let units = std::iter::once(root::unit(&config)).chain(blocks).collect();
        Self { config, layers, units }
    }

    /// Parameters, a tied head counted once.
    #[must_use]
    pub fn num_parameters(&self) -> u64 {
        self.units.iter().map(|unit| unit.len() as u64).sum()
    }

    /// Invariant numerics of these dtypes.
    #[must_use]
    pub fn numerics(&self, dtype: Dtype, state_dtype: Dtype) -> Numerics {
        let residual_dtype = if self.config.residual_in_fp32 { Dtype::F32 } else { dtype };
        let (eps, arithmetic) = (self.config.rms_norm_eps, Arithmetic::Invariant);
        Numerics { dtype, state_dtype, residual_dtype, eps, arithmetic }
    }

    /// The numerics of an experiment, which its engine and its trainer share.
    #[must_use]
    pub fn numerics_of(&self, config: &Config) -> Numerics {
        let engine = &config.engine;
        let invariant = self.numerics(config.model.dtype, engine.mamba_ssm_cache_dtype);
        Numerics { arithmetic: engine.numerics, ..invariant }
    }
}

/// A whole model packed for forward passes, as the engine holds it.
#[derive(Clone, Debug)]
pub struct Model {
    pub root: Root,
    pub blocks: Vec<Block>,
}

impl Model {
    /// From the units' weights, in the plan's order and on their device, to run under `num`. On a
    /// device the model shares their memory, wherever a tensor can be used as it lies.
    #[must_use]
    pub fn load(plan: &Plan, num: &Numerics, units: &[Weights]) -> Self {
        assert_eq!(units.len(), plan.units.len(), "one array of weights a unit");
        let purpose = num.purpose(false);
        let root = Root::load(&plan.config, &plan.units[0], &units[0], purpose);
        let blocks = plan.layers.iter().zip(&plan.units[1..]).zip(&units[1..]);
        let blocks = blocks
            .map(|((kind, spec), unit)| Block::load(&plan.config, *kind, spec, unit, purpose));
        Self { root, blocks: blocks.collect() }
    }
}
