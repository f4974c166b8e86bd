//! What a completion of a `jsonl` problem is worth.

use regex::Regex;
use serde::Serialize;

use super::command::RewardCommand;
use super::decimal::Decimal;
use super::RolloutError;
use crate::config::RewardConfig;

/// One completion beside what it should be; one line of a reward command's input.
#[derive(Clone, Debug, Serialize)]
pub struct Graded<'a> {
    pub prompt: &'a str,
    /// What comes before the first end token.
    pub completion: String,
    pub answer: &'a str,
}

/// A checked way of judging completions.
#[derive(Debug)]
pub enum Reward {
    Exact,
    Numeric,
    /// Every completion earns 0.
    None,
    Regex {
        pattern: String,
    },
    Command(RewardCommand),
}

impl Reward {
    /// # Errors
    /// A pattern that is no regular expression, a command without a program, a time-out that is
    /// not positive.
    pub fn new(config: &RewardConfig) -> Result<Self, RolloutError> {
        Ok(match config {
            RewardConfig::Exact => Self::Exact,
            RewardConfig::Numeric => Self::Numeric,
            RewardConfig::None => Self::None,
            RewardConfig::Regex { pattern } => {
                // An answer is escaped, so that any stands for all.
                compile(pattern, "0")?;
                Self::Regex { pattern: pattern.clone() }
            }
            RewardConfig::Command { argv, timeout_s } => {
                Self::Command(RewardCommand::new(argv, *timeout_s)?)
            }
        })
    }

    /// Whether the answer is one that a completion could equal.
    #[must_use]
    pub fn can_judge(&self, answer: &str) -> bool {
        match self {
            Self::Numeric => answer_number(answer).is_some(),
            Self::Exact | Self::None | Self::Regex { .. } | Self::Command(_) => true,
        }
    }

    /// One reward a completion, in their order: 1.0 and 0.0, or what the command says.
    ///
    /// # Errors
    /// A command that fails; a pattern that an answer makes too large.
    pub fn score(&self, graded: &[Graded<'_>]) -> Result<Vec<f64>, RolloutError> {
        match self {
            Self::Exact => Ok(each(graded, |g| g.completion.trim() == g.answer.trim())),
            Self::Numeric => Ok(each(graded, |g| is_number(&g.completion, g.answer))),
            Self::None => Ok(each(graded, |_| false)),
            Self::Regex { pattern } => {
                let mut rewards = Vec::with_capacity(graded.len());
                // A group's rollouts share their answer, hence the compiled pattern.
                for group in graded.chunk_by(|a, b| a.answer == b.answer) {
                    let regex = compile(pattern, group[0].answer)?;
                    rewards.extend(each(group, |g| regex.is_match(&g.completion)));
                }
                Ok(rewards)
            }
            Self::Command(command) => command.score(graded),
        }
    }
}

fn each(graded: &[Graded<'_>], holds: impl Fn(&Graded<'_>) -> bool) -> Vec<f64> {
    graded.iter().map(|g| if holds(g) { 1.0 } else { 0.0 }).collect()
}

/// Whether the completion's last number is the answer's. A completion without one is wrong.
fn is_number(completion: &str, answer: &str) -> bool {
    let found = Decimal::last(completion);
    found.is_some() && found == answer_number(answer)
}

/// GSM8K writes its reasoning, then `#### 18`; other answers end in their number.
fn answer_number(answer: &str) -> Option<Decimal> {
    match answer.rsplit_once("####") {
        Some((_, result)) => Decimal::first(result),
        None => Decimal::last(answer),
    }
}

fn compile(pattern: &str, answer: &str) -> Result<Regex, RolloutError> {
    Regex::new(&pattern.replace("{answer}", &regex::escape(answer)))
        .map_err(|source| RolloutError::Pattern { pattern: pattern.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(config: &RewardConfig, completion: &str, answer: &str, expected: f64) {
        let graded = Graded { prompt: "q", completion: completion.to_owned(), answer };
        let found = Reward::new(config).unwrap().score(&[graded]).unwrap();
        assert_eq!(found, [expected], "{config:?}: {completion:?} for {answer:?}");
    }

    #[test]
    fn exact() {
        for (completion, answer, expected) in [
            ("Paris", "Paris", 1.0),
            (" Paris\n", "\tParis ", 1.0),
            ("paris", "Paris", 0.0),
            ("Paris.", "Paris", 0.0),
            ("", "Paris", 0.0),
            ("", "", 1.0),
        ] {
            check(&RewardConfig::Exact, completion, answer, expected);
        }
    }

    #[test]
    fn numeric() {
        let gsm8k = "He had 3 bags of 700 = <<3*700=2100>>2,100 nuts.\n#### 2,100";
        for (completion, answer, expected) in [
            ("2100", gsm8k, 1.0),
            ("So it is $2,100.00.", gsm8k, 1.0),
            (gsm8k, gsm8k, 1.0),
            ("2100 or 3", gsm8k, 0.0),
            ("-2100", gsm8k, 0.0),
            ("I do not know", gsm8k, 0.0),
            ("", gsm8k, 0.0),
            ("= -0.5", "-.50", 1.0),
            ("50%", "50", 1.0),
            ("18", "about 17, in all 18", 1.0),
            ("18", "#### 18 eggs in 3 days", 1.0),
            ("3", "#### 18 eggs in 3 days", 0.0),
            ("0.30000000000000004", "0.3", 0.0),
            ("9007199254740993", "9007199254740992", 0.0),
        ] {
            check(&RewardConfig::Numeric, completion, answer, expected);
        }
    }

    #[test]
    fn regex() {
        let config = |pattern: &str| RewardConfig::Regex { pattern: pattern.to_owned() };
        for (pattern, completion, answer, expected) in [
            (r"^answer: {answer}$", "answer: 1.5", "1.5", 1.0),
            (r"^answer: {answer}$", "answer: 1x5", "1.5", 0.0),
            (r"\b{answer}\b", "it is 19, surely", "19", 1.0),
            (r"\b{answer}\b", "it is 190", "19", 0.0),
            (r"(?i)yes", "well, YES", "unused", 1.0),
            (r"^\d{2}$", "42", "7", 1.0),
            (r"{answer}", "a+b", "a+b", 1.0),
            (r"{answer}", "aab", "a+b", 0.0),
        ] {
            check(&config(pattern), completion, answer, expected);
        }
        let error = Reward::new(&config("(")).unwrap_err().to_string();
        assert!(
            error.starts_with("task.reward_pattern \"(\" is not a regular expression: "),
            "{error}"
        );
    }

    #[test]
    fn one_step_may_mix_answers() {
        let reward = Reward::new(&RewardConfig::Regex { pattern: "^{answer}$".into() }).unwrap();
        let graded = |completion: &str, answer| Graded {
            prompt: "q",
            completion: completion.to_owned(),
            answer,
        };
        let step = [graded("1", "1"), graded("2", "1"), graded("2", "2"), graded("1", "1")];
        assert_eq!(reward.score(&step).unwrap(), [1.0, 0.0, 1.0, 1.0]);
        assert!(reward.score(&[]).unwrap().is_empty());
    }
}
