//! What a server has printed last, and why it ended.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

/// What is read of one line; an engine that dies may print its whole queue as one.
const LINE_BYTES: u64 = 4096;
const LINES: usize = 8;
const SHOWN_CHARS: usize = 300;

/// The last lines of a log, and before them the first one that names an error, which is the cause
/// where many follow from it. Only what stands behind `from`, in bytes, is this server's.
pub(super) fn last_words(log: &Path, from: u64) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        file.seek(SeekFrom::Start(from))?;
        told(BufReader::new(file))
    };
    read().unwrap_or_else(|error| error.to_string())
}

fn told(mut log: impl BufRead) -> std::io::Result<String> {
    let mut cause: Option<String> = None;
    let mut end: Vec<String> = Vec::new();
    while let Some(line) = next_line(&mut log)? {
        if line.trim().is_empty() {
            continue;
        }
        let names_error = line.contains("Error: ") && !line.contains("WARNING");
        if cause.is_none() && names_error {
            cause = Some(line.clone());
        }
        end.push(line);
        if end.len() > LINES {
            end.remove(0);
        }
    }
    let cause = cause.filter(|cause| !end.contains(cause));
    let all: Vec<String> = cause.into_iter().chain(end).collect();
    Ok(if all.is_empty() { "(none)".to_owned() } else { all.join("\n") })
}

/// The beginning of the next line; `None` at the end.
fn next_line(log: &mut impl BufRead) -> std::io::Result<Option<String>> {
    let mut bytes = Vec::new();
    if log.by_ref().take(LINE_BYTES).read_until(b'\n', &mut bytes)? == 0 {
        return Ok(None);
    }
    if !bytes.ends_with(b"\n") {
        log.skip_until(b'\n')?;
    }
    let line = String::from_utf8_lossy(&bytes);
    Ok(Some(line.trim_end().chars().take(SHOWN_CHARS).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_stands_before_the_end() {
        let long = format!("dump {}\n", "x".repeat(10_000));
        let end = "a\nb\nc\nd\ne\nf\ng\nh";
        for (text, expected) in [
            (String::new(), "(none)".to_owned()),
            ("one\n\n two \n".to_owned(), "one\n two".to_owned()),
            ("ValueError: no\nbye".to_owned(), "ValueError: no\nbye".to_owned()),
            (
                format!("WARNING OSError: 24\nRuntimeError: first\n{long}KeyError: later\n{end}\n"),
                format!("RuntimeError: first\n{end}"),
            ),
            (long.clone(), long[..SHOWN_CHARS].to_owned()),
        ] {
            assert_eq!(told(text.as_bytes()).expect("a text"), expected);
        }
    }
}
