// silu(gate) * up, element by element. Bit for bit src/ops/swiglu.rs.
#include "elements.cuh"

// y = round(silu(gate) * up).
extern "C" __global__ void swiglu_forward(
    const float* __restrict__ gate,
    const float* __restrict__ up,
    uint64_t len,
    uint32_t dtype,
    float* __restrict__ y) {
    const uint64_t i = this_element();
    if (i < len) y[i] = to_dtype(silu(gate[i]) * up[i], dtype);
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
