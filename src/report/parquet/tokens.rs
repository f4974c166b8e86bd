//! One row a sampled token.

use std::path::Path;

use super::super::ReportError;
use super::column::{optional, required, Column};
use super::table::{self, Table};
use crate::base::{EngineStep, LogProb, Position, RequestId, TokenId};
use crate::rollout::{LegLogProbs, Rollout};

/// A row of `tokens/step-NNNNN.parquet`; its fields are the columns, in their order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenRow {
    /// The column `request_id`.
    pub request: RequestId,
    /// In prompt + completion, counted from 0.
    pub position: Position,
    pub token_id: TokenId,
    /// Whether the token counts in loss and gap.
    pub loss_mask: bool,
    pub logp_decode: Option<LogProb>,
    pub logp_prefill: Option<LogProb>,
    pub logp_trainer: Option<LogProb>,
    pub logp_reference: Option<LogProb>,
    /// The forward pass that sampled it. This and what follows is a null where the engine keeps no
    /// record of its own.
    pub engine_step: Option<EngineStep>,
    /// The kernels of that pass: `prefill` or `decode`.
    pub phase: Option<String>,
    /// Tokens of the request in that pass, and before it.
    pub scheduled_tokens: Option<u32>,
    pub computed_tokens: Option<u32>,
    /// Where the request stood in that pass's batch.
    pub batch_row: Option<u32>,
    pub batch_rows: Option<u32>,
    /// Idle rows beside them, up to a captured batch size.
    pub padding_rows: Option<u32>,
}

/// Writes the sampled tokens of one step's rollouts, atomically.
pub fn write_tokens(path: &Path, rollouts: &[Rollout]) -> Result<(), ReportError> {
    let rows: Vec<_> = rollouts.iter().flat_map(token_rows).collect();
    table::write(path, columns(&rows))
}

/// Reads what [`write_tokens`] wrote.
pub fn read_tokens(path: &Path) -> Result<Vec<TokenRow>, ReportError> {
    let table = Table::open(path)?;
    let rows = &mut table.empty_rows::<TokenRow, RequestId>("request_id")?[..];
    table.required("request_id", rows, |row, v| row.request = v)?;
    table.required("position", rows, |row, v| row.position = v)?;
    table.required("token_id", rows, |row, v| row.token_id = v)?;
    table.required("loss_mask", rows, |row, v| row.loss_mask = v)?;
    table.optional("logp_decode", rows, |row, v| row.logp_decode = v)?;
    table.optional("logp_prefill", rows, |row, v| row.logp_prefill = v)?;
    table.optional("logp_trainer", rows, |row, v| row.logp_trainer = v)?;
    table.optional("logp_reference", rows, |row, v| row.logp_reference = v)?;
    table.optional("engine_step", rows, |row, v| row.engine_step = v)?;
    table.optional("phase", rows, |row, v| row.phase = v)?;
    table.optional("scheduled_tokens", rows, |row, v| row.scheduled_tokens = v)?;
    table.optional("computed_tokens", rows, |row, v| row.computed_tokens = v)?;
    table.optional("batch_row", rows, |row, v| row.batch_row = v)?;
    table.optional("batch_rows", rows, |row, v| row.batch_rows = v)?;
    table.optional("padding_rows", rows, |row, v| row.padding_rows = v)?;
    Ok(rows.to_vec())
}

fn columns(rows: &[TokenRow]) -> Vec<Column> {
    vec![
        required("request_id", rows, |row| row.request),
        required("position", rows, |row| row.position),
        required("token_id", rows, |row| row.token_id),
        required("loss_mask", rows, |row| row.loss_mask),
        optional("logp_decode", rows, |row| row.logp_decode),
        optional("logp_prefill", rows, |row| row.logp_prefill),
        optional("logp_trainer", rows, |row| row.logp_trainer),
        optional("logp_reference", rows, |row| row.logp_reference),
        optional("engine_step", rows, |row| row.engine_step),
        optional("phase", rows, |row| row.phase.clone()),
        optional("scheduled_tokens", rows, |row| row.scheduled_tokens),
        optional("computed_tokens", rows, |row| row.computed_tokens),
        optional("batch_row", rows, |row| row.batch_row),
        optional("batch_rows", rows, |row| row.batch_rows),
        optional("padding_rows", rows, |row| row.padding_rows),
    ]
}

fn token_rows(rollout: &Rollout) -> impl Iterator<Item = TokenRow> + '_ {
    let completion = &rollout.completion;
    let len = completion.tokens.len();
    assert_eq!(rollout.loss_mask.len(), len, "one mask bit a token of {}", completion.id);
    for leg in [&rollout.prefill, &rollout.trainer, &rollout.reference].into_iter().flatten() {
        assert_eq!(leg.len(), len, "one logprob a token of {}", completion.id);
    }
    let says = !completion.lives.is_empty();
    completion.tokens.iter().enumerate().map(move |(i, sampled)| TokenRow {
        request: completion.id,
        position: position(completion.prompt.len() + i),
        token_id: sampled.token,
        loss_mask: rollout.loss_mask[i],
        logp_decode: Some(sampled.logp),
        logp_prefill: of_leg(&rollout.prefill, i),
        logp_trainer: of_leg(&rollout.trainer, i),
        logp_reference: of_leg(&rollout.reference, i),
        engine_step: says.then_some(sampled.engine_step),
        phase: says.then(|| sampled.phase.name().to_owned()),
        scheduled_tokens: says.then_some(sampled.scheduled_tokens),
        computed_tokens: says.then_some(sampled.computed_tokens),
        batch_row: says.then_some(sampled.batch_row),
        batch_rows: says.then_some(sampled.batch_rows),
        padding_rows: says.then_some(sampled.padding_rows),
    })
}

fn of_leg(leg: &Option<LegLogProbs>, i: usize) -> Option<LogProb> {
    leg.as_ref().and_then(|logps| logps[i])
}

fn position(index: usize) -> Position {
    Position::new(u32::try_from(index).expect("a sequence is shorter than 2^32 tokens"))
}
