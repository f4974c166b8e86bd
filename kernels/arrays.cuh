// Activations as kernels take them: rows of f32 or bf16, perhaps the columns of wider rows.
//
// Every kernel that works on activations is a template over their element type, of which its entry
// picks one by the array's dtype. Numbers are f32 between a load and the store that rounds.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "numeric.cuh"

// Field for field `RowsArgument` of src/ops/cuda/floats.rs.
struct Rows {
    unsigned char* at;
    // Elements from one row to the next.
    uint64_t pitch;
    uint32_t dtype;
};

template <typename T>
__device__ __forceinline__ T* row_of(const Rows& rows, uint64_t row) {
    return reinterpret_cast<T*>(rows.at) + row * rows.pitch;
}

__device__ __forceinline__ float read(float x) { return x; }
__device__ __forceinline__ float read(uint16_t bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// Rounds to the element type; a NaN stays one.
__device__ __forceinline__ void write(float* at, float x) { *at = x; }
__device__ __forceinline__ void write(uint16_t* at, float x) {
    *at = __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// What a store would leave, as f32.
template <typename T>
__device__ __forceinline__ float rounded(float x);
template <>
__device__ __forceinline__ float rounded<float>(float x) { return x; }
template <>
__device__ __forceinline__ float rounded<uint16_t>(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

// Elements that a thread takes at a time where rows allow it: 16 bytes of bf16.
constexpr uint32_t EIGHT = 8;

__device__ __forceinline__ void read8(const float* at, float* x) {
    const float4 a = reinterpret_cast<const float4*>(at)[0];
    const float4 b = reinterpret_cast<const float4*>(at)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

__device__ __forceinline__ void read8(const uint16_t* at, float* x) {
    const uint4 word = *reinterpret_cast<const uint4*>(at);
    const uint32_t words[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = __uint_as_float(words[i] << 16);
        x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ void write8(float* at, const float* x) {
    reinterpret_cast<float4*>(at)[0] = make_float4(x[0], x[1], x[2], x[3]);
    reinterpret_cast<float4*>(at)[1] = make_float4(x[4], x[5], x[6], x[7]);
}

__device__ __forceinline__ void write8(uint16_t* at, const float* x) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    *reinterpret_cast<uint4*>(at) = make_uint4(words[0], words[1], words[2], words[3]);
}

// N elements at a time: EIGHT of rows that are made of eights, or one.
template <uint32_t N, typename T>
__device__ __forceinline__ void read_n(const T* at, float* x) {
    if constexpr (N == EIGHT) {
        read8(at, x);
    } else {
        static_assert(N == 1);
        x[0] = read(at[0]);
    }
}

template <uint32_t N, typename T>
__device__ __forceinline__ void write_n(T* at, const float* x) {
    if constexpr (N == EIGHT) {
        write8(at, x);
    } else {
        static_assert(N == 1);
        write(at, x[0]);
    }
}

// Calls a template's body for an element type, and for eight elements at a time where `even`.
#define BY_DTYPE(dtype, body, ...) \
    ((dtype) == BF16 ? body<uint16_t>(__VA_ARGS__) : body<float>(__VA_ARGS__))
#define BY_DTYPE_AND_WIDTH(dtype, even, body, ...)                                            \
    ((dtype) == BF16                                                                          \
         ? ((even) ? body<uint16_t, EIGHT>(__VA_ARGS__) : body<uint16_t, 1>(__VA_ARGS__))     \
         : ((even) ? body<float, EIGHT>(__VA_ARGS__) : body<float, 1>(__VA_ARGS__)))
