//! Floats in JSON, whose grammar has no NaN and no infinity.

use serde::{Serialize, Serializer};

/// A finite float is written as a number, any other as the string `"NaN"`, `"inf"` or `"-inf"`,
/// so that it is neither lost nor taken for an absent value (`null`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct JsonFloat(pub f64);

impl Serialize for JsonFloat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() {
            serializer.serialize_f64(self.0)
        } else {
            serializer.collect_str(&self.0)
        }
    }
}

/// For fields: `#[serde(serialize_with = "float::serialize")]`.
pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    JsonFloat(*value).serialize(serializer)
}

/// As [`serialize`], with absent as `null`.
pub(super) fn serialize_option<S: Serializer>(
    value: &Option<f64>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    value.map(JsonFloat).serialize(serializer)
}

#[cfg(test)]
mod tests {
    use super::JsonFloat;

    #[test]
    fn every_float_reads_back_as_what_it_was() {
        for (value, expect) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (f64::MIN_POSITIVE, "2.2250738585072014e-308"),
            (f64::NAN, "\"NaN\""),
            (f64::INFINITY, "\"inf\""),
            (f64::NEG_INFINITY, "\"-inf\""),
        ] {
            assert_eq!(serde_json::to_string(&JsonFloat(value)).unwrap(), expect);
        }
    }
}
