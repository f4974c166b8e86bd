// What attention's forward and backward share.
//
// Shape letters: T packed query rows of all sequences, Q query heads, E head width.
#pragma once

#include "arrays.cuh"
#include "lanes.cuh"

constexpr uint32_t HALF_WARP = LANES;

// Field for field `HeadsArgument` of src/ops/attention/cuda.rs.
struct Heads {
    uint32_t query;
    uint32_t key_value;
    uint32_t width;
    // 1 / sqrt(width).
    float scale;
};

__device__ __forceinline__ uint64_t query_at(const Heads& heads, uint64_t token, uint32_t head) {
    return (token * heads.query + head) * heads.width;
}

__device__ __forceinline__ uint32_t group_of(const Heads& heads, uint32_t head) {
    return head / (heads.query / heads.key_value);
}
