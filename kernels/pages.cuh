// The engine's pages on the device: where a sequence's state lies, and its elements as f32.
//
// Addresses are 64 bits wide. The one product that need not be is slot x stride, whose width is a
// knob: see `state_elements`.
#pragma once

#include <cstdint>

#include "numeric.cuh"

// Field for field `StateArgument` of src/ops/pages/cuda.rs.
struct State {
    // One buffer; null where every sequence starts from zeros and nothing is stored.
    unsigned char* pages;
    // [spans]: the block that a span's state goes to.
    const uint32_t* slots;
    // [spans]: the block that it comes from; mostly the same one.
    const uint32_t* sources;
    // [spans]: whether the state is read, or zeros are taken in its place.
    const uint32_t* reads;
    // Bytes from a page's beginning to its state.
    uint64_t offset;
    // Elements from one block's state to the next.
    uint64_t stride;
    uint32_t dtype;
    // Width of slot x stride.
    uint32_t bits;
};

// Slot x stride in `bits`. 32 is a 32-bit unsigned product, as the selective scan shipped with
// until vLLM #35275: it wraps at 2^32 because the hardware wraps there.
__device__ __forceinline__ uint64_t state_elements(uint32_t slot, uint64_t stride, uint32_t bits) {
    if (bits == 32) {
        const uint32_t narrow = slot * static_cast<uint32_t>(stride);
        return narrow;
    }
    const uint64_t product = static_cast<uint64_t>(slot) * stride;
    return bits >= 64 ? product : product & ((uint64_t{1} << bits) - 1);
}

__device__ __forceinline__ uint64_t element_bytes(uint32_t dtype) {
    return dtype == BF16 ? 2 : 4;
}

__device__ __forceinline__ unsigned char* state_of(const State& state, uint32_t slot) {
    const uint64_t elements = state_elements(slot, state.stride, state.bits);
    return state.pages + state.offset + elements * element_bytes(state.dtype);
}

// The first byte of where a span's state goes.
__device__ __forceinline__ unsigned char* state_at(const State& state, uint32_t span) {
    return state_of(state, state.slots[span]);
}

// The first byte of where it comes from.
__device__ __forceinline__ const unsigned char* source_at(const State& state, uint32_t span) {
    return state_of(state, state.sources[span]);
}

// A stale page may hold a signalling NaN; widening makes it quiet, as the CPU's does.
__device__ __forceinline__ float widen(uint16_t bits) {
    const uint32_t quiet = (bits & 0x7fff) > 0x7f80 ? 0x0040 : 0;
    return __uint_as_float((static_cast<uint32_t>(bits) | quiet) << 16);
}

__device__ __forceinline__ float widen(float value) { return value; }

__device__ __forceinline__ float load_element(const unsigned char* at, uint32_t dtype, uint64_t i) {
    return dtype == BF16 ? widen(reinterpret_cast<const uint16_t*>(at)[i])
                         : reinterpret_cast<const float*>(at)[i];
}

__device__ __forceinline__ void narrow_into(uint16_t* at, float value) {
    *at = static_cast<uint16_t>(__float_as_uint(round_bf16(value)) >> 16);
}

__device__ __forceinline__ void narrow_into(float* at, float value) { *at = value; }

__device__ __forceinline__ void store_element(
    unsigned char* at, uint32_t dtype, uint64_t i, float value) {
    if (dtype == BF16) {
        narrow_into(reinterpret_cast<uint16_t*>(at) + i, value);
    } else {
        reinterpret_cast<float*>(at)[i] = value;
    }
}
