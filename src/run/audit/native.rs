//! Records of gapscope's own run folders.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{anyhow, bail, Context, Result};

use crate::base::{BlockId, Contract, LogProb, LogprobsMode, RequestId, Step};
use crate::engine::{Completion, FinishReason, Phase, SampledToken};
use crate::gap;
use crate::report::parquet::{read_rollouts, read_tokens, RolloutRow, TokenRow};
use crate::report::RunFolder;
use crate::rollout::import::Checks;
use crate::rollout::{LegLogProbs, Rollout};

/// Whether a folder is one that `gapscope run` leaves.
pub(super) fn is_run(path: &Path) -> bool {
    path.join("config.json").is_file() && path.join("tokens").is_dir()
}

/// The steps whose tokens a run has written down, in order.
pub(super) fn steps(root: &Path) -> Result<Vec<Step>> {
    let folder = root.join("tokens");
    let entries = folder.read_dir().with_context(|| folder.display().to_string())?;
    let mut steps = Vec::new();
    for entry in entries {
        let name = entry.with_context(|| folder.display().to_string())?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("step-"));
        let number = number.and_then(|name| name.strip_suffix(".parquet")?.parse().ok());
        steps.extend(number.map(Step::new));
    }
    if steps.is_empty() {
        bail!("{} holds no step: the run left no tokens", folder.display());
    }
    steps.sort_unstable();
    Ok(steps)
}

/// The floor that the run's own summary states, nats; 0 where it has none.
pub(super) fn floor(root: &Path) -> f64 {
    let text = std::fs::read_to_string(root.join("summary.json")).unwrap_or_default();
    let summary: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    summary["floor"].as_f64().filter(|floor| *floor >= 0.0).unwrap_or(0.0)
}

/// One request of a step: its record, its first state block, what was found of it.
pub(super) struct NativeRecord {
    pub(super) rollout: Rollout,
    pub(super) slot: Option<BlockId>,
    pub(super) checks: Checks,
}

pub(super) fn records(root: &Path, step: Step) -> Result<Vec<NativeRecord>> {
    let folder = RunFolder::open(root)?;
    let mut tokens: HashMap<RequestId, Vec<TokenRow>> = HashMap::new();
    for row in read_tokens(&folder.tokens(step))? {
        tokens.entry(row.request).or_default().push(row);
    }
    let path = folder.rollouts(step);
    let rows = read_rollouts(&path)?;
    let records = rows
        .into_iter()
        .map(|row| {
            let tokens = tokens.remove(&row.request).unwrap_or_default();
            record(row, &tokens).with_context(|| path.display().to_string())
        })
        .collect::<Result<_>>()?;
    if let Some(request) = tokens.keys().min() {
        bail!("{}: no request {request}, of which there are tokens", path.display());
    }
    Ok(records)
}

fn record(row: RolloutRow, tokens: &[TokenRow]) -> Result<NativeRecord> {
    let ids: Vec<_> = tokens.iter().map(|token| token.token_id).collect();
    if let Some(mismatch) = gap::token_mismatch(row.request, &row.completion_token_ids, &ids) {
        bail!("{}; no gap is computed", mismatch.message);
    }
    let mut checks = Checks { records: 1, ..Checks::default() };
    let decode: Vec<LogProb> = tokens
        .iter()
        .map(|token| {
            let cell = token.logp_decode.map(|logp| f64::from(logp.get()));
            checks.infer.take(cell, token.loss_mask)
        })
        .collect();
    let trainer: LegLogProbs = tokens
        .iter()
        .map(|token| {
            let cell = f64::from(token.logp_trainer?.get());
            Some(checks.train.take(Some(cell), token.loss_mask))
        })
        .collect();
    let leg = |value: fn(&TokenRow) -> Option<LogProb>| -> Option<LegLogProbs> {
        let leg: LegLogProbs = tokens.iter().map(value).collect();
        leg.iter().any(Option::is_some).then_some(leg)
    };
    let rollout = Rollout {
        prompt_text: row.prompt_text.clone(),
        completion_text: row.completion_text.clone(),
        reward: row.reward,
        advantage: row.advantage,
        loss_mask: tokens.iter().map(|token| token.loss_mask).collect(),
        prefill: leg(|token| token.logp_prefill),
        trainer: Some(trainer),
        reference: leg(|token| token.logp_reference),
        trainer_fingerprint: row.trainer_fingerprint,
        completion: completion(&row, tokens, &decode)?,
    };
    Ok(NativeRecord { rollout, slot: row.state_blocks.first().copied(), checks })
}

fn completion(row: &RolloutRow, tokens: &[TokenRow], decode: &[LogProb]) -> Result<Completion> {
    let logprobs_mode = match row.logprobs_mode.as_str() {
        "raw_logprobs" => LogprobsMode::RawLogprobs,
        "processed_logprobs" => LogprobsMode::ProcessedLogprobs,
        other => return Err(anyhow!("request {}: logprobs_mode {other:?}", row.request)),
    };
    let sampled = |(token, &logp): (&TokenRow, &LogProb)| SampledToken {
        token: token.token_id,
        logp,
        engine_step: token.engine_step.unwrap_or_default(),
        phase: match token.phase.as_deref() {
            Some(phase) if phase == Phase::Prefill.name() => Phase::Prefill,
            _ => Phase::Decode,
        },
        scheduled_tokens: token.scheduled_tokens.unwrap_or(0),
        computed_tokens: token.computed_tokens.unwrap_or(0),
        batch_row: token.batch_row.unwrap_or(0),
        batch_rows: token.batch_rows.unwrap_or(0),
        padding_rows: token.padding_rows.unwrap_or(0),
    };
    let stopped = row.finish_reason == FinishReason::Stop.name();
    Ok(Completion {
        id: row.request,
        engine: row.engine_index,
        prompt: row.prompt_token_ids.clone(),
        tokens: std::iter::zip(tokens, decode).map(sampled).collect(),
        finish_reason: if stopped { FinishReason::Stop } else { FinishReason::Length },
        contract: Contract {
            logprobs_mode,
            temperature: row.temperature,
            top_p: row.top_p,
            top_k: row.top_k,
            min_p: 0.0,
        },
        weight_version: row.weight_version,
        engine_fingerprint: row.engine_fingerprint,
        // The columns do not keep a request's lives apart; its run's own findings rest on them.
        lives: Vec::new(),
        preemptions: row.preemptions.unwrap_or(0),
        cached_tokens: row.cached_tokens.unwrap_or(0),
    })
}
