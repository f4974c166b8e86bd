//! A list of numbers as it stands in a record.

use std::fmt;

use serde::de::{DeserializeSeed, Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::line::MARK;

/// Numbers, with `None` for null; true and false are 1 and 0. NeMo-RL wraps a sample's list in a
/// batch of one, which is taken off, and a bare number is a list of one.
#[derive(Debug, Default)]
pub(in crate::rollout) struct Column {
    pub(super) cells: Vec<Option<f64>>,
    /// Innermost lists.
    lists: usize,
}

impl Column {
    pub(in crate::rollout) fn cells(&self) -> &[Option<f64>] {
        &self.cells
    }
}

impl<'de> Deserialize<'de> for Column {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut column = Self::default();
        Cells(&mut column).deserialize(deserializer)?;
        match column.lists {
            0 | 1 => Ok(column),
            lists => Err(D::Error::custom(format!("{lists} lists where one sample has one"))),
        }
    }
}

/// Appends what it meets; the result is whether it was a single value.
struct Cells<'a>(&'a mut Column);

impl Cells<'_> {
    fn push<E>(self, cell: Option<f64>) -> Result<bool, E> {
        self.0.cells.push(cell);
        Ok(true)
    }
}

impl<'de> DeserializeSeed<'de> for Cells<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Cells<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, true, false or null")
    }

    fn visit_f64<E>(self, value: f64) -> Result<bool, E> {
        self.push(Some(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<bool, E> {
        self.push(Some(value as f64))
    }

    fn visit_i64<E>(self, value: i64) -> Result<bool, E> {
        self.push(Some(value as f64))
    }

    fn visit_bool<E>(self, value: bool) -> Result<bool, E> {
        self.push(Some(f64::from(u8::from(value))))
    }

    fn visit_unit<E>(self) -> Result<bool, E> {
        self.push(None)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<bool, E> {
        let value = match text.strip_prefix(MARK).map(str::trim) {
            Some("") => f64::NAN,
            Some("+inf") => f64::INFINITY,
            Some("-inf") => f64::NEG_INFINITY,
            _ => return Err(E::invalid_type(serde::de::Unexpected::Str(text), &self)),
        };
        self.push(Some(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<bool, A::Error> {
        let (mut entries, mut values) = (0, 0);
        while let Some(value) = list.next_element_seed(Cells(&mut *self.0))? {
            entries += 1;
            values += usize::from(value);
        }
        if values > 0 && values < entries {
            return Err(A::Error::custom("a list that mixes numbers and lists"));
        }
        self.0.lists += usize::from(values == entries);
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_of_one_is_taken_off() {
        for (text, expected) in [
            ("[1, -2.5, null, true]", Ok(vec![Some(1.0), Some(-2.5), None, Some(1.0)])),
            ("[[1, 2]]", Ok(vec![Some(1.0), Some(2.0)])),
            ("[[[3]]]", Ok(vec![Some(3.0)])),
            ("7", Ok(vec![Some(7.0)])),
            ("[]", Ok(vec![])),
            ("[[]]", Ok(vec![])),
            ("[\"\u{7f}-inf  \"]", Ok(vec![Some(f64::NEG_INFINITY)])),
            ("[[1], [2]]", Err("2 lists where one sample has one")),
            ("[1, [2]]", Err("a list that mixes numbers and lists")),
            ("[\"NaN\"]", Err("invalid type: string \"NaN\", expected a number, true, false")),
            ("{}", Err("invalid type: map, expected a number, true, false or null")),
        ] {
            let found = serde_json::from_str::<Column>(text).map(|column| column.cells);
            match (found, expected) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{text}"),
                (Err(found), Err(expected)) => {
                    assert!(found.to_string().starts_with(expected), "{text}: {found}");
                }
                (found, expected) => panic!("{text}: {found:?}, not {expected:?}"),
            }
        }
    }
}
