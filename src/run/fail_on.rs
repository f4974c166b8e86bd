//! `--fail-on`: what makes a command end with exit code 3 though it did its work.
//!
//! An expression is `finding`, or a metric's tag, a comparison and a number, such as
//! `gap/k3_mean>1e-3`. It holds if it holds at any place that was looked at, a step of a run or a
//! whole audit. A metric that is absent or NaN is neither above nor below anything: it is no data,
//! holds nothing, and is said at the end.

use std::fmt;
use std::fs;
use std::str::FromStr;

use anyhow::Context;

use crate::config::nearest;
use crate::gap::Finding;
use crate::report::{read_rows, RunFolder};

/// One expression.
#[derive(Clone, Debug, PartialEq)]
pub enum FailOn {
    /// Any finding at all.
    Finding,
    Metric {
        tag: String,
        than: Than,
        bound: f64,
    },
}

/// How a value is held against a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Than {
    Above,
    AtLeast,
    Below,
    AtMost,
}

/// What an expression came to at one place.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// With what was found: a value, or the findings' kinds.
    Holds(String),
    HoldsNot,
    /// The metric is absent or NaN.
    NoData,
}

/// An expression that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FailOnError {
    #[error(
        "expected \"finding\", or a metric, one of > >= < <=, and a number, such as \
         'gap/k3_mean>1e-3'"
    )]
    NoExpression,
    #[error("{bound:?} is not a number that a metric can be held against")]
    NoNumber { bound: String },
    #[error("--fail-on '{expression}': there will be no metric {tag}{hint}")]
    UnknownTag { expression: String, tag: String, hint: String },
}

impl FailOn {
    /// # Errors
    /// Text that is no expression; the tag is not looked up.
    pub fn parse(text: &str) -> Result<Self, FailOnError> {
        if text.trim() == "finding" {
            return Ok(Self::Finding);
        }
        let at = text.find(['<', '>']).ok_or(FailOnError::NoExpression)?;
        let (tag, rest) = (text[..at].trim(), &text[at..]);
        let signs =
            [(">=", Than::AtLeast), ("<=", Than::AtMost), (">", Than::Above), ("<", Than::Below)];
        let (bound, than) = signs
            .into_iter()
            .find_map(|(sign, than)| Some((rest.strip_prefix(sign)?.trim(), than)))
            .ok_or(FailOnError::NoExpression)?;
        let no_tag = tag.is_empty() || tag.contains(|c: char| c == '=' || c.is_whitespace());
        if no_tag || bound.is_empty() {
            return Err(FailOnError::NoExpression);
        }
        match bound.parse::<f64>() {
            Ok(bound) if !bound.is_nan() => Ok(Self::Metric { tag: tag.to_owned(), than, bound }),
            _ => Err(FailOnError::NoNumber { bound: bound.to_owned() }),
        }
    }

    /// # Errors
    /// A tag that is not among the known ones, with those that it was probably meant to be.
    pub fn check_known(&self, known: &[String]) -> Result<(), FailOnError> {
        let Self::Metric { tag, .. } = self else { return Ok(()) };
        if known.contains(tag) {
            return Ok(());
        }
        let hint = match alike(tag, known).as_slice() {
            [] => String::new(),
            names => format!("; did you mean {}?", names.join(" or ")),
        };
        Err(FailOnError::UnknownTag { expression: self.to_string(), tag: tag.clone(), hint })
    }

    /// At one place: `metric` looks a tag up.
    pub fn holds(
        &self,
        metric: impl FnOnce(&str) -> Option<f64>,
        findings: &[&Finding],
    ) -> Outcome {
        match self {
            Self::Finding if findings.is_empty() => Outcome::HoldsNot,
            Self::Finding => {
                let mut kinds: Vec<&str> = findings.iter().map(|found| found.kind.name()).collect();
                kinds.dedup();
                Outcome::Holds(kinds.join(", "))
            }
            Self::Metric { tag, than, bound } => match metric(tag) {
                Some(value) if than.holds(value, *bound) => Outcome::Holds(value.to_string()),
                Some(value) if !value.is_nan() => Outcome::HoldsNot,
                _ => Outcome::NoData,
            },
        }
    }
}

impl FromStr for FailOn {
    type Err = FailOnError;

    fn from_str(text: &str) -> Result<Self, FailOnError> {
        Self::parse(text)
    }
}

impl fmt::Display for FailOn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Finding => f.write_str("finding"),
            Self::Metric { tag, than, bound } => write!(f, "{tag}{}{bound:?}", than.sign()),
        }
    }
}

impl Than {
    /// False where either is NaN.
    fn holds(self, value: f64, bound: f64) -> bool {
        match self {
            Self::Above => value > bound,
            Self::AtLeast => value >= bound,
            Self::Below => value < bound,
            Self::AtMost => value <= bound,
        }
    }

    const fn sign(self) -> &'static str {
        match self {
            Self::Above => ">",
            Self::AtLeast => ">=",
            Self::Below => "<",
            Self::AtMost => "<=",
        }
    }
}

/// Expressions watched from place to place.
#[derive(Clone, Debug)]
pub struct Watch {
    watched: Vec<Watched>,
    places: u64,
}

#[derive(Clone, Debug)]
struct Watched {
    expression: FailOn,
    /// Where it held first, and what was found there.
    held: Option<(String, String)>,
    without_data: u64,
}

impl Watch {
    #[must_use]
    pub fn new(expressions: &[FailOn]) -> Self {
        let watched = |expression: &FailOn| Watched {
            expression: expression.clone(),
            held: None,
            without_data: 0,
        };
        Self { watched: expressions.iter().map(watched).collect(), places: 0 }
    }

    /// Looks at one more place, such as `step 3`.
    pub fn look(
        &mut self,
        place: &str,
        metric: impl Fn(&str) -> Option<f64>,
        findings: &[&Finding],
    ) {
        self.places += 1;
        for one in &mut self.watched {
            match one.expression.holds(&metric, findings) {
                Outcome::Holds(found) => {
                    one.held.get_or_insert_with(|| (place.to_owned(), found));
                }
                Outcome::HoldsNot => {}
                Outcome::NoData => one.without_data += 1,
            }
        }
    }

    /// Whether any expression has held.
    #[must_use]
    pub fn held(&self) -> bool {
        self.watched.iter().any(|one| one.held.is_some())
    }

    /// A line for each expression that held, and for each that lacked data.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for Watched { expression, held, without_data } in &self.watched {
            if let Some((place, found)) = held {
                lines.push(format!("--fail-on '{expression}' held at {place}: {found}"));
            }
            if *without_data > 0 {
                let places = self.places;
                lines.push(format!(
                    "--fail-on '{expression}': no data at {without_data} of {places} place(s)"
                ));
            }
        }
        lines
    }
}

/// Looks at every step that a run has left.
pub(super) fn watch_run(expressions: &[FailOn], folder: &RunFolder) -> anyhow::Result<Watch> {
    let path = folder.findings();
    let read = || anyhow::Ok(serde_json::from_slice::<Vec<Finding>>(&fs::read(&path)?)?);
    let findings = read().with_context(|| format!("cannot read {}", path.display()))?;
    let mut watch = Watch::new(expressions);
    for row in read_rows(&folder.steps())? {
        let row = row?;
        let of_step = findings.iter().filter(|found| found.step == row.step);
        let metric = |tag: &str| row.metrics.get(tag).copied().flatten();
        watch.look(&format!("step {}", row.step), metric, &of_step.collect::<Vec<_>>());
    }
    Ok(watch)
}

/// Tags that end alike, or else the one that is nearest by letters.
fn alike<'a>(tag: &str, known: &'a [String]) -> Vec<&'a str> {
    let last = |name: &str| name.rsplit('/').next().map(str::to_owned);
    let names = || known.iter().map(String::as_str);
    let same: Vec<&str> = names().filter(|name| last(name) == last(tag)).take(3).collect();
    match same.is_empty() {
        true => nearest(tag, names()).into_iter().collect(),
        false => same,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        for (text, tag, than, bound, shown) in [
            ("gap/k3_mean>1e-3", "gap/k3_mean", Than::Above, 1e-3, "gap/k3_mean>0.001"),
            (" a/b >= -2 ", "a/b", Than::AtLeast, -2.0, "a/b>=-2.0"),
            ("a<inf", "a", Than::Below, f64::INFINITY, "a<inf"),
            (
                "gap_detail/frac_abs_gt_1e-6<=0",
                "gap_detail/frac_abs_gt_1e-6",
                Than::AtMost,
                0.0,
                "gap_detail/frac_abs_gt_1e-6<=0.0",
            ),
        ] {
            let found = FailOn::parse(text).unwrap();
            assert_eq!(found, FailOn::Metric { tag: tag.to_owned(), than, bound }, "{text}");
            assert_eq!(found.to_string(), shown);
            assert_eq!(FailOn::parse(shown), Ok(found), "it reads back");
        }
        assert_eq!(FailOn::parse(" finding"), Ok(FailOn::Finding));
        for (text, message) in [
            ("", "expected \"finding\", or a metric, "),
            ("findings", "expected \"finding\", or a metric, "),
            ("gap/k3_mean", "expected \"finding\", or a metric, "),
            ("gap/k3_mean=1", "expected \"finding\", or a metric, "),
            (">1", "expected \"finding\", or a metric, "),
            ("a>", "expected \"finding\", or a metric, "),
            ("a>=", "expected \"finding\", or a metric, "),
            ("a>b", "\"b\" is not a number that"),
            ("a=>1", "expected \"finding\", or a metric, "),
            ("a b>1", "expected \"finding\", or a metric, "),
            ("a>>1", "\">1\" is not a number that"),
            ("a>NaN", "\"NaN\" is not a number that"),
        ] {
            let error = FailOn::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(message), "{text}: {error}");
        }
    }

    #[test]
    fn an_unknown_tag_is_refused_with_its_likely_names() {
        let known = ["gap/k3_mean", "gap_detail/k3_max", "gap_detail/x/k3_mean"].map(String::from);
        for (tag, hint) in [
            ("k3_mean", "; did you mean gap/k3_mean or gap_detail/x/k3_mean?"),
            ("gap/k3_maen", "; did you mean gap/k3_mean?"),
            ("zzz", ""),
        ] {
            let error = FailOn::parse(&format!("{tag}>1")).unwrap().check_known(&known);
            let expected = format!("--fail-on '{tag}>1.0': there will be no metric {tag}{hint}");
            assert_eq!(error.unwrap_err().to_string(), expected);
        }
        FailOn::parse("gap/k3_mean>1").unwrap().check_known(&known).unwrap();
        FailOn::Finding.check_known(&[]).unwrap();
    }

    #[test]
    fn a_bound_is_held_against_every_kind_of_value() {
        let holds = |found: f64| Outcome::Holds(found.to_string());
        for (sign, value, expected) in [
            (">", Some(1.5), holds(1.5)),
            (">", Some(1.0), Outcome::HoldsNot),
            (">=", Some(1.0), holds(1.0)),
            (">", Some(f64::INFINITY), holds(f64::INFINITY)),
            ("<", Some(f64::NEG_INFINITY), holds(f64::NEG_INFINITY)),
            ("<", Some(1.0), Outcome::HoldsNot),
            ("<=", Some(1.0), holds(1.0)),
            (">", Some(f64::NAN), Outcome::NoData),
            ("<=", Some(f64::NAN), Outcome::NoData),
            ("<", None, Outcome::NoData),
        ] {
            let expression = FailOn::parse(&format!("a{sign}1")).unwrap();
            assert_eq!(expression.holds(|_| value, &[]), expected, "{value:?} {sign} 1");
        }
        assert_eq!(FailOn::Finding.holds(|_| Some(1.0), &[]), Outcome::HoldsNot);
    }

    #[test]
    fn the_first_place_is_named_and_missing_data_is_said() {
        let expressions = ["a>1", "b>1", "c>1"].map(|text| FailOn::parse(text).unwrap());
        let mut watch = Watch::new(&expressions);
        for (step, a) in [(1, 0.0), (2, 2.0), (3, 3.0)] {
            assert_eq!(watch.held(), step == 3);
            let metric = |tag: &str| match tag {
                "a" => Some(a),
                "b" => (step > 1).then_some(0.0),
                _ => None,
            };
            watch.look(&format!("step {step}"), metric, &[]);
        }
        assert!(watch.held());
        assert_eq!(
            watch.lines(),
            [
                "--fail-on 'a>1.0' held at step 2: 2",
                "--fail-on 'b>1.0': no data at 1 of 3 place(s)",
                "--fail-on 'c>1.0': no data at 3 of 3 place(s)",
            ]
        );
    }
}
