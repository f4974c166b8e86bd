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
    // log2(e)A.
    const float* a_dn;
    const float* skip_d;
    const float* dt_bias_d;
    State state;
};

// `decay` where the result is a normal number, a * b > NEVER_TINY: no comparison, one scaling.
constexpr float NEVER_TINY = -125.0f;

__device__ __forceinline__ float normal_decay(float a, float b) {
    float rounded;
    const float p = decay_mantissa(a, b, &rounded);
    // The rounder's low bits are zero: what is left of its sum is n.
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(rounded) << 23));
}

__device__ __forceinline__ float steeper(float a, float b) {
    return b < a || b != b ? b : a;
}

// The channel's most negative log2(e)A, or NaN where one is: while delta times it is over
// NEVER_TINY, every state of the channel decays by a normal number.
__device__ __forceinline__ float steepest(const float* a, uint32_t n) {
    float least = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < n; ++i) least = steeper(least, a[i]);
    return least;
}

// N neighbouring elements of a row as they lie there. Whoever asks for the next row's before it is
// done with its own must not touch them, or it waits for them.
template <typename T, uint32_t N>
struct Stored;

template <uint32_t N>
struct Stored<float, N> {
    float x[N];

    // Where `even`, four at a time.
    __device__ __forceinline__ void read(const float* at, uint32_t even) {
        if (even) {
#pragma unroll
            for (uint32_t i = 0; i < N; i += 4) {
                const float4 four = *reinterpret_cast<const float4*>(at + i);
                x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
            }
        } else {
#pragma unroll
            for (uint32_t i = 0; i < N; ++i) x[i] = at[i];
        }
    }

    __device__ __forceinline__ float operator[](uint32_t i) const { return x[i]; }
};

template <uint32_t N>
struct Stored<uint16_t, N> {
    uint32_t pairs[N / 2];

    __device__ __forceinline__ void read(const uint16_t* at, uint32_t even) {
        if (even) {
#pragma unroll
            for (uint32_t i = 0; i < N / 2; i += 2) {
                const uint2 four = *reinterpret_cast<const uint2*>(at + 2 * i);
                pairs[i] = four.x, pairs[i + 1] = four.y;
            }
        } else {
#pragma unroll
            for (uint32_t i = 0; i < N / 2; ++i) {
                pairs[i] = at[2 * i] | static_cast<uint32_t>(at[2 * i + 1]) << 16;
            }
        }
    }

    __device__ __forceinline__ float operator[](uint32_t i) const {
        return __uint_as_float(i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16);
    }
};

// One channel, one row: advances the channel's N states, returns sum_n h*C. B and C are numbers or
// as they are stored.
template <int FIXED, bool NORMAL = false, typename States>
__device__ __forceinline__ float step(
    float* h,
    const float* a,
    const States& b,
    const States& c,
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
                const float decayed = NORMAL ? normal_decay(delta, a[i]) : decay(delta, a[i]);
                h[i] = fused(decayed, h[i], input * b[i]);
                lanes[lane] = fused(h[i], c[i], lanes[lane]);
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
