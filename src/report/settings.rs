//! A resolved configuration as flat names and values, for tables and TensorBoard's hparams.

use serde::Serialize;
use serde_json::Value;

/// A setting that is not at its default.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// Dotted, such as `engine.state_index_bits`.
    pub key: String,
    pub value: Value,
    /// Absent where there is no such key by default.
    pub default: Option<Value>,
}

/// Every leaf of a configuration under its dotted key, sorted. Arrays are leaves.
#[must_use]
pub fn flatten(config: &impl Serialize) -> Vec<(String, Value)> {
    // Through text, because only there is an f32 of 0.6 the number 0.6.
    let value = serde_json::to_vec(config)
        .and_then(|text| serde_json::from_slice(&text))
        .expect("a configuration is plain data with string keys");
    let mut leaves = Vec::new();
    walk(&value, String::new(), &mut leaves);
    leaves
}

/// The leaves of `config` that differ from those of `default`, or have no counterpart there.
#[must_use]
pub fn changes(config: &impl Serialize, default: &impl Serialize) -> Vec<Change> {
    let defaults = flatten(default);
    let default_of = |key: &str| {
        defaults.iter().find(|(name, _)| name == key).map(|(_, default)| default.clone())
    };
    flatten(config)
        .into_iter()
        .map(|(key, value)| Change { default: default_of(&key), key, value })
        .filter(|change| change.default.as_ref() != Some(&change.value))
        .collect()
}

fn walk(value: &Value, prefix: String, leaves: &mut Vec<(String, Value)>) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let key = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
                walk(field, key, leaves);
            }
        }
        leaf => leaves.push((prefix, leaf.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_f32_reads_as_it_was_written() {
        assert_eq!(
            flatten(&crate::base::Contract { temperature: 0.6, ..crate::base::Contract::PLAIN })
                .into_iter()
                .find(|(key, _)| key == "temperature"),
            Some(("temperature".to_owned(), json!(0.6)))
        );
    }

    #[test]
    fn only_what_differs_is_a_change() {
        let default = json!({"seed": 0, "engine": {"bits": 64, "split": "a"}, "legs": ["x"]});
        let config = json!({"seed": 0, "engine": {"bits": 22, "split": "a"}, "legs": ["x", "y"],
            "model": {"source": {"preset": "tiny"}}});
        let found: Vec<_> = changes(&config, &default)
            .into_iter()
            .map(|change| (change.key, change.value, change.default))
            .collect();
        assert_eq!(
            found,
            [
                ("engine.bits".to_owned(), json!(22), Some(json!(64))),
                ("legs".to_owned(), json!(["x", "y"]), Some(json!(["x"]))),
                ("model.source.preset".to_owned(), json!("tiny"), None),
            ]
        );
    }
}
