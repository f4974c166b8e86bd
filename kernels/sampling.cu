// Greedy choice and the draw from a cumulative distribution, with the log-probability of what was
// taken; bit-equal to `ops::sampling`.
//
// Shape letters: R rows, V vocabulary. One block a row; dynamic shared memory: 12 bytes a tile.
#include "log_softmax.cuh"

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

// The token at `noise` of the cumulative distribution, whose tiles' sums and their total are known;
// the order is that of `sampling::draw`.
__device__ uint64_t draw(
    const Row& row, Best best, double noise, const double* tiles, double total) {
    __shared__ float masses[TILE];
    __shared__ uint64_t chosen;
    __shared__ double before;
    double target = noise * total;
    if (isnan(target)) {
        uint64_t last = last_with_mass(row, best.value, 0, row.vocab);
        return last == row.vocab ? best.index : last;
    }
    if (threadIdx.x == 0) {
        // The total is this very sum, and noise < 1: some tile is beyond the target.
        uint64_t tile = 0;
        uint64_t last = (row.vocab - 1) / TILE;
        double sum = 0.0;
        while (tile < last && sum + tiles[tile] <= target) {
            sum = sum + tiles[tile];
            tile++;
        }
        chosen = tile * TILE;
        before = sum;
    }
    __syncthreads();
    uint64_t start = chosen;
    int count = (int)min((uint64_t)TILE, row.vocab - start);
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        masses[i] = exp_f32(row[start + i] - best.value);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = before;
        for (int i = 0; i < count; i++) {
            if (masses[i] > 0.0f) {
                chosen = start + i;
                sum = sum + (double)masses[i];
                if (sum > target) {
                    break;
                }
            }
        }
    }
    __syncthreads();
    return chosen;
}

// picks[R, 2]: the token and the bits of its log-probability. The token is drawn from logits /
// temperature at noise[R], or is the most likely one where `greedy`; the log-probability is of
// logits / score_temperature.
extern "C" __global__ void sample_rows(const float* logits_rv, uint64_t vocab, float temperature,
                                       uint32_t greedy, const double* noise_r,
                                       float score_temperature, uint32_t* picks_r2) {
    extern __shared__ double tiles[];
    float* singles = (float*)(tiles + (vocab + TILE - 1) / TILE);
    const float* logits = logits_rv + (uint64_t)blockIdx.x * vocab;
    Row scored = {logits, vocab, score_temperature};
    Row drawn = {logits, vocab, temperature};
    // Mostly they are one distribution, whose exponentials are taken once.
    bool same = greedy || temperature == score_temperature;
    Best best = row_best(scored);
    Masses masses = tiled_mass(scored, best.value, singles, greedy || !same ? nullptr : tiles);
    uint64_t token = best.index;
    if (!same) {
        Best likeliest = row_best(drawn);
        float* unused = singles;
        double total = tiled_mass(drawn, likeliest.value, unused, tiles).twice;
        token = draw(drawn, likeliest, noise_r[blockIdx.x], tiles, total);
    } else if (!greedy) {
        token = draw(drawn, best, noise_r[blockIdx.x], tiles, masses.twice);
    }
    Normaliser normaliser = normaliser_of(best.value, masses.single);
    if (threadIdx.x == 0) {
        uint32_t* pick = picks_r2 + 2 * (uint64_t)blockIdx.x;
        pick[0] = (uint32_t)token;
        pick[1] = __float_as_uint(normaliser.log_prob(scored[token]));
    }
}
