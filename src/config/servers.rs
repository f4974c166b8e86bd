//! `engine.kind = "vllm"`: servers that sample, and how they are started.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::check::conflict;
use super::error::ConfigError;
use super::keys::find;
use super::kind::plain_url;
use super::nearest::nearest_key;
use super::source::Source;
use super::sweep::Sweep;
use super::types::{Config, Leg, Update};
use super::words::words;

/// Servers that others wrote, spoken to over HTTP.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ServersConfig {
    /// `http://HOST:PORT` of each; groups of rollouts go round, each whole to one.
    pub url: Vec<String>,
    /// As requests call the model; absent: the first that the server lists.
    pub served_model_name: Option<String>,
    /// Requests under way at once, a server.
    pub max_concurrent_requests: u32,
    /// Of one request, from sending it to the last byte of its answer.
    pub request_timeout_s: f64,
    /// The pauses between tries of one request, together.
    pub retry_for_s: f64,
    /// Whether each request carries a seed of its own.
    pub request_seeds: bool,
    /// Whether a server is asked, by its answers, of what its log-probabilities are.
    pub check_contract: bool,
    /// The model folder that the servers read, written anew after every update.
    pub sync_folder: Option<String>,
    pub launch: Option<LaunchConfig>,
}

/// Servers that a run starts, one for each address.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LaunchConfig {
    /// A program and its arguments, every key in them resolved. `{host}` and `{port}` stand for
    /// those of the address.
    pub argv: Vec<String>,
    /// From the start to the first sign of health.
    pub ready_timeout_s: f64,
    /// How often a server that ended by itself is started again.
    pub restarts: u32,
}

/// Before a request that has failed in passing is tried again; later ones are longer.
pub const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// Knobs that reach a server through its command line alone.
const BY_COMMAND: [&str; 8] = [
    "engine.gpu_memory_utilization",
    "engine.num_gpu_blocks_override",
    "engine.max_num_batched_tokens",
    "engine.max_num_seqs",
    "engine.enable_chunked_prefill",
    "engine.enable_prefix_caching",
    "engine.enforce_eager",
    "engine.mamba_ssm_cache_dtype",
];
/// What a server has of its own beside them, so that a sweep that varies it must start others.
const ITS_OWN: [&str; 4] = ["engine.max_model_len", "model.dtype", "model.path", "model.preset"];
const COMMAND: &str = "engine.launch.command";
const ARGS: &str = "engine.args";

/// `None` for the embedded engine.
pub(super) fn servers(source: &Source) -> Result<Option<ServersConfig>, ConfigError> {
    let command: Option<String> = source.optional(COMMAND);
    let orphan = source.names().find(|name| name.starts_with("engine.launch."));
    if let (None, Some(name)) = (&command, orphan) {
        return Err(conflict(source, &[name, COMMAND], "there is no command to start"));
    }
    if source.get::<String>("engine.kind") == "embedded" {
        return Ok(None);
    }
    let Some(url) = source.value("engine.url") else {
        return Err(ConfigError::Missing {
            file: source.file.clone(),
            key: "engine.url".to_owned(),
            fix: format!("{} asks for it", source.said("engine.kind")),
        });
    };
    let url = match url.as_str() {
        Some(one) => vec![one.to_owned()],
        None => source.get("engine.url"),
    };
    ignored_knobs(source, command.as_deref().unwrap_or_default())?;
    let launch = |text: String| -> Result<LaunchConfig, ConfigError> {
        Ok(LaunchConfig {
            argv: argv(source, &text)?,
            ready_timeout_s: source.get("engine.launch.ready_timeout_s"),
            restarts: source.get("engine.launch.restarts"),
        })
    };
    Ok(Some(ServersConfig {
        url: url.iter().map(|url| plain_url(url).expect("its kind accepted it").into()).collect(),
        served_model_name: source.optional("engine.served_model_name"),
        max_concurrent_requests: source.get("engine.max_concurrent_requests"),
        request_timeout_s: source.get("engine.request_timeout_s"),
        retry_for_s: source.get("engine.retry_for_s"),
        request_seeds: source.get("engine.request_seeds"),
        check_contract: source.get("engine.check_contract"),
        sync_folder: source.optional("engine.sync_folder"),
        launch: command.map(launch).transpose()?,
    }))
}

/// A knob that never reaches the server would be turned for nothing.
fn ignored_knobs(source: &Source, command: &str) -> Result<(), ConfigError> {
    let has = |key: &str| command.contains(&format!("{{{key}}}"));
    let by_args = source.by_args();
    let args = source.names().find(|name| *name == ARGS);
    if let (Some(args), false) = (args, has(ARGS)) {
        let why = "a server is given them at its start: put {engine.args} into the command";
        return Err(conflict(source, &[args, COMMAND], why));
    }
    let ignored = |name: &&str| {
        BY_COMMAND.contains(name) && !has(name) && !(has(ARGS) && by_args.contains(name))
    };
    if let Some(name) = source.names().find(ignored) {
        let why = format!("a server is given it at its start: put {{{name}}} into the command");
        return Err(conflict(source, &[name, COMMAND], &why));
    }
    let varied = source.sweep.as_ref().map(Sweep::keys).unwrap_or_default();
    let is_its_own = |name: &&str| BY_COMMAND.contains(name) || ITS_OWN.contains(name);
    let mut ignored = varied.iter().map(String::as_str).filter(is_its_own).filter(|key| !has(key));
    match ignored.next() {
        Some(key) => Err(ConfigError::Sweep {
            why: format!(
                "varies {key}, and every point would ask the same server: put {{{key}}} into \
                 {COMMAND}, which starts one a point"
            ),
        }),
        None => Ok(()),
    }
}

/// The command's words, with the value of each key that stands in braces; `{engine.args}` as a word
/// of its own becomes all of them.
fn argv(source: &Source, text: &str) -> Result<Vec<String>, ConfigError> {
    let refuse = |why: String| source.refuse(COMMAND, why);
    let shell: bool = source.get("engine.launch.shell");
    if shell {
        let script = filled(source, text).map_err(refuse)?;
        return Ok(["sh", "-c", &script].map(str::to_owned).to_vec());
    }
    let mut argv = Vec::new();
    for word in words(text).map_err(refuse)? {
        if word == format!("{{{ARGS}}}") {
            let args: String = source.optional(ARGS).unwrap_or_default();
            argv.extend(words(&args).map_err(|why| source.refuse(ARGS, why))?);
        } else {
            argv.push(filled(source, &word).map_err(refuse)?);
        }
    }
    match argv.first().is_none_or(String::is_empty) {
        true => Err(refuse("a program, then its arguments".to_owned())),
        false => Ok(argv),
    }
}

/// A text with the value of each key that it names in braces. Braces around anything without a dot
/// are left alone, as JSON among the arguments has them.
fn filled(source: &Source, text: &str) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(open) = rest.find('{') {
        out.push_str(&rest[..open]);
        rest = &rest[open..];
        let name = rest.find('}').map(|close| &rest[1..close]).unwrap_or_default();
        let letter = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let is_name = name == "seed" || (name.contains('.') && name.chars().all(letter));
        if !is_name {
            out.push('{');
            rest = &rest[1..];
            continue;
        }
        if find(name).is_none() {
            let near = nearest_key(name).map(|near| format!("; did you mean {{{near}}}?"));
            return Err(format!(
                "keys in braces, and {{{name}}} is none{}",
                near.unwrap_or_default()
            ));
        }
        let value = source.value(name).ok_or(format!(
            "keys in braces that have a value, and {{{name}}} has none: write it"
        ))?;
        out += &value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        rest = &rest[name.len() + 2..];
    }
    Ok(out + rest)
}

/// What a server cannot be asked.
pub(super) fn check(config: &Config, source: &Source) -> Result<(), ConfigError> {
    let Some(servers) = &config.engine.servers else { return Ok(()) };
    if config.trainer.update != Update::None && servers.sync_folder.is_none() {
        let why = "a server keeps the weights that it was started with: write \
                   trainer.update = \"none\", or engine.sync_folder = \"the model folder that it \
                   reads\", which is written anew after every update";
        return Err(conflict(source, &["engine.kind", "trainer.update"], why));
    }
    let restarts = servers.launch.as_ref().map_or(0, |launch| launch.restarts);
    if restarts > 0 && servers.retry_for_s < FIRST_PAUSE.as_secs_f64() {
        let why = format!(
            "a request that its server dies under is not tried again, so that the run ends before \
             the server is started again: raise engine.retry_for_s to at least {}, or leave \
             restarts out",
            FIRST_PAUSE.as_secs_f64()
        );
        return Err(conflict(source, &["engine.launch.restarts", "engine.retry_for_s"], &why));
    }
    if config.check.legs.contains(&Leg::Prefill) && !config.contract().scores_raw_logits() {
        let why = "a server's prompt_logprobs, which are its prefill leg, are always raw: leave \
                   the leg out, or record raw_logprobs";
        return Err(conflict(source, &["check.legs", "engine.logprobs_mode"], why));
    }
    Ok(())
}
