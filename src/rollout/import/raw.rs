//! A record as it stands in its line.

use std::collections::BTreeMap;

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::Deserialize;

use super::column::Column;
use super::line::quote_non_finite;
use super::{Format, RecordProblem};
use crate::rollout::routes::Captures;

/// The keys that are read, of every format; all others are passed over unread.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Raw {
    pub(super) token_ids: Option<Column>,
    /// The ids that the trainer computed over, where a dump keeps both sides'.
    pub(super) trainer_token_ids: Option<Column>,
    pub(super) inference_temperature: Option<f64>,
    pub(super) inference_top_p: Option<f64>,
    pub(super) inference_top_k: Option<f64>,
    pub(super) inference_min_p: Option<f64>,
    pub(super) inference_logprobs_mode: Option<String>,
    pub(super) trainer_temperature: Option<f64>,
    pub(super) trainer_top_p: Option<f64>,
    pub(super) trainer_top_k: Option<f64>,
    pub(super) trainer_min_p: Option<f64>,
    pub(super) trainer_logprobs_mode: Option<String>,
    /// Of a mixture of experts, one entry a token.
    pub(super) routed_experts: Option<Captures<u32>>,
    pub(super) routed_weights: Option<Captures<f32>>,
    pub(super) trainer_routed_experts: Option<Captures<u32>>,
    pub(super) trainer_routed_weights: Option<Captures<f32>>,

    // NeMo-RL.
    pub(super) idx: Option<Column>,
    pub(super) input_lengths: Option<Column>,
    pub(super) token_loss_mask: Option<Column>,
    pub(super) sample_loss_mask: Option<Column>,
    pub(super) generation_logprobs: Option<Column>,
    pub(super) prev_logprobs: Option<Column>,

    // prime-rl.
    pub(super) schema_version: Option<u64>,
    pub(super) step: Option<u64>,
    /// The run's own step, where it differs from the trainer's.
    pub(super) export_step: Option<u64>,
    pub(super) rank: Option<u32>,
    pub(super) export_sequence_idx: Option<u32>,
    pub(super) loss_mask: Option<Column>,
    pub(super) inference_logprobs: Option<Column>,
    pub(super) trainer_logprobs: Option<Column>,
}

impl Raw {
    pub(super) fn parse(content: Vec<u8>) -> Result<Self, RecordProblem> {
        parse(content)
    }
}

/// The format whose keys a record has, or its keys.
pub(super) fn sniff(content: Vec<u8>) -> Result<Result<Format, Vec<String>>, RecordProblem> {
    let keys: BTreeMap<String, IgnoredAny> = parse(content)?;
    let has = |names: &[&str]| names.iter().any(|name| keys.contains_key(*name));
    Ok(if has(&["choices", "response"]) {
        Ok(Format::Vllm)
    } else if has(&["turns"]) {
        Ok(Format::Torchtitan)
    } else if has(&["generation_logprobs", "prev_logprobs"]) {
        Ok(Format::NemoRl)
    } else if has(&["inference_logprobs", "trainer_logprobs"]) {
        Ok(Format::PrimeRl)
    } else {
        Err(keys.into_keys().collect())
    })
}

pub(super) fn parse<T: DeserializeOwned>(mut content: Vec<u8>) -> Result<T, RecordProblem> {
    quote_non_finite(&mut content);
    let is_object = content.trim_ascii_start().starts_with(b"{");
    if !is_object && serde_json::from_slice::<IgnoredAny>(&content).is_ok() {
        return Err(RecordProblem::NotAnObject);
    }
    serde_json::from_slice(&content).map_err(|error| {
        let text = error.to_string();
        // The position in serde's message is within the line; it is said here as the file's.
        let mut reason = text.split(" at line ").next().unwrap_or(&text).to_owned();
        if error.is_eof() {
            reason += "; the line ends within the record, as where a dump was cut off";
        }
        RecordProblem::NotJson { column: error.column(), reason }
    })
}
