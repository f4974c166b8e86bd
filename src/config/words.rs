//! A command line as its words.

/// Splits at blanks, as a shell does, and does nothing else that a shell does: quotes hold a word
/// together, a backslash takes the next character as it is (within double quotes before `"` and
/// `\` alone).
///
/// # Errors
/// A quote that is never closed, or a backslash at the very end.
pub(super) fn words(text: &str) -> Result<Vec<String>, String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match (quote, c) {
            (Some(open), _) if c == open => quote = None,
            (Some('"'), '\\') if matches!(chars.peek(), Some('"' | '\\')) => {
                word.get_or_insert_default().extend(chars.next());
            }
            (Some(_), _) => word.get_or_insert_default().push(c),
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, '\\') => match chars.next() {
                Some(next) => word.get_or_insert_default().push(next),
                None => return Err("a command that does not end in a backslash".to_owned()),
            },
            (None, _) if c.is_whitespace() => words.extend(word.take()),
            (None, _) => word.get_or_insert_default().push(c),
        }
    }
    match quote {
        Some(open) => Err(format!("a command in which every {open} is closed")),
        None => {
            words.extend(word);
            Ok(words)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blanks_part_words_and_quotes_hold_them() {
        for (text, expected) in [
            ("vllm  serve\t/m \n", vec!["vllm", "serve", "/m"]),
            ("a 'b c' \"d 'e\"", vec!["a", "b c", "d 'e"]),
            (r#"--x='{"a": 1}'"#, vec![r#"--x={"a": 1}"#]),
            (r#"a\ b "c\"d\n" '\'"#, vec!["a b", r#"c"d\n"#, r"\"]),
            ("'' x", vec!["", "x"]),
            ("$HOME *.py ; ls", vec!["$HOME", "*.py", ";", "ls"]),
            ("  ", vec![]),
        ] {
            assert_eq!(words(text).expect(text), expected, "{text}");
        }
        for (text, expected) in [
            ("a 'b", "a command in which every ' is closed"),
            ("a \"b'", "a command in which every \" is closed"),
            ("a \\", "a command that does not end in a backslash"),
        ] {
            assert_eq!(words(text).expect_err(text), expected);
        }
    }
}
