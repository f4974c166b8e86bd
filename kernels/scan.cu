// Mamba-1's selective scan with its gate, of rows of any length.
//
// Shape letters: T packed rows of all sequences, D channels, N states a channel. A thread owns one
// channel of one sequence and walks its rows in order. Sums over n follow the 16 lanes of
// src/ops/simd.rs. Bit for bit src/ops/scan.rs.
//
// Every kernel comes twice: `_16` holds the 16 states of nearly every Mamba-1 in registers, `_any`
// keeps N of them in `spill`, [spans, D, N] floats.
#include "scan.cuh"

// Field for field `SequencesArgument` of src/ops/scan/cuda.rs.
struct Sequences : ScanInputs {
    const uint32_t* starts;
    const uint32_t* lens;
    uint32_t channels;
    uint32_t states;
    uint32_t row_dtype;
    // Whether B and C are read four at a time.
    uint32_t even;
    float* spill;
    Rows y_td;
};

// What a row brings to a thread, as it is stored.
template <int FIXED, typename T>
struct Brought {
    T x, dt, z;
    Stored<T, FIXED ? FIXED : 2> b, c;

    __device__ __forceinline__ void ask(const Sequences& s, uint64_t row, uint32_t channel) {
        x = row_of<T>(s.c_td, row)[channel];
        dt = row_of<T>(s.dt_td, row)[channel];
        z = row_of<T>(s.z_td, row)[channel];
        if constexpr (FIXED > 0) {
            b.read(row_of<T>(s.b_tn, row), s.even);
            c.read(row_of<T>(s.c_tn, row), s.even);
        }
    }
};

template <int FIXED, typename T>
__device__ __forceinline__ void forward(const Sequences& s) {
    const uint32_t span = blockIdx.x;
    const uint32_t channel = blockIdx.y * blockDim.x + threadIdx.x;
    if (channel >= s.channels) return;
    const uint32_t n = FIXED ? FIXED : s.states;
    const uint64_t first = static_cast<uint64_t>(channel) * n;
    float h_own[FIXED ? FIXED : 1], a_own[FIXED ? FIXED : 1];
    // Elsewhere a thread keeps its states, and a row's B and C, in memory of its own.
    float* spill = s.spill + (static_cast<uint64_t>(span) * s.channels + channel) * n * 3;
    float *h = FIXED ? h_own : spill;
    const float* a = FIXED ? a_own : s.a_dn + first;
    if constexpr (FIXED > 0) {
#pragma unroll
        for (uint32_t i = 0; i < FIXED; ++i) a_own[i] = s.a_dn[first + i];
    }

    const State& state = s.state;
    const bool paged = state.pages != nullptr;
    const bool reads = paged && state.reads[span];
    const unsigned char* from = reads ? source_at(state, span) : nullptr;
    unsigned char* at = paged ? state_at(state, span) : nullptr;
#pragma unroll
    for (uint32_t i = 0; i < n; ++i) {
        h[i] = reads ? load_element(from, state.dtype, first + i) : 0.0f;
    }
    const float skip = s.skip_d[channel], dt_bias = s.dt_bias_d[channel];
    const float least = steepest(a, n);
    const uint64_t end = static_cast<uint64_t>(s.starts[span]) + s.lens[span];
    Brought<FIXED, T> next;
    if (s.starts[span] < end) next.ask(s, s.starts[span], channel);
    for (uint64_t row = s.starts[span]; row < end; ++row) {
        const Brought<FIXED, T> now = next;
        // On its way while this one is worked on.
        if (row + 1 < end) next.ask(s, row + 1, channel);
        const float x = read(now.x), delta = softplus(read(now.dt) + dt_bias);
        float sum;
        if constexpr (FIXED > 0) {
            sum = delta * least > NEVER_TINY ? step<FIXED, true>(h, a, now.b, now.c, n, delta, x)
                                             : step<FIXED>(h, a, now.b, now.c, n, delta, x);
        } else {
            const T *b_n = row_of<T>(s.b_tn, row), *c_n = row_of<T>(s.c_tn, row);
            float *b = spill + n, *c = spill + 2 * n;
            for (uint32_t i = 0; i < n; ++i) b[i] = read(b_n[i]), c[i] = read(c_n[i]);
            sum = step<FIXED>(h, a, b, c, n, delta, x);
        }
        write(row_of<T>(s.y_td, row) + channel, fused(skip, x, sum) * silu(read(now.z)));
        round_states<FIXED>(h, n, s.row_dtype);
    }
    if (!paged) return;
#pragma unroll
    for (uint32_t i = 0; i < n; ++i) store_element(at, state.dtype, first + i, h[i]);
}

extern "C" __global__ void __launch_bounds__(64, 10) scan_forward_16(Sequences s) {
    s.y_td.dtype == BF16 ? forward<16, uint16_t>(s) : forward<16, float>(s);
}

extern "C" __global__ void scan_forward_any(Sequences s) {
    s.y_td.dtype == BF16 ? forward<0, uint16_t>(s) : forward<0, float>(s);
}

// States whose addresses may be one another's go through copies, [spans, len] elements of their own
// dtype: all are loaded first and, after `forward` has worked on the copies, stored one span after
// another. A thread owns an element.
__device__ __forceinline__ void copy_element(
    unsigned char* to, const unsigned char* from, uint32_t dtype, uint64_t to_i, uint64_t from_i) {
    if (dtype == BF16) {
        reinterpret_cast<uint16_t*>(to)[to_i] = reinterpret_cast<const uint16_t*>(from)[from_i];
    } else {
        reinterpret_cast<uint32_t*>(to)[to_i] = reinterpret_cast<const uint32_t*>(from)[from_i];
    }
}

extern "C" __global__ void scan_load(State state, uint64_t len, unsigned char* copies) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint32_t span = blockIdx.y;
    if (i >= len || !state.reads[span]) return;
    copy_element(copies, source_at(state, span), state.dtype, span * len + i, i);
}

extern "C" __global__ void scan_store(
    const unsigned char* copies, State state, uint32_t span, uint64_t len) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < len) copy_element(state_at(state, span), copies, state.dtype, i, span * len + i);
}
