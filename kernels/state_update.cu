// The selective scan of one row a sequence, which moves a whole state in and out for it: decode.
// Bit for bit the scan of the same row.
//
// Shape letters: D channels, 16 states a channel. A warp works on 32 channels of a sequence. Four
// threads share a channel's states, so that a warp's loads and stores are whole sectors; each has
// what else belongs to one channel of the four that it works on.
#include "scan.cuh"

constexpr uint32_t STATES = 16;
constexpr uint32_t SHARE = 4;
constexpr uint32_t ALL = 0xffffffffu;

// Field for field `UpdateArgument` of src/ops/scan/cuda.rs.
struct Update : ScanInputs {
    uint32_t rows;
    // Whether B and C are read four at a time.
    uint32_t even;
    Rows y_td;
};

__device__ __forceinline__ void read4(const float* at, float* x) {
    const float4 v = *reinterpret_cast<const float4*>(at);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

// A stale page may hold a signalling NaN; what is computed from it is a NaN either way.
__device__ __forceinline__ void read4(const uint16_t* at, float* x) {
    const uint2 v = *reinterpret_cast<const uint2*>(at);
    x[0] = __uint_as_float(v.x << 16), x[1] = __uint_as_float(v.x & 0xffff0000u);
    x[2] = __uint_as_float(v.y << 16), x[3] = __uint_as_float(v.y & 0xffff0000u);
}

__device__ __forceinline__ void write4(float* at, const float* x) {
    *reinterpret_cast<float4*>(at) = make_float4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ void write4(uint16_t* at, const float* x) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(x[0], x[1]);
    const __nv_bfloat162 high = __floats2bfloat162_rn(x[2], x[3]);
    *reinterpret_cast<uint2*>(at) = make_uint2(
        *reinterpret_cast<const uint32_t*>(&low), *reinterpret_cast<const uint32_t*>(&high));
}

// A thread's four states of one channel; returns sum_n h*C over all of the channel's, which the
// four threads fold as `fold` does: 16 to 8 and 4 across them, then within one.
template <bool NORMAL>
__device__ __forceinline__ float advance(
    float* h, const float* a, const float* b, const float* c, float delta, float x) {
    const float input = delta * x;
    float lanes[SHARE];
#pragma unroll
    for (uint32_t i = 0; i < SHARE; ++i) {
        const float decay = NORMAL ? exp_decay(delta * a[i]) : exp_f32(delta * a[i]);
        h[i] = decay * h[i] + input * b[i];
        // A lane begins at zero, which makes a negative zero a positive one.
        lanes[i] = 0.0f + h[i] * c[i];
        lanes[i] += __shfl_xor_sync(ALL, lanes[i], 2);
        lanes[i] += __shfl_xor_sync(ALL, lanes[i], 1);
    }
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

// A thread's shares of the four channels of its quad, `S` elements of a state apart by 16.
template <typename S>
__device__ __forceinline__ void read_shares(
    const State& state, uint32_t row, uint64_t first, float (*h)[SHARE]) {
    if (!state.reads[row]) {
#pragma unroll
        for (uint32_t j = 0; j < SHARE; ++j) {
            for (uint32_t i = 0; i < SHARE; ++i) h[j][i] = 0.0f;
        }
        return;
    }
    const S* from = reinterpret_cast<const S*>(source_at(state, row)) + first;
#pragma unroll
    for (uint32_t j = 0; j < SHARE; ++j) read4(from + j * STATES, h[j]);
}

// What one row brings to a thread: of its own channel, and of its share of the states.
struct Brought {
    float h[SHARE][SHARE];
    float x, dt, z;
    float b[SHARE], c[SHARE];
};

template <typename T, typename S>
__device__ __forceinline__ void bring(
    const Update& u, uint32_t row, uint32_t channel, uint64_t first, uint32_t share, Brought& in) {
    read_shares<S>(u.state, row, first, in.h);
    in.x = read(row_of<T>(u.c_td, row)[channel]);
    in.dt = read(row_of<T>(u.dt_td, row)[channel]);
    in.z = read(row_of<T>(u.z_td, row)[channel]);
    if (u.even) {
        read4(row_of<T>(u.b_tn, row) + share * SHARE, in.b);
        read4(row_of<T>(u.c_tn, row) + share * SHARE, in.c);
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < SHARE; ++i) {
        in.b[i] = read(row_of<T>(u.b_tn, row)[share * SHARE + i]);
        in.c[i] = read(row_of<T>(u.c_tn, row)[share * SHARE + i]);
    }
}

// Grid (groups of rows, tiles of channels); a block's rows are gridDim.x apart. What the next row
// brings is on its way while a row is worked on.
template <typename T, typename S>
__device__ __forceinline__ void update(const Update& u) {
    const uint32_t share = threadIdx.x % SHARE;
    const uint32_t channel = blockIdx.y * blockDim.x + threadIdx.x;
    const uint64_t first = static_cast<uint64_t>(channel - share) * STATES + share * SHARE;
    Brought in;
    bring<T, S>(u, blockIdx.x, channel, first, share, in);
    float a[SHARE][SHARE];
    float least = 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < SHARE; ++j) {
        read4(u.a_dn + first + j * STATES, a[j]);
        least = steeper(least, steepest(a[j], SHARE));
    }
    const float skip = u.skip_d[channel], dt_bias = u.dt_bias_d[channel];
    for (uint32_t row = blockIdx.x; row < u.rows; row += gridDim.x) {
        Brought now = in;
        if (row + gridDim.x < u.rows) bring<T, S>(u, row + gridDim.x, channel, first, share, in);
        const float delta = softplus(now.dt + dt_bias);
        float sum = 0.0f;
        S* at = reinterpret_cast<S*>(state_at(u.state, row)) + first;
#pragma unroll
        for (uint32_t j = 0; j < SHARE; ++j) {
            const float delta_j = __shfl_sync(ALL, delta, j, SHARE);
            const float x_j = __shfl_sync(ALL, now.x, j, SHARE);
            // One answer for the warp, whose threads exchange what they sum.
            const bool normal = __all_sync(ALL, delta_j * least > NEVER_TINY);
            const float one = normal ? advance<true>(now.h[j], a[j], now.b, now.c, delta_j, x_j)
                                     : advance<false>(now.h[j], a[j], now.b, now.c, delta_j, x_j);
            sum = share == j ? one : sum;
            write4(at + j * STATES, now.h[j]);
        }
        write(row_of<T>(u.y_td, row) + channel, (sum + skip * now.x) * silu(now.z));
    }
}

extern "C" __global__ void __launch_bounds__(128, 4)
state_update(Update u) {
    if (u.y_td.dtype == BF16) {
        u.state.dtype == BF16 ? update<uint16_t, uint16_t>(u) : update<uint16_t, float>(u);
    } else {
        u.state.dtype == BF16 ? update<float, uint16_t>(u) : update<float, float>(u);
    }
}
