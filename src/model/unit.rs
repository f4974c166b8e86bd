//! FSDP units: which tensors live and travel together, in which order, with which shapes.
//!
//! A unit is one flat array. The order of its tensors is the order in which blocks take them, so
//! one list is layout, loader and gradient map at once.

use rayon::prelude::*;

use crate::config::Dtype;
use crate::ops::array::{Array, Device, SliceMut};
use crate::ops::weights::{widen, Part, Weights};

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

/// Elements that one thread rounds at a time.
const PIECE: usize = 1 << 16;

/// A unit's weights as gathered: compute-dtype bytes, the form in which they reach the engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitBytes {
    dtype: Dtype,
    bytes: Vec<u8>,
}

impl UnitBytes {
    /// Rounds f32 master weights to the compute dtype, little-endian.
    #[must_use]
    pub fn from_master(flat: &[f32], dtype: Dtype) -> Self {
        let width = dtype.bytes() as usize;
        let mut bytes = vec![0; flat.len() * width];
        let pieces = bytes.par_chunks_mut(PIECE * width).zip(flat.par_chunks(PIECE));
        pieces.for_each(|(bytes, flat)| {
            let elements = bytes.chunks_exact_mut(width).zip(flat);
            match dtype {
                Dtype::F32 => elements.for_each(|(b, w)| b.copy_from_slice(&w.to_le_bytes())),
                Dtype::Bf16 => elements.for_each(|(b, w)| {
                    b.copy_from_slice(&half::bf16::from_f32(*w).to_le_bytes());
                }),
            }
        });
        Self { dtype, bytes }
    }

    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    /// Appends further elements, in bytes of the same dtype.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Widened to f32, which loses nothing, on the host.
    #[must_use]
    pub fn to_f32(&self) -> Vec<f32> {
        widen(&self.bytes, self.dtype)
    }

    /// As the blocks of a device take them.
    #[must_use]
    pub fn open(&self, device: &Device) -> Weights {
        Weights::open(&self.bytes, self.dtype, device)
    }

    /// Moves one element to a neighbouring value of its dtype: the smallest difference that two
    /// sides can have.
    pub fn bump_ulp(&mut self, element: usize) {
        let width = self.dtype.bytes() as usize;
        let low = &mut self.bytes[element * width];
        *low = if *low == u8::MAX { *low - 1 } else { *low + 1 };
    }

    /// xxh3 of each tensor's bytes, in the unit's order.
    pub fn fingerprints<'a>(&'a self, spec: &'a UnitSpec) -> impl Iterator<Item = u64> + 'a {
        let width = self.dtype.bytes() as usize;
        assert_eq!(self.bytes.len(), spec.len() * width, "unit {}", spec.name);
        let mut rest = self.bytes.as_slice();
        spec.tensors.iter().map(move |tensor| {
            let (part, after) = rest.split_at(tensor.len() * width);
            rest = after;
            xxhash_rust::xxh3::xxh3_64(part)
        })
    }
}

/// One number for a whole model: xxh3 over its tensors' fingerprints in unit order.
#[must_use]
pub fn combine_fingerprints(tensors: &[u64]) -> u64 {
    let bytes: Vec<u8> = tensors.iter().flat_map(|hash| hash.to_le_bytes()).collect();
    xxhash_rust::xxh3::xxh3_64(&bytes)
}
