//! What is sent.

use serde::Serialize;

use crate::base::{Contract, TokenId};
use crate::engine::GenerationRequest;

/// How to sample, said in full.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Sampling {
    temperature: f32,
    top_p: f32,
    /// 0 keeps everything.
    top_k: u32,
    min_p: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    repetition_penalty: f32,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<i64>,
}

impl Sampling {
    pub(super) fn of(contract: &Contract, seed: Option<i64>) -> Self {
        let Contract { temperature, top_p, top_k, min_p, .. } = *contract;
        Self {
            temperature,
            top_p,
            top_k,
            min_p,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            seed,
        }
    }
}

/// A completion to sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Generate<'a> {
    pub(super) request: &'a GenerationRequest,
    pub(super) sampling: Sampling,
}

/// The body of `POST /v1/completions`.
#[derive(Debug, Serialize)]
pub(super) struct Body<'a> {
    pub(super) model: &'a str,
    pub(super) prompt: &'a [TokenId],
    pub(super) max_tokens: u32,
    pub(super) n: u32,
    #[serde(flatten)]
    pub(super) sampling: Sampling,
    pub(super) ignore_eos: bool,
    pub(super) stop_token_ids: &'a [TokenId],
    /// So many of the most probable tokens beside the sampled one.
    pub(super) logprobs: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<u32>,
    /// The only ones that may be sampled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) allowed_token_ids: Option<&'a [TokenId]>,
    pub(super) return_token_ids: bool,
    pub(super) return_tokens_as_token_ids: bool,
    /// By which the server's own log calls the request.
    pub(super) request_id: String,
}

impl<'a> Body<'a> {
    /// Samples one token under the model's own distribution.
    pub(super) fn one_token(
        model: &'a str,
        prompt: &'a [TokenId],
        temperature: f32,
        request_id: String,
    ) -> Self {
        Self {
            model,
            prompt,
            max_tokens: 1,
            n: 1,
            sampling: Sampling::of(&Contract { temperature, ..Contract::PLAIN }, None),
            ignore_eos: true,
            stop_token_ids: &[],
            logprobs: 0,
            prompt_logprobs: None,
            allowed_token_ids: None,
            return_token_ids: true,
            return_tokens_as_token_ids: true,
            request_id,
        }
    }

    pub(super) fn generate(model: &'a str, asked: &Generate<'a>, request_id: String) -> Self {
        let Generate { request, sampling } = *asked;
        Self {
            max_tokens: request.max_new_tokens,
            sampling,
            ignore_eos: request.ignore_eos,
            stop_token_ids: if request.ignore_eos { &[] } else { &request.eos_token_ids },
            ..Self::one_token(model, &request.prompt, 1.0, request_id)
        }
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("numbers and strings are JSON")
    }
}
