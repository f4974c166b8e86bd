//! Lines of bounded length, and what Python's json writes beside JSON.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use memchr::{memchr2, memchr3};

use super::{at_line, ImportError, RecordProblem};

/// The most that is read of one line: some 800,000 tokens with both sides' log-probabilities.
pub(super) const MAX_LINE_BYTES: u64 = 64 << 20;

/// Stands before the name of a non-finite number in a string that stands for one. Neither Python
/// nor any tokenizer writes it into a number's place.
pub(super) const MARK: char = '\u{7f}';

#[derive(Debug)]
pub(super) struct Lines {
    path: PathBuf,
    file: BufReader<File>,
    line: u64,
}

impl Lines {
    pub(super) fn open(path: &Path) -> Result<Self, ImportError> {
        let error = |source| ImportError::Read { path: path.to_owned(), source };
        // A pipe may never end, and never begin.
        if !std::fs::metadata(path).map_err(error)?.is_file() {
            return Err(error(std::io::Error::other("it is not a regular file")));
        }
        let file = BufReader::with_capacity(1 << 20, File::open(path).map_err(error)?);
        Ok(Self { path: path.to_owned(), file, line: 0 })
    }

    /// The next line that is not blank, without its end, and its number from 1.
    pub(super) fn next_line(&mut self) -> Result<Option<(Vec<u8>, u64)>, ImportError> {
        loop {
            let mut bytes = Vec::new();
            self.line += 1;
            // One byte over the limit tells a line that is too long from one that just fits.
            let read = self.file.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut bytes);
            let read =
                read.map_err(|source| ImportError::Read { path: self.path.clone(), source })?;
            if read == 0 {
                return Ok(None);
            }
            if bytes.ends_with(b"\n") {
                bytes.pop();
            }
            if bytes.len() as u64 > MAX_LINE_BYTES {
                return Err(at_line(&self.path, self.line, RecordProblem::TooLong));
            }
            if !bytes.trim_ascii().is_empty() {
                return Ok(Some((bytes, self.line)));
            }
        }
    }
}

/// Python's json writes NaN, Infinity and -Infinity bare. Each becomes a string of the same length
/// that [`MARK`] begins, so that columns in messages stay; strings are left alone.
pub(in crate::rollout) fn quote_non_finite(line: &mut [u8]) {
    const WORDS: [(&[u8], &[u8]); 3] =
        [(b"NaN", b"\"\x7f\""), (b"Infinity", b"\"\x7f+inf \""), (b"-Infinity", b"\"\x7f-inf  \"")];
    let mut at = 0;
    while let Some(found) = memchr3(b'"', b'N', b'I', line.get(at..).unwrap_or_default()) {
        at += found;
        match line[at] {
            b'"' => at = end_of_string(line, at),
            _ => {
                let is_negative = line[..at].ends_with(b"-") && line[at] == b'I';
                let from = at - usize::from(is_negative);
                at += 1;
                let word = WORDS.iter().find(|(word, _)| line[from..].starts_with(word));
                if let Some((word, quoted)) = word {
                    at = from + word.len();
                    line[from..at].copy_from_slice(quoted);
                }
            }
        }
    }
}

/// Behind the closing quote of the string that opens at `from`.
fn end_of_string(line: &[u8], from: usize) -> usize {
    let mut at = from + 1;
    while let Some(found) = memchr2(b'"', b'\\', line.get(at..).unwrap_or_default()) {
        at += found;
        match line[at] {
            b'"' => return at + 1,
            _ => at += 2,
        }
    }
    line.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bare_words_are_quoted() {
        for (line, expected) in [
            ("[NaN, 1]", "[\"\u{7f}\", 1]"),
            ("[Infinity,-Infinity]", "[\"\u{7f}+inf \",\"\u{7f}-inf  \"]"),
            (r#"{"NaN": "Infinity"}"#, r#"{"NaN": "Infinity"}"#),
            (r#"["a \" NaN", "\\", NaN]"#, "[\"a \\\" NaN\", \"\\\\\", \"\u{7f}\"]"),
            ("[-1, -I, Na]", "[-1, -I, Na]"),
            (r#"["never closed NaN"#, r#"["never closed NaN"#),
            (r#"["ends in \"#, r#"["ends in \"#),
        ] {
            let mut bytes = line.as_bytes().to_vec();
            quote_non_finite(&mut bytes);
            assert_eq!(String::from_utf8(bytes).unwrap(), expected);
        }
    }
}
