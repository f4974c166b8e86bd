//! From a line to a rollout: ids first, then lengths, then what the numbers are of, then numbers.

use super::column::Column;
use super::contract::contracts;
use super::raw::Raw;
use super::values::{Checks, SideChecks};
use super::{Format, RecordProblem, Source};
use crate::base::{Contract, EngineIndex, LogProb, RequestId, TokenId, WeightVersion};
use crate::engine::{Completion, FinishReason, SampledToken};
use crate::rollout::routes::{routes, Captures};
use crate::rollout::{Rollout, Routes, TokenRoutes};

/// One record, with what was found of it before any number.
#[derive(Clone, Debug, PartialEq)]
pub struct Imported {
    /// The completion begins at the first token that the loss mask counts; what stands before it
    /// is the prompt. Of the engine nothing is known but its samples. `prompt_id` is prime-rl's
    /// rank or 0, `rollout_idx` the dump's own index or the line's.
    pub rollout: Rollout,
    /// Of what the trainer's side's log-probabilities are; the rollout says it of the other side's.
    pub trainer_contract: Contract,
    /// The inference side's and the trainer's captures of a router, up to the padding.
    pub routes: [Option<Routes>; 2],
    /// Counted from 1.
    pub line: u64,
    pub checks: Checks,
}

/// A record whose keys have been found, whatever the format calls them.
struct Parts {
    id: RequestId,
    token_ids: Vec<TokenId>,
    trainer_token_ids: Option<Vec<TokenId>>,
    mask: Vec<bool>,
    infer: Column,
    train: Column,
    /// Keys of the mask and both sides, for messages.
    keys: [&'static str; 3],
    /// Tokens that are not padding.
    length: Option<usize>,
    checks: Checks,
}

pub(super) fn import(
    mut raw: Raw,
    source: &Source,
    line: u64,
    strict: bool,
) -> Result<Imported, RecordProblem> {
    let contracts = contracts(&raw, strict)?;
    let mut parts = match source.format {
        Format::NemoRl => nemo_rl(&mut raw, source, line)?,
        Format::PrimeRl => prime_rl(&mut raw, source, line)?,
        Format::Vllm | Format::Torchtitan => unreachable!("records of an engine are read apart"),
    };
    same_ids(&parts)?;
    same_lengths(&parts)?;
    parts.checks.records = 1;
    parts.checks.unknown_contracts = u64::from(contracts.is_none());
    parts.checks.unlike_contracts = u64::from(contracts.is_some_and(|[a, b]| !a.is_like(&b)));
    if source.format == Format::NemoRl && parts.mask.first() == Some(&true) {
        parts.mask[0] = false;
        parts.checks.first_tokens = 1;
    }
    let routes = both_routes(&mut raw, &parts)?;
    let imported = rollout(parts, contracts.unwrap_or([Contract::PLAIN; 2]), line);
    Ok(Imported { routes, ..imported })
}

fn nemo_rl(raw: &mut Raw, source: &Source, line: u64) -> Result<Parts, RecordProblem> {
    let need = |key, column: Option<Column>| needed(Format::NemoRl, key, column);
    let index = match raw.idx.take() {
        Some(column) => count("idx", &column, u64::from(u32::MAX))?,
        None => line - 1,
    };
    let length = match raw.input_lengths.take() {
        Some(column) => Some(count("input_lengths", &column, u64::from(u32::MAX))? as usize),
        None => None,
    };
    let mut mask = mask("token_loss_mask", &need("token_loss_mask", raw.token_loss_mask.take())?)?;
    let mut checks = Checks::default();
    if let Some(column) = raw.sample_loss_mask.take() {
        if self::mask("sample_loss_mask", &column)?.contains(&false) {
            checks.masked_records = 1;
            mask.fill(false);
        }
    }
    Ok(Parts {
        id: RequestId::new(source.step.get(), 0, index as u32),
        token_ids: ids("token_ids", &need("token_ids", raw.token_ids.take())?)?,
        trainer_token_ids: trainer_ids(raw)?,
        mask,
        infer: need("generation_logprobs", raw.generation_logprobs.take())?,
        train: need("prev_logprobs", raw.prev_logprobs.take())?,
        keys: ["token_loss_mask", "generation_logprobs", "prev_logprobs"],
        length,
        checks,
    })
}

fn prime_rl(raw: &mut Raw, source: &Source, line: u64) -> Result<Parts, RecordProblem> {
    let need = |key, column: Option<Column>| needed(Format::PrimeRl, key, column);
    if let Some(found) = raw.schema_version.filter(|&version| version != 1) {
        return Err(RecordProblem::Schema { found });
    }
    let expected = source.step.get();
    if let Some(found) = raw.export_step.or(raw.step).filter(|&step| step != expected) {
        return Err(RecordProblem::OtherStep { found, expected });
    }
    let index = raw.export_sequence_idx.unwrap_or((line - 1) as u32);
    Ok(Parts {
        id: RequestId::new(expected, raw.rank.unwrap_or(0), index),
        token_ids: ids("token_ids", &need("token_ids", raw.token_ids.take())?)?,
        trainer_token_ids: trainer_ids(raw)?,
        mask: mask("loss_mask", &need("loss_mask", raw.loss_mask.take())?)?,
        infer: need("inference_logprobs", raw.inference_logprobs.take())?,
        train: need("trainer_logprobs", raw.trainer_logprobs.take())?,
        keys: ["loss_mask", "inference_logprobs", "trainer_logprobs"],
        length: None,
        checks: Checks::default(),
    })
}

fn same_ids(parts: &Parts) -> Result<(), RecordProblem> {
    let Some(trainer) = &parts.trainer_token_ids else { return Ok(()) };
    let engine = &parts.token_ids;
    let at = std::iter::zip(engine, trainer).take_while(|(a, b)| a == b).count();
    if at == engine.len() && at == trainer.len() {
        return Ok(());
    }
    Err(RecordProblem::TokenIds(format!(
        "lengths {} and {}, first difference at {at}: inference {}, trainer {}",
        engine.len(),
        trainer.len(),
        around(engine, at),
        around(trainer, at)
    )))
}

/// Up to two ids on each side of `at`, and the one there in brackets.
fn around(ids: &[TokenId], at: usize) -> String {
    let shown = (at.saturating_sub(2)..=at + 2).filter_map(|place| match ids.get(place) {
        Some(id) if place == at => Some(format!("[{id}]")),
        Some(id) => Some(id.to_string()),
        None => (place == at).then(|| "[end]".to_owned()),
    });
    shown.collect::<Vec<_>>().join(" ")
}

fn same_lengths(parts: &Parts) -> Result<(), RecordProblem> {
    let tokens = parts.token_ids.len();
    let found = [parts.mask.len(), parts.infer.cells.len(), parts.train.cells.len()];
    for (key, found) in std::iter::zip(parts.keys, found) {
        if found != tokens {
            return Err(RecordProblem::Length { key, tokens, found });
        }
    }
    let Some(length) = parts.length else { return Ok(()) };
    if length > tokens {
        return Err(RecordProblem::Length { key: "input_lengths", tokens, found: length });
    }
    match parts.mask[length..].iter().position(|&counted| counted) {
        Some(at) => Err(RecordProblem::MaskedPadding { at: length + at, length }),
        None => Ok(()),
    }
}

/// Of each side, where the record carries any.
fn both_routes(raw: &mut Raw, parts: &Parts) -> Result<[Option<Routes>; 2], RecordProblem> {
    let tokens = parts.token_ids.len();
    let side = |key, experts: Option<Captures<u32>>, weights| -> Result<_, RecordProblem> {
        let Some(experts) = experts else { return Ok(None) };
        let found = routes(experts, weights, tokens);
        let mut found = found.map_err(|problem| RecordProblem::Routes { key, problem })?;
        found.truncate(parts.length.unwrap_or(tokens));
        Ok(Some(found))
    };
    let weights = (raw.routed_weights.take(), raw.trainer_routed_weights.take());
    let found = [
        side("routed_experts", raw.routed_experts.take(), weights.0)?,
        side("trainer_routed_experts", raw.trainer_routed_experts.take(), weights.1)?,
    ];
    let layers = found
        .each_ref()
        .map(|side| side.as_ref()?.iter().flatten().next().map(TokenRoutes::layers));
    match layers {
        [Some(engine), Some(trainer)] if engine != trainer => {
            Err(RecordProblem::RouteLayers { engine, trainer })
        }
        _ => Ok(found),
    }
}

fn rollout(parts: Parts, contracts: [Contract; 2], line: u64) -> Imported {
    let [contract, trainer_contract] = contracts;
    let Parts { id, token_ids, mask, infer, train, length, mut checks, .. } = parts;
    let end = length.unwrap_or(token_ids.len());
    let start = mask.iter().position(|&counted| counted).unwrap_or(end);
    let take = |counts: &mut SideChecks, cells: &[Option<f64>]| -> Vec<LogProb> {
        let values: Vec<LogProb> =
            (start..end).map(|at| counts.take(cells[at], mask[at])).collect();
        let counted = (start..end).rev().filter(|&at| mask[at]);
        counts.look_at_tail(counted.map(|at| values[at - start]));
        values
    };
    let infer = take(&mut checks.infer, &infer.cells);
    let train = take(&mut checks.train, &train.cells);
    let completion = Completion {
        id,
        engine: EngineIndex::default(),
        prompt: token_ids[..start].to_vec(),
        tokens: std::iter::zip(&token_ids[start..end], infer)
            .map(|(&token, logp)| SampledToken::alone(token, logp))
            .collect(),
        finish_reason: FinishReason::Length,
        contract,
        weight_version: WeightVersion::new(0),
        engine_fingerprint: None,
        lives: Vec::new(),
        preemptions: 0,
        cached_tokens: 0,
    };
    let rollout = Rollout {
        completion,
        prompt_text: String::new(),
        completion_text: String::new(),
        reward: 0.0,
        advantage: 0.0,
        loss_mask: mask[start..end].to_vec(),
        prefill: None,
        trainer: Some(train.into_iter().map(Some).collect()),
        reference: None,
        trainer_fingerprint: None,
    };
    Imported { rollout, trainer_contract, routes: [None, None], line, checks }
}

fn needed(
    format: Format,
    key: &'static str,
    column: Option<Column>,
) -> Result<Column, RecordProblem> {
    column.ok_or(RecordProblem::MissingKey { key, format: format.name() })
}

fn trainer_ids(raw: &mut Raw) -> Result<Option<Vec<TokenId>>, RecordProblem> {
    raw.trainer_token_ids.take().map(|column| ids("trainer_token_ids", &column)).transpose()
}

fn ids(key: &'static str, column: &Column) -> Result<Vec<TokenId>, RecordProblem> {
    let id = |(at, cell): (usize, &Option<f64>)| match whole(*cell, u64::from(u32::MAX)) {
        Some(id) => Ok(TokenId::new(id as u32)),
        None => Err(RecordProblem::NotAnId { key, at, found: cell_text(*cell) }),
    };
    column.cells.iter().enumerate().map(id).collect()
}

fn mask(key: &'static str, column: &Column) -> Result<Vec<bool>, RecordProblem> {
    let counted = |(at, cell): (usize, &Option<f64>)| match whole(*cell, 1) {
        Some(value) => Ok(value == 1),
        None => Err(RecordProblem::NotAMask { key, at, found: cell_text(*cell) }),
    };
    column.cells.iter().enumerate().map(counted).collect()
}

fn count(key: &'static str, column: &Column, limit: u64) -> Result<u64, RecordProblem> {
    let found = match column.cells[..] {
        [cell] => match whole(cell, limit) {
            Some(value) => return Ok(value),
            None => cell_text(cell),
        },
        ref cells => format!("a list of {}", cells.len()),
    };
    Err(RecordProblem::NotACount { key, found, limit })
}

fn whole(cell: Option<f64>, limit: u64) -> Option<u64> {
    let value = cell.filter(|value| value.fract() == 0.0 && *value >= 0.0)?;
    (value <= limit as f64).then_some(value as u64)
}

fn cell_text(cell: Option<f64>) -> String {
    cell.map_or("null".to_owned(), |value| value.to_string())
}
