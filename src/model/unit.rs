//! FSDP units: which tensors live and travel together, in which order, with which shapes.
//!
//! A unit is one flat array. The order of its tensors is the order in which blocks take them, so
//! one list is layout, loader and gradient map at once.

use crate::ops::array::{Array, SliceMut};
use crate::ops::weights::{Part, Weights};

/// One named tensor of a unit, by its Hugging Face name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    pub name: String,
    pub shape: Vec<usize>,
}

impl TensorSpec {
    pub(super) fn new(prefix: &str, name: &str, shape: &[usize]) -> Self {
        Self { name: format!("{prefix}{name}"), shape: shape.to_vec() }
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The tensors of one unit, in flat order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitSpec {
    pub name: String,
    pub tensors: Vec<TensorSpec>,
}

impl UnitSpec {
    /// Elements of the flat array.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tensors.iter().map(TensorSpec::len).sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The tensors of a unit's weights, in order.
    pub fn tensors_of<'a>(&'a self, weights: &'a Weights) -> impl Iterator<Item = Part<'a>> + 'a {
        assert_eq!(weights.len(), self.len(), "unit {}", self.name);
        let mut rest = weights.whole();
        self.tensors.iter().map(move |tensor| {
            let (part, after) = rest.split_at(tensor.len());
            rest = after;
            part
        })
    }

    /// The fingerprint of each tensor of a unit's weights, in order (`ops::fingerprint`).
    #[must_use]
    pub fn fingerprints(&self, weights: &Weights) -> Vec<u64> {
        assert_eq!(weights.len(), self.len(), "unit {}", self.name);
        let lens: Vec<usize> = self.tensors.iter().map(TensorSpec::len).collect();
        weights.fingerprints(&lens)
    }

    /// The tensors of a flat gradient, in order, to add to.
    pub fn gradients_of<'a>(&'a self, flat: &'a mut Array) -> impl Iterator<Item = SliceMut<'a>> {
        assert_eq!(flat.len(), self.len(), "unit {}", self.name);
        let mut rest = Some(flat.slice_mut());
        self.tensors.iter().map(move |tensor| {
            let whole = rest.take().expect("the rest is put back below");
            let (part, after) = whole.split_at(tensor.len());
            rest = Some(after);
            part
        })
    }

    /// The tensors of a flat array on the host, in order.
    pub fn parts<'a>(&'a self, flat: &'a [f32]) -> impl Iterator<Item = &'a [f32]> + 'a {
        assert_eq!(flat.len(), self.len(), "unit {}", self.name);
        let mut rest = flat;
        self.tensors.iter().map(move |tensor| {
            let (part, after) = rest.split_at(tensor.len());
            rest = after;
            part
        })
    }
}

/// One number for a whole model: xxh3 over its tensors' fingerprints in unit order.
#[must_use]
pub fn combine_fingerprints(tensors: &[u64]) -> u64 {
    let bytes: Vec<u8> = tensors.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    xxhash_rust::xxh3::xxh3_64(&bytes)
}
