// The normaliser of one row of logits: exact maximum, then the sum of exp(x - max) in 1,024-wide
// vocabulary tiles, 16 lanes within a tile, tiles ascending, in f32.
//
// A block works on one row. Logits are divided by a temperature as they are read; dividing by 1
// changes no bit. Shape letter: V vocabulary.
#pragma once
#include "lanes.cuh"

constexpr int TILE = 1024;

struct Row {
    const float* logits_v;
    uint64_t vocab;
    float temperature;
    __device__ float divided(float x) const {
        return temperature == 1.0f ? x : __fdiv_rn(x, temperature);
    }
    __device__ float operator[](uint64_t i) const { return divided(logits_v[i]); }
};

// Calls use(x, i) for every `stride`th element from `first` to `end`, in order. Sixteen are asked
// for before the first is divided, which has a branch that no load passes.
template <typename Use>
__device__ __forceinline__ void each_element(
    const Row& row, uint64_t first, uint64_t end, uint32_t stride, Use use) {
    constexpr uint32_t AT_ONCE = 16;
    for (; first < end; first += static_cast<uint64_t>(AT_ONCE) * stride) {
        float x[AT_ONCE];
#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; ++k) {
            const uint64_t i = first + static_cast<uint64_t>(k) * stride;
            x[k] = i < end ? row.logits_v[i] : 0.0f;
        }
#pragma unroll
        for (uint32_t k = 0; k < AT_ONCE; ++k) {
            const uint64_t i = first + static_cast<uint64_t>(k) * stride;
            if (i < end) use(row.divided(x[k]), i);
        }
    }
}

// A lane's elements of a tile, every 16th.
template <typename Use>
__device__ __forceinline__ void lane_elements(const Row& row, uint64_t tile, Use use) {
    const uint64_t first = tile * TILE, end = min(row.vocab, (tile + 1) * TILE);
    each_element(row, first + threadIdx.x % LANES, end, LANES, use);
}

// A lane's share of a tile's sum of exp(x - max), in f32 and in f64.
struct Masses {
    float single;
    double twice;
};

template <bool TWICE>
__device__ __forceinline__ Masses lane_mass(const Row& row, float max, uint64_t tile) {
    Masses mass = {0, 0};
    lane_elements(row, tile, [&](float x, uint64_t) {
        const float one = exp_f32(x - max);
        mass.single = mass.single + one;
        if (TWICE) mass.twice = mass.twice + (double)one;
    });
    return mass;
}

// Sum over the tiles of one row of the tile's 16-lane sum of exp(x - max), tiles ascending. `tiles`
// has a place for every tile; every thread gets the total.
__device__ inline float tiled_mass(const Row& row, float max, float* tiles) {
    uint64_t count = (row.vocab + TILE - 1) / TILE;
    uint64_t half = threadIdx.x / LANES;
    uint64_t halves = blockDim.x / LANES;
    // Both halves of a warp go round equally often, because the fold needs the whole warp.
    for (uint64_t first = 0; first < count; first += halves) {
        uint64_t tile = first + half;
        float lane = tile < count ? lane_mass<false>(row, max, tile).single : 0.0f;
        lane = fold_lanes(lane);
        if (tile < count && threadIdx.x % LANES == 0) {
            tiles[tile] = lane;
        }
    }
    __syncthreads();
    __shared__ float total;
    if (threadIdx.x == 0) {
        float sum = 0;
        for (uint64_t tile = 0; tile < count; tile++) {
            sum = sum + tiles[tile];
        }
        total = sum;
    }
    __syncthreads();
    float sum = total;
    __syncthreads();
    return sum;
}

// The largest logit of a row, NaN ignored, and the lowest index that has it (0 where every logit is
// NaN or -inf); every thread gets both.
struct Best {
    float value;
    uint64_t index;
};

__device__ __forceinline__ Best better(Best a, Best b) {
    bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
    return second ? b : a;
}

__device__ inline Best row_best(const Row& row) {
    __shared__ Best warps[32];
    Best best = {-INFINITY, 0};
    each_element(row, threadIdx.x, row.vocab, blockDim.x, [&](float x, uint64_t i) {
        if (x > best.value) best = {x, i};
    });
    for (int step = 16; step > 0; step /= 2) {
        Best other;
        other.value = __shfl_xor_sync(0xffffffffu, best.value, step);
        other.index = __shfl_xor_sync(0xffffffffu, (unsigned long long)best.index, step);
        best = better(best, other);
    }
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x / 32] = best;
    }
    __syncthreads();
    best = warps[0];
    for (int warp = 1; warp < blockDim.x / 32; warp++) {
        best = better(best, warps[warp]);
    }
    __syncthreads();
    return best;
}

// log p(i) = (x_i - max) - log_sum.
struct Normaliser {
    float max;
    float log_sum;
    __device__ float log_prob(float x) const { return (x - max) - log_sum; }
};

// The sum is at least 1 unless a NaN or an infinity went in.
__device__ __forceinline__ Normaliser normaliser_of(float max, float sum) {
    return {max, isfinite(sum) ? ln_f32(sum) : NAN};
}

__device__ inline Normaliser normalise(const Row& row, float max, float* tiles) {
    return normaliser_of(max, tiled_mass(row, max, tiles));
}
