//! From a chunk of packed sequences to the flat arrays of the loss.

use super::pass::Chunk;
use super::{grpo, Experience, SequenceScores};
use crate::base::LogProb;

/// A chunk's experiences in the flat form of the loss.
pub(super) struct GrpoChunk<'a> {
    spans: Vec<std::ops::Range<usize>>,
    advantages: Vec<f64>,
    mask: Vec<bool>,
    new: &'a [f64],
    old: Vec<f64>,
    reference: Option<Vec<f64>>,
    rollout: Vec<f64>,
}

impl<'a> GrpoChunk<'a> {
    pub(super) fn new(
        chunk: &Chunk,
        experiences: &[Experience],
        reference: Option<&[SequenceScores]>,
        new: &'a [f64],
    ) -> Self {
        let nats =
            |values: &[LogProb]| values.iter().map(|v| f64::from(v.get())).collect::<Vec<_>>();
        let mine = || chunk.sequences.iter().map(|&index| &experiences[index]);
        let mut end = 0;
        let spans = mine().map(|experience| {
            let start = end;
            end += experience.mask.len();
            start..end
        });
        let spans = spans.collect();
        let of_reference = |all: &[SequenceScores]| {
            chunk.sequences.iter().flat_map(|&index| nats(&all[index].ratio)).collect()
        };
        let old: Vec<f64> = mine().flat_map(|experience| nats(&experience.old)).collect();
        let d = mine().flat_map(|experience| experience.d.iter().copied());
        Self {
            spans,
            advantages: mine().map(|experience| experience.advantage).collect(),
            mask: mine().flat_map(|experience| experience.mask.iter().copied()).collect(),
            new,
            reference: reference.map(of_reference),
            // The loss weighs by exp(old - rollout), which must be exp(d) whatever the contract.
            rollout: old.iter().zip(d).map(|(old, d)| old - d).collect(),
            old,
        }
    }

    pub(super) fn borrow(&self) -> grpo::Chunk<'_> {
        grpo::Chunk {
            spans: &self.spans,
            advantages: &self.advantages,
            mask: &self.mask,
            new: self.new,
            old: &self.old,
            reference: self.reference.as_deref(),
            rollout: Some(&self.rollout),
        }
    }
}
