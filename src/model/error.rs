//! What can be wrong with a model folder.

use std::path::PathBuf;

/// Every message says what was asked, what was found and, where it is not plain, what to do.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
    #[error(
        "{path} is not a model folder: {reason}; name a folder that holds config.json and \
         model.safetensors, or a preset: {presets}"
    )]
    NotAFolder { path: PathBuf, reason: &'static str, presets: String },
    #[error("{path}: not JSON: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: {field}: {reason}")]
    Field { path: PathBuf, field: String, reason: String },
    #[error("{path}: {field}: {source}")]
    JsonField { path: PathBuf, field: String, source: serde_json::Error },
    #[error(
        "{path} holds {bytes} bytes that are no whole safetensors file ({reason}): copy or \
         download it again"
    )]
    Safetensors { path: PathBuf, reason: String, bytes: u64 },
    #[error(
        "{path} holds {bytes} bytes that are no whole GGUF file ({reason}): copy or download it \
         again"
    )]
    Gguf { path: PathBuf, reason: String, bytes: u64 },
    #[error(
        "{index}: tensor {tensor} is in the shard {shard}, which cannot be read: {source}; copy or \
         download it again"
    )]
    Shard { index: PathBuf, shard: String, tensor: String, source: std::io::Error },
    #[error("{path}: tensor {name}: {reason}")]
    Tensor { path: PathBuf, name: String, reason: String },
    #[error("unknown preset {found:?}; the presets are {known}")]
    Preset { found: String, known: String },
    #[error("{path} already exists; name a folder that does not")]
    Exists { path: PathBuf },
}
