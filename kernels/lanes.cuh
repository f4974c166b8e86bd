// Sums over one row in the order of `ops::simd::sum_by`: 16 lanes, lane l takes the elements
// l, l + 16, l + 32, .. in ascending order, then the lanes are folded in halves.
#pragma once

#include <cstdint>

#include "numeric.cuh"

// Folds the 16 values of a half-warp in halves: 16 to 8, 4, 2, 1. Lane 0 of the half has the sum;
// the others hold numbers of no meaning. All 32 threads of the warp must call it.
template <typename T>
__device__ __forceinline__ T fold_lanes(T lane) {
    for (uint32_t width = LANES / 2; width > 0; width /= 2) {
        lane = lane + __shfl_down_sync(0xffffffffu, lane, width, LANES);
    }
    return lane;
}

// Terms that are staged in shared memory at a time.
constexpr uint32_t STAGED = 2048;

// The fold of every lane's step(so far, term(i)) for its own i in 0..len, by a whole block, which
// gets the result in every thread. The block computes terms in parallel and 16 of its threads take
// the steps; a block has at least one warp.
template <typename Term, typename Step>
__device__ float block_lanes(uint64_t len, Term term, Step step) {
    __shared__ float staged[STAGED];
    __shared__ float total;
    float lane = 0.0f;
    for (uint64_t start = 0; start < len; start += STAGED) {
        uint32_t count = min((uint64_t)STAGED, len - start);
        for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
            staged[i] = term(start + i);
        }
        __syncthreads();
        if (threadIdx.x < LANES) {
            for (uint32_t i = threadIdx.x; i < count; i += LANES) {
                lane = step(lane, staged[i]);
            }
        }
        __syncthreads();
    }
    if (threadIdx.x < warpSize) {
        lane = fold_lanes(lane);
        if (threadIdx.x == 0) {
            total = lane;
        }
    }
    __syncthreads();
    float sum = total;
    // The next call may write `total` at once.
    __syncthreads();
    return sum;
}

// Sum of term(i), i in 0..len.
template <typename Term>
__device__ float block_sum(uint64_t len, Term term) {
    return block_lanes(len, term, [](float sum, float one) { return sum + one; });
}
