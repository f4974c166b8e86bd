//! Text and numbers as the page shows them.

use std::fmt::Write;

/// Text as HTML shows it literally, in content and in quoted attributes.
pub(in crate::report) fn escape(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    text.chars().for_each(|c| push_escaped(&mut html, c));
    html
}

/// As [`escape`], with every character that would be invisible or move its neighbours spelled
/// out: models emit any bytes, and these are what one looks for.
pub(in crate::report) fn visible(text: &str) -> String {
    let mut html = String::with_capacity(text.len());
    for c in text.chars() {
        match spelled(c) {
            Some(name) => write!(html, "<i>{name}</i>").expect("a string grows"),
            None => push_escaped(&mut html, c),
        }
    }
    html
}

/// As [`visible`], but text alone and not yet escaped: charts have no markup in their labels.
pub(in crate::report) fn plain(text: &str) -> String {
    text.chars().map(|c| spelled(c).unwrap_or_else(|| c.to_string())).collect()
}

/// At most so many characters, the last one an ellipsis where the text is longer.
pub(in crate::report) fn shorten(text: &str, chars: usize) -> String {
    match text.char_indices().nth(chars) {
        None => text.to_owned(),
        Some(_) => text.chars().take(chars.saturating_sub(1)).chain(['\u{2026}']).collect(),
    }
}

/// The name of a character that cannot be seen.
fn spelled(c: char) -> Option<String> {
    match c {
        '\0' => Some("\\0".to_owned()),
        '\t' => Some("\\t".to_owned()),
        '\n' => Some("\\n".to_owned()),
        '\r' => Some("\\r".to_owned()),
        c if c.is_ascii_control() => Some(format!("\\x{:02x}", u32::from(c))),
        c if is_hidden(c) => Some(format!("U+{:04X}", u32::from(c))),
        _ => None,
    }
}

fn push_escaped(html: &mut String, c: char) {
    match c {
        '&' => *html += "&amp;",
        '<' => *html += "&lt;",
        '>' => *html += "&gt;",
        '"' => *html += "&quot;",
        '\'' => *html += "&#39;",
        c => html.push(c),
    }
}

/// Controls, separators, formats, fillers, variation selectors, private use, non-characters: a
/// superset of what browsers draw as nothing or as a change of direction.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || (c.is_whitespace() && c != ' ')
        || matches!(u32::from(c),
            0xad | 0x34f | 0x61c | 0x115f..=0x1160 | 0x17b4..=0x17b5 | 0x180b..=0x180f
            | 0x200b..=0x200f | 0x2028..=0x202e | 0x2060..=0x206f | 0x3164 | 0xe000..=0xf8ff
            | 0xfe00..=0xfe0f | 0xfeff | 0xffa0 | 0xfff0..=0xfffb | 0x1d173..=0x1d17a
            | 0xe0000..=0x10_ffff)
        || u32::from(c) & 0xfffe == 0xfffe
}

/// An absent number is a dash.
pub(in crate::report) fn optional(value: Option<f64>) -> String {
    value.map_or("–".to_owned(), number)
}

/// Four significant digits; exact where the number is 0, and never 0 where it is not.
pub(in crate::report) fn number(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 {
        "0".to_owned()
    } else if !value.is_finite() {
        minus(value.to_string())
    } else if (1e-3..1e6).contains(&magnitude) {
        let decimals = (3 - magnitude.log10().floor() as i32).clamp(0, 6) as usize;
        let text = format!("{value:.decimals$}");
        let text =
            if decimals > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
        minus(text.to_owned())
    } else {
        let text = format!("{value:.3e}");
        let (mantissa, exponent) = text.split_once('e').expect("scientific form");
        let mantissa = mantissa.trim_end_matches('0').trim_end_matches('.');
        minus(format!("{mantissa}e{exponent}"))
    }
}

/// With commas between thousands.
pub(in crate::report) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A minus sign as wide as a plus.
fn minus(text: String) -> String {
    text.replace('-', "\u{2212}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_text_is_markup_or_hidden() {
        for (text, expect) in [
            ("a b", "a b"),
            ("<script>&\"'", "&lt;script&gt;&amp;&quot;&#39;"),
            ("&lt;", "&amp;lt;"),
            ("\0\n\t\u{1b}\u{7f}", r"<i>\0</i><i>\n</i><i>\t</i><i>\x1b</i><i>\x7f</i>"),
            ("\u{85}\u{a0}\u{200b}", "<i>U+0085</i><i>U+00A0</i><i>U+200B</i>"),
            ("\u{202e}evil\u{2066}", "<i>U+202E</i>evil<i>U+2066</i>"),
            ("\u{feff}\u{ffff}\u{10ffff}", "<i>U+FEFF</i><i>U+FFFF</i><i>U+10FFFF</i>"),
            ("é 数 \u{fffd} 😀", "é 数 \u{fffd} 😀"),
        ] {
            assert_eq!(visible(text), expect);
            let tagless = expect.replace("<i>", "").replace("</i>", "");
            assert_eq!(escape(&plain(text)), tagless);
        }
        for (text, expect) in [("", ""), ("abc", "abc"), ("abcd", "ab\u{2026}"), ("ééé", "ééé")]
        {
            assert_eq!(shorten(text, 3), expect);
        }
    }

    #[test]
    fn numbers_are_short_and_zero_is_only_zero() {
        for (value, expect) in [
            (0.0, "0"),
            (-0.0, "0"),
            (1.0, "1"),
            (0.25, "0.25"),
            (-12.345_6, "\u{2212}12.35"),
            (123_456.0, "123456"),
            (1000.0, "1000"),
            (0.001_234_5, "0.001234"),
            (3.2e-7, "3.2e\u{2212}7"),
            (1e-300, "1e\u{2212}300"),
            (2.5e9, "2.5e9"),
            (f64::NAN, "NaN"),
            (f64::NEG_INFINITY, "\u{2212}inf"),
        ] {
            assert_eq!(number(value), expect);
        }
        assert_eq!(optional(None), "–");
        for (value, expect) in [(0, "0"), (999, "999"), (1000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(count(value), expect);
        }
    }
}
