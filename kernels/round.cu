// Rounding to the compute dtype and the sums that are rounded, element by element. Bit for bit
// src/ops/round.rs.
#include "elements.cuh"

// x = round(x).
extern "C" __global__ void round_to(float* __restrict__ x, uint64_t len, uint32_t dtype) {
    const uint64_t i = this_element();
    if (i < len) x[i] = to_dtype(x[i], dtype);
}

// x = round(x + y); with F32 the plain sum.
extern "C" __global__ void add_rounded(
    float* __restrict__ x, const float* __restrict__ y, uint64_t len, uint32_t dtype) {
    const uint64_t i = this_element();
    if (i < len) x[i] = to_dtype(x[i] + y[i], dtype);
}
