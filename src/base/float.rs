//! Floats in JSON, whose grammar has no NaN and no infinity.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A finite float is written as a number, any other as the string `"NaN"`, `"inf"` or `"-inf"`,
/// so that it is neither lost nor taken for an absent value (`null`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JsonFloat(pub f64);

impl Serialize for JsonFloat {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() {
            serializer.serialize_f64(self.0)
        } else {
            serializer.collect_str(&self.0)
        }
    }
}

impl<'de> Deserialize<'de> for JsonFloat {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a number, \"NaN\", \"inf\" or \"-inf\"")]
        enum Written {
            Number(f64),
            Name(NonFinite),
        }
        #[derive(Deserialize)]
        enum NonFinite {
            NaN,
            #[serde(rename = "inf")]
            Infinity,
            #[serde(rename = "-inf")]
            NegativeInfinity,
        }
        Ok(Self(match Written::deserialize(deserializer)? {
            Written::Number(value) => value,
            Written::Name(NonFinite::NaN) => f64::NAN,
            Written::Name(NonFinite::Infinity) => f64::INFINITY,
            Written::Name(NonFinite::NegativeInfinity) => f64::NEG_INFINITY,
        }))
    }
}

/// For fields: `#[serde(with = "float")]`.
pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    JsonFloat(*value).serialize(serializer)
}

/// As [`serialize`].
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(JsonFloat::deserialize(from)?.0)
}

/// For fields that may be absent, which is `null`: `#[serde(with = "float::optional")]`.
pub mod optional {
    use super::{Deserialize, Deserializer, JsonFloat, Serialize, Serializer};

    pub fn serialize<S: Serializer>(value: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
        value.map(JsonFloat).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
        Ok(Option::<JsonFloat>::deserialize(from)?.map(|float| float.0))
    }
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
            let JsonFloat(back) = serde_json::from_str(expect).unwrap();
            assert!(back.to_bits() == value.to_bits() || (back.is_nan() && value.is_nan()));
        }
        for wrong in ["\"nan\"", "\"1.0\"", "null", "true", "[]"] {
            let error = serde_json::from_str::<JsonFloat>(wrong).unwrap_err().to_string();
            assert_eq!(error, "a number, \"NaN\", \"inf\" or \"-inf\"", "{wrong}");
        }
    }
}
