//! What the model is asked, and what its completions earn.

use std::sync::Arc;

use super::arithmetic::Arithmetic;
use super::jsonl::Jsonl;
use super::reward::Graded;
use super::text::Codec;
use super::RolloutError;
use crate::base::{Step, TokenId};
use crate::config::TaskConfig;

/// One prompt and the answer that is looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The prompt as text, without special tokens.
    pub text: String,
    /// The prompt as the engine gets it.
    pub prompt: Vec<TokenId>,
    pub answer: String,
}

/// One completion of a problem, special tokens included, to be judged.
#[derive(Clone, Copy, Debug)]
pub struct Attempt<'a> {
    pub problem: &'a Problem,
    pub completion: &'a [TokenId],
}

/// What problems are drawn for. Seeded problems of one use are drawn apart from those of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Draw {
    WarmStart,
    Rollouts,
    Evaluation,
}

impl Draw {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::WarmStart => "warm start",
            Self::Rollouts => "rollouts",
            Self::Evaluation => "evaluation",
        }
    }
}

/// A task over one model's text.
pub struct Task {
    codec: Arc<Codec>,
    kind: Kind,
}

enum Kind {
    Arithmetic(Arithmetic),
    Jsonl(Jsonl),
}

impl Task {
    /// Reads the task's file, if it has one.
    ///
    /// # Errors
    /// Settings that no problem can satisfy, and files that are not what the configuration says.
    pub fn new(config: &TaskConfig, seed: u64, codec: Arc<Codec>) -> Result<Self, RolloutError> {
        let kind = match config {
            TaskConfig::Arithmetic {
                max_operand,
                operators,
                examples,
                prompt_tokens,
                min_prompt_tokens,
            } => {
                let longest = *prompt_tokens;
                Kind::Arithmetic(Arithmetic::new(
                    seed,
                    *max_operand,
                    operators,
                    *examples,
                    longest.map(|longest| (min_prompt_tokens.unwrap_or(longest), longest)),
                    &codec,
                )?)
            }
            TaskConfig::Jsonl { path, prompt_key, answer_key, reward } => {
                Kind::Jsonl(Jsonl::open(path, prompt_key, answer_key, reward, &codec)?)
            }
        };
        Ok(Self { codec, kind })
    }

    /// The `n` problems of a step: the same for the same seed, use, step and `n`, whatever was
    /// drawn before. A file is walked in order, `n` problems a step, and begun again at its end; it
    /// holds no problems apart, so an evaluation takes its first ones.
    ///
    /// # Errors
    /// A prompt that the model's text cannot hold.
    pub fn problems(&self, draw: Draw, step: Step, n: u32) -> Result<Vec<Problem>, RolloutError> {
        let problem = |index| match &self.kind {
            Kind::Arithmetic(task) => task.problem(draw, step, index, &self.codec),
            Kind::Jsonl(task) => {
                let step = if draw == Draw::Evaluation { Step::new(1) } else { step };
                task.problem(step, n, index, &self.codec)
            }
        };
        (0..n).map(problem).collect()
    }

    /// The answer as a whole completion, its end token included, for the supervised warm start.
    ///
    /// # Errors
    /// An answer that the model's text cannot hold.
    pub fn target(&self, problem: &Problem) -> Result<Vec<TokenId>, RolloutError> {
        self.codec.encode_completion(&problem.answer)
    }

    /// The reward of every attempt, in their order. Only what comes before a completion's first
    /// end token is judged.
    ///
    /// A reward command is run once for all attempts. This blocks until it is done, and must not
    /// be called from within an async task.
    ///
    /// # Errors
    /// A reward command that fails in any way.
    pub fn rewards(&self, attempts: &[Attempt<'_>]) -> Result<Vec<f64>, RolloutError> {
        let task = match &self.kind {
            Kind::Arithmetic(_) => {
                let reward =
                    |a: &Attempt<'_>| Arithmetic::reward(a.problem, a.completion, &self.codec);
                return Ok(attempts.iter().map(reward).collect());
            }
            Kind::Jsonl(task) => task,
        };
        let graded: Vec<Graded<'_>> = attempts
            .iter()
            .map(|attempt| Graded {
                prompt: &attempt.problem.text,
                completion: self.codec.decode_answer(attempt.completion).0,
                answer: &attempt.problem.answer,
            })
            .collect();
        let rewards = task.reward().score(&graded)?;
        assert_eq!(rewards.len(), attempts.len(), "one reward a completion");
        Ok(rewards)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::config::RewardConfig;
    use crate::rollout::SpecialTokens;

    fn task(config: &TaskConfig) -> Task {
        let eos = vec![TokenId::new(2)];
        let special = SpecialTokens { pad: None, bos: Some(TokenId::new(1)), eos };
        Task::new(config, 7, Arc::new(Codec::bytes(256, special).unwrap())).unwrap()
    }

    fn arithmetic() -> Task {
        task(&TaskConfig::Arithmetic {
            max_operand: 99,
            operators: "+-".to_owned(),
            examples: 1,
            prompt_tokens: Some(24),
            min_prompt_tokens: None,
        })
    }

    fn jsonl(reward: RewardConfig) -> Task {
        task(&TaskConfig::Jsonl {
            path: PathBuf::from("tests/fixtures/problems.jsonl"),
            prompt_key: "question".to_owned(),
            answer_key: "answer".to_owned(),
            reward,
        })
    }

    /// What the warm start teaches is what the reward asks for; a digit more, or nothing, is not.
    #[test]
    fn targets_earn_the_reward() {
        let argv = ["sh", "-c", "sed 's/.*/0.5/'"].map(str::to_owned).to_vec();
        for (task, right, one_more, none) in [
            (arithmetic(), 1.0, 0.0, 0.0),
            (jsonl(RewardConfig::Exact), 1.0, 0.0, 0.0),
            (jsonl(RewardConfig::Numeric), 1.0, 0.0, 0.0),
            (jsonl(RewardConfig::Regex { pattern: "(?s)^{answer}$".into() }), 1.0, 0.0, 0.0),
            (jsonl(RewardConfig::Command { argv, timeout_s: 60.0 }), 0.5, 0.5, 0.5),
        ] {
            let problems = task.problems(Draw::WarmStart, Step::new(1), 3).unwrap();
            for problem in &problems {
                let target = task.target(problem).unwrap();
                let (end, answer) = target.split_last().unwrap();
                let digit = TokenId::new(u32::from(b'1'));
                let more = [answer, &[digit, *end]].concat();
                let nothing = [*end];
                let attempts = [target.as_slice(), &more, &nothing]
                    .map(|completion| Attempt { problem, completion });
                assert_eq!(task.rewards(&attempts).unwrap(), [right, one_more, none]);
            }
        }
    }

    #[test]
    fn a_step_is_the_same_whatever_was_drawn_before() {
        for task in [arithmetic(), jsonl(RewardConfig::Exact)] {
            let draw = |step| task.problems(Draw::Rollouts, Step::new(step), 2).unwrap();
            let third = draw(3);
            let (_, second) = (draw(1), draw(2));
            assert_eq!(draw(3), third);
            assert_ne!(second, third);
        }
    }

    #[test]
    fn no_attempts_earn_nothing() {
        for task in [arithmetic(), jsonl(RewardConfig::Numeric)] {
            assert!(task.problems(Draw::Evaluation, Step::new(1), 0).unwrap().is_empty());
            assert!(task.rewards(&[]).unwrap().is_empty());
        }
    }
}
