//! Seeded sums, differences and products whose answers can be checked.

use super::task::{Draw, Problem};
use super::text::{excerpt, Codec};
use super::RolloutError;
use crate::base::{Step, Stream, TokenId};

/// Products of operands up to this are exact in an `i64`.
const MAX_OPERAND: u64 = 1_000_000_000;
/// Far above any context length, far below what would fill memory.
const MAX_EXAMPLES: u32 = 1 << 16;
const MAX_PROMPT_TOKENS: u32 = 1 << 24;

/// Problems such as `12+7=`, after worked examples, one a line, where they are asked for.
#[derive(Clone, Debug)]
pub struct Arithmetic {
    seed: u64,
    max_operand: u64,
    operators: Vec<Operator>,
    examples: u32,
    padding: Option<Padding>,
}

/// How prompts are filled up in front.
#[derive(Clone, Copy, Debug)]
struct Padding {
    /// A prompt's length, BOS included, is drawn from `shortest` to `longest`; one that is longer
    /// by itself than what was drawn stays as it is.
    shortest: u32,
    longest: u32,
    filler: TokenId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Plus,
    Minus,
    Times,
}

impl Operator {
    fn from_char(c: char) -> Option<Self> {
        match c {
            '+' => Some(Self::Plus),
            '-' => Some(Self::Minus),
            '*' => Some(Self::Times),
            _ => None,
        }
    }

    fn symbol(self) -> char {
        match self {
            Self::Plus => '+',
            Self::Minus => '-',
            Self::Times => '*',
        }
    }

    fn apply(self, a: i64, b: i64) -> i64 {
        match self {
            Self::Plus => a + b,
            Self::Minus => a - b,
            Self::Times => a * b,
        }
    }
}

/// One equation before it is text.
#[derive(Clone, Copy, Debug)]
struct Equation {
    a: i64,
    operator: Operator,
    b: i64,
}

impl Equation {
    fn question(self) -> String {
        format!("{}{}{}=", self.a, self.operator.symbol(), self.b)
    }

    fn answer(self) -> String {
        self.operator.apply(self.a, self.b).to_string()
    }
}

impl Arithmetic {
    /// `prompt_tokens` is the shortest and the longest length to fill prompts up to. Fails here
    /// rather than at step 300 if prompts of the widest operands do not fit into the longest.
    ///
    /// # Errors
    /// A value over its limit, operators that are not of "+-*", a prompt over `prompt_tokens`.
    pub fn new(
        seed: u64,
        max_operand: u64,
        operators: &str,
        examples: u32,
        prompt_tokens: Option<(u32, u32)>,
        codec: &Codec,
    ) -> Result<Self, RolloutError> {
        check_limit("max_operand", max_operand, MAX_OPERAND)?;
        check_limit("examples", examples.into(), MAX_EXAMPLES.into())?;
        let longest = prompt_tokens.map_or(0, |(_, longest)| longest);
        check_limit("prompt_tokens", longest.into(), MAX_PROMPT_TOKENS.into())?;
        let operators: Vec<Operator> = operators
            .chars()
            .map(Operator::from_char)
            .collect::<Option<_>>()
            .filter(|list: &Vec<_>| !list.is_empty())
            .ok_or_else(|| RolloutError::Operators { operators: operators.to_owned() })?;
        let padding = match prompt_tokens {
            None => None,
            Some((shortest, longest)) => {
                Some(Padding { shortest, longest, filler: line_end(codec)? })
            }
        };
        let task = Self { seed, max_operand, operators, examples, padding };
        task.check_widest(codec)?;
        Ok(task)
    }

    /// One problem: a function of the seed, the use, the step and the index alone.
    pub(super) fn problem(
        &self,
        draw: Draw,
        step: Step,
        index: u32,
        codec: &Codec,
    ) -> Result<Problem, RolloutError> {
        let purpose = format!("arithmetic {} step {step}", draw.name());
        let mut stream = Stream::new(self.seed, &purpose, u64::from(index));
        let examples: Vec<Equation> = (0..self.examples).map(|_| self.draw(&mut stream)).collect();
        let asked = self.draw(&mut stream);
        let length = self.padding.map_or(0, |padding| {
            stream.integer(padding.shortest.into(), padding.longest.into()) as u32
        });
        self.write(&examples, asked, length, codec)
    }

    /// 1.0 for the answer's very digits with nothing before or after them, 0.0 for anything else.
    /// Where the model has end tokens one of them must follow: digits that were cut off by the
    /// length limit are no answer yet.
    pub(super) fn reward(problem: &Problem, completion: &[TokenId], codec: &Codec) -> f64 {
        let (text, ended) = codec.decode_answer(completion);
        let must_end = !codec.special().eos.is_empty();
        if text == problem.answer && ended == must_end {
            1.0
        } else {
            0.0
        }
    }

    fn draw(&self, stream: &mut Stream) -> Equation {
        let operator = self.operators[stream.integer(0, self.operators.len() as u64 - 1) as usize];
        let mut operand = || stream.integer(0, self.max_operand) as i64;
        Equation { a: operand(), operator, b: operand() }
    }

    /// Padding is written in tokens, not in text, so that the length is exact under any tokenizer.
    fn write(
        &self,
        examples: &[Equation],
        asked: Equation,
        length: u32,
        codec: &Codec,
    ) -> Result<Problem, RolloutError> {
        let mut text = String::new();
        for example in examples {
            text.push_str(&format!("{}{}\n", example.question(), example.answer()));
        }
        text.push_str(&asked.question());
        let mut prompt = codec.encode_prompt(&text)?;
        if let Some(Padding { longest, filler, .. }) = self.padding {
            if prompt.len() > longest as usize {
                let tokens = prompt.len();
                let prompt = excerpt(&text);
                return Err(RolloutError::PromptTooLong { prompt, tokens, prompt_tokens: longest });
            }
            let missing = (length as usize).saturating_sub(prompt.len());
            let after_bos = usize::from(prompt.first() == codec.special().bos.as_ref());
            prompt.splice(after_bos..after_bos, std::iter::repeat_n(filler, missing));
            text.insert_str(0, &"\n".repeat(missing));
        }
        Ok(Problem { text, prompt, answer: asked.answer() })
    }

    fn check_widest(&self, codec: &Codec) -> Result<(), RolloutError> {
        let max = self.max_operand as i64;
        // The smallest number of each width: as the first operand of a difference it makes the
        // widest answer, as in 10-99=-89.
        let smallest = std::iter::successors(Some(1), |n| Some(n * 10)).take_while(|&n| n <= max);
        let smallest: Vec<i64> = std::iter::once(0).chain(smallest).collect();
        for &operator in &self.operators {
            let first = if operator == Operator::Minus { &smallest[..] } else { &[max] };
            for &a in first {
                let examples = vec![Equation { a, operator, b: max }; self.examples as usize];
                self.write(&examples, Equation { a: max, operator, b: max }, 0, codec)?;
            }
        }
        Ok(())
    }
}

fn check_limit(key: &'static str, value: u64, limit: u64) -> Result<(), RolloutError> {
    if value > limit {
        return Err(RolloutError::OverLimit { key, value, limit });
    }
    Ok(())
}

/// The one token of an empty line.
fn line_end(codec: &Codec) -> Result<TokenId, RolloutError> {
    match codec.encode("\n")?.as_slice() {
        &[id] => Ok(id),
        ids => Err(RolloutError::NoPadding { tokens: ids.len() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout::SpecialTokens;

    fn codec() -> Codec {
        let id = |id| Some(TokenId::new(id));
        let eos = vec![TokenId::new(2), TokenId::new(3)];
        Codec::bytes(256, SpecialTokens { pad: id(0), bos: id(1), eos }).unwrap()
    }

    fn problems(task: &Arithmetic, draw: Draw, step: u64, n: u32) -> Vec<Problem> {
        let problem = |index| task.problem(draw, Step::new(step), index, &codec()).unwrap();
        (0..n).map(problem).collect()
    }

    /// The equation of a line, worked out by the test.
    fn solve(question: &str) -> String {
        let body = question.strip_suffix('=').unwrap();
        let at = body.find(['+', '-', '*']).unwrap();
        let (a, b): (i64, i64) = (body[..at].parse().unwrap(), body[at + 1..].parse().unwrap());
        let answer = match &body[at..=at] {
            "+" => a + b,
            "-" => a - b,
            _ => a * b,
        };
        answer.to_string()
    }

    #[test]
    fn lengths_are_drawn_from_their_range() {
        let task = Arithmetic::new(7, 9, "+", 0, Some((3, 12)), &codec()).unwrap();
        let lengths: Vec<usize> =
            problems(&task, Draw::Rollouts, 1, 200).iter().map(|p| p.prompt.len()).collect();
        // BOS and "a+b=" are 5 tokens by themselves.
        assert!((5..=12).all(|length| lengths.contains(&length)), "{lengths:?}");
        assert!(lengths.iter().all(|length| (5..=12).contains(length)), "{lengths:?}");
    }

    #[test]
    fn questions_and_worked_examples_are_right() {
        let task = Arithmetic::new(7, 99, "+-*", 3, None, &codec()).unwrap();
        let all = problems(&task, Draw::Rollouts, 1, 200);
        for problem in &all {
            let lines: Vec<&str> = problem.text.lines().collect();
            assert_eq!(lines.len(), 4, "{:?}", problem.text);
            assert_eq!(solve(lines[3]), problem.answer);
            for example in &lines[..3] {
                let (question, answer) = example.split_at(example.find('=').unwrap() + 1);
                assert_eq!(solve(question), answer);
            }
            assert_eq!(problem.prompt, codec().encode_prompt(&problem.text).unwrap());
            assert_eq!(problem.prompt[0], TokenId::new(1));
        }
        assert!(all.iter().any(|problem| problem.answer.starts_with('-')));
        for operator in ['+', '-', '*'] {
            assert!(all.iter().any(|problem| problem
                .text
                .lines()
                .last()
                .unwrap()
                .contains(operator)));
        }
    }

    #[test]
    fn a_problem_depends_on_seed_use_step_and_index_alone() {
        let task = |seed| Arithmetic::new(seed, 999, "+", 1, None, &codec()).unwrap();
        let base = problems(&task(7), Draw::Rollouts, 5, 4);
        assert_eq!(base, problems(&task(7), Draw::Rollouts, 5, 4));
        assert_eq!(base[..2], problems(&task(7), Draw::Rollouts, 5, 2)[..]);
        assert_ne!(base[0], base[1]);
        assert_ne!(base, problems(&task(8), Draw::Rollouts, 5, 4));
        assert_ne!(base, problems(&task(7), Draw::Rollouts, 6, 4));
        assert_ne!(base, problems(&task(7), Draw::WarmStart, 5, 4));
    }

    #[test]
    fn padding_is_exact() {
        let task = Arithmetic::new(7, 99, "+-", 2, Some((40, 40)), &codec()).unwrap();
        for problem in problems(&task, Draw::Rollouts, 1, 50) {
            assert_eq!(problem.prompt.len(), 40);
            assert_eq!(problem.prompt, codec().encode_prompt(&problem.text).unwrap());
            assert!(problem.text.starts_with("\n\n"));
        }
        // BOS and "99+99=" are 7 tokens.
        let fits = Arithmetic::new(7, 99, "+", 0, Some((7, 7)), &codec()).unwrap();
        assert!(problems(&fits, Draw::Rollouts, 1, 50).iter().all(|p| p.prompt.len() == 7));
        let error = Arithmetic::new(7, 99, "+", 0, Some((6, 6)), &codec()).unwrap_err();
        let expected =
            "the prompt \"99+99=\" takes 7 tokens, over task.prompt_tokens = 6; raise it, \
                        or lower task.examples or task.max_operand";
        assert_eq!(error.to_string(), expected);
    }

    /// Every equation there is fits where the check found that the widest fits.
    #[test]
    fn the_widest_prompt_is_found_before_the_first_step() {
        for operators in ["+", "-", "*"] {
            let operator = Operator::from_char(operators.chars().next().unwrap()).unwrap();
            for max in [1_u32, 9, 10, 99] {
                let shortest = (1..100)
                    .find(|&n| {
                        Arithmetic::new(7, max.into(), operators, 1, Some((n, n)), &codec()).is_ok()
                    })
                    .unwrap();
                let pairs = (0..=max).flat_map(|a| (0..=max).map(move |b| (a, b)));
                let equations: Vec<_> =
                    pairs.map(|(a, b)| Equation { a: a.into(), operator, b: b.into() }).collect();
                let question = equations.iter().map(|e| e.question().len()).max().unwrap();
                let example =
                    equations.iter().map(|e| e.question().len() + e.answer().len()).max().unwrap();
                // BOS in front, a line end between them.
                assert_eq!(shortest as usize, 2 + example + question, "{operators} {max}");
            }
        }
    }

    #[test]
    fn only_the_exact_answer_and_an_end_earn_the_reward() {
        let problem = Problem { text: "12+7=".into(), prompt: vec![], answer: "19".into() };
        let reward = |bytes: &[u8]| {
            let ids: Vec<_> = bytes.iter().map(|&b| TokenId::new(b.into())).collect();
            Arithmetic::reward(&problem, &ids, &codec())
        };
        for right in [&b"19\x02"[..], b"19\x03", b"19\x02 and more", b"19\x02\x02\x02"] {
            assert_eq!(reward(right), 1.0, "{right:?}");
        }
        let wrong: [&[u8]; 11] = [
            b"",
            b"19",
            b"\x0219",
            b"9\x02",
            b"190\x02",
            b" 19\x02",
            b"19 \x02",
            b"019\x02",
            b"+19\x02",
            b"1\x009\x02",
            b"\x19\x02",
        ];
        for wrong in wrong {
            assert_eq!(reward(wrong), 0.0, "{wrong:?}");
        }
    }

    #[test]
    fn without_an_end_token_the_whole_completion_is_the_answer() {
        let codec = Codec::bytes(256, SpecialTokens::default()).unwrap();
        let problem = Problem { text: "12-17=".into(), prompt: vec![], answer: "-5".into() };
        for (text, expected) in [("-5", 1.0), ("-5 ", 0.0), ("5", 0.0)] {
            let ids = codec.encode_completion(text).unwrap();
            assert_eq!(Arithmetic::reward(&problem, &ids, &codec), expected, "{text:?}");
        }
    }

    #[test]
    fn impossible_settings_are_refused() {
        let check = |max_operand, operators, examples, expected: &str| {
            let error = Arithmetic::new(7, max_operand, operators, examples, None, &codec());
            assert_eq!(error.unwrap_err().to_string(), expected);
        };
        let over = "task.max_operand = 1000000001 is over its limit of 1000000000; lower it";
        check(1_000_000_001, "+", 0, over);
        check(9, "+", 65_537, "task.examples = 65537 is over its limit of 65536; lower it");
        for operators in ["", "/", "+ "] {
            let text = format!("task.operators = {operators:?} must be one or more of \"+-*\"");
            check(9, operators, 0, &text);
        }
        let largest = Arithmetic::new(7, 1_000_000_000, "*", 0, None, &codec()).unwrap();
        assert_eq!(problems(&largest, Draw::Rollouts, 1, 3).len(), 3);
    }
}
