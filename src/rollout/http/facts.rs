//! What a server is, and of what its log-probabilities are.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::client::Client;
use super::error::{Problem, ServerError};
use crate::base::{Contract, LogprobsMode, TokenId};

/// A temperature that shows what it is applied to.
const COLD: f32 = 0.1;
/// Nats between the best token's log-probability at temperature 1 and at [`COLD`]: raw ones are
/// equal but for rounding, processed ones are far apart unless all tokens are equally likely.
const SAME: f64 = 0.05;
const APART: f64 = 0.25;

/// What a server says of itself, and what its answers show.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerFacts {
    pub url: String,
    /// As requests call it.
    pub model: String,
    /// The folder or name that it was loaded from.
    pub root: Option<String>,
    pub max_model_len: Option<u32>,
    pub version: Option<String>,
    /// As two probes show; absent where nobody asked, or where they do not tell.
    pub logprobs_mode: Option<LogprobsMode>,
}

impl fmt::Display for ServerFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
        write!(f, "{} (model {} of {}, ", self.url, self.model, or(&self.root))?;
        write!(f, "version {}, {})", or(&self.version), self.logprobs_mode.map_or("?", mode_name))
    }
}

/// A step's rollouts come from one engine.
pub(super) fn alike(all: &[ServerFacts]) -> Result<(), ServerError> {
    let key = |one: &ServerFacts| {
        let ServerFacts { model, root, max_model_len, version, logprobs_mode, .. } = one;
        (model.clone(), root.clone(), *max_model_len, version.clone(), *logprobs_mode)
    };
    match all.iter().find(|other| key(other) != key(&all[0])) {
        Some(other) => Err(ServerError::Unlike(Box::new([all[0].clone(), other.clone()]))),
        None => Ok(()),
    }
}

/// That what log-probabilities depend on is as it was, server by server. A context of another
/// length changes none, and probes that do not tell show no other mode.
pub(super) fn unchanged(before: &[ServerFacts], now: &[ServerFacts]) -> Result<(), ServerError> {
    let or = |text: &Option<String>| text.clone().unwrap_or_else(|| "unknown".to_owned());
    let mode = |facts: &ServerFacts, other: &ServerFacts| {
        let told = facts.logprobs_mode.filter(|_| other.logprobs_mode.is_some());
        told.map_or("unknown", mode_name).to_owned()
    };
    for (had, has) in before.iter().zip(now) {
        let all = [
            ("model", had.model.clone(), has.model.clone()),
            ("model's root", or(&had.root), or(&has.root)),
            ("version", or(&had.version), or(&has.version)),
            ("logprobs mode", mode(had, has), mode(has, had)),
        ];
        let differs = |(_, had, has): &(&str, String, String)| had != has;
        if let Some((what, before, now)) = all.into_iter().find(differs) {
            return Err(ServerError::Changed { url: has.url.clone(), what, before, now });
        }
    }
    Ok(())
}

impl Client {
    /// Asks what is served, and where a contract is given, of what the log-probabilities are.
    pub(super) async fn identify(
        &mut self,
        name: Option<String>,
        contract: Option<Contract>,
    ) -> Result<ServerFacts, ServerError> {
        let refused = |client: &Self, problem| ServerError::Request {
            url: client.url().to_owned(),
            what: "its account of itself".to_owned(),
            tries: 1,
            problem: Box::new(problem),
        };
        let served = self.served().await?;
        let found = match &name {
            Some(name) => served.iter().find(|one| one.id == *name),
            None => served.first(),
        };
        let Some(found) = found.cloned() else {
            let served = served.into_iter().map(|one| one.id).collect();
            let asked = name.unwrap_or_default();
            return Err(refused(self, Problem::OtherModel { asked, served }));
        };
        self.model.clone_from(&found.id);
        let logprobs_mode = match contract {
            Some(_) => self.mode().await?,
            None => None,
        };
        if let (Some(stated), Some(mode)) = (contract, logprobs_mode) {
            agree(&stated, mode).map_err(|problem| refused(self, problem))?;
        }
        (self.max_model_len, self.logprobs_mode) = (found.max_model_len, logprobs_mode);
        Ok(ServerFacts {
            url: self.url().to_owned(),
            model: found.id,
            root: found.root,
            max_model_len: found.max_model_len,
            version: self.version().await?,
            logprobs_mode,
        })
    }

    /// The same token behind the same prompt, at two temperatures.
    async fn mode(&self) -> Result<Option<LogprobsMode>, ServerError> {
        let prompt = [1, 2, 3, 4].map(TokenId::new);
        let (warm, cold) = (self.best(&prompt, 1.0).await?, self.best(&prompt, COLD).await?);
        let both = warm.zip(cold).map(|(warm, cold)| (warm, (warm - cold).abs()));
        Ok(match both {
            // A token that is sure of itself is so at any temperature, and says nothing.
            Some((warm, apart)) if apart <= SAME && warm <= -APART => {
                Some(LogprobsMode::RawLogprobs)
            }
            Some((_, apart)) if apart >= APART => Some(LogprobsMode::ProcessedLogprobs),
            _ => None,
        })
    }
}

fn agree(stated: &Contract, mode: LogprobsMode) -> Result<(), Problem> {
    let found = Contract { logprobs_mode: mode, ..*stated };
    if found.is_like(stated) {
        return Ok(());
    }
    Err(Problem::Contract {
        found: found.to_string(),
        stated: stated.to_string(),
        mode: mode_name(mode),
        other: mode_name(stated.logprobs_mode),
    })
}

fn mode_name(mode: LogprobsMode) -> &'static str {
    match mode {
        LogprobsMode::RawLogprobs => "raw_logprobs",
        LogprobsMode::ProcessedLogprobs => "processed_logprobs",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_log_probabilities_depend_on_may_not_change() {
        let facts = ServerFacts {
            url: "http://a:1".to_owned(),
            model: "tiny".to_owned(),
            root: Some("/m".to_owned()),
            max_model_len: Some(512),
            version: Some("1".to_owned()),
            logprobs_mode: Some(LogprobsMode::RawLogprobs),
        };
        let like = || facts.clone();
        let processed = Some(LogprobsMode::ProcessedLogprobs);
        for (now, says) in [
            (like(), None),
            (ServerFacts { max_model_len: None, ..like() }, None),
            (ServerFacts { logprobs_mode: None, ..like() }, None),
            (ServerFacts { model: "big".into(), ..like() }, Some("model was tiny")),
            (ServerFacts { root: Some("/n".into()), ..like() }, Some("model's root was /m")),
            (ServerFacts { version: None, ..like() }, Some("version was 1")),
            (ServerFacts { logprobs_mode: processed, ..like() }, Some("mode was raw_logprobs")),
        ] {
            // The first of two is as it was.
            let found = unchanged(&[like(), like()], &[like(), now]);
            match says {
                None => found.expect("nothing that matters"),
                Some(says) => {
                    let error = found.expect_err(says).to_string();
                    assert!(error.contains(&format!("{says} when the run began")), "{error}");
                }
            }
        }
    }
}
