// Greedy choice and the draw from a cumulative distribution, with the log-probability of what was
// taken; bit-equal to `ops::sampling`. A row is the work of many blocks: they find each tile's
// largest logit, then, knowing the row's, each tile's mass; one more block a row picks.
//
// Shape letters: R rows, V vocabulary, T tiles of 1,024 of it.
#include "log_softmax.cuh"

// The largest logit of a tile, and the lowest index that has it.
struct TileBest {
    float value;
    uint32_t index;
};

__device__ __forceinline__ uint64_t tiles_of(uint64_t vocab) { return (vocab + TILE - 1) / TILE; }

// Bests[R, T]. Grid (R, groups of tiles); 16 threads a tile.
extern "C" __global__ void sample_bests(
    const float* logits_rv, uint64_t vocab, float temperature, TileBest* bests_rt) {
    const uint64_t tile = (uint64_t)blockIdx.y * (blockDim.x / LANES) + threadIdx.x / LANES;
    const uint64_t tiles = tiles_of(vocab);
    const Row row = {logits_rv + (uint64_t)blockIdx.x * vocab, vocab, temperature};
    Best best = {-INFINITY, 0};
    lane_elements(row, tile, [&](float x, uint64_t i) {
        if (x > best.value) best = {x, i};
    });
    for (uint32_t step = LANES / 2; step > 0; step /= 2) {
        Best other;
        other.value = __shfl_xor_sync(0xffffffffu, best.value, step, LANES);
        other.index = __shfl_xor_sync(0xffffffffu, (unsigned long long)best.index, step, LANES);
        best = better(best, other);
    }
    if (tile < tiles && threadIdx.x % LANES == 0) {
        bests_rt[blockIdx.x * tiles + tile] = {best.value, (uint32_t)best.index};
    }
}

// A row's largest logit from its tiles', for every thread. A tile without one has index 0 and -inf,
// which no other index yields to.
__device__ __forceinline__ Best row_best_of(const TileBest* bests_t, uint64_t tiles) {
    Best best = {-INFINITY, 0};
    for (uint64_t tile = threadIdx.x % 32; tile < tiles; tile += 32) {
        best = better(best, {bests_t[tile].value, bests_t[tile].index});
    }
    for (int step = 16; step > 0; step /= 2) {
        Best other;
        other.value = __shfl_xor_sync(0xffffffffu, best.value, step);
        other.index = __shfl_xor_sync(0xffffffffu, (unsigned long long)best.index, step);
        best = better(best, other);
    }
    return best;
}

// The tiles' masses in f32 and f64, [R, T] each. Grid (R, groups of tiles); 16 threads a tile.
extern "C" __global__ void sample_masses(
    const float* logits_rv,
    uint64_t vocab,
    float temperature,
    const TileBest* bests_rt,
    float* singles_rt,
    double* doubles_rt) {
    const uint64_t tile = (uint64_t)blockIdx.y * (blockDim.x / LANES) + threadIdx.x / LANES;
    const uint64_t tiles = tiles_of(vocab), first = blockIdx.x * tiles;
    const Row row = {logits_rv + (uint64_t)blockIdx.x * vocab, vocab, temperature};
    const float max = row_best_of(bests_rt + first, tiles).value;
    Masses lane = {0, 0};
    if (tile < tiles) lane = lane_mass<true>(row, max, tile);
    const float single = fold_lanes(lane.single);
    const double twice = fold_lanes(lane.twice);
    if (tile < tiles && threadIdx.x % LANES == 0) {
        singles_rt[first + tile] = single;
        doubles_rt[first + tile] = twice;
    }
}

// Of a row's elements from `first` to `end`, the last that has any mass; `end` where none has.
// Every thread of the block calls it and gets the answer.
__device__ uint64_t last_with_mass(const Row& row, float max, uint64_t first, uint64_t end) {
    __shared__ unsigned long long last;
    if (threadIdx.x == 0) {
        last = 0;
    }
    __syncthreads();
    unsigned long long mine = 0;
    for (uint64_t i = first + threadIdx.x; i < end; i += blockDim.x) {
        if (exp_f32(row[i] - max) > 0.0f) {
            mine = i + 1;
        }
    }
    atomicMax(&last, mine);
    __syncthreads();
    uint64_t found = last;
    __syncthreads();
    return found == 0 ? end : found - 1;
}

// From the masses of one tile, of which `count` are its own and the others zero: the first entry
// whose cumulative sum, begun at `sum`, is over the target, or the last that has any mass.
__device__ int walk(const float* masses, int count, double sum, double target) {
    constexpr int STRIDE = 16;
    int last = 0;
    for (int start = 0; start < count; start += STRIDE) {
        float some[STRIDE];
#pragma unroll
        for (int k = 0; k < STRIDE; k++) some[k] = masses[start + k];
        double after = sum;
#pragma unroll
        for (int k = 0; k < STRIDE; k++) after = after + (double)some[k];
        // The sums only grow: if the last is not over the target, none is.
        const bool over = after > target;
        for (int k = 0; k < STRIDE; k++) {
            const float mass = masses[start + k];
            if (mass > 0.0f) {
                last = start + k;
                sum = sum + (double)mass;
                if (over && sum > target) return last;
            }
        }
    }
    return last;
}

// The token at `noise` of the cumulative distribution, whose tiles' masses are known; the order is
// that of `sampling::draw`.
__device__ uint64_t draw(const Row& row, Best best, double noise, const double* doubles_t) {
    __shared__ float masses[TILE];
    __shared__ uint64_t chosen;
    __shared__ double before, target;
    const uint64_t tiles = tiles_of(row.vocab);
    if (threadIdx.x == 0) {
        double total = 0.0;
#pragma unroll 16
        for (uint64_t tile = 0; tile < tiles; tile++) total = total + doubles_t[tile];
        // The total is this very sum, and noise < 1: some tile is beyond the target.
        target = noise * total;
        double sum = 0.0;
        uint64_t tile = 0;
        while (tile + 1 < tiles && sum + doubles_t[tile] <= target) {
            sum = sum + doubles_t[tile];
            tile++;
        }
        chosen = tile * TILE;
        before = sum;
    }
    __syncthreads();
    if (isnan(target)) {
        uint64_t last = last_with_mass(row, best.value, 0, row.vocab);
        return last == row.vocab ? best.index : last;
    }
    const uint64_t start = chosen;
    const int count = (int)min((uint64_t)TILE, row.vocab - start);
    for (int i = threadIdx.x; i < TILE; i += blockDim.x) {
        masses[i] = i < count ? exp_f32(row[start + i] - best.value) : 0.0f;
    }
    __syncthreads();
    if (threadIdx.x == 0) chosen = start + walk(masses, count, before, target);
    __syncthreads();
    return chosen;
}

// picks[R, 2]: the token and the bits of its log-probability. The token is drawn from logits /
// temperature at noise[R], or is the most likely one where `greedy`; the log-probability is of
// logits / score_temperature. `drawn` and `scored` are each distribution's tiles, and may be one's.
extern "C" __global__ void sample_picks(
    const float* logits_rv,
    uint64_t vocab,
    float temperature,
    uint32_t greedy,
    const double* noise_r,
    float score_temperature,
    const TileBest* drawn_bests_rt,
    const double* drawn_doubles_rt,
    const TileBest* scored_bests_rt,
    const float* scored_singles_rt,
    uint32_t* picks_r2) {
    const uint64_t tiles = tiles_of(vocab), first = blockIdx.x * tiles;
    const float* logits = logits_rv + (uint64_t)blockIdx.x * vocab;
    const Row scored = {logits, vocab, score_temperature};
    const Row drawn = {logits, vocab, temperature};
    const Best best = row_best_of(scored_bests_rt + first, tiles);
    uint64_t token = best.index;
    if (!greedy) {
        const Best likeliest = row_best_of(drawn_bests_rt + first, tiles);
        token = draw(drawn, likeliest, noise_r[blockIdx.x], drawn_doubles_rt + first);
    }
    if (threadIdx.x == 0) {
        float sum = 0.0f;
#pragma unroll 16
        for (uint64_t tile = 0; tile < tiles; tile++) sum = sum + scored_singles_rt[first + tile];
        uint32_t* pick = picks_r2 + 2 * (uint64_t)blockIdx.x;
        pick[0] = (uint32_t)token;
        pick[1] = __float_as_uint(normaliser_of(best.value, sum).log_prob(scored[token]));
    }
}
