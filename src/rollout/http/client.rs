//! One server: requests, limits, time-outs, tries.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use reqwest::Method;
use serde::Deserialize;
use tokio::sync::Semaphore;

use super::answer::{message, parse, Answer};
use super::error::{Problem, ServerError};
use super::news::News;
use super::request::{Body, Generate};
use super::Starting;
use crate::base::{LogProb, LogprobsMode, RequestId, TokenId};
use crate::config::{ServersConfig, FIRST_PAUSE};
use crate::engine::{FinishReason, SampledToken};

const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Whether a server that is being started is up.
const LOOKED_EVERY: Duration = Duration::from_millis(50);
const COMPLETIONS: &str = "/v1/completions";

#[derive(Debug)]
pub(super) struct Client {
    http: reqwest::Client,
    url: String,
    /// As requests call it; empty until the server was asked, as the next two are absent.
    pub(super) model: String,
    pub(super) max_model_len: Option<u32>,
    pub(super) logprobs_mode: Option<LogprobsMode>,
    timeout: Duration,
    retry_for: Duration,
    limit: Semaphore,
    starting: Starting,
    news: Arc<News>,
}

/// A model that a server lists.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Served {
    pub(super) id: String,
    pub(super) root: Option<String>,
    pub(super) max_model_len: Option<u32>,
}

impl Client {
    pub(super) fn new(
        url: &str,
        config: &ServersConfig,
        (starting, news): (Starting, Arc<News>),
    ) -> Result<Self, ServerError> {
        // A proxy that the environment names is for other hosts than a cluster's own.
        let http = reqwest::Client::builder().no_proxy().build();
        let http = http.map_err(|error| ServerError::Runtime(std::io::Error::other(error)))?;
        Ok(Self {
            http,
            url: url.to_owned(),
            model: String::new(),
            max_model_len: None,
            logprobs_mode: None,
            timeout: seconds(config.request_timeout_s),
            retry_for: seconds(config.retry_for_s),
            limit: Semaphore::new(config.max_concurrent_requests as usize),
            starting,
            news,
        })
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    pub(super) async fn complete(
        &self,
        asked: &Generate<'_>,
    ) -> Result<(Vec<SampledToken>, FinishReason), ServerError> {
        let id = asked.request.id;
        let body = |name| Body::generate(&self.model, asked, name);
        let read = |answer: Answer| answer.only()?.completion(asked.request);
        self.ask(&id.to_string(), body, read).await
    }

    /// One prefill over all the tokens, and one token more, because a server samples at least one.
    /// Where that is too many for it, the last one is left out of the prompt and is the only one
    /// that may be sampled, which raw log-probabilities do not see; others would: it has none then.
    pub(super) async fn score(
        &self,
        id: RequestId,
        tokens: &[TokenId],
        prompt_len: usize,
    ) -> Result<Vec<Option<LogProb>>, ServerError> {
        let fits = self.max_model_len.is_none_or(|max| tokens.len() < max as usize);
        let (prompt, last) = tokens.split_at(tokens.len() - usize::from(!fits));
        let is_raw = self.logprobs_mode == Some(LogprobsMode::RawLogprobs);
        let body = |name| Body {
            prompt_logprobs: Some(0),
            allowed_token_ids: (!fits && is_raw).then_some(last),
            ..Body::one_token(&self.model, prompt, 1.0, name)
        };
        let read = |answer: Answer| {
            let choice = answer.only()?;
            let mut scores = choice.prompt_logprobs(prompt, prompt_len)?;
            scores.extend(last.iter().map(|&last| choice.sampled(last).filter(|_| is_raw)));
            Ok(scores)
        };
        self.ask(&format!("{id}.prefill"), body, read).await
    }

    /// The largest log-probability of the token behind a prompt, by a sampler of this temperature.
    pub(super) async fn best(
        &self,
        prompt: &[TokenId],
        temperature: f32,
    ) -> Result<Option<f64>, ServerError> {
        let body =
            |name| Body { logprobs: 1, ..Body::one_token(&self.model, prompt, temperature, name) };
        self.ask("probe", body, |answer: Answer| Ok(answer.only()?.best())).await
    }

    pub(super) async fn served(&self) -> Result<Vec<Served>, ServerError> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<Served>,
        }
        let once = || async {
            let body = self.once(Method::GET, "/v1/models", None).await?;
            Ok(parse::<Models>(body)?.data)
        };
        self.tried("GET /v1/models", once).await
    }

    /// `None` from a server that does not say.
    pub(super) async fn version(&self) -> Result<Option<String>, ServerError> {
        #[derive(Deserialize)]
        struct Version {
            version: String,
        }
        let once = || async {
            match self.once(Method::GET, "/version", None).await {
                Ok(body) => Ok(Some(parse::<Version>(body)?.version)),
                Err(Problem::Status { status: 404, .. }) => Ok(None),
                Err(problem) => Err(problem),
            }
        };
        self.tried("GET /version", once).await
    }

    /// Reads the model folder again; then forgets prefixes that the old weights have computed.
    pub(super) async fn reload(&self) -> Result<(), ServerError> {
        for (path, body) in
            [("/collective_rpc", r#"{"method": "reload_weights"}"#), ("/reset_prefix_cache", "")]
        {
            let once = || async {
                let sent = self.once(Method::POST, path, Some(body.as_bytes().to_vec())).await;
                match sent {
                    Err(Problem::Status { status: 404, .. }) => Err(Problem::NoReload(path)),
                    sent => sent.map(|_| ()),
                }
            };
            self.tried(&format!("POST {path}"), once).await?;
        }
        Ok(())
    }

    /// A completion request under the limit. The server is told its name and which try it is,
    /// because the try before may still be running there.
    async fn ask<'b, T>(
        &self,
        name: &str,
        body: impl Fn(String) -> Body<'b>,
        read: impl Fn(Answer) -> Result<T, Problem>,
    ) -> Result<T, ServerError> {
        let _place = self.limit.acquire().await.expect("nobody closes the limit");
        let tries = AtomicU32::new(0);
        let once = || async {
            let name = match tries.fetch_add(1, Ordering::Relaxed) {
                0 => name.to_owned(),
                before => format!("{name}-{}", before + 1),
            };
            let sent = body(name).bytes();
            read(parse(self.once(Method::POST, COMPLETIONS, Some(sent)).await?)?)
        };
        self.tried(&format!("request {name}"), once).await
    }

    /// Tries until it is done, fails for good, is late a second time, or the pauses together have
    /// been long enough. A server that is being started is waited for, which costs no try.
    async fn tried<T, F>(&self, what: &str, once: impl Fn() -> F) -> Result<T, ServerError>
    where
        F: std::future::Future<Output = Result<T, Problem>>,
    {
        let tries = AtomicU32::new(0);
        let pauses = ExponentialBuilder::default()
            .with_min_delay(FIRST_PAUSE)
            .with_max_delay(LONGEST_PAUSE)
            .without_max_times()
            .with_total_delay(Some(self.retry_for));
        let counted = || async {
            while self.starting.load(Ordering::Acquire) {
                tokio::time::sleep(LOOKED_EVERY).await;
            }
            tries.fetch_add(1, Ordering::Relaxed);
            once().await
        };
        let mut was_late = false;
        let passes = |problem: &Problem| match problem {
            Problem::TimedOut(seconds) => {
                self.news.late(&self.url, *seconds);
                !std::mem::replace(&mut was_late, true)
            }
            other => other.is_passing(),
        };
        let done = counted.retry(pauses).when(passes).await;
        done.map_err(|problem| ServerError::Request {
            url: self.url.clone(),
            what: what.to_owned(),
            tries: tries.load(Ordering::Relaxed),
            problem: Box::new(problem),
        })
    }

    /// The body of a good answer.
    async fn once(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<Vec<u8>, Problem> {
        let url = format!("{}{path}", self.url);
        let mut request = self.http.request(method, url).timeout(self.timeout);
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body);
        }
        let failed = |error: reqwest::Error| match error {
            late if late.is_timeout() => Problem::TimedOut(self.timeout.as_secs_f64()),
            away if away.is_connect() => Problem::Unreachable(told(&away)),
            broken => Problem::BrokenOff(told(&broken)),
        };
        let answer = request.send().await.map_err(failed)?;
        let status = answer.status();
        let body = answer.bytes().await.map_err(failed)?.to_vec();
        if !status.is_success() {
            return Err(Problem::Status { status: status.as_u16(), message: message(&body) });
        }
        Ok(body)
    }
}

/// Of a checked configuration; for as good as ever where a clock does not count so far.
fn seconds(count: f64) -> Duration {
    Duration::try_from_secs_f64(count).unwrap_or(Duration::MAX)
}

/// The innermost cause, which says it best.
fn told(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
