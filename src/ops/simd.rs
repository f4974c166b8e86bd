//! Vector code whose bits do not depend on the vector unit.
//!
//! Every loop here is written over explicit lanes, and where a product is rounded is said in the
//! code: sums of products, and polynomials, are chains of [`fused`], and Rust contracts nothing by
//! itself. So AVX2, AVX-512 and a GPU give the same bits; they differ in speed alone. The
//! elementary functions are ours for the same reason: a C library's `expf` differs from machine to
//! machine.

/// Lanes of every reduction. A row is cut into chunks of this many elements, each lane sums its
/// own column in ascending order, and the lanes are folded in halves.
pub const LANES: usize = 16;

/// Runs `body` compiled for the widest vectors this CPU has. `body` must be a closure over
/// `#[inline(always)]` code: what is not inlined into it stays at the baseline width.
#[inline(always)]
pub fn vectorized<R>(body: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        if has_avx512() {
            // SAFETY: the CPU has the features, checked on the line above.
            return unsafe { with_avx512(body) };
        }
        if has_avx2() {
            // SAFETY: the CPU has the feature, checked on the line above.
            return unsafe { with_avx2(body) };
        }
    }
    body()
}

/// a · b + c, rounded once (IEEE 754's fusedMultiplyAdd). One instruction inside [`vectorized`];
/// elsewhere, and on a CPU without it, a call into the C library, which has the same bits.
#[inline(always)]
#[must_use]
pub fn fused(a: f32, b: f32, c: f32) -> f32 {
    a.mul_add(b, c)
}

/// The vectors that [`vectorized`] takes on this CPU.
#[must_use]
pub fn vector_unit() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        match (has_avx512(), has_avx2()) {
            (true, _) => "AVX-512",
            (false, true) => "AVX2",
            (false, false) => "SSE2, without fused multiply-add: slow",
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        "the architecture's own vectors"
    }
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn has_avx512() -> bool {
    has_avx2()
        && std::is_x86_feature_detected!("avx512f")
        && std::is_x86_feature_detected!("avx512vl")
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn has_avx2() -> bool {
    std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma")
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
unsafe fn with_avx512<R>(body: impl FnOnce() -> R) -> R {
    body()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn with_avx2<R>(body: impl FnOnce() -> R) -> R {
    body()
}

/// Folds lanes in halves: 16 to 8, 4, 2, 1.
#[inline(always)]
#[must_use]
pub fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Every lane after `step(lane so far, i)` for its own i in 0..len, folded.
#[inline(always)]
fn lanes_by(len: usize, step: impl Fn(f32, usize) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let whole = len - len % LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum = step(*sum, start + lane);
        }
    }
    for index in whole..len {
        lanes[index - whole] = step(lanes[index - whole], index);
    }
    fold(lanes)
}

/// Sum of `term(i)` for i in 0..len, in the lane order above.
#[inline(always)]
pub fn sum_by(len: usize, term: impl Fn(usize) -> f32) -> f32 {
    lanes_by(len, |sum, i| sum + term(i))
}

/// Inner product in the lane order above.
#[inline(always)]
#[must_use]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "dot of unequal lengths");
    lanes_by(a.len(), |sum, i| fused(a[i], b[i], sum))
}

/// 1.5 · 2^23: adding it rounds a small float to an integer, kept in the low bits of the mantissa.
const ROUNDER: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has 9 trailing zero bits, so that n · part is exact for |n| < 512.
#[allow(clippy::excessive_precision)] // Its exact value, which is the point.
const LN_2_HIGH: f32 = 0.693_359_375;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// e^x, within 1 ulp of the true value for normal results; overflow is +inf, NaN stays NaN.
#[inline(always)]
#[must_use]
pub fn exp(x: f32) -> f32 {
    // Beyond these bounds the result is inf or 0 anyway; within them exponents do not overflow.
    let x = x.clamp(-104.0, 89.0);
    let rounded = fused(x, std::f32::consts::LOG2_E, ROUNDER);
    let n = rounded - ROUNDER;
    let r = fused(n, -LN_2_LOW, fused(n, -LN_2_HIGH, x));
    // Least relative error for |r| <= ln(2)/2, 3.1e-9, of those that begin with 1 + r.
    let mut p = 1.381_461_3e-3;
    p = fused(p, r, 8.368_71e-3);
    p = fused(p, r, 4.166_839e-2);
    p = fused(p, r, 0.166_665_21);
    p = fused(p, r, 0.499_999_94);
    p = fused(p, r, 1.0);
    p = fused(p, r, 1.0);
    scaled(p, rounded)
}

/// 2^(a·b) for a·b <= 0 or NaN, the product not rounded: how a state decays, a being Δ and b
/// log2(e)·A. Within 1 ulp for normal results.
#[inline(always)]
#[must_use]
pub fn decay(a: f32, b: f32) -> f32 {
    let rounded = fused(a, b, ROUNDER);
    let f = fused(a, b, ROUNDER - rounded);
    // Least relative error for |f| <= 1/2, 3.1e-9, of those that begin with 1 + ln(2)·f.
    let mut p = 1.532_115_4e-4;
    p = fused(p, f, 1.339_016_1e-3);
    p = fused(p, f, 9.618_526e-3);
    p = fused(p, f, 5.550_362e-2);
    p = fused(p, f, 0.240_226_48);
    p = fused(p, f, std::f32::consts::LN_2);
    p = fused(p, f, 1.0);
    // Half of the least subnormal is 2^-150; beyond it exponents overflow.
    if a * b < -151.0 {
        0.0
    } else {
        scaled(p, rounded)
    }
}

/// p · 2^n for n + [`ROUNDER`]; in two factors, so that both are normal numbers when the result is
/// subnormal.
#[inline(always)]
fn scaled(p: f32, rounded: f32) -> f32 {
    let exponent = rounded.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
    let half = exponent >> 1;
    let power = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    p * power(half) * power(exponent.wrapping_sub(half))
}

/// Natural logarithm of a positive normal number, within 2 ulp.
#[inline(always)]
#[must_use]
pub fn ln(x: f32) -> f32 {
    // x = 2^e · m with m in [sqrt(1/2), sqrt(2)).
    const SQRT_HALF_BITS: u32 = 0x3f35_04f3;
    let shifted = x.to_bits().wrapping_sub(SQRT_HALF_BITS);
    let e = (shifted as i32 >> 23) as f32;
    let m = f32::from_bits((shifted & 0x007f_ffff).wrapping_add(SQRT_HALF_BITS));
    let f = m - 1.0;
    // ln(1 + f) = 2 atanh(s); |s| <= 0.172 leaves an error below 1e-9 of s after s^11.
    let s = f / (2.0 + f);
    let z = s * s;
    let mut p = 2.0 / 11.0;
    p = fused(p, z, 2.0 / 9.0);
    p = fused(p, z, 2.0 / 7.0);
    p = fused(p, z, 2.0 / 5.0);
    p = fused(p, z, 2.0 / 3.0);
    // 2s is written as f - s·f, exact where f is small.
    let tail = s * fused(z, p, -f);
    fused(e, LN_2_HIGH, f + fused(e, LN_2_LOW, tail))
}

/// ln(1 + e^x); x itself above 20, as PyTorch's softplus and every Mamba kernel have it.
#[inline(always)]
#[must_use]
pub fn softplus(x: f32) -> f32 {
    let u = exp(x.min(20.0));
    let w = 1.0 + u;
    // Gives back what rounding `1 + u` lost: the whole of u where u is tiny.
    let soft = ln(w) - ((w - 1.0) - u) / w;
    if x > 20.0 || x.is_nan() {
        x
    } else {
        soft
    }
}

/// 1 / (1 + e^-x).
#[inline(always)]
#[must_use]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x · sigmoid(x), with one division.
#[inline(always)]
#[must_use]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Derivative of [`silu`].
#[inline(always)]
#[must_use]
pub fn silu_derivative(x: f32) -> f32 {
    let s = sigmoid(x);
    s * fused(x, 1.0 - s, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance from `got` to the f64 truth in units of the last place of the truth's f32.
    fn ulps(got: f32, truth: f64) -> f64 {
        let near = truth as f32;
        let ulp = f64::from(f32::from_bits(near.abs().to_bits() + 1)) - f64::from(near.abs());
        ((f64::from(got) - truth) / ulp).abs()
    }

    fn worst(lo: f64, hi: f64, ours: impl Fn(f32) -> f32, truth: impl Fn(f64) -> f64) -> f64 {
        let n = 400_000;
        (0..=n)
            .map(|i| (lo + (hi - lo) * f64::from(i) / f64::from(n)) as f32)
            .map(|x| ulps(ours(x), truth(f64::from(x))))
            .fold(0.0, f64::max)
    }

    #[test]
    fn elementary_functions_against_f64() {
        let decayed = |x: f64| (1.25 * f64::from(x as f32 / 1.25)).exp2();
        for (name, bound, found) in [
            ("exp", 1.01, worst(-87.3, 88.7, exp, f64::exp)),
            ("exp near 0", 1.01, worst(-1.0, 1.0, exp, f64::exp)),
            ("decay", 1.01, worst(-125.9, 0.0, |x| decay(1.25, x / 1.25), decayed)),
            ("decay near 0", 1.01, worst(-1.0, 0.0, |x| decay(1.25, x / 1.25), decayed)),
            ("ln", 2.0, worst(1e-3, 10.0, ln, f64::ln)),
            ("ln wide", 2.0, worst(1.0, 1e30, ln, f64::ln)),
            ("softplus", 4.0, worst(-80.0, 20.0, softplus, |x| x.exp().ln_1p())),
            ("sigmoid", 3.0, worst(-80.0, 80.0, sigmoid, |x| 1.0 / (1.0 + (-x).exp()))),
        ] {
            assert!(found <= bound, "{name}: {found} ulp");
        }
    }

    #[test]
    fn edges() {
        for (name, got, want) in [
            ("exp(0)", exp(0.0), 1.0),
            ("exp(-inf)", exp(f32::NEG_INFINITY), 0.0),
            ("exp(inf)", exp(f32::INFINITY), f32::INFINITY),
            ("exp(100)", exp(100.0), f32::INFINITY),
            ("exp(-200)", exp(-200.0), 0.0),
            ("exp(-100), subnormal", exp(-100.0), 3.8e-44),
            ("decay by nothing", decay(0.0, -16.0), 1.0),
            ("decay, subnormal", decay(140.25, -1.0), f32::from_bits(431)),
            ("decay, the least subnormal", decay(-149.4, 1.0), f32::from_bits(1)),
            ("decay to nothing", decay(150.5, -1.0), 0.0),
            ("decay by far too much", decay(1e30, -1e30), 0.0),
            ("decay without bound", decay(f32::INFINITY, -1.0), 0.0),
            ("ln(1)", ln(1.0), 0.0),
            ("softplus(21)", softplus(21.0), 21.0),
            ("softplus(inf)", softplus(f32::INFINITY), f32::INFINITY),
            ("softplus(-inf)", softplus(f32::NEG_INFINITY), 0.0),
            ("silu(0)", silu(0.0), 0.0),
        ] {
            assert_eq!(got, want, "{name}");
        }
        assert!(decay(f32::NAN, -1.0).is_nan() && decay(0.0, f32::NEG_INFINITY).is_nan());
        assert!(exp(f32::NAN).is_nan() && softplus(f32::NAN).is_nan() && silu(f32::NAN).is_nan());
    }

    #[test]
    fn bits_do_not_depend_on_the_vector_unit() {
        let xs: Vec<f32> = (0..997).map(|i| (i as f32 - 500.0) * 0.037).collect();
        let map = || {
            xs.iter()
                .map(|&x| (exp(x), decay(x.abs(), -1.1), softplus(x), silu(x)))
                .collect::<Vec<_>>()
        };
        assert_eq!(map(), vectorized(map));
        let total = || (sum_by(xs.len(), |i| xs[i]), dot(&xs, &xs));
        assert_eq!(total(), vectorized(total));
    }
}
