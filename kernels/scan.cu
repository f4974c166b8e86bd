// Mamba-1's selective scan with its gate: prefill and decode, forward and the backward's second
// forward all run the same `step`.
//
// Shape letters: T packed rows of all sequences, D channels, N states a channel. A thread owns one
// channel of one sequence and walks its rows in order. Sums over n follow the 16 lanes of
// src/ops/simd.rs. Bit for bit src/ops/scan.rs, forward and backward.
//
// Every kernel comes twice: `_16` holds the 16 states of nearly every Mamba-1 in registers, `_any`
// keeps N of them in `spill`, [spans, D, N] floats.
#include "ordered.cuh"
#include "scan.cuh"

// Field for field `SequencesArgument` of src/ops/scan/cuda.rs.
struct Sequences : ScanInputs {
    const uint32_t* starts;
    const uint32_t* lens;
    uint32_t channels;
    uint32_t states;
    uint32_t row_dtype;
    // Whether B and C are read eight at a time.
    uint32_t even;
    float* spill;
    Rows y_td;
};

template <int FIXED, typename T>
__device__ __forceinline__ void read_states(
    const T* at, uint32_t n, uint32_t even, float* to) {
    if (FIXED && even) {
#pragma unroll
        for (uint32_t i = 0; i < FIXED; i += EIGHT) read8(at + i, to + i);
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < (FIXED ? FIXED : n); ++i) to[i] = read(at[i]);
}

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
    float b_own[FIXED ? FIXED : 1], c_own[FIXED ? FIXED : 1];
    float *b = FIXED ? b_own : spill + n, *c = FIXED ? c_own : spill + 2 * n;

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
    for (uint64_t row = s.starts[span]; row < end; ++row) {
        const float x = read(row_of<T>(s.c_td, row)[channel]);
        const float delta = softplus(read(row_of<T>(s.dt_td, row)[channel]) + dt_bias);
        const float z = read(row_of<T>(s.z_td, row)[channel]);
        read_states<FIXED>(row_of<T>(s.b_tn, row), n, s.even, b);
        read_states<FIXED>(row_of<T>(s.c_tn, row), n, s.even, c);
        const bool normal = FIXED && delta * least > NEVER_TINY;
        const float sum = normal ? step<FIXED, true>(h, a, b, c, n, delta, x)
                                 : step<FIXED>(h, a, b, c, n, delta, x);
        write(row_of<T>(s.y_td, row) + channel, (sum + skip * x) * silu(z));
        round_states<FIXED>(h, n, s.row_dtype);
    }
    if (!paged) return;
#pragma unroll
    for (uint32_t i = 0; i < n; ++i) store_element(at, state.dtype, first + i, h[i]);
}

extern "C" __global__ void scan_forward_16(Sequences s) {
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

// The backward of sequences that start from nothing, for the channels `first`..`first + width`:
// the rows' own gradients; of every row, channel and state the terms of dB and dC, [T, N, width]
// each, which another kernel sums in order; and each span's own sums by A_log, the skip and dt's
// bias, [spans, N + 2, width], rows descending. Grid (spans, tiles of the width).
//
// The states are recomputed into `now_tnw` (before rounding), then the thread walks back:
// p_t = g_t*C_t + exp(delta_{t+1}*A)*p_{t+1} (Mamba, Gu and Dao 2023). A state that has been used
// makes room for its term of dC.
template <int FIXED>
__device__ __forceinline__ void backward(
    const float* __restrict__ c_td,
    const float* __restrict__ dt_td,
    const float* __restrict__ b_tn,
    const float* __restrict__ c_tn,
    const float* __restrict__ z_td,
    const float* __restrict__ a_dn,
    const float* __restrict__ skip_d,
    const float* __restrict__ dt_bias_d,
    const float* __restrict__ dy_td,
    const uint32_t* __restrict__ starts,
    const uint32_t* __restrict__ lens,
    uint32_t channels,
    uint32_t states,
    uint32_t state_dtype,
    uint32_t first,
    uint32_t width,
    float* __restrict__ spill,
    float* __restrict__ now_tnw,
    float* __restrict__ db_tnw,
    float* __restrict__ partials,
    float* __restrict__ dx_td,
    float* __restrict__ ddt_td,
    float* __restrict__ dz_td) {
    const uint32_t span = blockIdx.x;
    const uint32_t within = blockIdx.y * blockDim.x + threadIdx.x;
    if (within >= width) return;
    const uint32_t channel = first + within;
    const uint32_t n = FIXED ? FIXED : states;
    float own[FIXED ? FIXED : 1], a_own[FIXED ? FIXED : 1], da_own[FIXED ? FIXED : 1] = {};
    const float* a_n = a_dn + static_cast<uint64_t>(channel) * n;
    // First the state, then, on the way back, its gradient.
    float* h = FIXED ? own : spill + (static_cast<uint64_t>(span) * channels + channel) * n;
    const float* a = FIXED ? a_own : a_n;
    if constexpr (FIXED > 0) {
#pragma unroll
        for (uint32_t i = 0; i < FIXED; ++i) a_own[i] = a_n[i];
    }
#pragma unroll
    for (uint32_t i = 0; i < n; ++i) h[i] = 0.0f;

    const float skip = skip_d[channel], dt_bias = dt_bias_d[channel];
    const uint64_t start = starts[span], end = start + lens[span];
    for (uint64_t row = start; row < end; ++row) {
        const uint64_t here = row * channels + channel;
        const float delta = softplus(dt_td[here] + dt_bias);
        step<FIXED>(h, a, b_tn + row * n, c_tn + row * n, n, delta, c_td[here]);
        float* now_n = now_tnw + row * n * width + within;
#pragma unroll
        for (uint32_t i = 0; i < n; ++i) now_n[static_cast<uint64_t>(i) * width] = h[i];
        round_states<FIXED>(h, n, state_dtype);
    }

    float* p = h;
    float* sums = partials + static_cast<uint64_t>(span) * (n + 2) * width + within;
#pragma unroll
    for (uint32_t i = 0; i < n; ++i) {
        p[i] = 0.0f;
        if (!FIXED) sums[static_cast<uint64_t>(i) * width] = 0.0f;
    }
    float dskip = 0.0f, ddt_bias = 0.0f;
    for (uint64_t row = end; row-- > start;) {
        const uint64_t here = row * channels + channel;
        const uint64_t terms = row * n * width + within;
        // Of the row before; not touched in a sequence's first row.
        const uint64_t before = terms - static_cast<uint64_t>(width) * n;
        const float *b_n = b_tn + row * n, *c_n = c_tn + row * n;
        const float x = c_td[here], z = z_td[here], raw = dt_td[here] + dt_bias;
        const float delta = softplus(raw), dy = dy_td[here], g = dy * silu(z);
        float y[LANES] = {}, dx[LANES] = {}, ddelta[LANES] = {};
#pragma unroll
        for (uint32_t base = 0; base < n; base += LANES) {
#pragma unroll
            for (uint32_t lane = 0; lane < LANES; ++lane) {
                const uint32_t i = base + lane;
                if (i < n) {
                    const uint64_t at = static_cast<uint64_t>(i) * width;
                    const float held =
                        row > start ? to_dtype(now_tnw[before + at], state_dtype) : 0.0f;
                    const float b = b_n[i], c = c_n[i];
                    const float decay = exp_f32(delta * a[i]);
                    const float decayed = decay * held;
                    const float now = decayed + delta * x * b;
                    const float p_now = p[i] + g * c;
                    now_tnw[terms + at] = g * now;
                    db_tnw[terms + at] = p_now * delta * x;
                    const float da = p_now * delta * decayed * a[i];
                    if (FIXED) {
                        da_own[FIXED ? i : 0] += da;
                    } else {
                        sums[at] += da;
                    }
                    p[i] = p_now * decay;
                    y[lane] += now * c;
                    dx[lane] += p_now * delta * b;
                    ddelta[lane] += p_now * (b * x + a[i] * decayed);
                }
            }
        }
        dz_td[here] = dy * (fold(y) + skip * x) * silu_derivative(z);
        dx_td[here] = fold(dx) + skip * g;
        const float slope = raw > 20.0f ? 1.0f : sigmoid(raw);
        const float ddt = fold(ddelta) * slope;
        ddt_td[here] = ddt;
        dskip += g * x;
        ddt_bias += ddt;
    }
    if constexpr (FIXED > 0) {
#pragma unroll
        for (uint32_t i = 0; i < FIXED; ++i) sums[static_cast<uint64_t>(i) * width] = da_own[i];
    }
    sums[static_cast<uint64_t>(n) * width] = dskip;
    sums[static_cast<uint64_t>(n + 1) * width] = ddt_bias;
}

#define BACKWARD_PARAMETERS                                                                      \
    const float *c_td, const float *dt_td, const float *b_tn, const float *c_tn,                 \
        const float *z_td, const float *a_dn, const float *skip_d, const float *dt_bias_d,       \
        const float *dy_td, const uint32_t *starts, const uint32_t *lens, uint32_t channels,     \
        uint32_t states, uint32_t state_dtype, uint32_t first, uint32_t width, float *spill,     \
        float *now_tnw, float *db_tnw, float *partials, float *dx_td, float *ddt_td, float *dz_td
#define BACKWARD_ARGUMENTS                                                                       \
    c_td, dt_td, b_tn, c_tn, z_td, a_dn, skip_d, dt_bias_d, dy_td, starts, lens, channels,       \
        states, state_dtype, first, width, spill, now_tnw, db_tnw, partials, dx_td, ddt_td, dz_td

extern "C" __global__ void scan_backward_16(BACKWARD_PARAMETERS) {
    backward<16>(BACKWARD_ARGUMENTS);
}

extern "C" __global__ void scan_backward_any(BACKWARD_PARAMETERS) {
    backward<0>(BACKWARD_ARGUMENTS);
}

// Channels that a block stages at a time, one a thread.
constexpr uint32_t STAGED = 256;

// out[T, N]: terms[T, N, width] summed over the channels, ascending, and added to what the channels
// before these left; the first channels begin at zero. A block owns LANES states of one row, each
// of its first threads one sum. Grid (T, tiles of the states).
extern "C" __global__ void __launch_bounds__(STAGED) scan_sum_channels(
    const float* __restrict__ terms_tnw,
    uint32_t states,
    uint32_t width,
    uint32_t is_first,
    float* __restrict__ out_tn) {
    // The one column more puts the states of a channel into different banks.
    __shared__ float staged[LANES][STAGED + 1];
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * states + blockIdx.y * LANES;
    const uint32_t own = min(LANES, states - blockIdx.y * LANES);
    const float* terms = terms_tnw + first * width;
    const bool adds = threadIdx.x < own;
    float sum = adds && !is_first ? out_tn[first + threadIdx.x] : 0.0f;
    for (uint32_t from = 0; from < width; from += STAGED) {
        const uint32_t count = min(STAGED, width - from);
        if (threadIdx.x < count) {
#pragma unroll
            for (uint32_t i = 0; i < LANES; ++i) {
                if (i < own) {
                    const uint64_t at = static_cast<uint64_t>(i) * width + from + threadIdx.x;
                    staged[i][threadIdx.x] = terms[at];
                }
            }
        }
        __syncthreads();
        if (adds) {
            const float* mine = staged[threadIdx.x];
            sum = add_in_order<16>(sum, count, [&](uint64_t channel) { return mine[channel]; });
        }
        __syncthreads();
    }
    if (adds) out_tn[first + threadIdx.x] = sum;
}

// The gradients by A_log, [D, N], the skip and dt's bias, [D], of the channels from `first`: to
// each the spans' own sums are added, spans in order. A thread owns one of a channel's N + 2.
extern "C" __global__ void scan_sum_spans(
    const float* __restrict__ partials,
    uint64_t spans,
    uint32_t states,
    uint32_t width,
    uint64_t first,
    float* __restrict__ da_log_dn,
    float* __restrict__ dskip_d,
    float* __restrict__ dt_bias_d) {
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t len = static_cast<uint64_t>(states + 2) * width;
    if (at >= len) return;
    const uint64_t channel = first + at % width, i = at / width;
    float* out = i < states    ? da_log_dn + channel * states + i
                 : i == states ? dskip_d + channel
                               : dt_bias_d + channel;
    *out = add_in_order<16>(*out, spans, [&](uint64_t span) { return partials[span * len + at]; });
}
