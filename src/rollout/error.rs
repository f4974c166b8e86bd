//! What can go wrong between text and rewards, said so that the reader knows what to change.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

/// Every error of this room.
#[derive(Debug, thiserror::Error)]
pub enum RolloutError {
    #[error(
        "{path}: {source}; a model folder has a readable tokenizer.json, or none and then its \
         tokens are bytes"
    )]
    TokenizerFile { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    #[error(
        "{path}: token id {id} ({token:?}) is outside the model's vocabulary of {vocab_size}; the \
         tokenizer belongs to another model"
    )]
    TokenizerTooLarge { path: PathBuf, id: u32, token: String, vocab_size: u32 },
    #[error("{path}: cannot encode {text:?}: {source}")]
    Encode { path: PathBuf, text: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error(
        "the model's vocabulary of {vocab_size} is too small for bytes as tokens (256); put its \
         tokenizer.json into the model folder"
    )]
    TooFewIdsForBytes { vocab_size: u32 },
    #[error("the {name} token id {id} is outside the model's vocabulary of {vocab_size}")]
    SpecialOutsideVocabulary { name: &'static str, id: u32, vocab_size: u32 },
    #[error(
        "byte {byte:#04x} at offset {offset} of {text:?} cannot be text: the model uses token id \
         {byte} as {name}; take the byte out"
    )]
    ReservedByte { byte: u8, offset: usize, name: &'static str, text: String },

    #[error("task.{key} = {value} is over its limit of {limit}; lower it")]
    OverLimit { key: &'static str, value: u64, limit: u64 },
    #[error("task.operators = {operators:?} must be one or more of \"+-*\"")]
    Operators { operators: String },
    #[error(
        "the prompt {prompt:?} takes {tokens} tokens, over task.prompt_tokens = {prompt_tokens}; \
         raise it, or lower task.examples or task.max_operand"
    )]
    PromptTooLong { prompt: String, tokens: usize, prompt_tokens: u32 },
    #[error(
        "task.prompt_tokens pads with empty lines, and a line end takes {tokens} tokens of this \
         tokenizer where exactly one is needed; remove task.prompt_tokens"
    )]
    NoPadding { tokens: usize },

    #[error("{path}: {source}; task.path must name a readable JSON Lines file")]
    TaskFile { path: PathBuf, source: io::Error },
    #[error("{path}: no problem in it; task.path must name a file of one JSON object a line")]
    NoProblems { path: PathBuf },
    #[error("{path}, line {line}: {problem}")]
    TaskLine { path: PathBuf, line: u64, problem: LineProblem },

    #[error("task.reward_pattern {pattern:?} is not a regular expression: {source}")]
    Pattern { pattern: String, source: regex::Error },
    #[error("task.reward_command names no program; write [\"program\", \"argument\", ...]")]
    NoProgram,
    #[error("task.reward_timeout_s = {timeout_s} must be a positive number of seconds")]
    Timeout { timeout_s: f64 },
    #[error("reward command {program:?}: {failure}")]
    Command { program: String, failure: CommandFailure },
}

/// What is wrong with one line of a task file.
#[derive(Debug, thiserror::Error)]
pub enum LineProblem {
    #[error("longer than {limit_bytes} bytes; split the file's problems over lines")]
    TooLong { limit_bytes: u64 },
    #[error("column {column}: not JSON: {reason}")]
    NotJson { column: usize, reason: String },
    #[error("column 1: {found}, where a JSON object is needed")]
    NotAnObject { found: &'static str },
    #[error("no key {key:?}; the keys here are {found:?}")]
    MissingKey { key: String, found: Vec<String> },
    #[error("key {key:?} holds {found}; write it as a string")]
    WrongType { key: String, found: &'static str },
    #[error("key {key:?} is empty, and an empty prompt has nothing to go on from")]
    EmptyPrompt { key: String },
    #[error("key {key:?} holds no number for the numeric reward: {answer:?}")]
    NoNumber { key: String, answer: String },
    #[error("key {key:?}: {source}")]
    Text { key: String, source: Box<RolloutError> },
}

/// How a reward command failed. Standard error is quoted from its end.
#[derive(Debug, thiserror::Error)]
pub enum CommandFailure {
    #[error(
        "cannot be started: {0}; the first of task.reward_command must be a program on PATH or a \
         path"
    )]
    Start(io::Error),
    #[error("its pipes failed: {0}")]
    Pipe(io::Error),
    #[error("{status}{}", quoted(.stderr))]
    Exit { status: ExitStatus, stderr: String },
    #[error(
        "not done after {timeout_s} s with {completions} completions, killed; raise \
         task.reward_timeout_s or lower the work{}", quoted(.stderr)
    )]
    TimedOut { timeout_s: f64, completions: usize, stderr: String },
    #[error(
        "printed more than {limit_bytes} bytes for {completions} completions, killed; it must \
         print one number a line{}", quoted(.stderr)
    )]
    Flood { limit_bytes: u64, completions: usize, stderr: String },
    #[error(
        "line {} of its output is missing: it printed {found} lines for {expected} completions{}",
        .found + 1, quoted(.stderr)
    )]
    TooFewLines { expected: usize, found: usize, stderr: String },
    #[error(
        "line {} of its output is one too many: it printed {found} lines for {expected} \
         completions{}", .expected + 1, quoted(.stderr)
    )]
    TooManyLines { expected: usize, found: usize, stderr: String },
    #[error("line {line} of its output is {found:?}, not a finite number{}", quoted(.stderr))]
    NotANumber { line: usize, found: String, stderr: String },
}

fn quoted(stderr: &str) -> String {
    if stderr.is_empty() {
        return "; its standard error is empty".to_owned();
    }
    format!("; its standard error ends\n{stderr}")
}
