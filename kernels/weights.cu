// Weights between their two forms: f32, and bytes in the compute dtype. Bit for bit
// src/ops/weights.rs and src/model/unit.rs.
#include "elements.cuh"
#include "pages.cuh"

// out[len]: widened, which loses nothing.
extern "C" __global__ void weights_widen(
    const unsigned char* __restrict__ bytes,
    uint64_t len,
    uint32_t dtype,
    float* __restrict__ out) {
    const uint64_t i = this_element();
    if (i < len) out[i] = load_element(bytes, dtype, i);
}

// out[C, R] of bytes [R, C]: widened and transposed.
extern "C" __global__ void weights_widen_transposed(
    const unsigned char* __restrict__ bytes,
    uint64_t rows,
    uint64_t columns,
    uint32_t dtype,
    float* __restrict__ out) {
    const uint64_t i = this_element();
    if (i < rows * columns) out[i] = load_element(bytes, dtype, i % rows * columns + i / rows);
}

// Bytes of f32 weights, rounded.
extern "C" __global__ void weights_narrow(
    const float* __restrict__ weights,
    uint64_t len,
    uint32_t dtype,
    unsigned char* __restrict__ bytes) {
    const uint64_t i = this_element();
    if (i < len) store_element(bytes, dtype, i, weights[i]);
}

// log2(e)A = -log2(e)exp(A_log).
extern "C" __global__ void weights_decays(
    const float* __restrict__ logarithms, uint64_t len, float* __restrict__ out) {
    const uint64_t i = this_element();
    if (i < len) out[i] = -exp_f32(logarithms[i]) * LOG2_E;
}
