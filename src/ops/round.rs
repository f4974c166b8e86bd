//! Rounding to the compute dtype, written out wherever it happens.
//!
//! The CPU computes in f32 and rounds at the points the GPU would store: a value of dtype bf16 is
//! an f32 whose low 16 bits are zero.

#[cfg(feature = "cuda")]
pub mod cuda;

use std::borrow::Cow;

use super::array::Array;
use super::simd::vectorized;
use crate::config::Dtype;

/// `x` rounded to the nearest bf16, ties to even; infinities and NaN are kept.
#[inline(always)]
#[must_use]
pub fn bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    // A NaN whose payload sits in the low bits must not become an infinity.
    let quiet = (bits | 0x0040_0000) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { quiet } else { rounded })
}

/// `x` rounded to `dtype`.
#[inline(always)]
#[must_use]
pub fn to_dtype(x: f32, dtype: Dtype) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::Bf16 => bf16(x),
    }
}

/// Rounds every element in place.
pub fn slice_to_dtype(xs: &mut [f32], dtype: Dtype) {
    if dtype == Dtype::Bf16 {
        vectorized(|| xs.iter_mut().for_each(|x| *x = bf16(*x)));
    }
}

impl Array {
    /// Rounds every element in place.
    pub fn round_to(&mut self, dtype: Dtype) {
        match self {
            Self::Cpu(xs) => slice_to_dtype(xs, dtype),
            #[cfg(feature = "cuda")]
            Self::Cuda(xs) if xs.dtype() == dtype => {}
            #[cfg(feature = "cuda")]
            Self::Cuda(xs) => *xs = xs.rounded_to(dtype),
        }
    }

    /// The elements rounded: these, or a dense copy.
    #[must_use]
    pub fn rounded(&self, dtype: Dtype) -> Cow<'_, Self> {
        match self {
            Self::Cpu(_) if dtype == Dtype::F32 => Cow::Borrowed(self),
            Self::Cpu(xs) => {
                let mut xs = xs.clone();
                slice_to_dtype(&mut xs, dtype);
                Cow::Owned(Self::Cpu(xs))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(xs) if xs.dtype() == dtype && xs.width() == xs.len() => Cow::Borrowed(self),
            #[cfg(feature = "cuda")]
            Self::Cuda(xs) => Cow::Owned(Self::Cuda(xs.rounded_to(dtype))),
        }
    }

    /// The residual sum: self = round(self + y).
    pub fn add_rounded(&mut self, y: &Self, dtype: Dtype) {
        assert_eq!(self.len(), y.len(), "a sum of unequal lengths");
        match self {
            Self::Cpu(xs) => {
                xs.iter_mut().zip(y.cpu()).for_each(|(x, y)| *x = to_dtype(*x + y, dtype));
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(xs) => {
                assert_eq!(xs.dtype(), dtype, "a sum is rounded to its own dtype");
                cuda::add_rounded(xs, y.cuda());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_half_crate() {
        let specials = [0.0, -0.0, 1.0, f32::MAX, f32::MIN_POSITIVE, 1e-45, f32::INFINITY];
        let ties = (0..4096_u32).map(|i| f32::from_bits(0x3f80_0000 + i * 0x0800));
        for x in specials.into_iter().chain(ties).flat_map(|x| [x, -x]) {
            assert_eq!(bf16(x).to_bits(), half::bf16::from_f32(x).to_f32().to_bits(), "{x:e}");
        }
        assert!(bf16(f32::from_bits(0x7f80_0001)).is_nan());
    }
}
