//! `engine.args`: a server's own flags, read as the keys that they are.

use toml::Value;

use super::error::ConfigError;
use super::nearest::nearest;
use super::source::Source;
use super::words::words;

/// Flags with a value.
const VALUED: [(&str, &str); 8] = [
    ("--gpu-memory-utilization", "engine.gpu_memory_utilization"),
    ("--num-gpu-blocks-override", "engine.num_gpu_blocks_override"),
    ("--max-num-batched-tokens", "engine.max_num_batched_tokens"),
    ("--max-num-seqs", "engine.max_num_seqs"),
    ("--max-model-len", "engine.max_model_len"),
    ("--mamba-ssm-cache-dtype", "engine.mamba_ssm_cache_dtype"),
    ("--logprobs-mode", "engine.logprobs_mode"),
    ("--dtype", "model.dtype"),
];
/// Flags that stand for true; `--no-` before the name stands for false.
const SWITCHES: [(&str, &str); 3] = [
    ("--enable-chunked-prefill", "engine.enable_chunked_prefill"),
    ("--enable-prefix-caching", "engine.enable_prefix_caching"),
    ("--enforce-eager", "engine.enforce_eager"),
];

/// The keys that the flags set, in their order.
///
/// # Errors
/// A flag that is no key, or one without its value.
pub(super) fn keys(source: &Source) -> Result<Vec<(&'static str, Value)>, ConfigError> {
    let Some(text) = source.optional::<String>("engine.args") else { return Ok(Vec::new()) };
    let refuse = |why: String| source.refuse("engine.args", why);
    let mut rest = words(&text).map_err(refuse)?.into_iter().peekable();
    let mut found = Vec::new();
    while let Some(word) = rest.next() {
        let (flag, given) = match word.split_once('=') {
            Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
            None => (word, None),
        };
        // vLLM takes either spelling.
        let flag = flag.replace('_', "-");
        let of = |table: &[(&str, &'static str)], flag: &str| {
            table.iter().find(|(known, _)| *known == flag).map(|(_, key)| *key)
        };
        let off = flag.strip_prefix("--no-").map(|name| format!("--{name}"));
        if let Some(key) = of(&VALUED, &flag) {
            let value = given.or_else(|| rest.next_if(|next| !next.starts_with("--")));
            let value = value.ok_or_else(|| refuse(format!("a value behind {flag}")))?;
            found.push((key, plain(&value)));
        } else if let (Some(key), None) = (of(&SWITCHES, &flag), &given) {
            found.push((key, Value::Boolean(true)));
        } else if let (Some(key), None) = (off.and_then(|on| of(&SWITCHES, &on)), &given) {
            found.push((key, Value::Boolean(false)));
        } else {
            return Err(refuse(unknown(&flag)));
        }
    }
    Ok(found)
}

fn unknown(flag: &str) -> String {
    let all = || VALUED.iter().chain(&SWITCHES).map(|(known, _)| *known);
    let near = match nearest(flag, all()) {
        Some(near) => format!("did you mean {near}?"),
        None => "others go into engine.launch.command itself".to_owned(),
    };
    format!("{}, each once, and {flag} is none; {near}", all().collect::<Vec<_>>().join(", "))
}

/// As the experiment file would have it: a number where it is one.
fn plain(text: &str) -> Value {
    match (text.parse::<i64>(), text.parse::<f64>()) {
        (Ok(whole), _) => Value::Integer(whole),
        (_, Ok(number)) => Value::Float(number),
        _ => Value::String(text.to_owned()),
    }
}
