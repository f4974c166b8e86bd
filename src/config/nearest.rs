//! The known name that an unknown one was probably meant to be.

use std::iter::successors;

use super::keys::{last_part, table_of, KEYS};

/// The nearest known key or table, judged by the whole dotted name, or by its last part where only
/// the table is wrong.
pub(super) fn nearest_key(unknown: &str) -> Option<&'static str> {
    let cost = |known: &str| {
        let elsewhere = 1 + edits(last_part(unknown), last_part(known));
        edits(unknown, known).min(elsewhere)
    };
    let names = KEYS.iter().flat_map(|key| {
        successors(Some(key.name), |name| Some(table_of(name)).filter(|table| !table.is_empty()))
    });
    best(names.map(|name| (cost(name), name)), last_part(unknown))
}

/// The nearest of `known`, unless half of the name would have to change.
#[must_use]
pub fn nearest<'a>(unknown: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    best(known.map(|name| (edits(unknown, name), name)), unknown)
}

/// The cheapest candidate, unless half of the name would have to change.
fn best<'a>(candidates: impl Iterator<Item = (usize, &'a str)>, unknown: &str) -> Option<&'a str> {
    let limit = (unknown.chars().count() / 2).max(1);
    candidates
        .filter(|(cost, _)| *cost <= limit)
        .min_by_key(|(cost, _)| *cost)
        .map(|(_, name)| name)
}

/// Levenshtein's distance in characters.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let change = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, expected) in [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "", 3),
            ("kitten", "sitting", 3),
            ("fifo", "filo", 1),
            ("lifo", "fifo", 1),
            ("stop", "spot", 2),
        ] {
            assert_eq!(edits(a, b), expected, "{a} {b}");
        }
    }

    #[test]
    fn unknown_keys_find_their_neighbours() {
        for (unknown, expected) in [
            ("engine.max_num_seq", Some("engine.max_num_seqs")),
            ("engine.max_seqs", Some("engine.max_num_seqs")),
            ("temperature", Some("rollout.temperature")),
            ("engine.temperature", Some("rollout.temperature")),
            ("trainer.kl_coeff", Some("trainer.kl_coef")),
            ("nmae", Some("name")),
            ("trainr", Some("trainer")),
            ("trainer.warmstart", Some("trainer.warm_start")),
            ("engine.zzzzzz", None),
        ] {
            assert_eq!(nearest_key(unknown), expected, "{unknown}");
        }
    }
}
