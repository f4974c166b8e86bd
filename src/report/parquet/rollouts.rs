//! One row a request.

use std::path::Path;

use super::super::ReportError;
use super::column::{full_list, list, optional, required, Column};
use super::table::{self, Table};
use crate::base::{
    BlockId, EngineIndex, Generation, LogprobsMode, RequestId, TokenId, WeightVersion,
};
use crate::rollout::Rollout;

/// A row of `rollouts/step-NNNNN.parquet`; its fields are the columns, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RolloutRow {
    /// The columns `request_id`, `step`, `prompt_id` and `rollout_idx`.
    pub request: RequestId,
    pub prompt_token_ids: Vec<TokenId>,
    pub completion_token_ids: Vec<TokenId>,
    pub prompt_text: String,
    pub completion_text: String,
    pub reward: f64,
    pub advantage: f64,
    pub finish_reason: String,
    pub logprobs_mode: String,
    pub temperature: f32,
    pub top_p: f32,
    pub top_k: u32,
    /// `embedded`, or the name of the server that sampled.
    pub engine: String,
    /// Which of them, and whose all block ids are.
    pub engine_index: EngineIndex,
    pub weight_version: WeightVersion,
    /// A null where the engine does not say.
    pub engine_fingerprint: Option<u64>,
    pub trainer_fingerprint: Option<u64>,
    /// One a Mamba group, as are the next two. These and all that follow are nulls in the file
    /// where the engine keeps no record of its own; the lists are read back as empty then.
    pub state_blocks: Vec<BlockId>,
    pub state_block_generations: Vec<Generation>,
    /// A null is a block that nobody had before.
    pub state_block_previous_owners: Vec<Option<RequestId>>,
    pub attn_blocks: Vec<BlockId>,
    pub preemptions: Option<u32>,
    pub cached_tokens: Option<u32>,
    /// The blocks that hold them: group after group, each in the order of their tokens.
    pub cached_blocks: Vec<BlockId>,
    /// Tokens of the prefix up to each block's end.
    pub cached_block_tokens: Vec<u32>,
    /// Whose tokens filled each.
    pub cached_block_filled_by: Vec<RequestId>,
    /// Of the weights that filled each.
    pub cached_block_weight_versions: Vec<WeightVersion>,
}

/// Writes one step's rollouts, atomically. `engine` names what sampled them.
pub fn write_rollouts(path: &Path, rollouts: &[Rollout], engine: &str) -> Result<(), ReportError> {
    let rows: Vec<_> = rollouts.iter().map(|rollout| RolloutRow::new(rollout, engine)).collect();
    table::write(path, columns(&rows))
}

/// Reads what [`write_rollouts`] wrote.
pub fn read_rollouts(path: &Path) -> Result<Vec<RolloutRow>, ReportError> {
    let table = Table::open(path)?;
    let rows = &mut table.empty_rows::<RolloutRow, RequestId>("request_id")?[..];
    table.required("request_id", rows, |row, v| row.request = v)?;
    table.full_list("prompt_token_ids", rows, |row, v| {
        row.prompt_token_ids = v.unwrap_or_default()
    })?;
    table.full_list("completion_token_ids", rows, |row, v| {
        row.completion_token_ids = v.unwrap_or_default()
    })?;
    table.required("prompt_text", rows, |row, v| row.prompt_text = v)?;
    table.required("completion_text", rows, |row, v| row.completion_text = v)?;
    table.required("reward", rows, |row, v| row.reward = v)?;
    table.required("advantage", rows, |row, v| row.advantage = v)?;
    table.required("finish_reason", rows, |row, v| row.finish_reason = v)?;
    table.required("logprobs_mode", rows, |row, v| row.logprobs_mode = v)?;
    table.required("temperature", rows, |row, v| row.temperature = v)?;
    table.required("top_p", rows, |row, v| row.top_p = v)?;
    table.required("top_k", rows, |row, v| row.top_k = v)?;
    table.required("engine", rows, |row, v| row.engine = v)?;
    table.required("engine_index", rows, |row, v| row.engine_index = v)?;
    table.required("weight_version", rows, |row, v| row.weight_version = v)?;
    table.optional("engine_fingerprint", rows, |row, v| row.engine_fingerprint = v)?;
    table.optional("trainer_fingerprint", rows, |row, v| row.trainer_fingerprint = v)?;
    table.full_list("state_blocks", rows, |row, v| row.state_blocks = v.unwrap_or_default())?;
    table.full_list("state_block_generations", rows, |row, v| {
        row.state_block_generations = v.unwrap_or_default()
    })?;
    table.list("state_block_previous_owners", rows, |row, v| {
        row.state_block_previous_owners = v.unwrap_or_default()
    })?;
    table.full_list("attn_blocks", rows, |row, v| row.attn_blocks = v.unwrap_or_default())?;
    table.optional("preemptions", rows, |row, v| row.preemptions = v)?;
    table.optional("cached_tokens", rows, |row, v| row.cached_tokens = v)?;
    table.full_list("cached_blocks", rows, |row, v| row.cached_blocks = v.unwrap_or_default())?;
    table.full_list("cached_block_tokens", rows, |row, v| {
        row.cached_block_tokens = v.unwrap_or_default()
    })?;
    table.full_list("cached_block_filled_by", rows, |row, v| {
        row.cached_block_filled_by = v.unwrap_or_default()
    })?;
    table.full_list("cached_block_weight_versions", rows, |row, v| {
        row.cached_block_weight_versions = v.unwrap_or_default();
    })?;
    Ok(rows.to_vec())
}

fn columns(rows: &[RolloutRow]) -> Vec<Column> {
    vec![
        required("request_id", rows, |row| row.request),
        required("step", rows, |row| row.request.step),
        required("prompt_id", rows, |row| row.request.prompt_id),
        required("rollout_idx", rows, |row| row.request.rollout_idx),
        full_list("prompt_token_ids", rows, |row| Some(&row.prompt_token_ids[..])),
        full_list("completion_token_ids", rows, |row| Some(&row.completion_token_ids[..])),
        required("prompt_text", rows, |row| row.prompt_text.clone()),
        required("completion_text", rows, |row| row.completion_text.clone()),
        required("reward", rows, |row| row.reward),
        required("advantage", rows, |row| row.advantage),
        required("finish_reason", rows, |row| row.finish_reason.clone()),
        required("logprobs_mode", rows, |row| row.logprobs_mode.clone()),
        required("temperature", rows, |row| row.temperature),
        required("top_p", rows, |row| row.top_p),
        required("top_k", rows, |row| row.top_k),
        required("engine", rows, |row| row.engine.clone()),
        required("engine_index", rows, |row| row.engine_index),
        required("weight_version", rows, |row| row.weight_version),
        optional("engine_fingerprint", rows, |row| row.engine_fingerprint),
        optional("trainer_fingerprint", rows, |row| row.trainer_fingerprint),
        full_list("state_blocks", rows, |row| row.told(&row.state_blocks)),
        full_list("state_block_generations", rows, |row| row.told(&row.state_block_generations)),
        list("state_block_previous_owners", rows, |row| {
            row.told(&row.state_block_previous_owners).map(<[_]>::to_vec)
        }),
        full_list("attn_blocks", rows, |row| row.told(&row.attn_blocks)),
        optional("preemptions", rows, |row| row.preemptions),
        optional("cached_tokens", rows, |row| row.cached_tokens),
        full_list("cached_blocks", rows, |row| row.told(&row.cached_blocks)),
        full_list("cached_block_tokens", rows, |row| row.told(&row.cached_block_tokens)),
        full_list("cached_block_filled_by", rows, |row| row.told(&row.cached_block_filled_by)),
        full_list("cached_block_weight_versions", rows, |row| {
            row.told(&row.cached_block_weight_versions)
        }),
    ]
}

impl RolloutRow {
    /// What the engine's own record says; `None` where it keeps none.
    fn told<'a, T>(&self, list: &'a [T]) -> Option<&'a [T]> {
        self.preemptions.map(|_| list)
    }

    fn new(rollout: &Rollout, engine: &str) -> Self {
        let completion = &rollout.completion;
        let blocks = completion.state_blocks();
        let cached = completion.cached_blocks();
        let says = !completion.lives.is_empty();
        Self {
            request: completion.id,
            prompt_token_ids: completion.prompt.clone(),
            completion_token_ids: completion.token_ids().collect(),
            prompt_text: rollout.prompt_text.clone(),
            completion_text: rollout.completion_text.clone(),
            reward: rollout.reward,
            advantage: rollout.advantage,
            finish_reason: completion.finish_reason.name().to_owned(),
            logprobs_mode: mode_name(completion.contract.logprobs_mode).to_owned(),
            temperature: completion.contract.temperature,
            top_p: completion.contract.top_p,
            top_k: completion.contract.top_k,
            engine: engine.to_owned(),
            engine_index: completion.engine,
            weight_version: completion.weight_version,
            engine_fingerprint: completion.engine_fingerprint,
            trainer_fingerprint: rollout.trainer_fingerprint,
            state_blocks: blocks.iter().map(|block| block.block).collect(),
            state_block_generations: blocks.iter().map(|block| block.generation).collect(),
            state_block_previous_owners: blocks.iter().map(|block| block.previous_owner).collect(),
            attn_blocks: completion.attn_blocks().to_vec(),
            preemptions: says.then_some(completion.preemptions),
            cached_tokens: says.then_some(completion.cached_tokens),
            cached_blocks: cached.iter().map(|one| one.block).collect(),
            cached_block_tokens: cached.iter().map(|one| one.tokens).collect(),
            cached_block_filled_by: cached.iter().map(|one| one.filled_by).collect(),
            cached_block_weight_versions: cached.iter().map(|one| one.weight_version).collect(),
        }
    }
}

const fn mode_name(mode: LogprobsMode) -> &'static str {
    match mode {
        LogprobsMode::RawLogprobs => "raw_logprobs",
        LogprobsMode::ProcessedLogprobs => "processed_logprobs",
    }
}
