//! Which rows of a batch run as decode and which as prefill.
//!
//! Two functions, as in vLLM (`v1/attention/backends/utils.py`): [`reorder`] brings rows into
//! regions, [`num_decodes`] then draws the line. Under some policies the two look at different
//! things. A row on the wrong side reads whatever state its block holds: the decode kernel has no
//! notion of a sequence's first token.

use crate::config::BatchSplit;

/// What the classification sees of a row, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// In this step.
    pub scheduled: u32,
    /// Before this step.
    pub computed: u32,
    pub prompt: u32,
}

impl RowShape {
    #[must_use]
    pub fn is_prefilling(&self) -> bool {
        self.computed < self.prompt
    }
}

/// The batch order: row `i` of the result is row `order[i]` of `rows`. Regions come in the order
/// decode, extend (short, then long), prefill. A row already inside its region keeps its place; the
/// others fill the places between in region order, and in row order within a region.
#[must_use]
pub fn reorder(rows: &[RowShape], policy: BatchSplit) -> Vec<usize> {
    let regions: Vec<u8> = rows.iter().map(|row| region(row, policy)).collect();
    let mut targets = regions.clone();
    targets.sort_unstable();
    let misplaced: Vec<usize> = (0..rows.len()).filter(|&i| regions[i] != targets[i]).collect();
    let mut sources = misplaced.clone();
    sources.sort_by_key(|&row| regions[row]);
    let mut order: Vec<usize> = (0..rows.len()).collect();
    for (place, source) in misplaced.into_iter().zip(sources) {
        order[place] = source;
    }
    order
}

/// Whether the reorder takes a row for a decode, whichever kernels it then runs through.
#[must_use]
pub fn in_decode_region(row: &RowShape, policy: BatchSplit) -> bool {
    region(row, policy) == DECODE
}

const DECODE: u8 = 0;

fn region(row: &RowShape, policy: BatchSplit) -> u8 {
    const SHORT_EXTEND: u8 = 1;
    const EXTEND: u8 = 2;
    const PREFILL: u8 = 3;
    let is_first = row.computed == 0;
    match policy {
        BatchSplit::ScheduledTokens if row.scheduled <= 1 => DECODE,
        _ if is_first => PREFILL,
        _ if row.scheduled > 1 => EXTEND,
        BatchSplit::IsPrefilling if row.is_prefilling() => SHORT_EXTEND,
        _ => DECODE,
    }
}

/// How many rows at the front of a reordered batch run as decode.
///
/// Without `is_prefilling` (vLLM before #37303) only the lengths count: a one-token row is a decode
/// if every row is, or if it stands before the first longer one. With it, a row that is still in
/// its prompt is never a decode.
#[must_use]
pub fn num_decodes(query_lens: &[u32], is_prefilling: Option<&[bool]>) -> usize {
    assert!(query_lens.iter().all(|&len| len > 0), "a row without tokens: {query_lens:?}");
    let is_prefill =
        |row: usize| query_lens[row] > 1 || is_prefilling.is_some_and(|flags| flags[row]);
    (0..query_lens.len()).find(|&row| is_prefill(row)).unwrap_or(query_lens.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use BatchSplit::{ComputedTokens, IsPrefilling, ScheduledTokens};

    /// Rows as (scheduled, computed, prompt).
    fn shapes(rows: &[(u32, u32, u32)]) -> Vec<RowShape> {
        let shape = |&(scheduled, computed, prompt)| RowShape { scheduled, computed, prompt };
        rows.iter().map(shape).collect()
    }

    /// The batch order and how many rows of it are decoded.
    fn check(policy: BatchSplit, rows: &[(u32, u32, u32)], order: &[usize], decodes: usize) {
        let rows = shapes(rows);
        assert_eq!(reorder(&rows, policy), order, "{policy:?} {rows:?}");
        let lens: Vec<u32> = order.iter().map(|&row| rows[row].scheduled).collect();
        let flags: Vec<bool> = order.iter().map(|&row| rows[row].is_prefilling()).collect();
        let flags = (policy == IsPrefilling).then_some(&flags[..]);
        assert_eq!(num_decodes(&lens, flags), decodes, "{policy:?} {rows:?}");
    }

    #[test]
    fn batches_without_short_first_chunks_are_the_same_under_every_policy() {
        for policy in [ScheduledTokens, ComputedTokens, IsPrefilling] {
            check(policy, &[], &[], 0);
            check(policy, &[(1, 10, 10)], &[0], 1);
            check(policy, &[(1, 10, 10), (1, 20, 20), (1, 30, 30)], &[0, 1, 2], 3);
            check(policy, &[(100, 100, 900), (200, 200, 900)], &[0, 1], 0);
            let mixed = [(100, 100, 900), (1, 10, 5), (200, 200, 900), (1, 20, 5)];
            check(policy, &mixed, &[3, 1, 2, 0], 2);
            let last = [(100, 100, 900), (200, 200, 900), (1, 10, 5), (1, 20, 5)];
            check(policy, &last, &[2, 3, 0, 1], 2);
            check(policy, &[(100, 0, 100), (10, 50, 60), (1, 10, 5)], &[2, 1, 0], 1);
            let no_decode = [(100, 0, 900), (10, 50, 900), (200, 0, 900), (20, 75, 900)];
            check(policy, &no_decode, &[3, 1, 2, 0], 0);
            let long = [
                (1, 20, 9),
                (1, 50, 9),
                (374, 0, 900),
                (300, 20, 900),
                (1, 20, 9),
                (256, 0, 900),
                (1, 5, 4),
                (27, 0, 900),
                (1, 4, 3),
            ];
            check(policy, &long, &[0, 1, 6, 8, 4, 3, 2, 7, 5], 5);
        }
    }

    /// A new request that got the last token of the budget.
    #[test]
    fn a_first_chunk_of_one_token() {
        let rows = [(100, 0, 100), (1, 0, 60), (50, 100, 150), (1, 10, 5)];
        check(ScheduledTokens, &rows, &[3, 1, 2, 0], 2);
        check(ComputedTokens, &rows, &[3, 2, 0, 1], 1);
        check(IsPrefilling, &rows, &[3, 2, 0, 1], 1);

        let rows = [(1, 0, 60), (1, 0, 60), (1, 50, 40), (200, 0, 200)];
        check(ScheduledTokens, &rows, &[0, 1, 2, 3], 3);
        check(ComputedTokens, &rows, &[2, 1, 0, 3], 3);
        check(IsPrefilling, &rows, &[2, 1, 0, 3], 1);
    }

    /// Every row has one token: the leftover after decodes, or a prompt of one token.
    #[test]
    fn the_first_hole_is_a_batch_of_one_token_rows() {
        for rows in [[(1, 0, 60), (1, 9, 5), (1, 8, 5)], [(1, 0, 1), (1, 9, 5), (1, 8, 5)]] {
            check(ScheduledTokens, &rows, &[0, 1, 2], 3);
            check(ComputedTokens, &rows, &[2, 1, 0], 3);
            check(IsPrefilling, &rows, &[2, 1, 0], 2);
        }
    }

    /// The one-token first chunk is in the prefill region, but before the first longer row.
    #[test]
    fn the_second_hole_is_a_one_token_row_before_the_first_longer_one() {
        let rows = [(100, 0, 100), (1, 10, 5), (1, 0, 60), (1, 20, 5)];
        check(ComputedTokens, &rows, &[3, 1, 2, 0], 3);
        check(IsPrefilling, &rows, &[3, 1, 2, 0], 2);
    }

    /// Later chunks of one token carry their own state: only `is_prefilling` tells them from
    /// decodes.
    #[test]
    fn four_regions() {
        let rows = [(100, 0, 100), (1, 50, 100), (1, 100, 100), (10, 50, 100)];
        check(IsPrefilling, &rows, &[2, 1, 3, 0], 1);
        check(ComputedTokens, &rows, &[2, 1, 3, 0], 2);
        check(ScheduledTokens, &rows, &[2, 1, 3, 0], 2);
        let rows = [(1, 50, 60), (1, 70, 60), (10, 70, 60)];
        check(IsPrefilling, &rows, &[1, 0, 2], 1);
        check(ComputedTokens, &rows, &[0, 1, 2], 2);
    }

    #[test]
    #[should_panic(expected = "a row without tokens")]
    fn a_row_without_tokens_is_refused() {
        let _ = num_decodes(&[1, 0], None);
    }
}
