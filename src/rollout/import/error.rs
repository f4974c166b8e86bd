//! What can be wrong with a dump, said with file and line.

use std::io;
use std::path::PathBuf;

use super::line::MAX_LINE_BYTES;

#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    #[error("{}: {source}; give a dump's file or folder that can be read", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: no record in it; was the dump cut off before its first one?", path.display())]
    Empty { path: PathBuf },
    #[error(
        "{} is a folder without a dump: it holds no tokens/step-NNNNN.parquet (gapscope), no \
         train_data_stepN.jsonl (NeMo-RL), and no step_N/rank_R.jsonl (prime-rl)", path.display()
    )]
    NoDump { path: PathBuf },
    #[error(
        "{}: no step_N in it has the STABLE marker, so prime-rl is still writing or was stopped; \
         wait, or name the files themselves", path.display()
    )]
    NothingStable { path: PathBuf },
    #[error(
        "{}, line {line}: no format of a dump with both sides' log-probabilities has these keys: \
         {keys:?}; NeMo-RL has generation_logprobs and prev_logprobs, prime-rl inference_logprobs \
         and trainer_logprobs, a vLLM response choices, torchtitan turns; pass --format if it is \
         one of them", path.display()
    )]
    UnknownFormat { path: PathBuf, line: u64, keys: Vec<String> },
    #[error("{}, line {line}: {problem}", path.display())]
    Record { path: PathBuf, line: u64, problem: Box<RecordProblem> },
}

/// What is wrong with one record.
#[derive(Debug, thiserror::Error)]
pub enum RecordProblem {
    #[error(
        "longer than {MAX_LINE_BYTES} bytes, the most that is read of a line; one record is one \
         line"
    )]
    TooLong,
    #[error("column {column}: not a record: {reason}")]
    NotJson { column: usize, reason: String },
    #[error("not a JSON object; one record is one object")]
    NotAnObject,
    #[error(
        "sample {place} has no token ids; ask the server with return_token_ids, and give prompts \
         as ids: text is not tokenised again"
    )]
    NoTokenIds { place: u32 },
    #[error("sample {place} has no log-probabilities; ask the server with logprobs")]
    NoLogProbs { place: u32 },
    #[error("no key {key:?}, which a {format} record has")]
    MissingKey { key: &'static str, format: &'static str },
    #[error(
        "token_ids has {tokens} entries and {key} has {found}: lengths {tokens} and {found}; both \
         sides and the mask must be of the same tokens"
    )]
    Length { key: &'static str, tokens: usize, found: usize },
    #[error("the two sides' token ids differ: {0}; no gap is computed, hand token ids on")]
    TokenIds(String),
    #[error("{key}[{at}] is {found}, not a token id")]
    NotAnId { key: &'static str, at: usize, found: String },
    #[error("{key}[{at}] is {found}, neither 0 nor 1")]
    NotAMask { key: &'static str, at: usize, found: String },
    #[error("{key} is {found}, not one whole number up to {limit}")]
    NotACount { key: &'static str, found: String, limit: u64 },
    #[error("the mask counts token {at}, which is padding: input_lengths is {length}")]
    MaskedPadding { at: usize, length: usize },
    #[error("{key}{problem}")]
    Routes { key: &'static str, problem: String },
    #[error(
        "routed_experts has {engine} layers and trainer_routed_experts {trainer}; both are of the \
         layers with experts, in order"
    )]
    RouteLayers { engine: usize, trainer: usize },
    #[error("schema_version is {found}, and only 1 is known")]
    Schema { found: u64 },
    #[error("the record is of step {found}, its file of step {expected}; a file is of one step")]
    OtherStep { found: u64, expected: u64 },
    #[error("{key} is {found}, not {takes}")]
    Sampling { key: &'static str, found: f64, takes: &'static str },
    #[error("{key} is {found:?}; raw_logprobs and processed_logprobs are known")]
    Mode { key: &'static str, found: String },
    #[error(
        "the two sides' log-probabilities are of unlike distributions: inference {infer}, trainer \
         {train}; recompute one side, or pass --allow-unlike to compare them as they are"
    )]
    Unlike { infer: String, train: String },
}
