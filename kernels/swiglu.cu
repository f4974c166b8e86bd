// silu(gate) * up, element by element. Bit for bit src/ops/swiglu.rs.
#include "arrays.cuh"
#include "elements.cuh"

// y = round(silu(gate) * up), N elements a thread; `len` is of y.
template <typename T, uint32_t N>
__device__ __forceinline__ void forward(Rows gate, Rows up, uint64_t len, uint32_t width, Rows y) {
    const uint64_t i = this_element() * N;
    if (i >= len) return;
    const uint64_t row = i / width, column = i % width;
    float g[N], u[N];
    read_n<N>(row_of<T>(gate, row) + column, g);
    read_n<N>(row_of<T>(up, row) + column, u);
#pragma unroll
    for (uint32_t k = 0; k < N; ++k) g[k] = silu(g[k]) * u[k];
    write_n<N>(row_of<T>(y, row) + column, g);
}

extern "C" __global__ void swiglu_forward(
    Rows gate, Rows up, uint64_t len, uint32_t width, uint32_t even, Rows y) {
    BY_DTYPE_AND_WIDTH(y.dtype, even, forward, gate, up, len, width, y);
}

// From dy: dgate and dup, overwritten.
extern "C" __global__ void swiglu_backward(
    const float* __restrict__ gate,
    const float* __restrict__ up,
    const float* __restrict__ dy,
    uint64_t len,
    float* __restrict__ dgate,
    float* __restrict__ dup) {
    const uint64_t i = this_element();
    if (i >= len) return;
    dgate[i] = dy[i] * up[i] * silu_derivative(gate[i]);
    dup[i] = dy[i] * silu(gate[i]);
}
