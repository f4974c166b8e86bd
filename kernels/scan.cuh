// One row of the selective scan, which prefill, decode and the backward's second forward share.
//
// Shape letters: D channels, N states a channel. Sums over n follow the 16 lanes of
// src/ops/simd.rs. Bit for bit src/ops/scan.rs.
#pragma once

#include "arrays.cuh"
#include "pages.cuh"

// What every row brings, [T, D] and [T, N], the layer's weights, and where the states lie. Field
// for field `InputsArgument` of src/ops/scan/cuda.rs.
struct ScanInputs {
    Rows c_td;
    Rows dt_td;
    Rows b_tn;
    Rows c_tn;
    Rows z_td;
    const float* a_dn;
    const float* skip_d;
    const float* dt_bias_d;
    State state;
};

// exp_f32 where x <= 0 and the result is a normal number, x > NEVER_TINY: no clamps, one scaling.
// n * 0.693359375 is exact, so that its difference with x is rounded once either way.
constexpr float NEVER_TINY = -86.0f;

__device__ __forceinline__ float exp_decay(float x) {
    constexpr float ROUNDER = 12582912.0f;
    const float rounded = x * 1.44269504088896340736f + ROUNDER;
    const float n = rounded - ROUNDER;
    const float r = __fmaf_rn(-n, 0.693359375f, x) - n * -2.1219444e-4f;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = (p * (r * r) + r) + 1.0f;
    // The rounder's low bits are zero: what is left of its sum is n.
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(rounded) << 23));
}

__device__ __forceinline__ float steeper(float a, float b) {
    return b < a || b != b ? b : a;
}

// The channel's most negative A, or NaN where one is: while delta times it is over NEVER_TINY,
// every state of the channel decays by a normal number.
__device__ __forceinline__ float steepest(const float* a, uint32_t n) {
    float least = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < n; ++i) least = steeper(least, a[i]);
    return least;
}

// One channel, one row: advances the channel's N states, returns sum_n h*C.
template <int FIXED, bool NORMAL = false>
__device__ __forceinline__ float step(
    float* h,
    const float* a,
    const float* b,
    const float* c,
    uint32_t states,
    float delta,
    float x) {
    const uint32_t n = FIXED ? FIXED : states;
    const float input = delta * x;
    float lanes[LANES] = {};
#pragma unroll
    for (uint32_t base = 0; base < n; base += LANES) {
#pragma unroll
        for (uint32_t lane = 0; lane < LANES; ++lane) {
            const uint32_t i = base + lane;
            if (i < n) {
                const float decay = NORMAL ? exp_decay(delta * a[i]) : exp_f32(delta * a[i]);
                const float now = decay * h[i] + input * b[i];
                h[i] = now;
                lanes[lane] += now * c[i];
            }
        }
    }
    return fold(lanes);
}

// A bf16 state is rounded after every row: a decode that goes through its page cannot help it.
// Fast arithmetic leaves that to the store and passes F32 here.
template <int FIXED>
__device__ __forceinline__ void round_states(float* h, uint32_t states, uint32_t row_dtype) {
    if (row_dtype != BF16) return;
#pragma unroll
    for (uint32_t i = 0; i < (FIXED ? FIXED : states); ++i) h[i] = round_bf16(h[i]);
}
