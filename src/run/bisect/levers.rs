//! The knobs that tell causes apart: what each is turned to, and what a gap points to that ends
//! with it.

use super::Seen;
use crate::config::{Arithmetic, BatchSplit, Config, Dtype, FreeListOrder, Update};

/// One knob, turned.
pub(super) struct Lever {
    /// Dotted, with the value it had and the value it has now.
    pub change: String,
    pub config: Config,
    /// What a gap is about that is gone then.
    pub points_to: &'static str,
    /// Whether that is a culprit by itself; other levers only narrow the place down.
    pub decides: bool,
}

/// Every lever that this experiment's configuration leaves to turn, the strongest first.
///
/// A lever is the stronger the less it changes beside what it is about. Those that decide come
/// first: first the ones after which every rollout that was right is the same as before, then the
/// ones that change what is sampled or how the pool is filled. A weak lever can end a gap by
/// accident, so it says something only where no stronger one has ended it.
pub(super) fn levers(config: &Config, seen: &Seen) -> Vec<Lever> {
    let policies = [state_index(config), batch_split(config), numerics(config), eager(config)];
    let passes = [force_prefill(config), one_sequence_a_pass(config)];
    let contents = [prefix_caching(config), more_blocks(config, seen)];
    let meanings = [sampling(config), updates(config), dtype(config)];
    let places = [budget(config), rollouts(config), free_list(config), fewer_blocks(config, seen)];
    let decide = policies.into_iter().chain(passes).chain(contents).chain(meanings);
    decide.chain(places).chain([one_at_a_time(config)]).flatten().collect()
}

fn turned(
    config: &Config,
    change: String,
    turn: impl FnOnce(&mut Config),
    points_to: &'static str,
    decides: bool,
) -> Option<Lever> {
    let mut config = config.clone();
    turn(&mut config);
    Some(Lever { change, config, points_to, decides })
}

fn state_index(config: &Config) -> Option<Lever> {
    let bits = config.engine.state_index_bits;
    let change = format!("engine.state_index_bits {bits} -> 64");
    let turn = |c: &mut Config| c.engine.state_index_bits = 64;
    (bits < 64).then(|| turned(config, change, turn, "a state address that overflows", true))?
}

fn batch_split(config: &Config) -> Option<Lever> {
    let old = config.engine.batch_split != BatchSplit::IsPrefilling;
    let change = "engine.batch_split -> is_prefilling".to_owned();
    let turn = |c: &mut Config| c.engine.batch_split = BatchSplit::IsPrefilling;
    let points_to = "a short first chunk that is taken for a decode and reads a stale state";
    old.then(|| turned(config, change, turn, points_to, true))?
}

fn numerics(config: &Config) -> Option<Lever> {
    let fast = config.engine.numerics == Arithmetic::Fast;
    let change = "engine.numerics fast -> invariant".to_owned();
    let turn = |c: &mut Config| c.engine.numerics = Arithmetic::Invariant;
    let points_to = "rounding: orders of sums that follow the shape of a batch";
    fast.then(|| turned(config, change, turn, points_to, true))?
}

fn eager(config: &Config) -> Option<Lever> {
    let turn = |c: &mut Config| c.engine.enforce_eager = true;
    let points_to = "rows that fill a batch of decodes up to a captured size";
    let change = "engine.enforce_eager -> true".to_owned();
    (!config.engine.enforce_eager).then(|| turned(config, change, turn, points_to, true))?
}

fn force_prefill(config: &Config) -> Option<Lever> {
    let turn = |c: &mut Config| c.engine.force_prefill = true;
    let points_to = "the decode path, or the state that it reads back";
    let change = "engine.force_prefill -> true".to_owned();
    (!config.engine.force_prefill).then(|| turned(config, change, turn, points_to, true))?
}

fn one_sequence_a_pass(config: &Config) -> Option<Lever> {
    let tokens = config.trainer.max_tokens_per_chunk;
    let change = format!("trainer.max_tokens_per_chunk {tokens} -> 1");
    let turn = |c: &mut Config| c.trainer.max_tokens_per_chunk = 1;
    let points_to = "the trainer's batch: packing, padding or an order of sums that follows it";
    (tokens > 1).then(|| turned(config, change, turn, points_to, true))?
}

fn prefix_caching(config: &Config) -> Option<Lever> {
    let turn = |c: &mut Config| c.engine.enable_prefix_caching = false;
    let points_to = "reused state: stale weights or a wrong boundary";
    let change = "engine.enable_prefix_caching true -> false".to_owned();
    let cached = config.engine.enable_prefix_caching;
    cached.then(|| turned(config, change, turn, points_to, true))?
}

/// Only where somebody was preempted: else more blocks only move the load.
fn more_blocks(config: &Config, seen: &Seen) -> Option<Lever> {
    let &Seen { num_blocks, preemptions, .. } = seen;
    let double = num_blocks.checked_mul(2)?;
    let turn = |c: &mut Config| c.engine.num_gpu_blocks_override = Some(double);
    let points_to = "preemption: what a request keeps or loses when it gives up its blocks";
    let change = format!("engine.num_gpu_blocks_override {num_blocks} -> {double}");
    (preemptions > 0).then(|| turned(config, change, turn, points_to, true))?
}

fn sampling(config: &Config) -> Option<Lever> {
    let rollout = &config.rollout;
    let plain = (rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p);
    let turn = |c: &mut Config| {
        let rollout = &mut c.rollout;
        (rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p) = (1.0, 1.0, 0, 0.0);
    };
    let change = "rollout.temperature -> 1, without top_p, top_k and min_p".to_owned();
    let points_to = "what the numbers mean: temperature or filters on one side only";
    (plain != (1.0, 1.0, 0, 0.0)).then(|| turned(config, change, turn, points_to, true))?
}

fn updates(config: &Config) -> Option<Lever> {
    let trains = config.trainer.update == Update::Adamw;
    let turn = |c: &mut Config| c.trainer.update = Update::None;
    let points_to = "weights that arrive late, too early or at one side only";
    // A warm start is made of updates too.
    (trains && config.trainer.warm_start.steps == 0)
        .then(|| turned(config, "trainer.update -> none".to_owned(), turn, points_to, true))?
}

fn dtype(config: &Config) -> Option<Lever> {
    let dtypes = [config.model.dtype, config.engine.mamba_ssm_cache_dtype];
    let turn = |c: &mut Config| {
        (c.model.dtype, c.engine.mamba_ssm_cache_dtype) = (Dtype::F32, Dtype::F32);
    };
    let change = "model.dtype and engine.mamba_ssm_cache_dtype -> f32".to_owned();
    (dtypes != [Dtype::F32; 2]).then(|| turned(config, change, turn, "rounding", true))?
}

fn budget(config: &Config) -> Option<Lever> {
    let budget = config.engine.max_num_batched_tokens;
    let change = format!("engine.max_num_batched_tokens {budget} -> {}", budget + 1);
    let turn = |c: &mut Config| c.engine.max_num_batched_tokens = budget + 1;
    let points_to =
        "where prompts are cut into chunks: a first chunk of one token, or a resumed one";
    turned(config, change, turn, points_to, false)
}

fn rollouts(config: &Config) -> Option<Lever> {
    let each = config.rollout.rollouts_per_prompt;
    let change = format!("rollout.rollouts_per_prompt {each} -> {}", each / 2);
    let turn = |c: &mut Config| c.rollout.rollouts_per_prompt = each / 2;
    let points_to = "the load: how many blocks a step takes, or how full a batch is";
    (each >= 4).then(|| turned(config, change, turn, points_to, false))?
}

fn free_list(config: &Config) -> Option<Lever> {
    let (order, name) = match config.engine.free_list {
        FreeListOrder::Fifo => (FreeListOrder::Lifo, "lifo"),
        FreeListOrder::Lifo => (FreeListOrder::Fifo, "fifo"),
    };
    let turn = |c: &mut Config| c.engine.free_list = order;
    let points_to = "which blocks are taken: their ids, or what was left in them";
    turned(config, format!("engine.free_list -> {name}"), turn, points_to, false)
}

fn fewer_blocks(config: &Config, seen: &Seen) -> Option<Lever> {
    let num_blocks = seen.num_blocks;
    let half = num_blocks / 2;
    let turn = |c: &mut Config| c.engine.num_gpu_blocks_override = Some(half);
    let points_to = "high block ids: an address that overflows";
    let change = format!("engine.num_gpu_blocks_override {num_blocks} -> {half}");
    (half >= 2).then(|| turned(config, change, turn, points_to, false))?
}

fn one_at_a_time(config: &Config) -> Option<Lever> {
    let seqs = config.engine.max_num_seqs;
    let turn = |c: &mut Config| c.engine.max_num_seqs = 1;
    let points_to = "who else is in the batch";
    let change = format!("engine.max_num_seqs {seqs} -> 1");
    (seqs > 1).then(|| turned(config, change, turn, points_to, false))?
}
