//! Flat arrays in equal shards, one a rank: rank r has the elements from r * n on, and what the
//! last shards have beyond the array's end is zeros.

#[cfg(feature = "cuda")]
pub mod cuda;

use std::sync::Arc;

use super::array::Array;
use super::weights::Weights;

/// Elements of each shard of `len`, n.
#[must_use]
pub fn shard_len(len: usize, count: usize) -> usize {
    len.div_ceil(count)
}

/// Shard `index` of `count`, padded, of elements that are `width` entries each.
#[must_use]
pub fn cut<T: Copy + Default>(flat: &[T], width: usize, index: usize, count: usize) -> Vec<T> {
    let n = shard_len(flat.len() / width, count) * width;
    let at = |rank: usize| (rank * n).min(flat.len());
    let mut own = flat[at(index)..at(index + 1)].to_vec();
    own.resize(n, T::default());
    own
}

impl Weights {
    /// The `len` elements that were cut into these.
    #[must_use]
    pub fn join(shards: &[&Self], len: usize) -> Self {
        let n = shards[0].len();
        assert!(shards.iter().all(|shard| shard.len() == n), "shards of two lengths");
        assert_eq!(n, shard_len(len, shards.len()), "shards of another array");
        match shards[0] {
            Self::Cpu { dtype, .. } => {
                let mut whole = Vec::with_capacity(n * shards.len());
                shards.iter().for_each(|shard| whole.extend_from_slice(shard.cpu()));
                assert!(whole[len..].iter().all(|&x| x == 0.0), "padding is never written to");
                whole.truncate(len);
                Self::Cpu { values: Arc::new(whole), dtype: *dtype }
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => {
                let parts: Vec<_> = shards.iter().map(|shard| shard.whole().bytes()).collect();
                Self::Cuda(cuda::joined(&parts).part(0..len))
            }
        }
    }

    fn cpu(&self) -> &[f32] {
        match self {
            Self::Cpu { values, .. } => values,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => panic!("weights of two devices in one operation"),
        }
    }
}

impl Array {
    /// Shard `index`, padded, of the sum of f32 arrays of one length, one a rank, added in the
    /// order given.
    #[must_use]
    pub fn shard_of_sum(wholes: &[&Self], index: usize) -> Self {
        let (len, count) = (wholes[0].len(), wholes.len());
        assert!(wholes.iter().all(|whole| whole.len() == len), "a sum of unequal lengths");
        let n = shard_len(len, count);
        let range = (index * n).min(len)..((index + 1) * n).min(len);
        let mut sum = wholes[0].row_range(1, range.clone());
        wholes[1..].iter().for_each(|whole| sum.add_assign(&whole.row_range(1, range.clone())));
        sum.padded(n)
    }

    /// With zeros after the last element, up to `len`.
    #[must_use]
    pub fn padded(self, len: usize) -> Self {
        if self.len() == len {
            return self;
        }
        let device = self.device();
        let zeros = device.zeros(len - self.len());
        Self::concat(&device, vec![self, zeros])
    }
}

/// A unit on its way from its shards, on a device perhaps while the device computes.
#[derive(Debug)]
pub struct Arriving {
    // Dropped first: the memory is given back once it is not written to any more.
    #[cfg(feature = "cuda")]
    _way: Option<super::cuda::Way>,
    weights: Weights,
}

impl Arriving {
    /// It is there already.
    #[must_use]
    pub fn here(weights: Weights) -> Self {
        Self {
            #[cfg(feature = "cuda")]
            _way: None,
            weights,
        }
    }

    #[cfg(feature = "cuda")]
    pub(super) fn by(way: super::cuda::Way, weights: Weights) -> Self {
        Self { _way: Some(way), weights }
    }

    /// What the device computes from now on may use it.
    #[must_use]
    pub fn settle(self) -> Weights {
        self.weights
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Dtype;
    use crate::ops::array::Device;

    fn numbers(len: usize) -> Vec<f32> {
        (0..len).map(|i| 1.0 + i as f32).collect()
    }

    #[test]
    fn what_was_cut_is_joined_again() {
        for len in [1, 2, 7, 8, 9, 24] {
            for count in [1, 2, 3, 4, 8] {
                let flat = numbers(len);
                let shards: Vec<_> = (0..count).map(|index| cut(&flat, 1, index, count)).collect();
                let n = shard_len(len, count);
                assert!(shards.iter().all(|shard| shard.len() == n) && n * count < len + count);
                let open = |shard: &Vec<f32>| {
                    Weights::of_master(&Device::Cpu.upload(shard.clone()), Dtype::F32)
                };
                let shards: Vec<Weights> = shards.iter().map(open).collect();
                let whole = Weights::join(&shards.iter().collect::<Vec<_>>(), len);
                assert_eq!(whole.whole().to_array().into_host(), flat, "{len} in {count}");
            }
        }
    }

    #[test]
    fn a_sum_is_in_the_order_of_its_terms() {
        let wholes: Vec<Array> =
            [1e8, 1.0, -1e8].map(|x| Device::Cpu.upload(vec![x; 4])).into_iter().collect();
        let wholes: Vec<&Array> = wholes.iter().collect();
        assert_eq!(Array::shard_of_sum(&wholes, 0).into_host(), [0.0; 2]);
        let rotated = [wholes[0], wholes[2], wholes[1]];
        assert_eq!(Array::shard_of_sum(&rotated, 1).into_host(), [1.0; 2]);
        // Two of six elements are padding, all of the last rank's.
        assert_eq!(Array::shard_of_sum(&rotated, 2).into_host(), [0.0; 2]);
    }

    #[test]
    #[should_panic(expected = "padding is never written to")]
    fn padding_that_is_not_zero_is_seen() {
        let shard = |values: Vec<f32>| Weights::of_master(&Device::Cpu.upload(values), Dtype::F32);
        let _ = Weights::join(&[&shard(vec![1.0, 2.0]), &shard(vec![3.0, 4.0])], 3);
    }
}
