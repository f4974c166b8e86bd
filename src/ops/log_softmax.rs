//! The log-probability, defined once for every leg: exact maximum, then Σ exp(x - max) in a fixed
//! tree of 1,024-wide vocabulary tiles (lanes within a tile, tiles ascending), in f32.
//!
//! Callers bound memory by chunks of rows; a row is never cut.

#[cfg(feature = "cuda")]
pub mod cuda;

use super::array::Array;
#[cfg(feature = "cuda")]
use super::cuda::Floats;
use super::simd::{exp, ln, sum_by, vectorized};
use crate::base::TokenId;
#[cfg(feature = "cuda")]
use crate::config::Dtype;

/// Vocabulary entries of one tile.
pub(super) const TILE: usize = 1024;

/// A row's maximum and the logarithm of Σ exp(x - max): log p(i) = (x_i - max) - log_sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normaliser {
    pub max: f32,
    pub log_sum: f32,
}

impl Normaliser {
    /// Of one row of logits, `[V]`. A NaN anywhere gives NaN; entries of -inf weigh nothing.
    #[must_use]
    pub fn of(logits_v: &[f32]) -> Self {
        assert!(!logits_v.is_empty(), "a softmax over no entries");
        vectorized(
            #[inline(always)]
            || {
                let max = logits_v.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
                let mut sum = 0.0;
                for tile in logits_v.chunks(TILE) {
                    sum += sum_by(tile.len(), |i| exp(tile[i] - max));
                }
                Self { max, log_sum: ln_sum(sum) }
            },
        )
    }

    /// log p of an entry whose logit is `x`.
    #[inline(always)]
    #[must_use]
    pub fn log_prob(&self, x: f32) -> f32 {
        (x - self.max) - self.log_sum
    }
}

/// `ln` where it is defined; the sum is at least 1 unless a NaN or an infinity went in.
#[inline(always)]
fn ln_sum(sum: f32) -> f32 {
    if sum.is_finite() {
        ln(sum)
    } else {
        f32::NAN
    }
}

/// `dlogits[V] = (1[i = target] - p_i) · upstream`, overwritten: the gradient of log p(target).
pub fn backward(logits_v: &[f32], target: usize, upstream: f32, dlogits_v: &mut [f32]) {
    assert_eq!(logits_v.len(), dlogits_v.len(), "logits and gradient differ");
    let normaliser = Normaliser::of(logits_v);
    vectorized(
        #[inline(always)]
        || {
            for (d, &x) in dlogits_v.iter_mut().zip(logits_v) {
                *d = -exp(normaliser.log_prob(x)) * upstream;
            }
        },
    );
    dlogits_v[target] += upstream;
}

/// The gradient by logits[R, V] from that by each row's log p(target), where log p is of
/// logits / `temperature`.
#[must_use]
pub fn backward_rows(
    logits_rv: &Array,
    vocab: usize,
    targets: &[TokenId],
    upstream: &[f32],
    temperature: f32,
) -> Array {
    assert_eq!(logits_rv.len(), targets.len() * vocab, "one target a row of logits");
    assert_eq!(targets.len(), upstream.len(), "one gradient a target");
    match logits_rv {
        Array::Cpu(logits_rv) => {
            let scaled: Vec<f32> = logits_rv.iter().map(|x| x / temperature).collect();
            let mut dlogits_rv = vec![0.0; scaled.len()];
            let rows = scaled.chunks_exact(vocab).zip(dlogits_rv.chunks_exact_mut(vocab));
            for ((logits, dlogits), (target, up)) in rows.zip(targets.iter().zip(upstream)) {
                backward(logits, target.index(), up / temperature, dlogits);
            }
            Array::Cpu(dlogits_rv)
        }
        #[cfg(feature = "cuda")]
        Array::Cuda(logits) => {
            let gpu = logits.gpu();
            let mut dlogits = Floats::uninit(gpu, logits.len(), Dtype::F32);
            let (logits, out) = (logits.view(), &mut dlogits.view_mut());
            cuda::backward(gpu, &logits, vocab, targets, upstream, temperature, out);
            Array::Cuda(dlogits)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::{assert_close, finite_difference, random, wide};

    fn oracle(x: &[f64], target: usize) -> f64 {
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        x[target] - max - x.iter().map(|v| (v - max).exp()).sum::<f64>().ln()
    }

    #[test]
    fn against_f64_at_every_tile_remainder() {
        for vocab in [1, 2, 16, 256, 1023, 1024, 1025, 65_536] {
            for scale in [1.0, 20.0] {
                let x: Vec<f32> = random(vocab, 1).iter().map(|v| v * scale).collect();
                let normaliser = Normaliser::of(&x);
                for target in [0, vocab / 2, vocab - 1] {
                    let want = oracle(&wide(&x), target);
                    assert_close("log p", &[normaliser.log_prob(x[target])], [want], 2e-6);
                }
            }
        }
    }

    /// The order is part of the definition: another device must give the same bits.
    #[test]
    fn the_sum_is_the_documented_tree() {
        let x = random(2500, 3);
        let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut sum = 0.0_f32;
        for tile in x.chunks(1024) {
            let mut lanes = [0.0_f32; 16];
            for (i, v) in tile.iter().enumerate() {
                lanes[i % 16] += exp(v - max);
            }
            for width in [8, 4, 2, 1] {
                for lane in 0..width {
                    lanes[lane] += lanes[lane + width];
                }
            }
            sum += lanes[0];
        }
        assert_eq!(Normaliser::of(&x).log_sum.to_bits(), ln(sum).to_bits());
    }

    #[test]
    fn edges() {
        let log_probs =
            |x: &[f32]| x.iter().map(|&v| Normaliser::of(x).log_prob(v)).collect::<Vec<_>>();
        assert_eq!(log_probs(&[3.0]), [0.0]);
        assert_eq!(log_probs(&[0.0, f32::NEG_INFINITY]), [0.0, f32::NEG_INFINITY]);
        assert_eq!(log_probs(&[1e30, 1e30])[0], -(2.0_f32.ln()));
        assert!(log_probs(&[f32::NAN, 1.0])[1].is_nan());
        assert!(log_probs(&[f32::INFINITY, 1.0])[1].is_nan());
    }

    #[test]
    fn backward_against_finite_differences() {
        for vocab in [1, 5, 40] {
            let x = random(vocab, 2);
            let mut d = vec![0.0; vocab];
            backward(&x, vocab / 2, 0.7, &mut d);
            let want = finite_difference(&x, |x| 0.7 * oracle(x, vocab / 2));
            assert_close("dlogits", &d, want, 1e-6);
        }
    }
}
