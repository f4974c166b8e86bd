//! What can go wrong between a run and its servers, and which of it passes.

use std::io;

use super::ServerFacts;
use crate::base::{RequestId, TokenId};

#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("{url}: {what}, tried {tries} time(s): {problem}")]
    Request { url: String, what: String, tries: u32, problem: Box<Problem> },
    #[error(
        "the servers are unlike, and a step's rollouts must come from one engine: {} and {}; \
         start them alike, or name one alone", .0[0], .0[1]
    )]
    Unlike(Box<[ServerFacts; 2]>),
    #[error(
        "{url}: its {what} was {before} when the run began, and is {now}: start it as it was, or \
         run the experiment again with another --out"
    )]
    Changed { url: String, what: &'static str, before: String, now: String },
    #[error(
        "{url}: request {request} is of {prompt} prompt tokens and {new} new ones, and the \
         server's max_model_len is {max}: start it with --max-model-len {}, or lower \
         rollout.max_new_tokens",
        prompt + new
    )]
    TooLong { url: String, request: RequestId, prompt: u64, new: u64, max: u32 },
    #[error("given up before every answer was there")]
    Stopped,
    #[error("no runtime for requests: {0}")]
    Runtime(io::Error),
}

/// Why a request has no answer that can be used.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    #[error("cannot be reached: {0}; is a server running there?")]
    Unreachable(String),
    #[error("no whole answer within {0} s; raise engine.request_timeout_s or lower the load")]
    TimedOut(f64),
    #[error("the answer broke off: {0}")]
    BrokenOff(String),
    #[error("HTTP {status}: {message}")]
    Status { status: u16, message: String },
    #[error("the answer ends within its JSON, after {bytes} bytes")]
    Truncated { bytes: usize },
    #[error("the answer is not what a vLLM server gives: {reason}")]
    NotAnAnswer { reason: String },
    #[error("{found} choices where one was asked for")]
    Choices { found: usize },
    #[error(
        "no token ids in the answer: the server ignores return_token_ids, as vLLM does before \
         0.10.2; text is never tokenised again, so take a newer one"
    )]
    NoIds,
    #[error("no log-probabilities in the answer, though they were asked for")]
    NoLogProbs,
    #[error("{ids} token ids and {found} {what}: lengths must be equal")]
    Lengths { ids: usize, found: usize, what: &'static str },
    #[error(
        "the server's prompt is not the one that was sent: at {at} it has {found}, and {sent} was \
         sent; whatever adds tokens to prompts there is to be turned off"
    )]
    OtherPrompt { at: usize, found: String, sent: String },
    #[error(
        "the answer's ids and the tokens beside its log-probabilities differ: at {at} the id is \
         {id}, and the token {named}"
    )]
    OtherNames { at: usize, named: String, id: String },
    #[error("prompt_logprobs has at {at} values of {found}, and none of {sent}, which was sent")]
    OtherPlace { at: usize, found: String, sent: TokenId },
    #[error("a completion without a token")]
    NoTokens,
    #[error(
        "{found} tokens where at most {asked} were asked for: the server does not keep max_tokens"
    )]
    TooLong { found: usize, asked: u32 },
    #[error(
        "cut off after {found} of {asked} tokens: the server's --max-model-len is too small for \
         prompt and completion"
    )]
    CutOff { found: usize, asked: u32 },
    #[error("the completion ended by {0:?}, neither stop nor length")]
    Ended(String),
    #[error("it serves no model {asked:?}, but {served:?}: set engine.served_model_name")]
    OtherModel { asked: String, served: Vec<String> },
    #[error(
        "its log-probabilities are {found}, and by the configuration they are {stated}: set \
         engine.logprobs_mode = \"{mode}\", or start the server with --logprobs-mode {other}"
    )]
    Contract { found: String, stated: String, mode: &'static str, other: &'static str },
    #[error(
        "it has no {0}: start the server with VLLM_SERVER_DEV_MODE=1, or write \
         trainer.update = \"none\""
    )]
    NoReload(&'static str),
}

impl Problem {
    /// Whether the same request may fare better a little later.
    pub(super) fn is_passing(&self) -> bool {
        match self {
            Self::Unreachable(_)
            | Self::TimedOut(_)
            | Self::BrokenOff(_)
            | Self::Truncated { .. } => true,
            Self::Status { status, .. } => matches!(status, 408 | 429 | 500..=599),
            Self::Ended(reason) => reason == "abort",
            _ => false,
        }
    }
}
