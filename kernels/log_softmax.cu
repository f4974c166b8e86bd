// Log-probabilities of targets and the gradient by logits, bit-equal to `ops::log_softmax`.
//
// Shape letters: R rows, V vocabulary. One block a row; dynamic shared memory: 4 bytes a tile.
#include "log_softmax.cuh"

// log_probs[R]: of logits[R, V] / temperature at targets[R].
extern "C" __global__ void log_softmax_forward(const float* logits_rv, uint64_t vocab,
                                               float temperature, const uint32_t* targets_r,
                                               float* log_probs_r) {
    extern __shared__ float tiles[];
    Row row = {logits_rv + (uint64_t)blockIdx.x * vocab, vocab, temperature};
    Normaliser normaliser = normalise(row, row_best(row).value, tiles);
    if (threadIdx.x == 0) {
        log_probs_r[blockIdx.x] = normaliser.log_prob(row[targets_r[blockIdx.x]]);
    }
}

// dlogits[R, V] = (1[i = target] - p_i) * upstream, overwritten: the gradient of log p(target) by
// logits / temperature.
extern "C" __global__ void log_softmax_backward(const float* logits_rv, uint64_t vocab,
                                                float temperature, const uint32_t* targets_r,
                                                const float* upstream_r, float* dlogits_rv) {
    extern __shared__ float tiles[];
    uint64_t start = (uint64_t)blockIdx.x * vocab;
    Row row = {logits_rv + start, vocab, temperature};
    Normaliser normaliser = normalise(row, row_best(row).value, tiles);
    float upstream = upstream_r[blockIdx.x];
    uint64_t target = targets_r[blockIdx.x];
    for (uint64_t i = threadIdx.x; i < vocab; i += blockDim.x) {
        float d = -exp_f32(normaliser.log_prob(row[i])) * upstream;
        dlogits_rv[start + i] = i == target ? d + upstream : d;
    }
}
