//! JSON as Python writes it: with bare `NaN`, `Infinity` and `-Infinity`, which are not JSON
//! (ai-dynamo/dynamo#3043), or with `{"__float__": "Infinity"}`, as transformers 5 writes them.

use serde::{Deserialize, Deserializer};

/// Each bare word and the string of the same length that stands in for it, so that the line and
/// column of any later error stay those of the file. The longest first.
const WORDS: [(&str, &str); 3] =
    [("-Infinity", "\"-inf\"   "), ("Infinity", "\"inf\"   "), ("NaN", "\"?\"")];

/// The text with its bare words, outside of strings, made into strings that [`Float`] reads.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut in_string) = (text, false);
    while let Some(c) = rest.chars().next() {
        let word = WORDS.iter().find(|(word, _)| !in_string && rest.starts_with(word));
        let (taken, written) = match (word, c) {
            (Some((word, string)), _) => (word.len(), *string),
            // A backslash and what it escapes, which may be a quote.
            (None, '\\') if in_string => {
                let len = rest.chars().take(2).map(char::len_utf8).sum();
                (len, &rest[..len])
            }
            (None, _) => {
                in_string ^= c == '"';
                (c.len_utf8(), &rest[..c.len_utf8()])
            }
        };
        out.push_str(written);
        rest = &rest[taken..];
    }
    out
}

/// A number that may be one that JSON does not have.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Float(pub f64);

#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Number(f64),
    Word(String),
    Python { __float__: String },
}

impl<'de> Deserialize<'de> for Float {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let word = match Written::deserialize(from)? {
            Written::Number(number) => return Ok(Self(number)),
            Written::Word(word) | Written::Python { __float__: word } => word,
        };
        match word.as_str() {
            "inf" | "Infinity" => Ok(Self(f64::INFINITY)),
            "-inf" | "-Infinity" => Ok(Self(f64::NEG_INFINITY)),
            "?" | "NaN" => Ok(Self(f64::NAN)),
            other => Err(serde::de::Error::custom(format!("{other:?} is no number"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k23_bare_words_are_read_and_strings_are_left_alone() {
        let text = "{\"a\": [0.0, Infinity, -Infinity,\n 1e-6], \"NaN \\\" NaN\": \"Infinity\"}";
        let quoted = quoted(text);
        assert_eq!(quoted.len(), text.len());
        let json: serde_json::Value = serde_json::from_str(&quoted).expect("JSON");
        let floats: Vec<Float> = serde_json::from_value(json["a"].clone()).expect("numbers");
        let want = [0.0, f64::INFINITY, f64::NEG_INFINITY, 1e-6];
        assert_eq!(floats, want.map(Float));
        assert_eq!(json["NaN \" NaN"], "Infinity");
        for (text, want) in [
            ("NaN", f64::NAN),
            ("{\"__float__\": \"Infinity\"}", f64::INFINITY),
            ("{\"__float__\": \"-Infinity\"}", f64::NEG_INFINITY),
            ("{\"__float__\": \"NaN\"}", f64::NAN),
        ] {
            let Float(found) = serde_json::from_str(&super::quoted(text)).expect("a number");
            assert!(found == want || found.is_nan() && want.is_nan(), "{text}: {found}");
        }
        assert!(serde_json::from_str::<Float>("\"much\"").is_err());
    }

    #[test]
    fn an_error_after_a_bare_word_keeps_its_column() {
        let quoted = quoted("{\"a\": -Infinity, \"b\": !}");
        let error = serde_json::from_str::<serde_json::Value>(&quoted).expect_err("not JSON");
        assert_eq!((error.line(), error.column()), (1, 23));
    }
}
