// The arithmetic of `src/ops/simd.rs` and `src/ops/round.rs`, operation by operation: compiled
// without contraction but where the code says `fused`, with rounded division and square root, it
// has the CPU's bits.
#pragma once

#include <cstdint>

// Independent sums of a reduction; `ops::simd::LANES`.
constexpr uint32_t LANES = 16;

// `config::Dtype` as `ops::cuda::dtype_code` passes it.
constexpr uint32_t F32 = 0;
constexpr uint32_t BF16 = 1;

// Adds the lanes in halves: 16 to 8, 4, 2, 1. Straight-line, so that the array stays in registers.
__device__ __forceinline__ float fold(float* lanes) {
#pragma unroll
    for (uint32_t lane = 0; lane < 8; ++lane) lanes[lane] += lanes[lane + 8];
#pragma unroll
    for (uint32_t lane = 0; lane < 4; ++lane) lanes[lane] += lanes[lane + 4];
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// a * b + c, rounded once; `ops::simd::fused`.
__device__ __forceinline__ float fused(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}

__device__ __forceinline__ float power_of_two(int exponent) {
    return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

constexpr float LN_2 = 0.693147182464599609375f;
constexpr float LOG2_E = 1.44269504088896340736f;

// 1.5 * 2^23: adding it rounds a small float to an integer, kept in the low bits.
constexpr float ROUNDER = 12582912.0f;

// p * 2^n for n + ROUNDER.
__device__ __forceinline__ float scaled(float p, float rounded) {
    const int exponent = static_cast<int>(__float_as_uint(rounded) - __float_as_uint(ROUNDER));
    const int half = exponent >> 1;
    return p * power_of_two(half) * power_of_two(exponent - half);
}

// `ops::simd::exp`. A NaN passes both comparisons.
__device__ __forceinline__ float exp_f32(float x) {
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    const float rounded = fused(x, LOG2_E, ROUNDER);
    const float n = rounded - ROUNDER;
    const float r = fused(n, 2.1219444e-4f, fused(n, -0.693359375f, x));
    float p = 1.3814613e-3f;
    p = fused(p, r, 8.36871e-3f);
    p = fused(p, r, 4.166839e-2f);
    p = fused(p, r, 0.16666521f);
    p = fused(p, r, 0.49999994f);
    p = fused(p, r, 1.0f);
    p = fused(p, r, 1.0f);
    return scaled(p, rounded);
}

// What `ops::simd::decay` makes of its product before it scales it; `rounded` is n + ROUNDER.
__device__ __forceinline__ float decay_mantissa(float a, float b, float* rounded) {
    *rounded = fused(a, b, ROUNDER);
    const float f = fused(a, b, ROUNDER - *rounded);
    float p = 1.5321154e-4f;
    p = fused(p, f, 1.3390161e-3f);
    p = fused(p, f, 9.618526e-3f);
    p = fused(p, f, 5.550362e-2f);
    p = fused(p, f, 0.24022648f);
    p = fused(p, f, LN_2);
    return fused(p, f, 1.0f);
}

// `ops::simd::decay`.
__device__ __forceinline__ float decay(float a, float b) {
    float rounded;
    const float p = decay_mantissa(a, b, &rounded);
    return a * b < -151.0f ? 0.0f : scaled(p, rounded);
}

// `ops::simd::ln`, for positive normal numbers.
__device__ __forceinline__ float ln_f32(float x) {
    constexpr uint32_t SQRT_HALF_BITS = 0x3f3504f3u;
    const uint32_t shifted = __float_as_uint(x) - SQRT_HALF_BITS;
    const float e = static_cast<float>(static_cast<int>(shifted) >> 23);
    const float m = __uint_as_float((shifted & 0x007fffffu) + SQRT_HALF_BITS);
    const float f = m - 1.0f;
    const float s = f / (2.0f + f);
    const float z = s * s;
    float p = 2.0f / 11.0f;
    p = fused(p, z, 2.0f / 9.0f);
    p = fused(p, z, 2.0f / 7.0f);
    p = fused(p, z, 2.0f / 5.0f);
    p = fused(p, z, 2.0f / 3.0f);
    const float tail = s * fused(z, p, -f);
    return fused(e, 0.693359375f, f + fused(e, -2.1219444e-4f, tail));
}

__device__ __forceinline__ float softplus(float x) {
    const float u = exp_f32(fminf(x, 20.0f));
    const float w = 1.0f + u;
    const float soft = ln_f32(w) - ((w - 1.0f) - u) / w;
    return x > 20.0f || x != x ? x : soft;
}

__device__ __forceinline__ float sigmoid(float x) {
    return 1.0f / (1.0f + exp_f32(-x));
}

__device__ __forceinline__ float silu(float x) {
    return x / (1.0f + exp_f32(-x));
}

__device__ __forceinline__ float silu_derivative(float x) {
    const float s = sigmoid(x);
    return s * fused(x, 1.0f - s, 1.0f);
}

// To the nearest bf16, ties to even; a NaN stays one.
__device__ __forceinline__ float round_bf16(float x) {
    const uint32_t bits = __float_as_uint(x);
    const uint32_t rounded = (bits + (0x7fffu + ((bits >> 16) & 1u))) & 0xffff0000u;
    return __uint_as_float(x != x ? (bits | 0x00400000u) & 0xffff0000u : rounded);
}

__device__ __forceinline__ float to_dtype(float x, uint32_t dtype) {
    return dtype == BF16 ? round_bf16(x) : x;
}
