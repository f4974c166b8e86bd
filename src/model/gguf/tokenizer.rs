//! `tokenizer.json` and `tokenizer_config.json` of a byte-level BPE whose tokens and merges the
//! metadata carry.

use std::collections::BTreeMap;

use serde_json::{json, Value};
use tokenizers::Tokenizer;

use super::header::Gguf;
use crate::model::{HfConfig, ModelError};

const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const TYPES: &str = "tokenizer.ggml.token_type";

/// Names and texts of the two files.
///
/// # Errors
/// Another kind of tokenizer than those known, a missing key, and whatever makes of tokens and
/// merges no tokenizer.
pub(super) fn files(
    gguf: &Gguf,
    config: &HfConfig,
) -> Result<Vec<(&'static str, String)>, ModelError> {
    let model = gguf.text("tokenizer.ggml.model")?;
    if model != "gpt2" {
        let reason = format!("is {model:?}; this build knows byte-level BPE, \"gpt2\"");
        return Err(gguf.wrong("tokenizer.ggml.model", reason));
    }
    let tokens = gguf.texts(TOKENS)?;
    if tokens.len() > config.vocab_size {
        let (found, rows) = (tokens.len(), config.vocab_size);
        let reason = format!("has {found} tokens, and {} {rows} rows", super::EMBEDDING);
        return Err(gguf.wrong(TOKENS, reason));
    }
    let whole = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added(gguf, &tokens)?,
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer(gguf)?,
        "post_processor": post_processor(gguf, &tokens)?,
        "decoder": byte_level(),
        "model": {
            "type": "BPE",
            "vocab": vocabulary(gguf, &tokens)?,
            "merges": gguf.texts(MERGES)?,
        },
    });
    let whole = whole.to_string();
    // Read once, so that a merge of unknown tokens is an error here and not in the next command.
    if let Err(error) = whole.parse::<Tokenizer>() {
        // The place is one in a text that nobody has seen.
        let text = error.to_string();
        return Err(gguf.wrong(MERGES, text.split(" at line ").next().unwrap_or(&text)));
    }
    let mut config = json!({
        // Not the model's own class, which would bring a pre-tokenizer of its own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": false,
        "chat_template": gguf.optional("tokenizer.chat_template", Gguf::text)?,
    });
    for (name, key) in [
        ("bos_token", "tokenizer.ggml.bos_token_id"),
        ("eos_token", "tokenizer.ggml.eos_token_id"),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
        ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ] {
        config[name] = special(gguf, &tokens, key)?.map(|(_, token)| token).into();
    }
    Ok(vec![("tokenizer.json", whole), ("tokenizer_config.json", format!("{config:#}\n"))])
}

fn vocabulary<'t>(gguf: &Gguf, tokens: &[&'t str]) -> Result<BTreeMap<&'t str, usize>, ModelError> {
    let mut ids = BTreeMap::new();
    for (id, token) in tokens.iter().enumerate() {
        if let Some(earlier) = ids.insert(*token, id) {
            let reason = format!("tokens {earlier} and {id} are both {token:?}");
            return Err(gguf.wrong(TOKENS, reason));
        }
    }
    Ok(ids)
}

/// Control tokens, and those that a user has added to the text's own.
fn added(gguf: &Gguf, tokens: &[&str]) -> Result<Vec<Value>, ModelError> {
    const CONTROL: u64 = 3;
    const USER_DEFINED: u64 = 4;
    let types = gguf.optional(TYPES, Gguf::counts)?.unwrap_or_default();
    if !types.is_empty() && types.len() != tokens.len() {
        let reason = format!("has {} entries for {} tokens", types.len(), tokens.len());
        return Err(gguf.wrong(TYPES, reason));
    }
    let one = |(id, (token, kind)): (usize, (&&str, u64))| {
        json!({
            "id": id, "content": token, "special": kind == CONTROL, "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false,
        })
    };
    let all = tokens.iter().zip(types).enumerate();
    Ok(all.filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind)).map(one).collect())
}

fn byte_level() -> Value {
    json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true,
    })
}

/// How text is cut before merging, by llama.cpp's name for it.
fn pre_tokenizer(gguf: &Gguf) -> Result<Value, ModelError> {
    match gguf.text("tokenizer.ggml.pre")? {
        "gpt-2" => Ok(byte_level()),
        "smollm" => Ok(json!({
            "type": "Sequence",
            "pretokenizers": [{ "type": "Digits", "individual_digits": true }, byte_level()],
        })),
        other => {
            let reason = format!("is {other:?}; this build knows \"gpt-2\" and \"smollm\"");
            Err(gguf.wrong("tokenizer.ggml.pre", reason))
        }
    }
}

/// Puts the BOS token in front of a prompt where the file asks for it.
fn post_processor(gguf: &Gguf, tokens: &[&str]) -> Result<Option<Value>, ModelError> {
    if gguf.optional("tokenizer.ggml.add_eos_token", Gguf::flag)? == Some(true) {
        let reason = "is true, and a prompt that ends in EOS has no completion";
        return Err(gguf.wrong("tokenizer.ggml.add_eos_token", reason));
    }
    if gguf.optional("tokenizer.ggml.add_bos_token", Gguf::flag)? != Some(true) {
        return Ok(None);
    }
    let key = "tokenizer.ggml.bos_token_id";
    let Some((id, token)) = special(gguf, tokens, key)? else {
        return Err(gguf.wrong(key, "is missing, and tokenizer.ggml.add_bos_token is true"));
    };
    let text = |id: &str| json!({ "Sequence": { "id": id, "type_id": 0 } });
    let bos = json!({ "SpecialToken": { "id": token, "type_id": 0 } });
    Ok(Some(json!({
        "type": "TemplateProcessing",
        "single": [bos, text("A")],
        "pair": [bos, text("A"), bos, text("B")],
        "special_tokens": { token: { "id": token, "ids": [id], "tokens": [token] } },
    })))
}

/// The token that a key names by its id.
fn special<'t>(
    gguf: &Gguf,
    tokens: &[&'t str],
    key: &str,
) -> Result<Option<(usize, &'t str)>, ModelError> {
    let Some(id) = gguf.optional(key, Gguf::count)? else { return Ok(None) };
    match tokens.get(id) {
        Some(token) => Ok(Some((id, token))),
        None => Err(gguf.wrong(key, format!("is {id}, of {} tokens", tokens.len()))),
    }
}
