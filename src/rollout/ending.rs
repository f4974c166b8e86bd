//! Which tokens of a completion count, for a side that finds the end by itself.

use crate::base::TokenId;

/// Up to the first end id and with it. A completion without one was cut off, and none of it counts.
#[must_use]
pub fn mask_by_end(completion: &[TokenId], end_ids: &[TokenId]) -> Vec<bool> {
    let end = completion.iter().position(|token| end_ids.contains(token));
    (0..completion.len()).map(|at| end.is_some_and(|end| at <= end)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// huggingface/trl#7039: a model ends its turns with the second id of its list.
    #[test]
    fn k18_the_first_end_is_inside_the_mask_and_nothing_after_it() {
        let ids = |ids: &[u32]| ids.iter().map(|&id| TokenId::new(id)).collect::<Vec<_>>();
        for (completion, ends, expected) in [
            (&[5, 6, 7][..], &[2, 7][..], &[true, true, true][..]),
            (&[5, 6, 7], &[2], &[false, false, false]),
            (&[5, 2, 7, 9], &[2, 7], &[true, true, false, false]),
            (&[2], &[2, 7], &[true]),
            (&[], &[2], &[]),
        ] {
            assert_eq!(mask_by_end(&ids(completion), &ids(ends)), expected, "{completion:?}");
        }
    }
}
