//! Of what each side of a record says its log-probabilities are.

use super::raw::Raw;
use super::RecordProblem;
use crate::base::{Contract, LogprobsMode};

/// One side's keys and values.
struct Side<'a> {
    /// Of the temperature, top-p, top-k, min-p and the mode.
    keys: [&'static str; 5],
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<f64>,
    min_p: Option<f64>,
    mode: Option<&'a str>,
}

/// The inference side's and the trainer's; `None` where the record does not say it of both.
/// `strict` refuses two that are unlike.
pub(super) fn contracts(raw: &Raw, strict: bool) -> Result<Option<[Contract; 2]>, RecordProblem> {
    let infer = Side {
        keys: [
            "inference_temperature",
            "inference_top_p",
            "inference_top_k",
            "inference_min_p",
            "inference_logprobs_mode",
        ],
        temperature: raw.inference_temperature,
        top_p: raw.inference_top_p,
        top_k: raw.inference_top_k,
        min_p: raw.inference_min_p,
        mode: raw.inference_logprobs_mode.as_deref(),
    };
    let train = Side {
        keys: [
            "trainer_temperature",
            "trainer_top_p",
            "trainer_top_k",
            "trainer_min_p",
            "trainer_logprobs_mode",
        ],
        temperature: raw.trainer_temperature,
        top_p: raw.trainer_top_p,
        top_k: raw.trainer_top_k,
        min_p: raw.trainer_min_p,
        mode: raw.trainer_logprobs_mode.as_deref(),
    };
    let (Some(infer), Some(train)) = (infer.contract()?, train.contract()?) else {
        return Ok(None);
    };
    if strict && !infer.is_like(&train) {
        let (infer, train) = (infer.to_string(), train.to_string());
        return Err(RecordProblem::Unlike { infer, train });
    }
    Ok(Some([infer, train]))
}

impl Side<'_> {
    fn contract(&self) -> Result<Option<Contract>, RecordProblem> {
        let [temperature, top_p, top_k, min_p, mode] = self.keys;
        let logprobs_mode = match self.mode {
            None => None,
            Some("raw_logprobs") => Some(LogprobsMode::RawLogprobs),
            Some("processed_logprobs") => Some(LogprobsMode::ProcessedLogprobs),
            Some(found) => return Err(RecordProblem::Mode { key: mode, found: found.to_owned() }),
        };
        let taken = |key, value: Option<f64>, takes, holds: fn(f64) -> bool| match value {
            Some(found) if !holds(found) => Err(RecordProblem::Sampling { key, found, takes }),
            value => Ok(value),
        };
        let t = taken(
            temperature,
            self.temperature,
            "a temperature (a finite number from 0 on; 0 is greedy)",
            |t| t.is_finite() && t >= 0.0,
        )?;
        let p = taken(top_p, self.top_p, "a share over 0 and up to 1; 1 keeps everything", |p| {
            0.0 < p && p <= 1.0
        })?;
        let k = taken(top_k, self.top_k, "a count of tokens; 0 and -1 keep everything", |k| {
            k.fract() == 0.0 && -1.0 <= k && k <= f64::from(u32::MAX)
        })?;
        let m = taken(min_p, self.min_p, "a share from 0 to 1; 0 keeps everything", |m| {
            (0.0..=1.0).contains(&m)
        })?;
        if [t, p, k, m].iter().all(Option::is_none) && logprobs_mode.is_none() {
            return Ok(None);
        }
        Ok(Some(Contract {
            // What is named without a mode is named because it was applied.
            logprobs_mode: logprobs_mode.unwrap_or(LogprobsMode::ProcessedLogprobs),
            temperature: t.unwrap_or(1.0) as f32,
            top_p: p.unwrap_or(1.0) as f32,
            top_k: k.unwrap_or(0.0).max(0.0) as u32,
            min_p: m.unwrap_or(0.0) as f32,
        }))
    }
}
