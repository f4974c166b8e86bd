//! A 64-bit fingerprint of a tensor, the same number wherever the tensor lies.
//!
//! The tensor's bytes in the compute dtype are little-endian words of 64 bits, the last one filled
//! up with zeros. The fingerprint is `mix(mix(step(0) + w0) + mix(step(1) + w1) + ... + bytes)` in
//! wrapping arithmetic, where `step(i) = (i + 1) * STEP` and `bytes` counts the bytes: sums have no
//! order, so that any number of threads may share the work.
//!
//! `mix` is a bijection and so is adding `step(i)`: while the other words stay, two values of a
//! word never have the same term, nor two sums the same fingerprint. One changed element, or any
//! change within one word, is therefore always seen. For all other changes it is a hash: terms
//! behave as independent random numbers, and two tensors agree by a chance of 2^-64. `mix` and
//! `STEP` are those of the generator SplitMix64 (Steele, Lea and Flood 2014; the constants of the
//! mix are Stafford's thirteenth).

#[cfg(feature = "cuda")]
pub mod cuda;

use rayon::prelude::*;

use super::simd::vectorized;
use super::weights::Weights;
use crate::config::Dtype;

/// 2^64 over the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Elements that one thread adds up at a time: whole words in either dtype.
const PIECE: usize = 1 << 16;

impl Weights {
    /// The fingerprint of each of its tensors, which lie one after another with these lengths.
    #[must_use]
    pub fn fingerprints(&self, lens: &[usize]) -> Vec<u64> {
        assert_eq!(lens.iter().sum::<usize>(), self.len(), "the lengths of all tensors");
        let width = self.dtype().bytes();
        let sums: Vec<u64> = match self {
            Self::Cpu { values, dtype } => {
                let mut rest = values.as_slice();
                let sum = |&len: &usize| {
                    let (tensor, after) = rest.split_at(len);
                    rest = after;
                    sum(tensor, *dtype)
                };
                lens.iter().map(sum).collect()
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(unit) => cuda::sums(unit, lens),
        };
        let finish = |(sum, &len): (u64, &usize)| mix(sum.wrapping_add(len as u64 * width));
        sums.into_iter().zip(lens).map(finish).collect()
    }
}

#[inline(always)]
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Over the words of a tensor whose elements were widened to f32.
fn sum(tensor: &[f32], dtype: Dtype) -> u64 {
    let pieces = tensor.par_chunks(PIECE).enumerate();
    let of_piece = |(i, piece): (usize, &[f32])| {
        vectorized(|| match dtype {
            Dtype::F32 => sum_words::<2>(piece, i * (PIECE / 2), 0),
            // The upper half of its f32 is the whole of a bf16.
            Dtype::Bf16 => sum_words::<4>(piece, i * (PIECE / 4), 16),
        })
    };
    pieces.map(of_piece).reduce(|| 0, u64::wrapping_add)
}

/// Over words of `PER_WORD` elements each, from word `first` on; the low `dropped` bits of an
/// element's f32 are not its own.
#[inline(always)]
fn sum_words<const PER_WORD: usize>(values: &[f32], first: usize, dropped: u32) -> u64 {
    let term = |index: usize, elements: &[f32; PER_WORD]| {
        let mut word = 0;
        for (place, element) in elements.iter().enumerate() {
            word |= u64::from(element.to_bits() >> dropped) << (place * (64 / PER_WORD));
        }
        mix((index as u64 + 1).wrapping_mul(STEP).wrapping_add(word))
    };
    let (words, rest) = values.as_chunks::<PER_WORD>();
    let mut sum = 0_u64;
    for (index, elements) in words.iter().enumerate() {
        sum = sum.wrapping_add(term(first + index, elements));
    }
    if !rest.is_empty() {
        let mut last = [0.0; PER_WORD];
        last[..rest.len()].copy_from_slice(rest);
        sum = sum.wrapping_add(term(first + words.len(), &last));
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Stream;
    use crate::ops::array::Device;

    fn of(bytes: &[u8], dtype: Dtype, lens: &[usize]) -> Vec<u64> {
        Weights::open(bytes, dtype, &Device::Cpu).fingerprints(lens)
    }

    /// The definition, a byte at a time.
    fn defined(bytes: &[u8]) -> u64 {
        let mut words = vec![0_u64; bytes.len().div_ceil(8)];
        for (at, &byte) in bytes.iter().enumerate() {
            words[at / 8] |= u64::from(byte) << (8 * (at % 8));
        }
        let mut sum = 0_u64;
        let mut step = 0_u64;
        for word in words {
            step = step.wrapping_add(STEP);
            sum = sum.wrapping_add(mix(step.wrapping_add(word)));
        }
        mix(sum.wrapping_add(bytes.len() as u64))
    }

    /// Finite elements.
    fn random(len: usize, dtype: Dtype) -> Vec<u8> {
        let mut stream = Stream::new(3, "fingerprint", len as u64);
        let element = |_| (stream.integer(0, 0x7f7f_ffff) as u32).to_le_bytes();
        let elements = (0..len).map(element);
        elements.flat_map(|b| b[4 - dtype.bytes() as usize..].to_vec()).collect()
    }

    #[test]
    fn tensors_anywhere_in_a_unit_have_the_fingerprints_of_the_definition() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let lens = [5, 0, 1, 2, 3, 4, 1001, PIECE, PIECE + 1, 2 * PIECE - 1];
            let bytes = random(lens.iter().sum(), dtype);
            let mut rest = bytes.as_slice();
            let expected = lens.map(|len| {
                let (tensor, after) = rest.split_at(len * dtype.bytes() as usize);
                rest = after;
                defined(tensor)
            });
            assert_eq!(of(&bytes, dtype, &lens), expected, "{dtype:?}");
        }
    }

    /// Records of several runs and machines are compared.
    #[test]
    fn the_definition_stays() {
        let ones = 1.0_f32.to_le_bytes().repeat(3);
        let found = [0, 1, 2, 3].map(|len| of(&ones[..4 * len], Dtype::F32, &[len])[0]);
        let expected = [0, 0x2322_789c_2cda_6e2c, 0xd465_91ec_c550_27da, 0x854a_7ec2_209d_6128];
        assert_eq!(found, expected);
    }

    #[test]
    fn every_single_change_is_seen_and_so_are_order_and_length() {
        let (len, dtype) = (37, Dtype::Bf16);
        let bytes = random(len, dtype);
        let mut seen = vec![of(&bytes, dtype, &[len])[0]];
        for bit in 0..8 * bytes.len() {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            // An exponent of ones is no number, whose lowest bits widening would set.
            let exponent = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]) & 0x7f80;
            if changed.chunks(2).all(|b| exponent(b) != 0x7f80) {
                seen.push(of(&changed, dtype, &[len])[0]);
            }
        }
        let words = bytes.chunks(8).rev().flatten().copied().collect::<Vec<_>>();
        seen.push(of(&words, dtype, &[len])[0]);
        for zeros in 0..9 {
            seen.push(of(&vec![0; 2 * zeros], dtype, &[zeros])[0]);
        }
        let count = seen.len();
        assert!(count > 500, "{count}");
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), count);
    }
}
