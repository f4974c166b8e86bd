//! The tokens of two runs, bit by bit.

use std::collections::HashMap;
use std::fmt;

use anyhow::Result;

use crate::base::{LogProb, Position, RequestId, Step};
use crate::report::parquet::{read_tokens, TokenRow};
use crate::report::RunFolder;

/// What the tokens of two runs differ in, over the steps that both have.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenDifferences {
    /// Tokens at a place that at least one run has.
    tokens: u64,
    different: u64,
    steps: u64,
    different_steps: u64,
    first: Option<FirstToken>,
}

/// The first token that is not the same on both sides.
#[derive(Clone, Debug)]
struct FirstToken {
    step: Step,
    request: RequestId,
    position: Position,
    /// What differs: column, left, right.
    columns: Vec<(&'static str, String, String)>,
}

/// Compared by their bits.
type LogProbColumn = (&'static str, fn(&TokenRow) -> Option<LogProb>);

const LOGPROBS: [LogProbColumn; 4] = [
    ("logp_decode", |row| row.logp_decode),
    ("logp_prefill", |row| row.logp_prefill),
    ("logp_trainer", |row| row.logp_trainer),
    ("logp_reference", |row| row.logp_reference),
];

impl TokenDifferences {
    /// Reads two files a step, one step at a time.
    pub(super) fn of(folders: &[RunFolder; 2], steps: &[Step]) -> Result<Self> {
        let mut found = Self::default();
        for &step in steps {
            let [left, right] = folders;
            found.add(step, &read_tokens(&left.tokens(step))?, &read_tokens(&right.tokens(step))?);
        }
        Ok(found)
    }

    /// A token's place is its request and its position: a completion that ends earlier moves no
    /// other.
    fn add(&mut self, step: Step, left: &[TokenRow], right: &[TokenRow]) {
        let place = |row: &TokenRow| (row.request, row.position);
        let mut unmatched: HashMap<_, _> = right.iter().map(|row| (place(row), row)).collect();
        let mut different = Vec::new();
        for row in left {
            let other = unmatched.remove(&place(row));
            let columns = columns(Some(row), other);
            if !columns.is_empty() {
                different.push((place(row), columns));
            }
        }
        let only_right = right.iter().filter(|row| unmatched.contains_key(&place(row)));
        different.extend(only_right.map(|row| (place(row), columns_of_one(row))));
        self.tokens += (left.len() + unmatched.len()) as u64;
        self.different += different.len() as u64;
        self.steps += 1;
        self.different_steps += u64::from(!different.is_empty());
        let first = different.into_iter().min_by_key(|(place, _)| *place);
        if let (None, Some(((request, position), columns))) = (&self.first, first) {
            self.first = Some(FirstToken { step, request, position, columns });
        }
    }

    pub(super) fn differ(&self) -> bool {
        self.different > 0
    }
}

fn columns_of_one(row: &TokenRow) -> Vec<(&'static str, String, String)> {
    columns(None, Some(row))
}

/// What differs between two rows of one place, of which one may be missing.
fn columns(
    left: Option<&TokenRow>,
    right: Option<&TokenRow>,
) -> Vec<(&'static str, String, String)> {
    let mut found = Vec::new();
    let mut put = |name, of: &dyn Fn(&TokenRow) -> (u64, String)| {
        let [(left, shown), (right, other)] = [left, right].map(|row| {
            row.map_or((None, "no token".to_owned()), |row| {
                let (bits, shown) = of(row);
                (Some(bits), shown)
            })
        });
        if left != right {
            found.push((name, shown, other));
        }
    };
    put("token_id", &|row| (u64::from(row.token_id.get()), row.token_id.to_string()));
    put("loss_mask", &|row| (u64::from(row.loss_mask), row.loss_mask.to_string()));
    for (name, of) in LOGPROBS {
        put(name, &|row| match of(row) {
            Some(logp) => (u64::from(logp.get().to_bits()), format!("{:?}", logp.get())),
            // No f32 has so many bits.
            None => (u64::MAX, "-".to_owned()),
        });
    }
    found
}

impl fmt::Display for TokenDifferences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tokens, different, steps, different_steps, first } = self;
        let Some(FirstToken { step, request, position, columns }) = first else {
            return writeln!(f, "tokens   {tokens} equal");
        };
        writeln!(
            f,
            "tokens   {different} of {tokens} differ, in {different_steps} of {steps} step(s); \
             first at step {step}, request {request}, position {position}: left | right"
        )?;
        for (column, left, right) in columns {
            writeln!(f, "  {column}  {left} | {right}")?;
        }
        Ok(())
    }
}
