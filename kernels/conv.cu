// Mamba's causal depthwise convolution with its silu.
//
// Shape letters: T packed rows of all sequences, D channels, K taps. A state is the last K-1
// columns before the silu, [K-1, D], oldest first. The taps are added oldest first, whether a
// column comes from this call or from the cached state; a thread owns a channel of a row, so that
// no sum is shared. Bit for bit src/ops/conv.rs, forward and backward.
#include "arrays.cuh"
#include "pages.cuh"
#include "ordered.cuh"

__device__ __forceinline__ const unsigned char* held_state(const State& state, uint32_t span) {
    return state.pages != nullptr && state.reads[span] ? source_at(state, span) : nullptr;
}

// N elements of a state from element i, as f32.
template <uint32_t N>
__device__ __forceinline__ void read_state(
    const unsigned char* at, uint32_t dtype, uint64_t i, float* x) {
    if (dtype == BF16) {
        read_n<N>(reinterpret_cast<const uint16_t*>(at) + i, x);
    } else {
        read_n<N>(reinterpret_cast<const float*>(at) + i, x);
    }
}

// A NaN of a page that held something else keeps its payload, as on the CPU.
template <uint32_t N>
__device__ __forceinline__ void write_state(
    unsigned char* at, uint32_t dtype, uint64_t i, const float* x) {
    bool plain = true;
#pragma unroll
    for (uint32_t k = 0; k < N; ++k) plain = plain && x[k] == x[k];
    if (!plain) {
        for (uint32_t k = 0; k < N; ++k) store_element(at, dtype, i + k, x[k]);
    } else if (dtype == BF16) {
        write_n<N>(reinterpret_cast<uint16_t*>(at) + i, x);
    } else {
        write_n<N>(reinterpret_cast<float*>(at) + i, x);
    }
}

// N channels of the column `back` places before a span's row t, from its rows or its state.
template <typename T, uint32_t N>
__device__ __forceinline__ void column(
    const Rows& x_td,
    const unsigned char* held,
    uint32_t held_dtype,
    uint64_t token,
    uint32_t t,
    uint32_t back,
    uint32_t channel,
    uint32_t channels,
    uint32_t taps,
    float* x) {
    if (t >= back) {
        read_n<N>(row_of<T>(x_td, token - back) + channel, x);
    } else if (held != nullptr) {
        const uint64_t at = static_cast<uint64_t>(taps - 1 + t - back) * channels + channel;
        read_state<N>(held, held_dtype, at, x);
    } else {
#pragma unroll
        for (uint32_t k = 0; k < N; ++k) x[k] = 0.0f;
    }
}

struct Convolution {
    const float* taps_kd;
    const float* bias_d;
    uint32_t channels;
    uint32_t taps;
};

// y[T, D] = round(silu(taps)). Grid (T, tiles of channels), N channels a thread. Where it ADVANCES
// every span has one row: its thread also leaves its channels' next state, once it has read them.
// Otherwise states are read, not yet advanced. TAPS columns are loaded before any is used; so are
// weights where it ADVANCES, because no load passes the stores of the next state.
template <bool ADVANCES, typename T, uint32_t N>
__device__ __forceinline__ void forward(
    Rows x_td,
    const Convolution& conv,
    const State& state,
    const uint32_t* starts,
    const uint32_t* span_of_token,
    Rows y_td) {
    constexpr uint32_t TAPS = 4;
    const uint64_t token = blockIdx.x;
    const uint32_t channel = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (channel >= conv.channels) return;
    const uint32_t span = ADVANCES ? token : span_of_token[token];
    const uint32_t t = ADVANCES ? 0 : static_cast<uint32_t>(token) - starts[span];
    const unsigned char* held = held_state(state, span);
    unsigned char* next = ADVANCES ? state_at(state, span) : nullptr;
    float sum[N], weight[TAPS][N], x[TAPS][N];
    const auto read_weight = [&](uint32_t k, float* to) {
        read_n<N>(conv.taps_kd + static_cast<uint64_t>(k) * conv.channels + channel, to);
    };
    read_n<N>(conv.bias_d + channel, sum);
    for (uint32_t first = 0; first < conv.taps; first += TAPS) {
#pragma unroll
        for (uint32_t j = 0; j < TAPS; ++j) {
            const uint32_t k = first + j;
            if (k >= conv.taps) break;
            column<T, N>(x_td, held, state.dtype, token, t, conv.taps - 1 - k, channel,
                         conv.channels, conv.taps, x[j]);
            if (ADVANCES) read_weight(k, weight[j]);
        }
#pragma unroll
        for (uint32_t j = 0; j < TAPS; ++j) {
            const uint32_t k = first + j;
            if (k >= conv.taps) break;
            // Column k of the state is column k - 1 of the next one, which nobody reads any more.
            if (ADVANCES && k > 0) {
                const uint64_t to = static_cast<uint64_t>(k - 1) * conv.channels + channel;
                write_state<N>(next, state.dtype, to, x[j]);
            }
            if (!ADVANCES) read_weight(k, weight[j]);
#pragma unroll
            for (uint32_t i = 0; i < N; ++i) sum[i] = fused(weight[j][i], x[j][i], sum[i]);
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) sum[i] = silu(sum[i]);
    write_n<N>(row_of<T>(y_td, token) + channel, sum);
}

template <typename T, uint32_t N>
__device__ __forceinline__ void rows_of_spans(
    Rows x_td,
    const Convolution& conv,
    const State& state,
    const uint32_t* starts,
    const uint32_t* span_of_token,
    Rows y_td) {
    forward<false, T, N>(x_td, conv, state, starts, span_of_token, y_td);
}

template <typename T, uint32_t N>
__device__ __forceinline__ void one_row_a_span(
    Rows x_td, const Convolution& conv, const State& state, Rows y_td) {
    forward<true, T, N>(x_td, conv, state, nullptr, nullptr, y_td);
}

extern "C" __global__ void conv_forward(
    Rows x_td,
    const float* __restrict__ taps_kd,
    const float* __restrict__ bias_d,
    State state,
    const uint32_t* __restrict__ starts,
    const uint32_t* __restrict__ span_of_token,
    uint32_t channels,
    uint32_t taps,
    uint32_t even,
    Rows y_td) {
    const Convolution conv{taps_kd, bias_d, channels, taps};
    BY_DTYPE_AND_WIDTH(y_td.dtype, even, rows_of_spans, x_td, conv, state, starts, span_of_token,
                       y_td);
}

extern "C" __global__ void conv_step(
    Rows x_td,
    const float* __restrict__ taps_kd,
    const float* __restrict__ bias_d,
    State state,
    uint32_t channels,
    uint32_t taps,
    uint32_t even,
    Rows y_td) {
    const Convolution conv{taps_kd, bias_d, channels, taps};
    BY_DTYPE_AND_WIDTH(y_td.dtype, even, one_row_a_span, x_td, conv, state, y_td);
}

// Keeps the last K-1 columns of state ++ x in the pages. Grid (spans, tiles of channels). Column j
// comes from column j + len, which is never behind j: ascending, nothing is read after its store.
template <typename T>
__device__ __forceinline__ void advance(
    Rows x_td,
    const State& state,
    const uint32_t* starts,
    const uint32_t* lens,
    uint32_t channels,
    uint32_t taps) {
    const uint32_t span = blockIdx.x;
    const uint32_t channel = blockIdx.y * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const uint64_t kept = taps - 1;
    unsigned char* at = state_at(state, span);
    for (uint64_t j = 0; j < kept; ++j) {
        const uint64_t from = lens[span] + j;
        float column = 0.0f;
        if (from >= kept) {
            column = read(row_of<T>(x_td, starts[span] + from - kept)[channel]);
        } else if (state.reads[span]) {
            column = load_element(source_at(state, span), state.dtype, from * channels + channel);
        }
        store_element(at, state.dtype, j * channels + channel, column);
    }
}

extern "C" __global__ void conv_advance(
    Rows x_td,
    State state,
    const uint32_t* __restrict__ starts,
    const uint32_t* __restrict__ lens,
    uint32_t channels,
    uint32_t taps) {
    BY_DTYPE(x_td.dtype, advance, x_td, state, starts, lens, channels, taps);
}

// bias + sum_k w_k * x[t-K+1+k], k ascending, of a sequence that starts from nothing.
__device__ __forceinline__ float sum_taps(
    const float* __restrict__ x_td,
    const float* __restrict__ taps_kd,
    const float* __restrict__ bias_d,
    uint64_t token,
    uint32_t t,
    uint32_t channel,
    uint32_t channels,
    uint32_t taps) {
    float pre = bias_d[channel];
    for (uint32_t k = 0; k < taps; ++k) {
        const uint32_t back = taps - 1 - k;
        const float x = t >= back ? x_td[(token - back) * channels + channel] : 0.0f;
        pre = fused(taps_kd[static_cast<uint64_t>(k) * channels + channel], x, pre);
    }
    return pre;
}

// dpre[T, D] = dy * silu'(taps), for sequences that start from nothing. Grid as the forward's.
extern "C" __global__ void conv_backward_pre(
    const float* __restrict__ x_td,
    const float* __restrict__ taps_kd,
    const float* __restrict__ bias_d,
    const float* __restrict__ dy_td,
    const uint32_t* __restrict__ starts,
    const uint32_t* __restrict__ span_of_token,
    uint32_t channels,
    uint32_t taps,
    float* __restrict__ dpre_td) {
    const uint64_t token = blockIdx.x;
    const uint32_t channel = blockIdx.y * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const uint32_t t = static_cast<uint32_t>(token) - starts[span_of_token[token]];
    const float pre = sum_taps(x_td, taps_kd, bias_d, token, t, channel, channels, taps);
    const uint64_t at = token * channels + channel;
    dpre_td[at] = dy_td[at] * silu_derivative(pre);
}

// dx[T, D]: of the rows that saw x, the earliest first, which is the last tap first. Overwritten.
extern "C" __global__ void conv_backward_input(
    const float* __restrict__ dpre_td,
    const float* __restrict__ taps_kd,
    const uint32_t* __restrict__ starts,
    const uint32_t* __restrict__ lens,
    const uint32_t* __restrict__ span_of_token,
    uint32_t channels,
    uint32_t taps,
    float* __restrict__ dx_td) {
    const uint64_t token = blockIdx.x;
    const uint32_t channel = blockIdx.y * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const uint32_t span = span_of_token[token];
    const uint64_t end = static_cast<uint64_t>(starts[span]) + lens[span];
    float dx = 0.0f;
    for (uint32_t ahead = 0; ahead < taps && token + ahead < end; ++ahead) {
        const uint64_t k = taps - 1 - ahead;
        const float dpre = dpre_td[(token + ahead) * channels + channel];
        dx = fused(dpre, taps_kd[k * channels + channel], dx);
    }
    dx_td[token * channels + channel] = dx;
}

// Each span's own sums by w, [spans, D, K], and, as tap K, by the bias, [spans, D]: rows ascending.
// Grid (tiles of channels in each span, K + 1); a thread owns one channel of one tap.
extern "C" __global__ void conv_backward_weights(
    const float* __restrict__ dpre_td,
    const float* __restrict__ x_td,
    const uint32_t* __restrict__ starts,
    const uint32_t* __restrict__ lens,
    uint32_t tiles,
    uint32_t channels,
    uint32_t taps,
    float* __restrict__ w_dk,
    float* __restrict__ bias_d) {
    const uint32_t span = blockIdx.x / tiles, k = blockIdx.y;
    const uint32_t channel = blockIdx.x % tiles * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const uint64_t own = static_cast<uint64_t>(span) * channels + channel, start = starts[span];
    const float* dpre = dpre_td + start * channels + channel;
    if (k == taps) {
        const auto term = [&](uint64_t t) { return dpre[t * channels]; };
        bias_d[own] = add_in_order<32>(0.0f, lens[span], term);
        return;
    }
    const uint64_t back = taps - 1 - k, count = lens[span] > back ? lens[span] - back : 0;
    const float* x = x_td + start * channels + channel;
    w_dk[own * taps + k] = dot_in_order<32>(0.0f, count, [&](uint64_t t) {
        return make_float2(dpre[(t + back) * channels], x[t * channels]);
    });
}
