// Rows by number: gathered, scattered, weighted, multiplied with each other. Bit for bit
// src/ops/array.rs and src/ops/routing.rs.
//
// Shape letters: R listed rows, W their width. No row is listed twice where rows are written, so
// no element has two writers.
#include "arrays.cuh"
#include "elements.cuh"
#include "ordered.cuh"

// out[R, W]: row r is row rows[r] of x.
template <typename T>
__device__ __forceinline__ void gather(
    Rows x, const uint32_t* rows, uint64_t len, uint64_t width, Rows out) {
    const uint64_t i = this_element();
    if (i >= len) return;
    const uint64_t row = i / width, column = i % width;
    row_of<T>(out, row)[column] = row_of<T>(x, rows[row])[column];
}

extern "C" __global__ void gather_rows(
    Rows x, const uint32_t* __restrict__ rows, uint64_t len, uint64_t width, Rows out) {
    BY_DTYPE(x.dtype, gather, x, rows, len, width, out);
}

// Row rows[r] of out becomes row r of x[R, W].
extern "C" __global__ void scatter_rows(
    const float* __restrict__ x,
    const uint32_t* __restrict__ rows,
    uint64_t len,
    uint64_t width,
    float* __restrict__ out) {
    const uint64_t i = this_element();
    if (i < len) out[rows[i / width] * width + i % width] = x[i];
}

// Row rows[r] of the f32 sums += weights[r] * row r of x[R, W].
template <typename T>
__device__ __forceinline__ void add_weighted(
    Rows x, const uint32_t* rows, const float* weights, uint64_t len, uint64_t width, float* sums) {
    const uint64_t i = this_element();
    if (i >= len) return;
    const uint64_t row = i / width, column = i % width;
    sums[rows[row] * width + column] += weights[row] * read(row_of<T>(x, row)[column]);
}

extern "C" __global__ void add_weighted_rows(
    Rows x,
    const uint32_t* __restrict__ rows,
    const float* __restrict__ weights,
    uint64_t len,
    uint64_t width,
    float* __restrict__ sums) {
    BY_DTYPE(x.dtype, add_weighted, x, rows, weights, len, width, sums);
}

// out[R, W]: row r of x times weights[r].
extern "C" __global__ void scale_rows(
    const float* __restrict__ x,
    const float* __restrict__ weights,
    uint64_t len,
    uint64_t width,
    float* __restrict__ out) {
    const uint64_t i = this_element();
    if (i < len) out[i] = weights[i / width] * x[i];
}

// dots[R]: row r of a times row r of b. LANES threads a row, each of which sums its own column in
// ascending order; then the lanes are folded in halves.
extern "C" __global__ void row_dots(
    const float* __restrict__ a,
    const float* __restrict__ b,
    uint64_t rows,
    uint64_t width,
    float* __restrict__ dots) {
    const uint64_t row = this_element() / LANES;
    const uint32_t lane = threadIdx.x % LANES;
    float sum = 0.0f;
    // A row that is none has no columns: its threads still take part in the shuffles.
    const uint64_t columns = row < rows ? width : 0;
    for (uint64_t column = lane; column < columns; column += LANES) {
        sum = fused(a[row * width + column], b[row * width + column], sum);
    }
    for (uint32_t apart = LANES / 2; apart > 0; apart /= 2) {
        sum += __shfl_down_sync(0xffffffffu, sum, apart, LANES);
    }
    if (row < rows && lane == 0) dots[row] = sum;
}

// out[len] += partials[count, len], one after another. A thread owns an element.
extern "C" __global__ void add_partials(
    const float* __restrict__ partials, uint64_t count, uint64_t len, float* __restrict__ out) {
    const uint64_t i = this_element();
    if (i >= len) return;
    const auto partial = [&](uint64_t part) { return partials[part * len + i]; };
    out[i] = add_in_order<16>(out[i], count, partial);
}
