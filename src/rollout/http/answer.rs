//! What comes back, and whether it answers what was asked.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::Deserialize;

use super::error::Problem;
use crate::base::{LogProb, TokenId};
use crate::engine::{FinishReason, GenerationRequest, SampledToken};
use crate::rollout::import::{quote_non_finite, Column, SideChecks};

/// Before the id, where a token's text would stand.
const TOKEN_ID: &str = "token_id:";

#[derive(Debug, Deserialize)]
pub(super) struct Answer {
    choices: Vec<Choice>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Choice {
    token_ids: Option<Vec<TokenId>>,
    prompt_token_ids: Option<Vec<TokenId>>,
    logprobs: Option<LogProbs>,
    prompt_logprobs: Option<Vec<Option<BTreeMap<String, PromptLogProb>>>>,
    finish_reason: Option<String>,
}

#[derive(Debug, Deserialize)]
struct LogProbs {
    tokens: Vec<String>,
    token_logprobs: Column,
    top_logprobs: Option<Vec<Option<BTreeMap<String, Column>>>>,
}

#[derive(Debug, Deserialize)]
struct PromptLogProb {
    logprob: Column,
}

/// JSON as servers write it, with Python's names for what is not finite.
pub(super) fn parse<T: DeserializeOwned>(mut body: Vec<u8>) -> Result<T, Problem> {
    quote_non_finite(&mut body);
    serde_json::from_slice(&body).map_err(|error| match error.is_eof() {
        true => Problem::Truncated { bytes: body.len() },
        false => Problem::NotAnAnswer { reason: error.to_string() },
    })
}

/// A server's own words about a refusal, or what there is of them.
pub(super) fn message(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Said {
        message: Option<String>,
        detail: Option<serde_json::Value>,
        error: Option<Box<Said>>,
    }
    let text = String::from_utf8_lossy(body);
    let said = serde_json::from_slice::<Said>(body).ok().and_then(|said| {
        let said =
            said.error.map_or((said.message, said.detail), |inner| (inner.message, inner.detail));
        said.0.or_else(|| said.1.map(|detail| detail.to_string()))
    });
    let said = said.unwrap_or_else(|| text.trim().to_owned());
    match said.char_indices().nth(400) {
        Some((end, _)) => format!("{}...", &said[..end]),
        None if said.is_empty() => "without a word".to_owned(),
        None => said,
    }
}

impl Answer {
    /// The one choice that was asked for.
    pub(super) fn only(self) -> Result<Choice, Problem> {
        let found = self.choices.len();
        let mut choices = self.choices.into_iter();
        match (choices.next(), found) {
            (Some(choice), 1) => Ok(choice),
            _ => Err(Problem::Choices { found }),
        }
    }
}

impl Choice {
    /// The sampled tokens, once ids, lengths and the end are known to fit the request. What stands
    /// in a log-probability's place without being one stays, as a non-finite value.
    pub(super) fn completion(
        self,
        asked: &GenerationRequest,
    ) -> Result<(Vec<SampledToken>, FinishReason), Problem> {
        self.same_prompt(&asked.prompt)?;
        let ids = self.token_ids.ok_or(Problem::NoIds)?;
        let logprobs = self.logprobs.ok_or(Problem::NoLogProbs)?;
        let values = logprobs.token_logprobs.cells();
        for (found, what) in
            [(values.len(), "log-probabilities"), (logprobs.tokens.len(), "tokens beside them")]
        {
            if found != ids.len() {
                return Err(Problem::Lengths { ids: ids.len(), found, what });
            }
        }
        let named = logprobs.tokens.iter().map(|name| name.strip_prefix(TOKEN_ID)?.parse().ok());
        if let Some((at, named, id)) = first_other(named, &ids) {
            return Err(Problem::OtherNames { at, named, id });
        }
        let finish_reason = match self.finish_reason.as_deref() {
            Some("stop") => FinishReason::Stop,
            Some("length") => FinishReason::Length,
            other => return Err(Problem::Ended(other.unwrap_or("nothing").to_owned())),
        };
        let (found, limit) = (ids.len(), asked.max_new_tokens);
        match (found, finish_reason) {
            (0, _) => return Err(Problem::NoTokens),
            _ if found > limit as usize => {
                return Err(Problem::TooLong { found, asked: limit });
            }
            (_, FinishReason::Length) if found < limit as usize => {
                return Err(Problem::CutOff { found, asked: limit });
            }
            _ => {}
        }
        // What is not a log-probability is counted where records are compared.
        let mut checks = SideChecks::default();
        let sampled = |(&token, &cell): (&TokenId, &Option<f64>)| {
            SampledToken::alone(token, checks.take(cell, false))
        };
        Ok((std::iter::zip(&ids, values).map(sampled).collect(), finish_reason))
    }

    /// Of the tokens from `prompt_len` on, which the server was given as a prompt with the rest.
    pub(super) fn prompt_logprobs(
        &self,
        tokens: &[TokenId],
        prompt_len: usize,
    ) -> Result<Vec<Option<LogProb>>, Problem> {
        self.same_prompt(tokens)?;
        let all = self.prompt_logprobs.as_ref().ok_or(Problem::NoLogProbs)?;
        if all.len() != tokens.len() {
            let (ids, found) = (tokens.len(), all.len());
            return Err(Problem::Lengths { ids, found, what: "prompt log-probabilities" });
        }
        let mut checks = SideChecks::default();
        let one = |(at, token): (usize, &TokenId)| {
            let place = all[at].as_ref().ok_or(Problem::NoLogProbs)?;
            let Some(found) = place.get(&token.to_string()) else {
                let found = place.keys().cloned().collect::<Vec<_>>().join(", ");
                return Err(Problem::OtherPlace { at, found, sent: *token });
            };
            Ok(Some(checks.take(found.logprob.cells().first().copied().flatten(), false)))
        };
        tokens.iter().enumerate().skip(prompt_len).map(one).collect()
    }

    /// Of the one sampled token, where it is this one.
    pub(super) fn sampled(&self, token: TokenId) -> Option<LogProb> {
        let is_it = self.token_ids.as_deref() == Some(&[token]);
        let cell = *self.logprobs.as_ref()?.token_logprobs.cells().first()?;
        is_it.then(|| SideChecks::default().take(cell, false))
    }

    /// The largest log-probability at the one sampled position.
    pub(super) fn best(&self) -> Option<f64> {
        let places = self.logprobs.as_ref()?.top_logprobs.as_ref()?;
        let values = places.first()?.as_ref()?.values();
        let values = values.filter_map(|value| value.cells().first().copied().flatten());
        values.filter(|value| value.is_finite()).reduce(f64::max)
    }

    fn same_prompt(&self, sent: &[TokenId]) -> Result<(), Problem> {
        let Some(told) = &self.prompt_token_ids else { return Err(Problem::NoIds) };
        match first_other(told.iter().map(|id| Some(id.get())), sent) {
            Some((at, found, sent)) => Err(Problem::OtherPrompt { at, found, sent }),
            None => Ok(()),
        }
    }
}

/// The first place where two lists of tokens differ, and what either has there. `None` among the
/// first is a token that has no id.
fn first_other(
    found: impl Iterator<Item = Option<u32>>,
    ids: &[TokenId],
) -> Option<(usize, String, String)> {
    let found: Vec<Option<u32>> = found.collect();
    let ids: Vec<Option<u32>> = ids.iter().map(|id| Some(id.get())).collect();
    let at = std::iter::zip(&found, &ids).take_while(|(a, b)| a == b).count();
    let shown = |ids: &[Option<u32>]| match ids.get(at) {
        Some(Some(id)) => id.to_string(),
        Some(None) => "text".to_owned(),
        None => "the end".to_owned(),
    };
    (at < found.len().max(ids.len())).then(|| (at, shown(&found), shown(&ids)))
}
