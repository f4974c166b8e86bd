//! `gapscope compare`: where two runs part.
//!
//! Settings, the metrics of every step, and the tokens with each log-probability, bit by bit. Time
//! is never compared. Of a token neither is when it was scheduled, which `pool/*` tells of a step.

mod metrics;
mod tokens;

use std::fmt;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::base::Step;
use crate::report::{flatten, RunFolder};
use metrics::MetricDifferences;
use tokens::TokenDifferences;

/// Rows of a list that are shown; the rest is counted.
const SHOWN: usize = 20;

/// What two runs have and have not in common.
#[derive(Clone, Debug)]
pub struct RunDifference {
    /// Key, left and right value; `None` where a run has no such key.
    config: Vec<(String, [Option<Value>; 2])>,
    metrics: MetricDifferences,
    tokens: TokenDifferences,
}

/// Compares two run folders.
///
/// # Errors
/// A folder that is no run, or a file in it that is missing, torn or not what a run writes.
pub fn compare(left: &Path, right: &Path) -> Result<RunDifference> {
    let folders = [RunFolder::open(left)?, RunFolder::open(right)?];
    let config = config_differences([settings(&folders[0])?, settings(&folders[1])?]);
    let metrics = MetricDifferences::of(&folders)?;
    let tokens = TokenDifferences::of(&folders, &metrics.common)?;
    Ok(RunDifference { config, metrics, tokens })
}

impl RunDifference {
    /// Whether the runs came to anything different. Settings alone are no difference: that they
    /// changed nothing is what one wants to know.
    #[must_use]
    pub fn differs(&self) -> bool {
        self.metrics.differ() || self.tokens.differ()
    }
}

impl fmt::Display for RunDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.config.len() {
            0 => writeln!(f, "config   equal")?,
            n => writeln!(f, "config   {n} setting(s) differ: left | right")?,
        }
        let shown = |value: &Option<Value>| value.as_ref().map_or("-".to_owned(), Value::to_string);
        for (key, [left, right]) in self.config.iter().take(SHOWN) {
            writeln!(f, "  {key}  {} | {}", shown(left), shown(right))?;
        }
        and_more(f, self.config.len())?;
        write!(f, "{}{}", self.metrics, self.tokens)
    }
}

fn and_more(f: &mut fmt::Formatter<'_>, rows: usize) -> fmt::Result {
    match rows.saturating_sub(SHOWN) {
        0 => Ok(()),
        more => writeln!(f, "  and {more} more"),
    }
}

type Settings = Vec<(String, Value)>;

/// As the file has them: runs of different versions may be compared.
fn settings(folder: &RunFolder) -> Result<Settings> {
    let path = folder.config();
    let read = || anyhow::Ok(serde_json::from_str::<Value>(&fs::read_to_string(&path)?)?);
    Ok(flatten(&read().with_context(|| format!("cannot read {}", path.display()))?))
}

/// By key, in order.
pub(super) fn config_differences(
    [left, right]: [Settings; 2],
) -> Vec<(String, [Option<Value>; 2])> {
    let value = |of: &Settings, key: &str| {
        of.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    };
    let mut keys: Vec<&String> = left.iter().chain(&right).map(|(key, _)| key).collect();
    keys.sort();
    keys.dedup();
    let both = keys.into_iter().map(|key| (key.clone(), [value(&left, key), value(&right, key)]));
    both.filter(|(_, [left, right])| left != right).collect()
}

/// `3`, or `3 to 7` of steps that are listed in order.
fn range(steps: &[Step]) -> String {
    match steps {
        [] => "none".to_owned(),
        [one] => one.to_string(),
        [first, .., last] => format!("{} from {first} to {last}", steps.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn settings_differ_by_value_and_by_being_there() {
        let left = flatten(&json!({"seed": 1, "engine": {"bits": 22, "old": true}, "name": "a"}));
        let right = flatten(&json!({"seed": 1, "engine": {"bits": 64}, "name": "a", "new": [1]}));
        let found = config_differences([left, right]);
        let expected = [
            ("engine.bits", [Some(json!(22)), Some(json!(64))]),
            ("engine.old", [Some(json!(true)), None]),
            ("new", [None, Some(json!([1]))]),
        ];
        assert_eq!(found, expected.map(|(key, values)| (key.to_owned(), values)));
    }
}
