//! Where two forwards of the same tokens part: the first position, and the first part of the model,
//! after which their residual streams are not the same bits.

use std::collections::HashMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::base::Position;
use crate::model::Part;

/// One token of a leg: a digest of the residual stream after each of [`crate::model::Plan::parts`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamRow {
    pub position: Position,
    pub parts: Vec<u64>,
}

/// Where two legs part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstDifference {
    pub position: Position,
    /// The part that made it; all before it left the same bits at this position.
    pub part: Part,
}

impl fmt::Display for FirstDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at position {}", self.part, self.position)
    }
}

/// The first row of `one`, in the order in which its leg computed them, that `other` has otherwise.
/// Rows that `other` lacks are passed over; of a position that it has twice, the last counts.
///
/// Where the streams are equal and the log-probabilities are not, it is the head, at the position
/// from which `first_bad` was predicted.
#[must_use]
pub fn first_difference(
    parts: &[Part],
    one: &[StreamRow],
    other: &[StreamRow],
    first_bad: Option<Position>,
) -> Option<FirstDifference> {
    let others: HashMap<Position, &StreamRow> =
        other.iter().map(|row| (row.position, row)).collect();
    let differs = |row: &StreamRow| {
        let other = others.get(&row.position)?;
        assert_eq!(row.parts.len(), parts.len(), "a digest a part");
        assert_eq!(other.parts.len(), parts.len(), "a digest a part");
        let part =
            std::iter::zip(&row.parts, &other.parts).position(|(one, other)| one != other)?;
        Some(FirstDifference { position: row.position, part: parts[part] })
    };
    let head = |bad: Position| FirstDifference {
        position: Position::new(bad.get().saturating_sub(1)),
        part: Part::HEAD,
    };
    one.iter().find_map(differs).or(first_bad.map(head))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::LayerId;
    use crate::model::PartKind;

    const EMBEDDING: Part = Part { layer: None, kind: PartKind::Embedding };
    const MIXER: Part = Part { layer: Some(LayerId::new(0)), kind: PartKind::Mamba };
    const EXPERTS: Part = Part { layer: Some(LayerId::new(0)), kind: PartKind::Moe };

    fn rows(rows: &[(u32, [u64; 3])]) -> Vec<StreamRow> {
        let row = |&(position, parts): &(u32, [u64; 3])| StreamRow {
            position: Position::new(position),
            parts: parts.to_vec(),
        };
        rows.iter().map(row).collect()
    }

    #[test]
    fn the_first_row_in_time_and_its_first_part_are_named() {
        let good = [(0, [1, 2, 3]), (1, [4, 5, 6]), (2, [7, 8, 9])];
        let bad = Some(Position::new(2));
        for (one, first_bad, expected) in [
            (&good[..], None, None),
            (&good, bad, Some((1, Part::HEAD))),
            (&[(0, [1, 2, 3]), (1, [4, 0, 0]), (2, [0, 0, 0])], bad, Some((1, MIXER))),
            (&[(0, [1, 2, 0]), (1, [4, 0, 0])], bad, Some((0, EXPERTS))),
            (&[(2, [0, 8, 9])], None, Some((2, EMBEDDING))),
            // Computed twice: the first time it was wrong.
            (&[(0, [1, 0, 0]), (0, [1, 2, 3]), (1, [4, 5, 6])], bad, Some((0, MIXER))),
            (&[(9, [0, 0, 0])], None, None),
        ] {
            let parts = [EMBEDDING, MIXER, EXPERTS];
            let found = first_difference(&parts, &rows(one), &rows(&good), first_bad);
            let expected = expected.map(|(position, part)| FirstDifference {
                position: Position::new(position),
                part,
            });
            assert_eq!(found, expected, "{one:?}");
        }
    }
}
