//! Problems from a file of one JSON object a line.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::error::LineProblem;
use super::reward::Reward;
use super::task::Problem;
use super::text::Codec;
use super::RolloutError;
use crate::base::Step;
use crate::config::RewardConfig;

const MAX_LINE_BYTES: u64 = 16 << 20;

/// The problems of a file, all read at the start so that its faults show before the first step.
#[derive(Debug)]
pub struct Jsonl {
    path: PathBuf,
    prompt_key: String,
    rows: Vec<Row>,
    reward: Reward,
}

#[derive(Debug)]
struct Row {
    /// Counted from 1.
    line: u64,
    prompt: String,
    answer: String,
}

impl Jsonl {
    /// Empty lines are skipped.
    ///
    /// # Errors
    /// A file that cannot be read or holds no problem; a line over 16 MiB, that is no JSON object,
    /// lacks a key, or has a prompt or an answer that cannot be used; an impossible reward.
    pub fn open(
        path: &Path,
        prompt_key: &str,
        answer_key: &str,
        reward: &RewardConfig,
        codec: &Codec,
    ) -> Result<Self, RolloutError> {
        let reward = Reward::new(reward)?;
        let file_error = |source| RolloutError::TaskFile { path: path.to_owned(), source };
        // A pipe may never end, and never begin.
        if !std::fs::metadata(path).map_err(file_error)?.is_file() {
            return Err(file_error(std::io::Error::other("it is not a regular file")));
        }
        let mut file = BufReader::new(File::open(path).map_err(file_error)?);
        let (mut rows, mut bytes) = (Vec::new(), Vec::new());
        for line in 1.. {
            bytes.clear();
            // One byte over the limit tells a line that is too long from one that just fits.
            let read = file.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut bytes);
            if read.map_err(file_error)? == 0 {
                break;
            }
            if bytes.trim_ascii().is_empty() && bytes.len() as u64 <= MAX_LINE_BYTES {
                continue;
            }
            let judged = (!matches!(reward, Reward::None)).then_some(answer_key);
            let row = read_row(&bytes, prompt_key, judged).and_then(|(prompt, answer)| {
                check_row(&prompt, &answer, prompt_key, answer_key, &reward, codec)?;
                Ok(Row { line, prompt, answer })
            });
            let at_line = |problem| RolloutError::TaskLine { path: path.to_owned(), line, problem };
            rows.push(row.map_err(at_line)?);
        }
        if rows.is_empty() {
            return Err(RolloutError::NoProblems { path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned(), prompt_key: prompt_key.to_owned(), rows, reward })
    }

    pub(super) fn reward(&self) -> &Reward {
        &self.reward
    }

    /// Row (step - 1) * n + index, counted around the end of the file.
    pub(super) fn problem(
        &self,
        step: Step,
        n: u32,
        index: u32,
        codec: &Codec,
    ) -> Result<Problem, RolloutError> {
        assert!(step.get() >= 1 && index < n, "step {step} and index {index} of {n}");
        let count = u128::from(step.get() - 1) * u128::from(n) + u128::from(index);
        let row = &self.rows[(count % self.rows.len() as u128) as usize];
        let prompt = codec.encode_prompt(&row.prompt).map_err(|source| {
            let problem =
                LineProblem::Text { key: self.prompt_key.clone(), source: Box::new(source) };
            RolloutError::TaskLine { path: self.path.clone(), line: row.line, problem }
        })?;
        Ok(Problem { text: row.prompt.clone(), prompt, answer: row.answer.clone() })
    }
}

fn read_row(
    bytes: &[u8],
    prompt_key: &str,
    answer_key: Option<&str>,
) -> Result<(String, String), LineProblem> {
    let content = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    if content.len() as u64 > MAX_LINE_BYTES {
        return Err(LineProblem::TooLong { limit_bytes: MAX_LINE_BYTES });
    }
    let value: Value = serde_json::from_slice(content).map_err(|error| {
        let text = error.to_string();
        // The position in serde's message is within the line; it is said here as the file's.
        let reason = text.split(" at line ").next().unwrap_or(&text).to_owned();
        LineProblem::NotJson { column: error.column(), reason }
    })?;
    let Value::Object(object) = value else {
        return Err(LineProblem::NotAnObject { found: kind_of(&value) });
    };
    let answer = answer_key.map_or(Ok(String::new()), |key| text_of(&object, key))?;
    Ok((text_of(&object, prompt_key)?, answer))
}

fn text_of(object: &Map<String, Value>, key: &str) -> Result<String, LineProblem> {
    match object.get(key) {
        Some(Value::String(text)) => Ok(text.clone()),
        // A fraction would come back in a spelling that the file does not have.
        Some(Value::Number(number)) if !number.is_f64() => Ok(number.to_string()),
        Some(other) => Err(LineProblem::WrongType { key: key.to_owned(), found: kind_of(other) }),
        None => {
            let found = object.keys().cloned().collect();
            Err(LineProblem::MissingKey { key: key.to_owned(), found })
        }
    }
}

fn check_row(
    prompt: &str,
    answer: &str,
    prompt_key: &str,
    answer_key: &str,
    reward: &Reward,
    codec: &Codec,
) -> Result<(), LineProblem> {
    let text_error = |key: &str| {
        let key = key.to_owned();
        move |source| LineProblem::Text { key, source: Box::new(source) }
    };
    if prompt.is_empty() {
        return Err(LineProblem::EmptyPrompt { key: prompt_key.to_owned() });
    }
    codec.check(prompt).map_err(text_error(prompt_key))?;
    codec.check(answer).map_err(text_error(answer_key))?;
    if !reward.can_judge(answer) {
        let answer = super::text::excerpt(answer);
        return Err(LineProblem::NoNumber { key: answer_key.to_owned(), answer });
    }
    Ok(())
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number that is not whole",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::base::TokenId;
    use crate::rollout::reward::Graded;
    use crate::rollout::SpecialTokens;

    /// Three problems on lines 1, 2 and 4.
    const PROBLEMS: &str = include_str!("../../tests/fixtures/problems.jsonl");

    fn codec() -> Codec {
        let eos = vec![TokenId::new(2)];
        let bos = Some(TokenId::new(1));
        Codec::bytes(256, SpecialTokens { pad: None, bos, eos }).unwrap()
    }

    fn open(content: &[u8], reward: &RewardConfig) -> Result<Jsonl, String> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content).unwrap();
        Jsonl::open(file.path(), "question", "answer", reward, &codec())
            .map_err(|error| error.to_string().replace(&file.path().display().to_string(), "FILE"))
    }

    fn check_error(content: &str, reward: &RewardConfig, expected: &str) {
        assert_eq!(open(content.as_bytes(), reward).err().as_deref(), Some(expected), "{content}");
    }

    #[test]
    fn rows_are_walked_in_order_and_around() {
        let task = open(PROBLEMS.as_bytes(), &RewardConfig::Numeric).unwrap();
        assert_eq!(task.rows.iter().map(|row| row.line).collect::<Vec<_>>(), [1, 2, 4]);
        let answer = |step, n, index| {
            let problem = task.problem(Step::new(step), n, index, &codec()).unwrap();
            assert_eq!(problem.prompt, codec().encode_prompt(&problem.text).unwrap());
            problem.answer.rsplit_once(' ').unwrap().1.to_owned()
        };
        let walk = |n: u32| -> Vec<String> {
            (1..=3)
                .flat_map(|step| (0..n).map(move |index| (step, index)))
                .map(|(step, index)| answer(step, n, index))
                .collect()
        };
        assert_eq!(walk(1), ["1,200", "-7", "3.5"]);
        assert_eq!(walk(2), ["1,200", "-7", "3.5", "1,200", "-7", "3.5"]);
        // (2^64 - 2) * 5 + 4 is 2 modulo 3; wrapped to 64 bits it would be 1.
        assert_eq!(answer(u64::MAX, 5, 4), "3.5");
    }

    #[test]
    fn every_row_is_its_own_right_answer() {
        let task = open(PROBLEMS.as_bytes(), &RewardConfig::Numeric).unwrap();
        for row in &task.rows {
            let graded = |completion: &str| Graded {
                prompt: &row.prompt,
                completion: completion.to_owned(),
                answer: &row.answer,
            };
            let step = [graded(&row.answer), graded("1"), graded("")];
            assert_eq!(task.reward().score(&step).unwrap(), [1.0, 0.0, 0.0]);
        }
    }

    #[test]
    fn whole_numbers_are_answers() {
        let task = open(br#"{"question": "2+3", "answer": 5}"#, &RewardConfig::Numeric).unwrap();
        assert_eq!(task.rows[0].answer, "5");
    }

    #[test]
    fn bad_lines_are_named() {
        let exact = &RewardConfig::Exact;
        let good = r#"{"question": "q", "answer": "a"}"#;
        for (line, expected) in [
            (r#"{"question": "q","#, "column 17: not JSON: EOF while parsing a value"),
            (r#"{"question": NaN}"#, "column 14: not JSON: expected value"),
            ("good", "column 1: not JSON: expected value"),
            (r#"["q", "a"]"#, "column 1: an array, where a JSON object is needed"),
            (r#"{"question": "q"}"#, r#"no key "answer"; the keys here are ["question"]"#),
            (
                r#"{"answer": "a", "Question": "q"}"#,
                r#"no key "question"; the keys here are ["Question", "answer"]"#,
            ),
            (
                r#"{"question": "", "answer": "a"}"#,
                r#"key "question" is empty, and an empty prompt has nothing to go on from"#,
            ),
            (
                r#"{"question": "q", "answer": 0.1}"#,
                r#"key "answer" holds a number that is not whole; write it as a string"#,
            ),
            (
                r#"{"question": null, "answer": "a"}"#,
                r#"key "question" holds null; write it as a string"#,
            ),
            (
                r#"{"question": "q\u0001", "answer": "a"}"#,
                "key \"question\": byte 0x01 at offset 1 of \"q\\u{1}\" cannot be text: the model \
                 uses token id 1 as bos; take the byte out",
            ),
        ] {
            let content = format!("{good}\n\n{line}\n{good}\n");
            check_error(&content, exact, &format!("FILE, line 3: {expected}"));
        }
        check_error(
            r#"{"question": "q", "answer": "none"}"#,
            &RewardConfig::Numeric,
            r#"FILE, line 1: key "answer" holds no number for the numeric reward: "none""#,
        );
        let broken = open(b"{\"question\": \"\xff\"}", exact).unwrap_err();
        assert!(broken.starts_with("FILE, line 1: column 15: not JSON: "), "{broken}");
    }

    #[test]
    fn files_without_problems_are_refused() {
        for content in ["", "\n\n", " \r\n"] {
            let expected =
                "FILE: no problem in it; task.path must name a file of one JSON object a line";
            check_error(content, &RewardConfig::Exact, expected);
        }
        let path = Path::new("/no/such/file.jsonl");
        let error = Jsonl::open(path, "q", "a", &RewardConfig::Exact, &codec()).unwrap_err();
        let expected =
            "/no/such/file.jsonl: No such file or directory (os error 2); task.path must \
                        name a readable JSON Lines file";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn lines_are_bounded() {
        let limit = MAX_LINE_BYTES as usize;
        let mut content = br#"{"question": "q", "answer": ""#.to_vec();
        content.resize(limit - 2, b'x');
        content.extend_from_slice(b"\"}\n");
        assert_eq!(open(&content, &RewardConfig::Exact).unwrap().rows.len(), 1);
        content.insert(limit - 3, b'x');
        let expected =
            "FILE, line 1: longer than 16777216 bytes; split the file's problems over lines";
        assert_eq!(open(&content, &RewardConfig::Exact).unwrap_err(), expected);
    }
}
