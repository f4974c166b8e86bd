//! Every key of an experiment file: the one place that decides names, values and defaults.

use super::fault::{ENGINE_FAULTS, TRAINER_FAULTS};
use super::kind::{Kind, Range};

/// One key of an experiment file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Key {
    /// Dotted.
    pub name: &'static str,
    pub kind: Kind,
    pub if_absent: IfAbsent,
    /// What others call it: vLLM's, verl's or TRL's name; empty where they have none.
    pub elsewhere: &'static str,
    pub meaning: &'static str,
}

/// What holds when the key is not written. Values are TOML text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfAbsent {
    /// This default.
    Is(&'static str),
    /// Nothing: the key has no value then. The text is an example.
    Nothing(&'static str),
    /// An error. The text is an example.
    Error(&'static str),
}
use IfAbsent::{Error, Is, Nothing};

/// Named shapes with seeded random weights.
pub const PRESETS: &[&str] =
    &["tiny-jamba", "tiny-jamba-moe", "tiny-mamba", "tiny-llama", "small-jamba", "jamba-3b-shape"];

const DTYPES: &[&str] = &["f32", "bf16", "float32", "bfloat16"];
const STATE_DTYPES: &[&str] = &["auto", "f32", "bf16", "float32", "bfloat16"];
const COUNT: Kind = Kind::Int { min: 1, max: u32::MAX as i64 };
const COUNT_OR_NONE: Kind = Kind::Int { min: 0, max: u32::MAX as i64 };
/// A thread and a whole gathered unit each.
const RANKS: Kind = Kind::Int { min: 1, max: 1024 };
const LONG_COUNT: Kind = Kind::Int { min: 1, max: i64::MAX };
const LONG_OR_NONE: Kind = Kind::Int { min: 0, max: i64::MAX };

/// Keys that mean something under one value of another key only: key, other key, its value.
const ONLY_WITH: &[(&str, &str, &str)] = &[
    ("engine.url", "engine.kind", "vllm"),
    ("engine.served_model_name", "engine.kind", "vllm"),
    ("engine.max_concurrent_requests", "engine.kind", "vllm"),
    ("engine.request_timeout_s", "engine.kind", "vllm"),
    ("engine.retry_for_s", "engine.kind", "vllm"),
    ("engine.request_seeds", "engine.kind", "vllm"),
    ("engine.check_contract", "engine.kind", "vllm"),
    ("engine.sync_folder", "engine.kind", "vllm"),
    ("engine.launch.command", "engine.kind", "vllm"),
    ("engine.launch.shell", "engine.kind", "vllm"),
    ("engine.launch.ready_timeout_s", "engine.kind", "vllm"),
    ("engine.launch.restarts", "engine.kind", "vllm"),
    ("engine.replicas", "engine.kind", "embedded"),
    ("engine.device_memory", "engine.kind", "embedded"),
    ("engine.batch_split", "engine.kind", "embedded"),
    ("engine.state_index_bits", "engine.kind", "embedded"),
    ("engine.free_list", "engine.kind", "embedded"),
    ("engine.sleep", "engine.kind", "embedded"),
    ("engine.force_prefill", "engine.kind", "embedded"),
    ("engine.faults", "engine.kind", "embedded"),
    ("trace.when", "engine.kind", "embedded"),
    ("trace.request", "engine.kind", "embedded"),
    ("task.max_operand", "task.kind", "arithmetic"),
    ("task.operators", "task.kind", "arithmetic"),
    ("task.examples", "task.kind", "arithmetic"),
    ("task.prompt_tokens", "task.kind", "arithmetic"),
    ("task.min_prompt_tokens", "task.kind", "arithmetic"),
    ("task.path", "task.kind", "jsonl"),
    ("task.prompt_key", "task.kind", "jsonl"),
    ("task.answer_key", "task.kind", "jsonl"),
    ("task.reward", "task.kind", "jsonl"),
    ("task.reward_pattern", "task.reward", "regex"),
    ("task.reward_command", "task.reward", "command"),
    ("task.reward_timeout_s", "task.reward", "command"),
];

/// The key and its value that `name` needs to mean anything.
pub(super) fn only_with(name: &str) -> Option<(&'static str, &'static str)> {
    ONLY_WITH.iter().find(|(key, ..)| *key == name).map(|(_, other, value)| (*other, *value))
}

pub(super) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.name == name)
}

/// Whether some key lies under the table `name`.
pub(super) fn is_table(name: &str) -> bool {
    KEYS.iter().any(|key| key.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('.')))
}

/// The table that a dotted name lies in; empty at the top.
pub(super) fn table_of(name: &str) -> &str {
    name.rsplit_once('.').map_or("", |(table, _)| table)
}

pub(super) fn last_part(name: &str) -> &str {
    name.rsplit_once('.').map_or(name, |(_, last)| last)
}

/// Rows of: name, kind, if absent, name elsewhere, meaning.
macro_rules! keys {
    ($($name:literal, $kind:expr, $if_absent:expr, $elsewhere:literal, $meaning:literal;)*) => {
        /// Every key, tables together, in the order in which a file shows them best.
        pub const KEYS: &[Key] = &[$(Key {
            name: $name,
            kind: $kind,
            if_absent: $if_absent,
            elsewhere: $elsewhere,
            meaning: $meaning,
        }),*];
    };
}

keys! {
    "name", Kind::Name, Error("\"my-run\""), "verl trainer.experiment_name",
        "Names the run, and its folder under runs/.";
    "seed", LONG_OR_NONE, Is("0"), "vLLM seed, TRL seed",
        "The one seed: weights of presets, tasks and sampling all draw from it.";
    "steps", LONG_COUNT, Is("100"), "verl trainer.total_training_steps, TRL max_steps",
        "Turns of the loop: generate, score, compare, update.";

    "model.path", Kind::Text, Nothing("\"configs/models/tiny-jamba\""), "vLLM model",
        "A Hugging Face folder, relative to the current directory. Either this or preset.";
    "model.preset", Kind::OneOf(PRESETS), Error("\"tiny-jamba\""), "",
        "A named shape with random weights drawn from the seed. Either this or path.";
    "model.dtype", Kind::OneOf(DTYPES), Is("\"f32\""), "vLLM dtype",
        "The dtype of weights and activations, in engine and trainer.";

    "engine.kind", Kind::OneOf(&["embedded", "vllm"]), Is("\"embedded\""), "",
        "Which engine generates: the one in this binary, or vLLM servers over HTTP.";
    "engine.url", Kind::Urls, Nothing("[\"http://127.0.0.1:8000\"]"), "",
        "Where the servers are. All rollouts of a prompt go to one of them.";
    "engine.served_model_name", Kind::Text, Nothing("\"my-model\""), "vLLM served_model_name",
        "What requests call the model; absent, the first that the server lists.";
    "engine.max_concurrent_requests", COUNT, Is("256"), "",
        "Requests under way at once at each server.";
    "engine.request_timeout_s", Kind::Number(Range::Positive), Is("600.0"), "",
        "Seconds from sending a request to the end of its answer; then it is tried once more.";
    "engine.retry_for_s", Kind::Number(Range::NonNegative), Is("60.0"), "",
        "Seconds of growing pauses after which a request that fails in passing is given up.";
    "engine.request_seeds", Kind::Bool, Is("false"), "vLLM seed of a request",
        "Whether each request carries a seed, drawn from seed and its id.";
    "engine.check_contract", Kind::Bool, Is("true"), "",
        "Whether two probes tell a server's logprobs mode; another than logprobs_mode is refused.";
    "engine.sync_folder", Kind::Text, Nothing("\"runs/served\""), "",
        "The model folder that the servers read: updates replace its weights, and they are told.";
    "engine.args", Kind::Text, Nothing("\"--gpu-memory-utilization 0.2\""), "vLLM's flags",
        "vLLM's own flags, each read as the key of that name.";
    "engine.replicas", COUNT, Is("1"), "vLLM data_parallel_size",
        "Engines side by side, each with a pool of its own. All rollouts of a prompt go to one.";
    "engine.device", Kind::OneOf(&["cpu", "cuda"]), Is("\"cpu\""), "",
        "Where engine and trainer compute; cuda is the first device that the driver shows. Where \
         there are as many as engines, each has its own; else they take turns on the first.";
    "engine.device_memory", Kind::BytesOrAuto, Is("\"auto\""), "",
        "Memory engines plan with: weights, blocks; those on one device each take an equal part. \
         auto: 256MiB; on cuda the device's own.";
    "engine.gpu_memory_utilization", Kind::Number(Range::UnitNotZero), Is("0.9"),
        "vLLM gpu_memory_utilization", "The share of device_memory that it may use.";
    "engine.num_gpu_blocks_override", Kind::Int { min: 2, max: u32::MAX as i64 },
        Nothing("1441"), "vLLM num_gpu_blocks_override",
        "Replaces the block count that memory gives, up or down. Block 0 is the null block.";
    "engine.max_num_batched_tokens", COUNT, Is("2048"), "vLLM max_num_batched_tokens",
        "The token budget of one engine step.";
    "engine.max_num_seqs", COUNT, Is("256"), "vLLM max_num_seqs",
        "Requests that may run at once.";
    "engine.max_model_len", COUNT, Is("512"), "vLLM max_model_len",
        "Prompt and completion together, in tokens.";
    "engine.enable_chunked_prefill", Kind::Bool, Is("true"), "vLLM enable_chunked_prefill",
        "Whether a prompt may be computed over several engine steps.";
    "engine.enable_prefix_caching", Kind::Bool, Is("false"), "vLLM enable_prefix_caching",
        "Whether a request starts behind the full blocks of its tokens that are computed already.";
    "engine.enforce_eager", Kind::Bool, Is("true"), "vLLM enforce_eager",
        "false fills batches of decodes with idle rows up to 1, 2, 4 or a multiple of 8 rows, and \
         on a GPU plays each size as a recording (CUDA graphs).";
    "engine.mamba_ssm_cache_dtype", Kind::OneOf(STATE_DTYPES), Is("\"auto\""),
        "vLLM mamba_ssm_cache_dtype", "The dtype of cached recurrent state; auto is model.dtype.";
    "engine.batch_split",
        Kind::OneOf(&["is_prefilling", "computed_tokens", "scheduled_tokens"]),
        Is("\"is_prefilling\""), "",
        "What tells prefill rows from decode rows: as vLLM since #37303, since #32118, before it.";
    "engine.state_index_bits", Kind::Int { min: 8, max: 64 }, Is("64"), "",
        "Width of slot x stride in the prefill scan's state load and store; 32 until vLLM #35275.";
    "engine.free_list", Kind::OneOf(&["fifo", "lifo"]), Is("\"fifo\""), "",
        "Which free block is taken next: the one freed longest ago, or the one freed last.";
    "engine.sleep", Kind::OneOf(&["off", "keep_pool", "drop_pool"]), Is("\"off\""),
        "vLLM enable_sleep_mode, verl rollout.free_cache_engine",
        "Whether the engine sleeps while others compute. drop_pool frees its pool then and wakes
\
         with one as at the start, so that no block, order or cached prefix outlives a step.";
    "engine.logprobs_mode", Kind::OneOf(&["raw_logprobs", "processed_logprobs"]),
        Is("\"raw_logprobs\""), "vLLM logprobs_mode",
        "Whether recorded logprobs are from before or after temperature and filters.";
    "engine.force_prefill", Kind::Bool, Is("false"), "",
        "Sends every row through the prefill kernels, one-token rows too.";
    "engine.numerics", Kind::OneOf(&["invariant", "fast"]), Is("\"invariant\""),
        "vLLM VLLM_BATCH_INVARIANT",
        "Whether a row's bits depend on that row alone, in engine and trainer. fast: a library's
\
         products and a scan in tiles; what they differ by is measured, and is the floor.";
    "engine.faults", Kind::SomeOf(ENGINE_FAULTS), Is("[]"), "",
        "Faults planted in the engine, to see them found: gapscope faults list tells of each.";
    "engine.launch.command", Kind::Text, Nothing("\"vllm serve my-model --port {port}\""), "",
        "Starts a server for each url, and ends it with the run. A key in braces is its value.";
    "engine.launch.shell", Kind::Bool, Is("false"), "",
        "Whether a shell reads the command; else it is split at blanks, and quotes hold words.";
    "engine.launch.ready_timeout_s", Kind::Number(Range::Positive), Is("600.0"), "",
        "Seconds that a server may take to become healthy.";
    "engine.launch.restarts", COUNT_OR_NONE, Is("0"), "",
        "How often a server that ended by itself is started again.";

    "rollout.prompts_per_step", COUNT, Is("8"), "verl data.train_batch_size",
        "Prompts a step.";
    "rollout.rollouts_per_prompt", COUNT, Is("8"),
        "vLLM n, verl rollout.n, TRL num_generations",
        "Completions sampled for each prompt: the group.";
    "rollout.max_new_tokens", COUNT, Is("16"),
        "vLLM max_tokens, verl data.max_response_length, TRL max_completion_length",
        "The longest completion, in tokens.";
    "rollout.ignore_eos", Kind::Bool, Is("false"), "vLLM ignore_eos",
        "Whether to sample on past the end-of-sequence token.";
    "rollout.temperature", Kind::Number(Range::NonNegative), Is("1.0"), "vLLM temperature",
        "Divides the logits; 0 (in fact below 1e-5) is greedy.";
    "rollout.top_p", Kind::Number(Range::UnitNotZero), Is("1.0"), "vLLM top_p",
        "Samples from the most probable tokens that hold this much probability; 1 keeps all.";
    "rollout.top_k", Kind::Int { min: -1, max: u32::MAX as i64 }, Is("0"), "vLLM top_k",
        "Samples from this many most probable tokens; 0 or -1 keeps all.";
    "rollout.min_p", Kind::Number(Range::Unit), Is("0.0"), "vLLM min_p",
        "Drops tokens less probable than this share of the most probable one; 0 keeps all.";

    "task.kind", Kind::OneOf(&["arithmetic", "jsonl"]), Is("\"arithmetic\""), "",
        "Where prompts come from: made-up sums, or a file.";
    "task.max_operand", LONG_OR_NONE, Is("9"), "",
        "Operands are drawn from 0 to this.";
    "task.operators", Kind::Letters("+-*"), Is("\"+\""), "",
        "The operators to draw from.";
    "task.examples", COUNT_OR_NONE, Is("0"), "",
        "Problems written out with their answers before the one that is asked.";
    "task.prompt_tokens", COUNT, Nothing("24"), "",
        "Pads every prompt in front to this many tokens.";
    "task.min_prompt_tokens", COUNT, Nothing("16"), "",
        "Pads each prompt to a length drawn from this to task.prompt_tokens.";
    "task.path", Kind::Text, Nothing("\"prompts.jsonl\""), "verl data.train_files",
        "The file, one JSON object a line, relative to the current directory.";
    "task.prompt_key", Kind::Text, Is("\"prompt\""), "verl data.prompt_key",
        "The field that holds the prompt.";
    "task.answer_key", Kind::Text, Is("\"answer\""), "",
        "The field that holds the answer.";
    "task.reward", Kind::OneOf(&["exact", "numeric", "regex", "command", "none"]),
        Is("\"exact\""), "",
        "How a completion is judged: equal text, equal last number, a pattern, a program, or not.";
    "task.reward_pattern", Kind::Text, Nothing("\"= *{answer}$\""), "",
        "A completion that matches earns 1; {answer} stands for the answer, escaped.";
    "task.reward_command", Kind::Words, Nothing("[\"python3\", \"reward.py\"]"), "",
        "A program that reads one JSON object a line and prints one number a line.";
    "task.reward_timeout_s", Kind::Number(Range::Positive), Is("10.0"), "",
        "Seconds that the program may take over one step's completions.";

    "trainer.update", Kind::OneOf(&["adamw", "none"]), Is("\"adamw\""), "",
        "none only scores: no gradient and no optimizer state is ever allocated.";
    "trainer.ranks", RANKS, Is("1"), "verl trainer.n_gpus_per_node",
        "Ranks that weights, optimizer and sequences are sharded over, as FSDP does: one a GPU \
         where there are as many, else threads that share the device.";
    "trainer.learning_rate", Kind::Number(Range::NonNegative), Is("1e-4"),
        "verl actor.optim.lr, TRL learning_rate", "The step size of AdamW.";
    "trainer.warmup_steps", LONG_OR_NONE, Is("0"),
        "verl actor.optim.lr_warmup_steps, TRL warmup_steps",
        "Updates over which the learning rate rises from 0.";
    "trainer.betas", Kind::Pair(Range::UnitNotOne), Is("[0.9, 0.95]"),
        "verl actor.optim.betas, TRL adam_beta1 and adam_beta2",
        "Decay of AdamW's two moments.";
    "trainer.eps", Kind::Number(Range::Positive), Is("1e-8"), "TRL adam_epsilon",
        "Added to the root of AdamW's second moment.";
    "trainer.weight_decay", Kind::Number(Range::NonNegative), Is("0.0"),
        "verl actor.optim.weight_decay, TRL weight_decay", "Decoupled weight decay.";
    "trainer.max_grad_norm", Kind::Number(Range::PositiveOrInfinite), Is("1.0"),
        "verl actor.grad_clip, TRL max_grad_norm",
        "Gradients are scaled down to this L2 norm; inf never scales.";
    "trainer.updates_per_step", COUNT, Is("1"),
        "verl data.train_batch_size / actor.ppo_mini_batch_size, TRL steps_per_generation",
        "Optimizer updates on a step's rollouts, each on an equal part of them.";
    "trainer.clip_ratio_low", Kind::Number(Range::UnitNotOne), Is("0.2"),
        "verl actor.clip_ratio_low, TRL epsilon", "The ratio is clipped below at 1 - this.";
    "trainer.clip_ratio_high", Kind::Number(Range::NonNegative), Is("0.2"),
        "verl actor.clip_ratio_high, TRL epsilon_high", "The ratio is clipped above at 1 + this.";
    "trainer.kl_coef", Kind::Number(Range::NonNegative), Is("0.0"),
        "verl actor.kl_loss_coef, TRL beta",
        "Weight of the k3 KL to the frozen start weights; 0 keeps no reference.";
    "trainer.importance_cap", Kind::Number(Range::Positive), Nothing("2.0"),
        "verl algorithm.rollout_correction.rollout_is_threshold, TRL vllm_importance_sampling_cap",
        "Weighs each token by its trainer-to-rollout probability ratio, up to this.";
    "trainer.loss_agg", Kind::OneOf(&["token_mean", "sequence_mean"]), Is("\"token_mean\""),
        "verl actor.loss_agg_mode, TRL loss_type", "What weighs the same: tokens, or sequences.";
    "trainer.scale_advantages", Kind::Bool, Is("true"),
        "verl algorithm.norm_adv_by_std_in_grpo, TRL scale_rewards",
        "Whether a group's advantages are divided by its standard deviation.";
    "trainer.max_tokens_per_chunk", COUNT, Is("256"), "verl actor.ppo_max_token_len_per_gpu",
        "Tokens of one packed forward and backward.";
    "trainer.faults", Kind::SomeOf(TRAINER_FAULTS), Is("[]"), "",
        "Faults planted in the trainer, to see them found: gapscope faults list tells of each.";
    "trainer.warm_start.steps", LONG_OR_NONE, Is("0"), "",
        "Supervised updates on the task's own answers before the loop.";
    "trainer.warm_start.batch", Kind::Int { min: 1, max: 1 << 20 }, Is("32"), "",
        "Problems in one supervised update.";
    "trainer.warm_start.learning_rate", Kind::Number(Range::NonNegative), Is("1e-3"), "",
        "The learning rate of supervised updates.";

    "check.legs", Kind::SomeOf(&["decode", "prefill", "trainer", "reference"]),
        Is("[\"decode\", \"trainer\"]"), "",
        "Ways of getting each token's logprob; decode and trainer are always among them.";

    "check.thresholds",
        Kind::OneOf(&["floor", "nemo_rl", "prime_rl", "slime", "miles", "exact"]),
        Is("\"floor\""), "",
        "Which steps are spikes, and have findings. floor: a |d| over the floor; nemo_rl:\n\
         k3_mean > 1e-3 or token_mult_prob_error > 1.05; prime_rl: k3_mean > 0.015; slime:\n\
         mean |d| > 0.1; miles: |mean d| > 0.03; exact: max |d| > 0. A non-finite logprob makes\n\
         one in each.";

    "check.floor", Kind::Number(Range::NonNegative), Nothing("1e-4"), "",
        "The largest healthy |d|, nats. Absent: 0 in invariant numerics, else measured.";

    "check.evidence", Kind::Bool, Is("false"), "",
        "Whether each step with a finding leaves evidence/step-NNNNN.json for gapscope judge.";

    "check.greedy_eval_prompts", COUNT_OR_NONE, Is("0"), "",
        "Problems answered greedily after the last step: sums drawn apart, or a file's first rows.";

    "checkpoint.every", LONG_COUNT, Is("10"), "verl trainer.save_freq, TRL save_steps",
        "Steps from one checkpoint to the next; run --resume goes on from the last one.";
    "checkpoint.keep", COUNT, Is("2"),
        "verl trainer.max_actor_ckpt_to_keep, TRL save_total_limit",
        "How many of the latest checkpoints stay.";
    "checkpoint.pool_bytes_max", Kind::Bytes, Is("\"1GiB\""), "",
        "A larger block pool is kept without its bytes, which matter where stale ones are read.";
    "checkpoint.save_final", Kind::Bool, Is("false"), "",
        "Whether a run with updates leaves its final weights as a Hugging Face folder.";

    "trace.when", Kind::OneOf(&["never", "first_spike", "always"]), Is("\"never\""), "",
        "Whether to keep what the engine saw, step by step: of the first spike, or of every step.";
    "trace.request", Kind::Text, Nothing("\"s3.p0.r5\""), "",
        "Keeps what the engine saw in the engine steps of this one request.";
    "trace.max_bytes", Kind::Bytes, Is("\"16MiB\""), "",
        "The size of a step's trace; what is over it is left out, and said to be.";

    "sweep.stop_after_spikes", COUNT, Nothing("3"), "",
        "Ends a point after this many spikes. Beside it goes any key with the values to try.";
    "sweep.points", Kind::Points, Nothing("[{ \"engine.max_num_seqs\" = 64 }]"), "",
        "Points to visit, in place of a cross product.";
}
