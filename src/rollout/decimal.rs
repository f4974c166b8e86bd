//! Numbers as they stand in text, compared digit by digit.

use std::iter::Peekable;
use std::str::CharIndices;

/// A decimal number in its one normal form, so that equal numbers are equal values.
///
/// No float: 0.1 + 0.2 is not the answer 0.3, and 9007199254740993 is not ...992.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decimal {
    /// False for zero.
    negative: bool,
    /// Without leading zeros; empty for 0.
    whole: String,
    /// Without trailing zeros.
    fraction: String,
}

impl Decimal {
    /// The first number of a text.
    #[must_use]
    pub fn first(text: &str) -> Option<Self> {
        Numbers::new(text).next()
    }

    /// The last number of a text.
    #[must_use]
    pub fn last(text: &str) -> Option<Self> {
        Numbers::new(text).last()
    }

    fn new(negative: bool, whole: &str, fraction: &str) -> Self {
        let whole = whole.trim_start_matches('0').to_owned();
        let fraction = fraction.trim_end_matches('0').to_owned();
        let zero = whole.is_empty() && fraction.is_empty();
        Self { negative: negative && !zero, whole, fraction }
    }
}

/// The numbers of a text, from left to right: `-1,234.50`, `$5`, `-$5`, `$-5`, `.5`, `50%`.
///
/// Commas belong to a number only where they part it into thousands ("1,234", not "1,2"); a dot
/// only before a digit ("18." is 18). A minus counts unless it is between two terms: "10-3" holds
/// 10 and 3, "x=-3" holds -3. A fraction, a range or an exponent is two numbers.
struct Numbers<'a> {
    text: &'a str,
    chars: Peekable<CharIndices<'a>>,
    /// A minus that waits for its digits.
    minus: bool,
    /// The character before the one at hand.
    before: Option<char>,
}

impl<'a> Numbers<'a> {
    fn new(text: &'a str) -> Self {
        Self { text, chars: text.char_indices().peekable(), minus: false, before: None }
    }

    /// Reads the number that starts at byte `start`, and where it ends.
    fn number_at(&self, start: usize) -> (Decimal, usize) {
        let mut whole = digits(&self.text[start..]).to_owned();
        let mut end = start + whole.len();
        if (1..=3).contains(&whole.len()) {
            while let Some(thousands) = self.text[end..].strip_prefix(',').map(digits) {
                if thousands.len() != 3 {
                    break;
                }
                whole.push_str(thousands);
                end += 1 + thousands.len();
            }
        }
        let fraction = self.text[end..].strip_prefix('.').map_or("", digits);
        if !fraction.is_empty() {
            end += 1 + fraction.len();
        }
        (Decimal::new(self.minus, &whole, fraction), end)
    }
}

impl Iterator for Numbers<'_> {
    type Item = Decimal;

    fn next(&mut self) -> Option<Decimal> {
        while let Some((at, c)) = self.chars.next() {
            let starts = match c {
                '.' => !digits(&self.text[at + 1..]).is_empty(),
                _ => c.is_ascii_digit(),
            };
            if starts {
                let (number, end) = self.number_at(at);
                while self.chars.next_if(|&(next, _)| next < end).is_some() {}
                // Any digit will do: what follows sees that a number came before it.
                self.before = Some('0');
                self.minus = false;
                return Some(number);
            }
            let after_term = self.before.is_some_and(|b| b.is_alphanumeric() || b == ')');
            self.minus = match c {
                '-' | '\u{2212}' => !after_term,
                '$' => self.minus,
                _ => false,
            };
            self.before = Some(c);
        }
        None
    }
}

/// The ASCII digits that a text starts with.
fn digits(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    &text[..end]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decimal(negative: bool, whole: &str, fraction: &str) -> Decimal {
        Decimal { negative, whole: whole.into(), fraction: fraction.into() }
    }

    fn check(text: &str, expected: Option<(bool, &str, &str)>) {
        let expected =
            expected.map(|(negative, whole, fraction)| decimal(negative, whole, fraction));
        assert_eq!(Decimal::last(text), expected, "{text:?}");
    }

    #[test]
    fn the_last_number_of_a_text() {
        for none in ["", "no number", "-", "$", ".", "...", "-.", "\u{664}\u{662}"] {
            check(none, None);
        }
        check("18", Some((false, "18", "")));
        check("#### 18", Some((false, "18", "")));
        check("It is 18.", Some((false, "18", "")));
        check("18...", Some((false, "18", "")));
        check("12 then 7 then 30 eggs", Some((false, "30", "")));
        check("0", Some((false, "", "")));
        check("-0.00", Some((false, "", "")));
        check("007", Some((false, "7", "")));
        check("1,450,000", Some((false, "1450000", "")));
        check("1,234.50", Some((false, "1234", "5")));
        check("$2,125.", Some((false, "2125", "")));
        check("50%", Some((false, "50", "")));
        check(".5", Some((false, "", "5")));
        check("0.50", Some((false, "", "5")));
        check("1.2.3", Some((false, "", "3")));
        check("-5", Some((true, "5", "")));
        check("-$5", Some((true, "5", "")));
        check("$-5.25", Some((true, "5", "25")));
        check("x=-5", Some((true, "5", "")));
        check("**-5**", Some((true, "5", "")));
        check("\u{2212}5", Some((true, "5", "")));
        check("- 5", Some((false, "5", "")));
        check("10-3", Some((false, "3", "")));
        check("(10)-3", Some((false, "3", "")));
        check("1.5-3", Some((false, "3", "")));
        check("covid-19", Some((false, "19", "")));
        check("10--3", Some((true, "3", "")));
        // Lists and half-made groups are not thousands.
        check("1,2", Some((false, "2", "")));
        check("1, 234", Some((false, "234", "")));
        check("1,2345", Some((false, "2345", "")));
        check("1234,567", Some((false, "567", "")));
        check("1,234,56", Some((false, "56", "")));
        check("9007199254740993", Some((false, "9007199254740993", "")));
        check("\u{ff15}\u{20ac}7\u{20ac}", Some((false, "7", "")));
    }

    #[test]
    fn the_first_number_of_a_text() {
        assert_eq!(Decimal::first("about -1,200.0 in 3 days"), Some(decimal(true, "1200", "")));
        assert_eq!(Decimal::first("none"), None);
    }

    #[test]
    fn equal_numbers_are_equal_values() {
        for (a, b, equal) in [
            ("70000", "$70,000.00", true),
            ("-0", "0", true),
            (".25", "0.250", true),
            ("5", "-5", false),
            ("0.3", "0.30000000000000004", false),
            ("9007199254740992", "9007199254740993", false),
            ("10", "1", false),
        ] {
            assert_eq!(Decimal::last(a) == Decimal::last(b), equal, "{a} and {b}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC*") {
            prop_assert!(Decimal::last(&text).is_some() || Decimal::first(&text).is_none());
        }

        #[test]
        fn never_panics_on_the_parts_of_numbers(text in "[0-9.,$\u{2212}\u{ff15} a-]{0,24}") {
            let has_digit = text.contains(|c: char| c.is_ascii_digit());
            prop_assert_eq!(Decimal::last(&text).is_some(), has_digit);
        }

        #[test]
        fn reads_back_what_was_written(cents in any::<i64>(), before in "[a-z =:]{0,8}") {
            let sign = if cents < 0 { "-" } else { "" };
            let (whole, rest) = (cents.unsigned_abs() / 100, cents.unsigned_abs() % 100);
            // A letter before the minus would make it part of a word.
            let found = Decimal::last(&format!("{before} {sign}{whole}.{rest:02}."));
            let expected = Decimal::new(cents < 0, &whole.to_string(), &format!("{rest:02}"));
            prop_assert_eq!(found, Some(expected));
        }
    }
}
