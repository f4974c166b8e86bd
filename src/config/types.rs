//! The checked configuration: plain data that the rest of the crate trusts without asking again.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::device::Device;
use super::fault::Fault;
use super::servers::ServersConfig;
use super::sleep::Sleep;
use super::sweep::Sweep;
use super::trace::TraceConfig;

use crate::base::{Contract, LogprobsMode};

/// One experiment, checked. Saved as `config.json` beside every run.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    pub name: String,
    pub seed: u64,
    pub steps: u64,
    pub model: ModelConfig,
    pub engine: EngineConfig,
    pub rollout: RolloutConfig,
    pub task: TaskConfig,
    pub trainer: TrainerConfig,
    pub check: CheckConfig,
    pub checkpoint: CheckpointConfig,
    /// Read by `sweep` alone and not saved: what a run did does not depend on it.
    #[serde(skip)]
    pub sweep: Option<Sweep>,
    /// Not saved either: it only looks.
    #[serde(skip)]
    pub trace: Option<TraceConfig>,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub struct ModelConfig {
    /// `path` or `preset`, as in the experiment file.
    #[serde(flatten)]
    pub source: ModelSource,
    /// The compute dtype of weights and activations, on both sides.
    pub dtype: Dtype,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelSource {
    /// A folder in the Hugging Face layout.
    Path(PathBuf),
    /// A named shape with seeded random weights.
    Preset(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    #[serde(alias = "float32")]
    F32,
    #[serde(alias = "bfloat16")]
    Bf16,
}

impl Dtype {
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct EngineConfig {
    /// Engines side by side, each with a pool of its own.
    #[serde(default = "one")]
    pub replicas: u32,
    pub device: Device,
    /// Bytes that the engines of one device may plan with, before `gpu_memory_utilization`; `None`
    /// is what the device has, or [`super::CPU_MEMORY`].
    pub device_memory: Option<u64>,
    pub gpu_memory_utilization: f64,
    /// Replaces the block count that the memory would give, up or down.
    pub num_gpu_blocks_override: Option<u32>,
    pub max_num_batched_tokens: u32,
    pub max_num_seqs: u32,
    pub max_model_len: u32,
    pub enable_chunked_prefill: bool,
    /// Whether a batch of decodes runs as it is; else it is padded up to a captured size.
    pub enforce_eager: bool,
    /// Whether requests start behind the tokens whose full blocks are computed already.
    pub enable_prefix_caching: bool,
    /// The dtype of the recurrent state in its cache pages; resolved (`auto` is the model's dtype).
    pub mamba_ssm_cache_dtype: Dtype,
    pub batch_split: BatchSplit,
    /// Width in bits, 8 to 64, of the product slot × stride in the prefill scan's state load and
    /// store.
    pub state_index_bits: u32,
    pub free_list: FreeListOrder,
    #[serde(default)]
    pub sleep: Sleep,
    pub logprobs_mode: LogprobsMode,
    pub force_prefill: bool,
    #[serde(default)]
    pub numerics: Arithmetic,
    /// Planted faults, by name (`engine.faults`), for `gapscope faults` and the tests.
    pub faults: Vec<Fault>,
    /// Servers that sample in place of the embedded engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub servers: Option<ServersConfig>,
}

const fn one() -> u32 {
    1
}

impl EngineConfig {
    /// The width of slot x stride in the prefill scan. As vLLM's kernel has it, a scan that keeps
    /// the states of block ends takes slots in 64 bits.
    #[must_use]
    pub fn scan_index_bits(&self) -> u32 {
        if self.enable_prefix_caching {
            u64::BITS
        } else {
            self.state_index_bits
        }
    }

    /// Whether the number of blocks is what the device's own memory leaves.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.device == Device::Cuda
            && self.device_memory.is_none()
            && self.num_gpu_blocks_override.is_none()
    }
}

/// How sums and recurrences are ordered, on both sides (`engine.numerics`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arithmetic {
    /// One order for every shape: a row's bits depend on that row alone.
    #[default]
    Invariant,
    /// An order that follows the shape: a library's matrix products, a scan in tiles.
    Fast,
}

/// How rows of one engine step are told apart as decode or prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchSplit {
    /// By whether the prompt is still being computed (vLLM since #37303).
    #[default]
    IsPrefilling,
    /// The reorder looks at computed tokens, the split at query lengths (vLLM #32118).
    ComputedTokens,
    /// Both look at scheduled tokens (vLLM before #32118).
    ScheduledTokens,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FreeListOrder {
    /// Taken at the head, returned at the tail: least recently freed first (vLLM).
    #[default]
    Fifo,
    /// A stack with block 1 on top.
    Lifo,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RolloutConfig {
    pub prompts_per_step: u32,
    pub rollouts_per_prompt: u32,
    pub max_new_tokens: u32,
    pub ignore_eos: bool,
    pub temperature: f32,
    pub top_p: f32,
    /// 0 keeps everything.
    pub top_k: u32,
    pub min_p: f32,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TaskConfig {
    Arithmetic {
        /// Operands are drawn from 0 to this.
        max_operand: u64,
        /// Subset of "+-*".
        operators: String,
        /// Problems written out with their answers before the one that is asked.
        examples: u32,
        /// Pads every prompt in front to this many tokens; absent leaves lengths as they
        /// fall.
        prompt_tokens: Option<u32>,
        /// Pads to a length drawn from this to `prompt_tokens`; absent pads to `prompt_tokens`.
        min_prompt_tokens: Option<u32>,
    },
    Jsonl {
        path: PathBuf,
        prompt_key: String,
        answer_key: String,
        reward: RewardConfig,
    },
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RewardConfig {
    /// The completion, trimmed, is the answer, trimmed.
    Exact,
    /// The last number of the completion equals the answer's number (after `####` where there is
    /// one).
    Numeric,
    /// Nothing is judged, and no answer is read: every completion earns 0.
    None,
    /// The completion matches this regular expression; `{answer}` in it stands for the answer,
    /// escaped.
    Regex { pattern: String },
    /// A program that reads one JSON object a line and prints one number a line.
    Command { argv: Vec<String>, timeout_s: f64 },
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct TrainerConfig {
    pub update: Update,
    /// At least 1.
    pub ranks: u32,
    pub learning_rate: f64,
    pub warmup_steps: u64,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
    /// Gradients are scaled down to this L2 norm; infinity never scales.
    #[serde(with = "or_infinity")]
    pub max_grad_norm: f64,
    /// Optimizer updates on one step's rollouts; the sequences are cut into this many equal
    /// minibatches.
    pub updates_per_step: u32,
    /// The ratio is clipped to [1 - low, 1 + high].
    pub clip_ratio_low: f64,
    pub clip_ratio_high: f64,
    /// Weight of the k3 KL to the frozen start weights; 0 keeps no reference.
    pub kl_coef: f64,
    /// Truncated importance weights: min(exp(old - rollout), cap). Absent: weight 1.
    pub importance_cap: Option<f64>,
    pub loss_agg: LossAggregation,
    /// Whether a group's advantages are divided by its standard deviation.
    pub scale_advantages: bool,
    /// Tokens of one packed forward and backward.
    pub max_tokens_per_chunk: u32,
    pub warm_start: WarmStart,
    /// Planted faults of the trainer's side.
    pub faults: Vec<Fault>,
}

/// Supervised steps on the task's own answers before the loop.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct WarmStart {
    /// 0 for none.
    pub steps: u64,
    pub batch: u32,
    pub learning_rate: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Update {
    #[default]
    Adamw,
    /// Scores only: no gradient and no optimizer state is ever allocated.
    None,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LossAggregation {
    /// Every token weighs the same.
    #[default]
    TokenMean,
    /// Every sequence weighs the same.
    SequenceMean,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CheckConfig {
    /// `decode` and `trainer` are always among them.
    pub legs: Vec<Leg>,
    #[serde(default)]
    pub thresholds: Thresholds,
    /// Nats; absent where it is known or measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<f64>,
    /// Whether each step with a finding leaves its evidence as a file.
    pub evidence: bool,
    /// Problems answered greedily after the last step; 0 for none.
    pub greedy_eval_prompts: u32,
}

/// What makes a step an alarm. A log-probability that is not finite always does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Thresholds {
    /// A token over the floor.
    #[default]
    Floor,
    /// NeMo-RL's guide: mean k3 over 1e-3, or mean exp|d| over 1.05.
    NemoRl,
    /// prime-rl's limit for a new model: mean k3 over 0.015.
    PrimeRl,
    /// slime: mean |d| over 0.1.
    Slime,
    /// miles: |mean d| over 0.03.
    Miles,
    /// Any difference.
    Exact,
}

/// One way of getting the log-probability of a sampled token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    Decode,
    Prefill,
    Trainer,
    Reference,
}

#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointConfig {
    /// Steps from one checkpoint to the next.
    pub every: u64,
    /// Checkpoints that stay, the latest ones.
    pub keep: u32,
    /// Bytes; a larger pool is kept without its bytes.
    pub pool_bytes_max: u64,
    /// Whether a run with updates leaves its final weights as a Hugging Face folder.
    pub save_final: bool,
}

impl Config {
    /// What the engine's recorded log-probabilities mean.
    #[must_use]
    pub fn contract(&self) -> Contract {
        Contract {
            logprobs_mode: self.engine.logprobs_mode,
            temperature: self.rollout.temperature,
            top_p: self.rollout.top_p,
            top_k: self.rollout.top_k,
            min_p: self.rollout.min_p,
        }
    }
}

/// A float that may be infinite, which JSON has no number for: infinity is the string "inf".
mod or_infinity {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        if value.is_infinite() {
            return "inf".serialize(serializer);
        }
        value.serialize(serializer)
    }

    #[derive(Deserialize)]
    enum Infinity {
        #[serde(rename = "inf")]
        Infinity,
    }

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Finite(f64),
        Infinite(Infinity),
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(match Written::deserialize(deserializer)? {
            Written::Finite(value) => value,
            Written::Infinite(Infinity::Infinity) => f64::INFINITY,
        })
    }
}
