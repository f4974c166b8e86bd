//! Records of the engine's side alone: responses of vLLM, and torchtitan's rollout samples. The
//! other side is a model's, which is at hand where they are audited.

use serde::Deserialize;

use super::column::Column;
use super::contract::contracts;
use super::raw::{parse, Raw};
use super::values::Checks;
use super::{Format, Imported, RecordProblem, Source};
use crate::base::{Contract, EngineIndex, LogProb, RequestId, TokenId, WeightVersion};
use crate::engine::{Completion, FinishReason, SampledToken};
use crate::rollout::Rollout;

/// One sampled stretch: a choice of a response, or a turn.
struct Sample {
    prompt: Option<Vec<TokenId>>,
    ids: Option<Vec<TokenId>>,
    values: Option<Vec<Option<f64>>>,
    stopped: bool,
}

/// Every record of a line. `prompt_id` is the line's number from 0, `rollout_idx` the place in it.
pub(super) fn import(
    content: &[u8],
    source: &Source,
    line: u64,
) -> Result<Vec<Imported>, RecordProblem> {
    let (samples, contract) = match source.format {
        Format::Torchtitan => (turns(content)?, stated(content, None)?),
        _ => responses(content)?,
    };
    let unknown = u64::from(contract.is_none());
    let contract = contract.unwrap_or(Contract::PLAIN);
    let prompt_id = u32::try_from(line - 1).unwrap_or(u32::MAX);
    let record = |(rollout_idx, sample): (u32, Sample)| {
        let id = RequestId::new(source.step.get(), prompt_id, rollout_idx);
        let checks = Checks { records: 1, unknown_contracts: unknown, ..Checks::default() };
        imported(sample, id, contract, line, checks)
    };
    (0..).zip(samples).map(record).collect()
}

fn imported(
    sample: Sample,
    id: RequestId,
    contract: Contract,
    line: u64,
    mut checks: Checks,
) -> Result<Imported, RecordProblem> {
    let (Some(prompt), Some(ids)) = (sample.prompt, sample.ids) else {
        return Err(RecordProblem::NoTokenIds { place: id.rollout_idx });
    };
    let Some(values) = sample.values else {
        return Err(RecordProblem::NoLogProbs { place: id.rollout_idx });
    };
    if values.len() != ids.len() {
        let (tokens, found) = (ids.len(), values.len());
        return Err(RecordProblem::Length { key: "log-probabilities", tokens, found });
    }
    let values: Vec<LogProb> =
        values.into_iter().map(|cell| checks.infer.take(cell, true)).collect();
    checks.infer.look_at_tail(values.iter().rev().copied());
    let tokens = std::iter::zip(&ids, values).map(|(&id, logp)| SampledToken::alone(id, logp));
    let completion = Completion {
        id,
        engine: EngineIndex::default(),
        prompt,
        tokens: tokens.collect(),
        finish_reason: if sample.stopped { FinishReason::Stop } else { FinishReason::Length },
        contract,
        weight_version: WeightVersion::new(0),
        engine_fingerprint: None,
        lives: Vec::new(),
        preemptions: 0,
        cached_tokens: 0,
    };
    let rollout = Rollout {
        prompt_text: String::new(),
        completion_text: String::new(),
        reward: 0.0,
        advantage: 0.0,
        loss_mask: vec![true; ids.len()],
        prefill: None,
        trainer: None,
        reference: None,
        trainer_fingerprint: None,
        completion,
    };
    Ok(Imported { rollout, trainer_contract: contract, routes: [None, None], line, checks })
}

/// What a line says of the sampling, by the keys that a dump may have beside its own, or by the
/// request beside its response. The model's side is computed under the same.
fn stated(content: &[u8], request: Option<Asked>) -> Result<Option<Contract>, RecordProblem> {
    let mut raw = Raw::parse(content.to_vec())?;
    if let Some(asked) = request {
        raw.inference_temperature = raw.inference_temperature.or(asked.temperature);
        raw.inference_top_p = raw.inference_top_p.or(asked.top_p);
        raw.inference_top_k = raw.inference_top_k.or(asked.top_k);
        raw.inference_min_p = raw.inference_min_p.or(asked.min_p);
        // What a request asks for is not yet what its log-probabilities are of: vLLM's are raw.
        let mode = || "raw_logprobs".to_owned();
        raw.inference_logprobs_mode = raw.inference_logprobs_mode.or_else(|| Some(mode()));
    }
    raw.trainer_temperature = raw.inference_temperature;
    raw.trainer_top_p = raw.inference_top_p;
    raw.trainer_top_k = raw.inference_top_k;
    raw.trainer_min_p = raw.inference_min_p;
    raw.trainer_logprobs_mode.clone_from(&raw.inference_logprobs_mode);
    Ok(contracts(&raw, true)?.map(|[engine, _]| engine))
}

/// What is read of a request.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Asked {
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<f64>,
    min_p: Option<f64>,
    prompt: Option<Prompt>,
    token_ids: Option<Vec<TokenId>>,
    sampling_params: Option<Box<Asked>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Prompt {
    Ids(Vec<TokenId>),
    Other(serde::de::IgnoredAny),
}

/// Of `/v1/completions`, `/v1/chat/completions` or `/inference/v1/generate`.
#[derive(Deserialize)]
struct Response {
    prompt_token_ids: Option<Vec<TokenId>>,
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    prompt_token_ids: Option<Vec<TokenId>>,
    token_ids: Option<Vec<TokenId>>,
    logprobs: Option<LogProbs>,
    finish_reason: Option<String>,
}

/// A list of numbers, or one of objects that hold one each.
#[derive(Default, Deserialize)]
#[serde(default)]
struct LogProbs {
    token_logprobs: Option<Column>,
    content: Option<Vec<ContentLogProb>>,
}

#[derive(Deserialize)]
struct ContentLogProb {
    logprob: Column,
}

/// A response alone, or beside its request.
fn responses(content: &[u8]) -> Result<(Vec<Sample>, Option<Contract>), RecordProblem> {
    #[derive(Deserialize)]
    struct Pair {
        request: Option<Asked>,
        response: Option<Response>,
    }
    let Pair { request, response } = parse(content.to_vec())?;
    let response = match response {
        Some(response) => response,
        None => parse(content.to_vec())?,
    };
    let request = request.map(|mut asked| {
        let inner = asked.sampling_params.take().map(|inner| *inner).unwrap_or_default();
        Asked {
            temperature: asked.temperature.or(inner.temperature),
            top_p: asked.top_p.or(inner.top_p),
            top_k: asked.top_k.or(inner.top_k),
            min_p: asked.min_p.or(inner.min_p),
            ..asked
        }
    });
    let sent = request.as_ref().and_then(|asked| match &asked.prompt {
        Some(Prompt::Ids(ids)) => Some(ids.clone()),
        _ => asked.token_ids.clone(),
    });
    let all = response.prompt_token_ids.or(sent);
    let sample = |choice: Choice| Sample {
        prompt: choice.prompt_token_ids.or_else(|| all.clone()),
        ids: choice.token_ids,
        values: choice.logprobs.and_then(LogProbs::values),
        stopped: choice.finish_reason.as_deref() == Some("stop"),
    };
    let samples = response.choices.into_iter().map(sample).collect();
    Ok((samples, stated(content, request)?))
}

impl LogProbs {
    fn values(self) -> Option<Vec<Option<f64>>> {
        let of_content = |content: Vec<ContentLogProb>| {
            content.iter().map(|one| one.logprob.cells().first().copied().flatten()).collect()
        };
        self.token_logprobs.map(|column| column.cells).or_else(|| self.content.map(of_content))
    }
}

/// torchtitan's turns; a turn's prompt holds the turns before it.
fn turns(content: &[u8]) -> Result<Vec<Sample>, RecordProblem> {
    #[derive(Deserialize)]
    struct Sampled {
        turns: Vec<Turn>,
    }
    #[derive(Deserialize)]
    struct Turn {
        prompt_token_ids: Option<Vec<TokenId>>,
        completion_token_ids: Option<Vec<TokenId>>,
        completion_logprobs: Option<Column>,
    }
    let Sampled { turns } = parse(content.to_vec())?;
    let sample = |turn: Turn| Sample {
        prompt: turn.prompt_token_ids,
        ids: turn.completion_token_ids,
        values: turn.completion_logprobs.map(|column| column.cells),
        stopped: false,
    };
    Ok(turns.into_iter().map(sample).collect())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::base::{LogprobsMode, Step};

    fn read(format: Format, line: &str) -> Result<Vec<Imported>, String> {
        let source = Source { path: PathBuf::from("x.jsonl"), format, step: Step::new(3) };
        import(line.as_bytes(), &source, 2).map_err(|problem| problem.to_string())
    }

    /// Prompt, ids, values, mode and temperature of each record.
    fn check(
        format: Format,
        line: &str,
        expected: &[(&[u32], &[u32], &[f32])],
        contract: Contract,
    ) {
        let found = read(format, line).unwrap_or_else(|problem| panic!("{line}: {problem}"));
        assert_eq!(found.len(), expected.len(), "{line}");
        for (place, (record, (prompt, ids, values))) in found.iter().zip(expected).enumerate() {
            let done = &record.rollout.completion;
            assert_eq!(done.id, RequestId::new(3, 1, place as u32), "{line}");
            assert_eq!(done.prompt.iter().map(|id| id.get()).collect::<Vec<_>>(), *prompt);
            assert_eq!(done.token_ids().map(TokenId::get).collect::<Vec<_>>(), *ids);
            let logps: Vec<f32> = done.tokens.iter().map(|sampled| sampled.logp.get()).collect();
            assert_eq!(
                logps.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
                values.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
                "{line}"
            );
            assert_eq!((done.contract, record.trainer_contract), (contract, contract), "{line}");
            assert!(record.rollout.trainer.is_none());
        }
    }

    #[test]
    fn every_kind_of_response_is_read() {
        let cold = Contract { temperature: 0.5, ..Contract::PLAIN };
        let processed = Contract { logprobs_mode: LogprobsMode::ProcessedLogprobs, ..cold };
        let two = r#""choices":[
            {"token_ids":[5,6],"prompt_token_ids":[1,2],"logprobs":{"token_logprobs":[-0.5,NaN]}},
            {"token_ids":[7],"prompt_token_ids":[1,2],"logprobs":{"token_logprobs":[null]}}]"#
            .replace('\n', " ");
        let nan = f32::NAN;
        let expected: &[(&[u32], &[u32], &[f32])] =
            &[(&[1, 2], &[5, 6], &[-0.5, nan]), (&[1, 2], &[7], &[nan])];
        check(Format::Vllm, &format!("{{{two}}}"), expected, Contract::PLAIN);
        let told =
            format!(r#"{{"request":{{"temperature":0.5,"prompt":"text"}},"response":{{{two}}}}}"#);
        check(Format::Vllm, &told, expected, cold);
        let told = format!(
            r#"{{"inference_temperature":0.5,"inference_logprobs_mode":"processed_logprobs",
            {two}}}"#
        );
        check(Format::Vllm, &told, expected, processed);
        let chat = r#"{"prompt_token_ids":[3],"choices":[{"token_ids":[5],"finish_reason":"stop",
            "logprobs":{"content":[{"token":"a","logprob":-0.25}]}}]}"#
            .replace('\n', " ");
        check(Format::Vllm, &chat, &[(&[3], &[5], &[-0.25])], Contract::PLAIN);
        let generated = r#"{"request":{"token_ids":[4],"sampling_params":{"temperature":0.5}},
            "response":{"choices":[{"token_ids":[5],
            "logprobs":{"content":[{"token":"token_id:5","logprob":-0.25}]}}]}}"#
            .replace('\n', " ");
        check(Format::Vllm, &generated, &[(&[4], &[5], &[-0.25])], cold);
    }

    #[test]
    fn every_turn_is_a_record() {
        let line = r#"{"is_validation":false,"group_id":"g","turns":[
            {"turn_id":0,"prompt_token_ids":[1],"completion_token_ids":[2],
             "completion_logprobs":[-1.0]},
            {"turn_id":1,"prompt_token_ids":[1,2,3],"completion_token_ids":[4,5],
             "completion_logprobs":[-0.5,-9999]}]}"#
            .replace('\n', " ");
        let expected: &[(&[u32], &[u32], &[f32])] =
            &[(&[1], &[2], &[-1.0]), (&[1, 2, 3], &[4, 5], &[-0.5, f32::NAN])];
        check(Format::Torchtitan, &line, expected, Contract::PLAIN);
    }

    #[test]
    fn what_is_missing_is_said() {
        for (format, line, expected) in [
            (
                Format::Vllm,
                r#"{"choices":[{"text":"a","logprobs":{"token_logprobs":[-1]}}]}"#,
                "sample 0 has no token ids; ask the server with return_token_ids",
            ),
            (
                Format::Vllm,
                r#"{"prompt_token_ids":[1],"choices":[{"token_ids":[1],"logprobs":null}]}"#,
                "sample 0 has no log-probabilities",
            ),
            (
                Format::Vllm,
                r#"{"prompt_token_ids":[1],
                "choices":[{"token_ids":[1,2],"logprobs":{"token_logprobs":[-1]}}]}"#,
                "token_ids has 2 entries and log-probabilities has 1",
            ),
            (Format::Torchtitan, r#"{"turns":[{"turn_id":0}]}"#, "sample 0 has no token ids"),
            (Format::Torchtitan, r#"{"turn":[]}"#, "not a record: missing field `turns`"),
        ] {
            let problem = read(format, line).expect_err(line);
            assert!(problem.contains(expected), "{problem}");
        }
    }
}
