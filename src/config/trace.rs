//! `[trace]`: of which engine steps a run keeps what the engine saw.

use super::check::{conflict, size};
use super::error::ConfigError;
use super::source::Source;
use super::types::Config;
use crate::base::RequestId;

/// What is traced, and how much of it. It is not saved with a run: what a run does and reports does
/// not depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceConfig {
    pub what: Traced,
    /// Of one step's files, each.
    pub max_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traced {
    /// The engine steps that this request was in.
    Request(RequestId),
    /// Those of the first step that spikes.
    FirstSpike,
    /// Those of every step.
    Always,
}

/// `None` where nothing is traced.
pub(super) fn trace(source: &Source) -> Result<Option<TraceConfig>, ConfigError> {
    let max_bytes = size(source, "trace.max_bytes");
    let when: String = source.get("trace.when");
    let what = match (source.optional::<String>("trace.request"), when.as_str()) {
        (None, "never") => return Ok(None),
        (None, "first_spike") => Traced::FirstSpike,
        (None, _) => Traced::Always,
        (Some(id), "never") => Traced::Request(id.parse().map_err(|_| {
            source.refuse("trace.request", "a request's id, such as \"s3.p0.r5\"".to_owned())
        })?),
        (Some(_), _) => {
            let keys = ["trace.request", "trace.when"];
            let why = "one request is traced, or whole steps: drop one of them";
            return Err(conflict(source, &keys, why));
        }
    };
    Ok(Some(TraceConfig { what, max_bytes }))
}

/// A request that the run will never have would leave no trace and no word of it.
pub(super) fn check(config: &Config, source: &Source) -> Result<(), ConfigError> {
    let Some(TraceConfig { what: Traced::Request(id), .. }) = config.trace else { return Ok(()) };
    let rollout = &config.rollout;
    let exists = (1..=config.steps).contains(&id.step.get())
        && id.prompt_id.get() < rollout.prompts_per_step
        && id.rollout_idx < rollout.rollouts_per_prompt;
    if exists {
        return Ok(());
    }
    let last =
        RequestId::new(config.steps, rollout.prompts_per_step - 1, rollout.rollouts_per_prompt - 1);
    Err(source.refuse("trace.request", format!("a request from s1.p0.r0 to {last}")))
}
