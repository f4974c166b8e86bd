//! What a key takes: one description that both checks a value and words the message.

use toml::Value;

use super::nearest::nearest;

/// What values a key takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Kind {
    Bool,
    Int {
        min: i64,
        max: i64,
    },
    /// A float, or an integer standing for one.
    Number(Range),
    /// Two numbers.
    Pair(Range),
    /// Bytes: an integer, or a string with a binary unit.
    Bytes,
    /// The same, or "auto".
    BytesOrAuto,
    /// What may name a folder.
    Name,
    Text,
    /// A program and its arguments.
    Words,
    /// Addresses of servers; one may stand alone.
    Urls,
    OneOf(&'static [&'static str]),
    /// Any of these, each at most once.
    SomeOf(&'static [&'static str]),
    /// A string of these characters, each at most once.
    Letters(&'static str),
    /// Sweep points: tables of dotted keys, each checked as the key it names.
    Points,
}

/// Which numbers. All but `PositiveOrInfinite` are finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    NonNegative,
    Positive,
    PositiveOrInfinite,
    /// (0, 1]
    UnitNotZero,
    /// [0, 1)
    UnitNotOne,
    /// [0, 1]
    Unit,
}

impl Kind {
    /// Whether a key of this kind takes the value.
    #[must_use]
    pub fn accepts(self, value: &Value) -> bool {
        match self {
            Self::Bool => value.is_bool(),
            Self::Int { min, max } => value.as_integer().is_some_and(|v| (min..=max).contains(&v)),
            Self::Number(range) => number(value).is_some_and(|v| range.contains(v)),
            Self::Pair(range) => value.as_array().is_some_and(|pair| {
                pair.len() == 2 && pair.iter().all(|v| number(v).is_some_and(|v| range.contains(v)))
            }),
            Self::Bytes => bytes(value).is_some(),
            Self::BytesOrAuto => value.as_str() == Some("auto") || bytes(value).is_some(),
            Self::Name => value.as_str().is_some_and(is_folder_name),
            Self::Text => value.as_str().is_some_and(|text| !text.is_empty()),
            Self::Words => value.as_array().is_some_and(|words| {
                words.first().and_then(Value::as_str).is_some_and(|program| !program.is_empty())
                    && words.iter().all(Value::is_str)
            }),
            Self::Urls => match value.as_array() {
                Some(urls) => {
                    let places: Option<Vec<String>> =
                        urls.iter().map(|url| plain_url(url.as_str()?).map(place)).collect();
                    places.is_some_and(|places| {
                        let one = |(i, place)| !places[..i].contains(place);
                        !places.is_empty() && places.iter().enumerate().all(one)
                    })
                }
                None => value.as_str().and_then(plain_url).is_some(),
            },
            Self::OneOf(names) => value.as_str().is_some_and(|name| names.contains(&name)),
            Self::SomeOf(names) => value.as_array().is_some_and(|chosen| {
                chosen.iter().enumerate().all(|(i, name)| {
                    name.as_str().is_some_and(|name| names.contains(&name))
                        && !chosen[..i].contains(name)
                })
            }),
            Self::Letters(letters) => value.as_str().is_some_and(|text| {
                !text.is_empty()
                    && text.chars().all(|c| letters.contains(c) && text.matches(c).count() == 1)
            }),
            Self::Points => value
                .as_array()
                .is_some_and(|points| !points.is_empty() && points.iter().all(Value::is_table)),
        }
    }

    /// What a key of this kind takes, to follow "it takes".
    #[must_use]
    pub fn allowed(self) -> String {
        match self {
            Self::Bool => "true or false".to_owned(),
            Self::Int { min, max: i64::MAX } => format!("an integer of at least {min}"),
            Self::Int { min, max } => format!("an integer from {min} to {max}"),
            Self::Number(range) => format!("a number {}", range.text()),
            Self::Pair(range) => format!("two numbers, each {}", range.text()),
            Self::Bytes => {
                "a positive number of bytes, or a string such as \"24MiB\" (KiB, MiB, GiB, TiB)"
                    .to_owned()
            }
            Self::BytesOrAuto => format!("\"auto\", {}", Self::Bytes.allowed()),
            Self::Name => {
                "a string that can name a folder: a letter or digit, then also any of .-_=,"
                    .to_owned()
            }
            Self::Text => "a string that is not empty".to_owned(),
            Self::Words => "an array of strings: a program, then its arguments".to_owned(),
            Self::Urls => {
                "http://HOST:PORT, or an array of them, each once; https is for a proxy or a \
                 tunnel in between"
                    .to_owned()
            }
            Self::OneOf(names) => format!("one of {}", quoted(names)),
            Self::SomeOf(names) => format!("an array of any of {}, each once", quoted(names)),
            Self::Letters(letters) => {
                format!("a string of any of the characters {letters}, each once")
            }
            Self::Points => "an array of tables of dotted keys".to_owned(),
        }
    }

    /// For a misspelt name, the one that was probably meant.
    pub(super) fn nearest(self, value: &Value) -> Option<&'static str> {
        let (Self::OneOf(names) | Self::SomeOf(names)) = self else { return None };
        let written = match value {
            Value::Array(chosen) => chosen.iter().filter_map(Value::as_str).collect(),
            one => Vec::from_iter(one.as_str()),
        };
        let unknown = written.into_iter().find(|name| !names.contains(name))?;
        nearest(unknown, names.iter().copied())
    }
}

impl Range {
    /// Judged also as the f32 that some keys become, so that 1e-60 is no positive number.
    fn contains(self, value: f64) -> bool {
        [value, f64::from(value as f32)].iter().all(|v| match self {
            Self::NonNegative => *v >= 0.0 && v.is_finite(),
            Self::Positive => *v > 0.0 && v.is_finite(),
            Self::PositiveOrInfinite => *v > 0.0,
            Self::UnitNotZero => *v > 0.0 && *v <= 1.0,
            Self::UnitNotOne => *v >= 0.0 && *v < 1.0,
            Self::Unit => *v >= 0.0 && *v <= 1.0,
        })
    }

    const fn text(self) -> &'static str {
        match self {
            Self::NonNegative => "of at least 0",
            Self::Positive => "above 0",
            Self::PositiveOrInfinite => "above 0, or inf",
            Self::UnitNotZero => "above 0 and at most 1",
            Self::UnitNotOne => "of at least 0 and below 1",
            Self::Unit => "from 0 to 1",
        }
    }
}

/// A positive number of bytes, from an integer or from a string with a binary unit.
pub(super) fn bytes(value: &Value) -> Option<u64> {
    let bytes = match value {
        Value::Integer(count) => u64::try_from(*count).ok()?,
        Value::String(text) => {
            let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
            let unit: u64 = match text[digits.len()..].trim_start() {
                "KiB" => 1 << 10,
                "MiB" => 1 << 20,
                "GiB" => 1 << 30,
                "TiB" => 1 << 40,
                _ => return None,
            };
            digits.parse::<u64>().ok()?.checked_mul(unit)?
        }
        _ => return None,
    };
    (bytes > 0).then_some(bytes)
}

fn number(value: &Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|v| v as f64))
}

/// An address over plain HTTP, with a port or without, less what OpenAI's clients write behind it;
/// `None` of anything else.
pub(super) fn plain_url(text: &str) -> Option<&str> {
    let rest = text.strip_prefix("http://")?.trim_end_matches('/');
    let address = rest.strip_suffix("/v1").unwrap_or(rest);
    let (host, port) = match address.rsplit_once(':') {
        Some((host, port)) => (host, port.parse::<u16>().is_ok_and(|port| port > 0)),
        None => (address, true),
    };
    let letter = |c: char| c.is_ascii_alphanumeric() || ".-_[]:".contains(c);
    (port && !host.is_empty() && host.chars().all(letter))
        .then(|| &text[.."http://".len() + address.len()])
}

/// The same of two ways to write one address.
fn place(url: &str) -> String {
    url.strip_suffix(":80").unwrap_or(url).to_ascii_lowercase()
}

fn is_folder_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-=,".contains(c))
}

fn quoted(names: &[&str]) -> String {
    names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_sizes() {
        let text = |t: &str| Value::String(t.to_owned());
        for (value, expected) in [
            (Value::Integer(1), Some(1)),
            (text("24MiB"), Some(24 << 20)),
            (text("80 GiB"), Some(80 << 30)),
            (text("1KiB"), Some(1024)),
            (text("3TiB"), Some(3 << 40)),
            (Value::Integer(0), None),
            (Value::Integer(-4096), None),
            (Value::Float(1e6), None),
            (text("0MiB"), None),
            (text("80GB"), None),
            (text("80"), None),
            (text("-1MiB"), None),
            (text("1.5GiB"), None),
            (text("MiB"), None),
            (text("16777216TiB"), None),
        ] {
            assert_eq!(bytes(&value), expected, "{value}");
        }
    }

    /// Each server gets its share of the prompts, so that one under two names would get two.
    #[test]
    fn a_server_is_named_once() {
        let url = |text: &&str| Value::String((*text).to_owned());
        for (urls, accepted) in [
            (&["http://a:1"][..], true),
            (&["http://a:1", "http://a:2"], true),
            (&["http://a:1", "http://b:1/v1"], true),
            (&["http://a:1", "http://a:1"], false),
            (&["http://a:1", "http://a:1/"], false),
            (&["http://a:1/v1", "http://a:1"], false),
            (&["http://a:1", "http://b:1", "http://a:1/v1/"], false),
            (&["http://a", "http://A:80/v1"], false),
            (&["http://a:1", "a:2"], false),
            (&["http://v1", "http://v2"], true),
            (&["http://a:1", "http://"], false),
            (&[], false),
        ] {
            let value = Value::Array(urls.iter().map(url).collect());
            assert_eq!(Kind::Urls.accepts(&value), accepted, "{value}");
        }
    }

    #[test]
    fn ranges_hold_as_f32_too() {
        use Range::*;
        for (range, inside, outside) in [
            (NonNegative, vec![0.0, 3e38], vec![-1e-9, f64::INFINITY, f64::NAN, 1e39]),
            (Positive, vec![1e-9], vec![0.0, 1e-60, f64::INFINITY, f64::NAN]),
            (PositiveOrInfinite, vec![1.0, f64::INFINITY], vec![0.0, f64::NAN]),
            (UnitNotZero, vec![1e-9, 1.0], vec![0.0, 1e-60, 1.000001, f64::NAN]),
            (UnitNotOne, vec![0.0, 0.999], vec![1.0, -0.1, f64::NAN]),
            (Unit, vec![0.0, 1.0], vec![-0.1, 1.1, f64::NAN]),
        ] {
            assert!(inside.iter().all(|v| range.contains(*v)), "{range:?}");
            assert!(!outside.iter().any(|v| range.contains(*v)), "{range:?}");
        }
    }
}
