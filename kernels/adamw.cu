// AdamW, element by element in f64, rounded once where a number is stored; and the squared norm.
// Bit for bit src/ops/adamw.rs.
#include "elements.cuh"

// Field for field `Step` of src/ops/adamw.rs.
struct Step {
    double beta1, beta2, eps, keep, stride, correction2, scale;
};

extern "C" __global__ void adamw_update(
    Step step,
    const float* __restrict__ gradient,
    uint64_t len,
    float* __restrict__ master,
    float* __restrict__ m,
    float* __restrict__ v) {
    const uint64_t i = this_element();
    if (i >= len) return;
    const double g = static_cast<double>(gradient[i]) * step.scale;
    const double new_m = step.beta1 * static_cast<double>(m[i]) + (1.0 - step.beta1) * g;
    const double new_v = step.beta2 * static_cast<double>(v[i]) + (1.0 - step.beta2) * g * g;
    const double denominator = sqrt(new_v) / step.correction2 + step.eps;
    const double kept = static_cast<double>(master[i]) * step.keep;
    master[i] = static_cast<float>(kept - step.stride * new_m / denominator);
    m[i] = static_cast<float>(new_m);
    v[i] = static_cast<float>(new_v);
}

// sums[chunks]: squares of `chunk` elements each, ascending. A thread owns a chunk.
extern "C" __global__ void adamw_squared_norms(
    const float* __restrict__ gradient,
    uint64_t len,
    uint64_t chunk,
    uint64_t chunks,
    double* __restrict__ sums) {
    const uint64_t i = this_element();
    if (i >= chunks) return;
    const uint64_t end = (i + 1) * chunk < len ? (i + 1) * chunk : len;
    double sum = 0.0;
    for (uint64_t at = i * chunk; at < end; ++at) {
        const double g = static_cast<double>(gradient[at]);
        sum += g * g;
    }
    sums[i] = sum;
}
