//! The tokens of two runs, bit by bit.

use std::collections::BTreeMap;
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
    /// What differs: column, left and right.
    columns: Vec<(&'static str, [String; 2])>,
}

/// What is compared of a token, as bits, and how these are shown.
struct Column {
    name: &'static str,
    bits: fn(&TokenRow) -> Option<u32>,
    show: fn(u32) -> String,
}

const COLUMNS: [Column; 6] = [
    Column { name: "token_id", bits: |row| Some(row.token_id.get()), show: |id| id.to_string() },
    Column {
        name: "loss_mask",
        bits: |row| Some(u32::from(row.loss_mask)),
        show: |mask| (mask == 1).to_string(),
    },
    logprob("logp_decode", |row| bits(row.logp_decode)),
    logprob("logp_prefill", |row| bits(row.logp_prefill)),
    logprob("logp_trainer", |row| bits(row.logp_trainer)),
    logprob("logp_reference", |row| bits(row.logp_reference)),
];

const fn logprob(name: &'static str, bits: fn(&TokenRow) -> Option<u32>) -> Column {
    Column { name, bits, show: |bits| format!("{:?}", f32::from_bits(bits)) }
}

fn bits(logp: Option<LogProb>) -> Option<u32> {
    logp.map(|logp| logp.get().to_bits())
}

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
        let mut places: BTreeMap<_, [Option<&TokenRow>; 2]> = BTreeMap::new();
        for (side, rows) in [left, right].into_iter().enumerate() {
            for row in rows {
                places.entry((row.request, row.position)).or_default()[side] = Some(row);
            }
        }
        let differ =
            |rows: &[Option<&TokenRow>; 2]| COLUMNS.iter().any(|column| column.differs(rows));
        let mut different = places.iter().filter(|(_, rows)| differ(rows)).peekable();
        if let (None, Some((&(request, position), rows))) = (&self.first, different.peek()) {
            let differs = COLUMNS.iter().filter(|column| column.differs(rows));
            let columns = differs.map(|column| column.shown(rows)).collect();
            self.first = Some(FirstToken { step, request, position, columns });
        }
        let count = different.count() as u64;
        self.tokens += places.len() as u64;
        self.different += count;
        self.steps += 1;
        self.different_steps += u64::from(count > 0);
    }

    pub(super) fn differ(&self) -> bool {
        self.different > 0
    }
}

impl Column {
    /// A token that is not there differs from one that is.
    fn differs(&self, [left, right]: &[Option<&TokenRow>; 2]) -> bool {
        left.map(self.bits) != right.map(self.bits)
    }

    fn shown(&self, rows: &[Option<&TokenRow>; 2]) -> (&'static str, [String; 2]) {
        let cell = |row: Option<&TokenRow>| match row.map(self.bits) {
            None => "no token".to_owned(),
            Some(None) => "-".to_owned(),
            Some(Some(bits)) => (self.show)(bits),
        };
        (self.name, rows.map(cell))
    }
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
        for (column, [left, right]) in columns {
            writeln!(f, "  {column}  {left} | {right}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::TokenId;

    fn row(position: u32, token: u32, decode: Option<f32>) -> TokenRow {
        TokenRow {
            position: Position::new(position),
            token_id: TokenId::new(token),
            logp_decode: decode.map(LogProb::new),
            ..TokenRow::default()
        }
    }

    fn check(left: &[TokenRow], right: &[TokenRow], expected: &str) {
        let mut found = TokenDifferences::default();
        found.add(Step::new(1), &[], &[]);
        found.add(Step::new(2), left, right);
        let text = found.to_string();
        assert_eq!(found.differ(), !expected.contains("equal"), "{text}");
        let expected = expected.replace("AT", "first at step 2, request s0.p0.r0, position");
        assert_eq!(text, expected);
    }

    #[test]
    fn tokens_are_compared_where_they_stand() {
        let same = [row(1, 7, Some(-0.5)), row(2, 8, Some(f32::NAN))];
        check(&same, &same, "tokens   2 equal\n");
        check(
            &same,
            &[row(1, 7, Some(-0.5)), row(2, 9, None)],
            "tokens   1 of 2 differ, in 1 of 2 step(s); AT 2: left | right\n  \
             token_id  8 | 9\n  logp_decode  NaN | -\n",
        );
        check(
            &[row(1, 7, Some(0.0))],
            &[row(1, 7, Some(-0.0))],
            "tokens   1 of 1 differ, in 1 of 2 step(s); AT 1: left | right\n  \
             logp_decode  0.0 | -0.0\n",
        );
        check(
            &same[1..],
            &same,
            "tokens   1 of 2 differ, in 1 of 2 step(s); AT 1: left | right\n  \
             token_id  no token | 7\n  loss_mask  no token | false\n  \
             logp_decode  no token | -0.5\n  logp_prefill  no token | -\n  \
             logp_trainer  no token | -\n  logp_reference  no token | -\n",
        );
    }
}
