//! The input of `score`: one JSON object a line.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::base::TokenId;
use crate::model::HfConfig;
use crate::trainer::Sequence;

/// A line is held in memory whole; this is some two million tokens.
const MAX_LINE_BYTES: u64 = 16 << 20;

/// What the file calls a sequence. It is handed on and means nothing here.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(untagged, expecting = "a string or a whole number")]
pub(super) enum Id {
    Text(String),
    Unsigned(u64),
    Signed(i64),
}

/// One line of the input.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Request {
    pub id: Id,
    pub sequence: Sequence,
}

/// What a model takes.
#[derive(Clone, Copy, Debug)]
pub(in crate::run) struct Limits {
    pub vocab: usize,
    /// The model's `max_position_embeddings`, where it has any.
    pub max_tokens: Option<usize>,
}

impl Limits {
    pub(in crate::run) fn of(config: &HfConfig) -> Self {
        Self { vocab: config.vocab_size, max_tokens: config.max_position_embeddings }
    }

    /// # Errors
    /// More tokens than the model has positions, or one outside its vocabulary.
    pub(in crate::run) fn check(self, tokens: &[TokenId]) -> Result<(), Problem> {
        let Self { vocab, max_tokens } = self;
        if let Some(max) = max_tokens.filter(|&max| tokens.len() > max) {
            return Err(Problem::TooManyTokens { len: tokens.len(), max });
        }
        match tokens.iter().position(|token| token.index() >= vocab) {
            Some(position) => {
                Err(Problem::OutsideVocabulary { token: tokens[position], position, vocab })
            }
            None => Ok(()),
        }
    }
}

/// The requests of a file, in order. Empty lines are skipped.
pub(super) struct Lines {
    path: PathBuf,
    file: BufReader<File>,
    limits: Limits,
    line: u64,
    bytes: Vec<u8>,
}

/// What is wrong with the input.
#[derive(Debug, thiserror::Error)]
pub(super) enum InputError {
    #[error("cannot read the tokens {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}, line {line}{}: {problem}", path.display(), Of(id))]
    Line { path: PathBuf, line: u64, id: Option<Id>, problem: Problem },
}

#[derive(Debug, thiserror::Error)]
pub(in crate::run) enum Problem {
    #[error("the line is over {limit} bytes, which is as much as is held in memory")]
    TooLong { limit: u64 },
    #[error(
        "expected an object such as {{\"id\":\"a\",\"token_ids\":[1,2],\"prompt_len\":1}}: {reason}"
    )]
    NoRequest { reason: String },
    #[error("{field} is missing; a line has id, token_ids and, if it is not 1, prompt_len")]
    Missing { field: &'static str },
    #[error("token_ids is empty")]
    NoTokens,
    #[error("token {token} at position {position} is outside the model's vocabulary of {vocab}")]
    OutsideVocabulary { token: TokenId, position: usize, vocab: usize },
    #[error(
        "prompt_len is {found} of {len} token(s); it takes 1 to {}: the first token is never \
         predicted, and there must be one to score",
        len - 1
    )]
    Prompt { found: u64, len: usize },
    #[error("1 token leaves nothing to score: the first token is never predicted")]
    OneToken,
    #[error("{len} tokens are more than the model's max_position_embeddings = {max}")]
    TooManyTokens { len: usize, max: usize },
}

/// As written; what may be missing is asked for afterwards, so that a message can name the id.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    id: Option<Id>,
    token_ids: Option<Vec<u32>>,
    prompt_len: Option<u64>,
}

impl Lines {
    pub(super) fn open(path: &Path, limits: Limits) -> Result<Self, InputError> {
        let failed = |source| InputError::Read { path: path.to_owned(), source };
        let kind = std::fs::metadata(path).map_err(failed)?;
        if !kind.is_file() {
            // The file is read twice, and a pipe only once.
            let reason =
                if kind.is_dir() { "it is a directory" } else { "it is not a regular file" };
            return Err(failed(io::Error::other(reason)));
        }
        let file = BufReader::new(File::open(path).map_err(failed)?);
        Ok(Self { path: path.to_owned(), file, limits, line: 0, bytes: Vec::new() })
    }

    fn read(&mut self) -> Result<Option<Request>, InputError> {
        loop {
            self.line += 1;
            self.bytes.clear();
            // One byte over the limit tells a line that is too long from one that just fits.
            let mut bounded = self.file.by_ref().take(MAX_LINE_BYTES + 1);
            let read = bounded.read_until(b'\n', &mut self.bytes);
            let read =
                read.map_err(|source| InputError::Read { path: self.path.clone(), source })?;
            if read == 0 {
                return Ok(None);
            }
            if read as u64 > MAX_LINE_BYTES || !self.bytes.trim_ascii().is_empty() {
                let request = request(&self.bytes, self.limits);
                return request.map(Some).map_err(|(id, problem)| InputError::Line {
                    path: self.path.clone(),
                    line: self.line,
                    id,
                    problem,
                });
            }
        }
    }
}

impl Iterator for Lines {
    type Item = Result<Request, InputError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}

type Refusal = (Option<Id>, Problem);

fn request(bytes: &[u8], limits: Limits) -> Result<Request, Refusal> {
    if bytes.len() as u64 > MAX_LINE_BYTES {
        return Err((None, Problem::TooLong { limit: MAX_LINE_BYTES }));
    }
    let bytes = bytes.trim_ascii();
    let no_request = |reason: String| (None, Problem::NoRequest { reason });
    // serde would take an array of the fields for the object.
    if !bytes.starts_with(b"{") {
        return Err(no_request("the line does not begin with {".to_owned()));
    }
    let written: Written = serde_json::from_slice(bytes).map_err(|error| {
        let (text, column) = (error.to_string(), error.column());
        // serde counts lines within the line.
        let reason = text.split(" at line ").next().unwrap_or(&text);
        no_request(format!("{reason} at column {column}"))
    })?;
    let id = written.id.ok_or((None, Problem::Missing { field: "id" }))?;
    match sequence(written.token_ids, written.prompt_len, limits) {
        Ok(sequence) => Ok(Request { id, sequence }),
        Err(problem) => Err((Some(id), problem)),
    }
}

fn sequence(
    token_ids: Option<Vec<u32>>,
    prompt_len: Option<u64>,
    limits: Limits,
) -> Result<Sequence, Problem> {
    let ids = token_ids.ok_or(Problem::Missing { field: "token_ids" })?;
    let len = ids.len();
    if len == 0 {
        return Err(Problem::NoTokens);
    }
    let tokens: Vec<TokenId> = ids.into_iter().map(TokenId::new).collect();
    limits.check(&tokens)?;
    if len == 1 {
        return Err(Problem::OneToken);
    }
    let found = prompt_len.unwrap_or(1);
    match usize::try_from(found) {
        Ok(prompt_len) if (1..len).contains(&prompt_len) => Ok(Sequence { tokens, prompt_len }),
        _ => Err(Problem::Prompt { found, len }),
    }
}

/// The id in a message, where it is known.
struct Of<'a>(&'a Option<Id>);

impl fmt::Display for Of<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => Ok(()),
            Some(Id::Text(id)) => write!(f, ", id {id:?}"),
            Some(Id::Unsigned(id)) => write!(f, ", id {id}"),
            Some(Id::Signed(id)) => write!(f, ", id {id}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { vocab: 256, max_tokens: Some(8) };

    fn check(line: &str, expected: Result<(&str, usize, usize), &str>) {
        let found = request(line.as_bytes(), LIMITS);
        match (found, expected) {
            (Ok(request), Ok((id, len, prompt_len))) => {
                let found = (request.sequence.tokens.len(), request.sequence.prompt_len);
                assert_eq!(serde_json::to_string(&request.id).unwrap(), id, "{line}");
                assert_eq!(found, (len, prompt_len), "{line}");
            }
            (Err((id, problem)), Err(expected)) => {
                let message = format!("{}: {problem}", Of(&id));
                assert!(message.contains(expected), "{line}: {message}");
            }
            (found, expected) => panic!("{line}: {found:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn lines() {
        check("{\"id\":\"a\",\"token_ids\":[0,255]}", Ok(("\"a\"", 2, 1)));
        check("{\"id\":7,\"token_ids\":[1,2,3],\"prompt_len\":2}\r\n", Ok(("7", 3, 2)));
        check("{\"id\":-7,\"token_ids\":[1,2,3],\"prompt_len\":null}", Ok(("-7", 3, 1)));
        let written = "expected an object such as {\"id\":\"a\",\"token_ids\":[1,2],\
            \"prompt_len\":1}: ";
        for (line, reason) in [
            ("nonsense", "the line does not begin with {"),
            ("[\"a\",[1,2],1]", "the line does not begin with {"),
            ("{\"id\":\"a\",\"token_ids\":[1,2", "EOF while parsing a list at column"),
            ("{\"id\":\"a\",\"token_ids\":[1,-2]}", "invalid value: integer `-2`, expected u32"),
            ("{\"id\":\"a\",\"token_ids\":[1,2.5]}", "invalid type: floating point `2.5`"),
            ("{\"id\":\"a\",\"token_ids\":[1,Infinity]}", "expected value at column"),
            ("{\"id\":1.5,\"token_ids\":[1,2]}", "a string or a whole number"),
            ("{\"id\":1,\"tokens\":[1,2]}", "unknown field `tokens`, expected one of `id`"),
            ("{\"id\":1,\"id\":2,\"token_ids\":[1,2]}", "duplicate field `id`"),
            ("{\"id\":1,\"token_ids\":[1,2],\"prompt_len\":-1}", "invalid value: integer `-1`"),
            ("{\"id\":1,\"token_ids\":[1,2]} {}", "trailing characters at column"),
        ] {
            check(line, Err(&format!(": {written}{reason}")));
        }
        for (line, message) in [
            ("{\"token_ids\":[1,2]}", ": id is missing; a line has id, token_ids and, if it is"),
            ("{\"id\":\"a\"}", ", id \"a\": token_ids is missing; a line has"),
            ("{\"id\":5,\"token_ids\":[]}", ", id 5: token_ids is empty"),
            ("{\"id\":5,\"token_ids\":[1]}", ", id 5: 1 token leaves nothing to score"),
            (
                "{\"id\":5,\"token_ids\":[1,2,256]}",
                "token 256 at position 2 is outside the model's vocabulary of 256",
            ),
            (
                "{\"id\":5,\"token_ids\":[1,2,3],\"prompt_len\":0}",
                "prompt_len is 0 of 3 token(s); it takes 1 to 2: the first token is never",
            ),
            ("{\"id\":5,\"token_ids\":[1,2,3],\"prompt_len\":3}", "prompt_len is 3 of 3 token(s)"),
            (
                "{\"id\":5,\"token_ids\":[1,2,3,4,5,6,7,8,9]}",
                "9 tokens are more than the model's max_position_embeddings = 8",
            ),
        ] {
            check(line, Err(message));
        }
    }

    #[test]
    fn a_line_without_an_end_is_not_read_to_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long.jsonl");
        std::fs::write(&path, vec![b'1'; MAX_LINE_BYTES as usize + 2]).unwrap();
        let error = Lines::open(&path, LIMITS).unwrap().next().unwrap().unwrap_err();
        let expected = format!(
            "{}, line 1: the line is over 16777216 bytes, which is as much as is held in memory",
            path.display()
        );
        assert_eq!(error.to_string(), expected);
    }
}
