// Fingerprints of tensors in the compute dtype. Bit for bit src/ops/fingerprint.rs, whose sums of
// 64-bit integers have no order.
#include "elements.cuh"

constexpr uint64_t STEP = 0x9e3779b97f4a7c15ull;

__device__ __forceinline__ uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Word `i` of a tensor that does not begin at a whole word, or its last one: zeros past the end.
__device__ __forceinline__ uint64_t gathered_word(
    const uint16_t* __restrict__ tensor, uint64_t halves, uint64_t i) {
    uint64_t word = 0;
    for (uint32_t place = 0; place < 4; ++place) {
        const uint64_t at = 4 * i + place;
        if (at < halves) word |= static_cast<uint64_t>(tensor[at]) << (16 * place);
    }
    return word;
}

// sum[1] += over the words of tensor[halves], whose elements are whole 16-bit halves. Threads go
// on in strides of the grid; the block's threads add up in shared memory first.
extern "C" __global__ void fingerprint_sum(
    const uint16_t* __restrict__ tensor, uint64_t halves, unsigned long long* __restrict__ sum) {
    __shared__ unsigned long long of_block;
    if (threadIdx.x == 0) of_block = 0;
    __syncthreads();
    const bool is_aligned = reinterpret_cast<uintptr_t>(tensor) % 8 == 0;
    const uint64_t whole = is_aligned ? halves / 4 : 0;
    const uint64_t words = (halves + 3) / 4;
    const uint64_t stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    const uint64_t* aligned = reinterpret_cast<const uint64_t*>(tensor);
    uint64_t of_thread = 0;
    uint64_t i = this_element();
#pragma unroll 4
    for (; i < whole; i += stride) of_thread += mix((i + 1) * STEP + aligned[i]);
    for (; i < words; i += stride) {
        of_thread += mix((i + 1) * STEP + gathered_word(tensor, halves, i));
    }
    atomicAdd(&of_block, static_cast<unsigned long long>(of_thread));
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(sum, of_block);
}
