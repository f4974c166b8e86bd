// Rotary positions: element i of a head's first half and element i of its second are one pair.
//
// Shape letters: T rows, Q heads, E head width. Cosines and sines [T, E / 2] come from the host.
// A thread owns a pair. Bit for bit src/ops/rope.rs.
#include "arrays.cuh"
#include "elements.cuh"

struct Pair {
    // Of the first element; the second is `half` further on.
    uint64_t first;
    // Of its angle.
    uint64_t angle;
};

__device__ __forceinline__ Pair pair_of(uint64_t i, uint32_t heads, uint32_t half) {
    const uint64_t head = i / half;
    const uint64_t within = i % half;
    return {head * 2 * half + within, head / heads * half + within};
}

// x[T, Q, E] in place, each element rounded.
template <typename T>
__device__ __forceinline__ void turn(
    Rows x_tqe, const float* cos, const float* sin, uint64_t pairs, uint32_t heads, uint32_t half) {
    const uint64_t i = this_element();
    if (i >= pairs) return;
    const uint64_t row = i / half / heads;
    T* first = row_of<T>(x_tqe, row) + i / half % heads * 2 * half + i % half;
    const float a = read(*first), b = read(first[half]);
    const float c = cos[row * half + i % half], s = sin[row * half + i % half];
    write(first, a * c - b * s);
    write(first + half, b * c + a * s);
}

extern "C" __global__ void rope_forward(
    Rows x_tqe,
    const float* __restrict__ cos,
    const float* __restrict__ sin,
    uint64_t pairs,
    uint32_t heads,
    uint32_t half) {
    BY_DTYPE(x_tqe.dtype, turn, x_tqe, cos, sin, pairs, heads, half);
}

// The gradient by the output into that by the input, in place: a turn back, not rounded.
extern "C" __global__ void rope_backward(
    float* __restrict__ dx_tqe,
    const float* __restrict__ cos,
    const float* __restrict__ sin,
    uint64_t pairs,
    uint32_t heads,
    uint32_t half) {
    const uint64_t i = this_element();
    if (i >= pairs) return;
    const Pair at = pair_of(i, heads, half);
    const float a = dx_tqe[at.first], b = dx_tqe[at.first + half];
    const float c = cos[at.angle], s = sin[at.angle];
    dx_tqe[at.first] = a * c + b * s;
    dx_tqe[at.first + half] = b * c - a * s;
}
