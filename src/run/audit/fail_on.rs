//! Conditions under which a command ends with exit code 3.

use anyhow::{bail, Result};
use serde::Serialize;

use crate::base::Step;
use crate::config;
use crate::gap::{Finding, Table};

/// Whether a value, first, satisfies a comparison with a bound.
type Holds = fn(f64, f64) -> bool;

/// Longer ones first, so that `>=` is not read as `>`.
const COMPARISONS: [(&str, Holds); 6] = [
    (">=", |value, bound| value >= bound),
    ("<=", |value, bound| value <= bound),
    ("==", |value, bound| value == bound),
    ("!=", |value, bound| value != bound),
    (">", |value, bound| value > bound),
    ("<", |value, bound| value < bound),
];

/// One condition, and what the steps so far say of it.
#[derive(Debug, Serialize)]
pub(super) struct FailOn {
    pub(super) expression: String,
    #[serde(skip)]
    what: What,
    /// The first step in which it held.
    pub(super) held_in: Option<Step>,
    /// Steps that had the value.
    pub(super) steps_with_data: u64,
}

#[derive(Debug)]
enum What {
    Finding,
    Metric { tag: String, holds: Holds, bound: f64 },
}

impl FailOn {
    /// `finding`, or a tag, a comparison and a number. `known` has every tag.
    pub(super) fn parse(expression: &str, known: &Table) -> Result<Self> {
        let what = match expression.trim() {
            "finding" => What::Finding,
            text => metric(text, known)?,
        };
        Ok(Self { expression: expression.to_owned(), what, held_in: None, steps_with_data: 0 })
    }

    /// A step without the value satisfies no comparison.
    pub(super) fn look_at(&mut self, step: Step, table: &Table, findings: &[Finding]) {
        let holds = match &self.what {
            What::Finding => Some(!findings.is_empty()),
            What::Metric { tag, holds, bound } => {
                let metric = table.metrics.iter().find(|metric| metric.tag() == *tag);
                let metric = metric.expect("the tag was looked up when the condition was read");
                metric.value.map(|value| holds(value, *bound))
            }
        };
        self.steps_with_data += u64::from(holds.is_some());
        if holds == Some(true) {
            self.held_in = self.held_in.or(Some(step));
        }
    }
}

fn metric(text: &str, known: &Table) -> Result<What> {
    let found = COMPARISONS.iter().find_map(|(sign, holds)| Some((text.split_once(sign)?, *holds)));
    let Some(((tag, bound), holds)) = found else {
        bail!(
            "--fail-on {text:?} is neither `finding` nor a tag, a comparison (> >= < <= == !=) and \
             a number, such as 'gap/k3_mean>1e-3'"
        );
    };
    let (tag, bound) = (tag.trim(), bound.trim());
    let tags: Vec<String> = known.metrics.iter().map(|metric| metric.tag()).collect();
    if !tags.iter().any(|known| known == tag) {
        let nearest = nearest(tag, &tags);
        bail!("--fail-on {text:?}: no metric is called {tag:?}{nearest}");
    }
    match bound.parse::<f64>() {
        Ok(bound) if !bound.is_nan() => Ok(What::Metric { tag: tag.to_owned(), holds, bound }),
        _ => bail!("--fail-on {text:?}: {bound:?} is not a number to compare {tag} with"),
    }
}

/// The nearest tags: by the whole of it, and by its name under another prefix.
fn nearest(tag: &str, tags: &[String]) -> String {
    let last = |tag: &str| tag.rsplit('/').next().unwrap_or(tag).to_owned();
    let name = last(tag);
    let whole = config::nearest(tag, tags.iter().map(String::as_str));
    let names: Vec<String> = tags.iter().map(|tag| last(tag)).collect();
    let by_name = config::nearest(&name, names.iter().map(String::as_str));
    let by_name = by_name.and_then(|near| tags.iter().find(|tag| last(tag) == near));
    let mut near: Vec<&str> = by_name.map(String::as_str).into_iter().chain(whole).collect();
    near.dedup();
    match near.is_empty() {
        true => format!("; such as {}", tags[0]),
        false => format!("; the nearest: {}", near.join(", ")),
    }
}
