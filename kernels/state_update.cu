// The selective scan of one row a sequence, which moves a whole state in and out for it: decode.
// Bit for bit the scan of the same row.
//
// Shape letters: D channels, 16 states a channel. A warp works on 32 channels of a sequence. Four
// threads share a channel's states, so that a warp's loads and stores are whole sectors; each has
// what else belongs to one channel of the four that it works on.
#include <cuda_pipeline.h>

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

// A thread's four states of one channel; `lanes` are their h*C.
template <bool NORMAL, typename Shares>
__device__ __forceinline__ void advance(
    float* h, const float* a, const Shares& b, const Shares& c, float delta, float x,
    float* lanes) {
    const float input = delta * x;
#pragma unroll
    for (uint32_t i = 0; i < SHARE; ++i) {
        const float factor = NORMAL ? normal_decay(delta, a[i]) : decay(delta, a[i]);
        h[i] = fused(factor, h[i], input * b[i]);
        // A lane begins at zero, which makes a negative zero a positive one.
        lanes[i] = fused(h[i], c[i], 0.0f);
    }
}

// The four threads of a quad add up each other's lanes of half as many channels, until each has
// one; the threads of the upper half keep the upper channels.
template <uint32_t CHANNELS>
__device__ __forceinline__ void exchange(float (*lanes)[SHARE], uint32_t share) {
    constexpr uint32_t KEPT = CHANNELS / 2;
    const bool is_upper = share & KEPT;
#pragma unroll
    for (uint32_t j = 0; j < KEPT; ++j) {
#pragma unroll
        for (uint32_t i = 0; i < SHARE; ++i) {
            const float kept = is_upper ? lanes[j + KEPT][i] : lanes[j][i];
            const float sent = is_upper ? lanes[j][i] : lanes[j + KEPT][i];
            lanes[j][i] = kept + __shfl_xor_sync(ALL, sent, KEPT);
        }
    }
}

// A quad's four channels; returns sum_n h*C of the thread's own one, folded as `fold` does: 16
// lanes to 8 and 4 across the threads, then within one.
template <bool NORMAL, typename Shares>
__device__ __forceinline__ float advance_quad(
    float (*h)[SHARE], const float (*a)[SHARE], const Shares& b, const Shares& c, float delta,
    float x, uint32_t share) {
    float lanes[SHARE][SHARE];
#pragma unroll
    for (uint32_t j = 0; j < SHARE; ++j) {
        const float delta_j = __shfl_sync(ALL, delta, j, SHARE);
        const float x_j = __shfl_sync(ALL, x, j, SHARE);
        advance<NORMAL>(h[j], a[j], b, c, delta_j, x_j, lanes[j]);
    }
    exchange<4>(lanes, share);
    exchange<2>(lanes, share);
    return (lanes[0][0] + lanes[0][2]) + (lanes[0][1] + lanes[0][3]);
}

// Rows whose states are on their way to a block while one is worked on.
constexpr uint32_t AHEAD = 2;
constexpr uint32_t THREADS = 128;

// A thread's shares of its quad's four channels, as they are stored, in rows that come and the row
// at hand: every thread copies what it alone reads.
template <typename S>
struct Ring {
    struct alignas(SHARE * sizeof(S)) Share {
        S h[SHARE];
    };
    Share rows[AHEAD + 1][SHARE][THREADS];
};

// The next row whose states a thread asks for; which block they lie in is looked up a row earlier.
template <typename S>
struct Asked {
    const Update& u;
    uint64_t first;
    uint32_t row, source, reads;

    __device__ __forceinline__ Asked(const Update& u, uint64_t first)
        : u(u), first(first), row(blockIdx.x) {
        look_up();
    }

    __device__ __forceinline__ void look_up() {
        if (row < u.rows) source = u.state.sources[row], reads = u.state.reads[row];
    }

    // Of a row that starts from nothing, zeros; beyond the last one, nothing.
    __device__ __forceinline__ void ask(typename Ring<S>::Share (*to)[THREADS]) {
        constexpr size_t bytes = sizeof(typename Ring<S>::Share);
        if (row < u.rows) {
            const S* from = reinterpret_cast<const S*>(state_of(u.state, source)) + first;
#pragma unroll
            for (uint32_t j = 0; j < SHARE; ++j) {
                __pipeline_memcpy_async(
                    &to[j][threadIdx.x], from + j * STATES, bytes, reads ? 0 : bytes);
            }
        }
        __pipeline_commit();
        row += gridDim.x;
        look_up();
    }
};

// What one row brings to a thread beside its states, as it is stored: of its own channel, and its
// share of B and C.
template <typename T>
struct Brought {
    T x, dt, z;
    Stored<T, SHARE> b, c;

    __device__ __forceinline__ void ask(const Update& u, uint32_t row, uint32_t channel) {
        x = row_of<T>(u.c_td, row)[channel];
        dt = row_of<T>(u.dt_td, row)[channel];
        z = row_of<T>(u.z_td, row)[channel];
        b.read(row_of<T>(u.b_tn, row) + channel % SHARE * SHARE, u.even);
        c.read(row_of<T>(u.c_tn, row) + channel % SHARE * SHARE, u.even);
    }
};

// Grid (groups of rows, tiles of channels); a block's rows are gridDim.x apart. The next rows'
// states, and what else the next one brings, are on their way while a row is worked on.
template <typename T, typename S>
__device__ __forceinline__ void update(const Update& u, Ring<S>& ring) {
    const uint32_t share = threadIdx.x % SHARE;
    const uint32_t channel = blockIdx.y * THREADS + threadIdx.x;
    const uint64_t first = static_cast<uint64_t>(channel - share) * STATES + share * SHARE;
    Asked<S> next{u, first};
#pragma unroll
    for (uint32_t k = 0; k < AHEAD; ++k) next.ask(ring.rows[k]);
    Brought<T> brought;
    brought.ask(u, blockIdx.x, channel);
    float a[SHARE][SHARE];
    float least = 0.0f;
#pragma unroll
    for (uint32_t j = 0; j < SHARE; ++j) {
        read4(u.a_dn + first + j * STATES, a[j]);
        least = steeper(least, steepest(a[j], SHARE));
    }
    least = steeper(least, __shfl_xor_sync(ALL, least, 1));
    least = steeper(least, __shfl_xor_sync(ALL, least, 2));
    const float skip = u.skip_d[channel], dt_bias = u.dt_bias_d[channel];
    uint32_t place = 0;
    for (uint32_t row = blockIdx.x; row < u.rows; row += gridDim.x) {
        const float x = read(brought.x), z = read(brought.z);
        const float delta = softplus(read(brought.dt) + dt_bias);
        const Stored<T, SHARE> b = brought.b, c = brought.c;
        const uint32_t slot = u.state.slots[row];
        next.ask(ring.rows[place == 0 ? AHEAD : place - 1]);
        if (row + gridDim.x < u.rows) brought.ask(u, row + gridDim.x, channel);
        __pipeline_wait_prior(AHEAD);
        float h[SHARE][SHARE];
#pragma unroll
        for (uint32_t j = 0; j < SHARE; ++j) read4(ring.rows[place][j][threadIdx.x].h, h[j]);
        // One answer for the warp, whose threads exchange what they sum.
        const bool normal = __all_sync(ALL, delta * least > NEVER_TINY);
        const float sum = normal
            ? advance_quad<true>(h, a, b, c, delta, x, share)
            : advance_quad<false>(h, a, b, c, delta, x, share);
        S* at = reinterpret_cast<S*>(state_of(u.state, slot)) + first;
#pragma unroll
        for (uint32_t j = 0; j < SHARE; ++j) write4(at + j * STATES, h[j]);
        write(row_of<T>(u.y_td, row) + channel, fused(skip, x, sum) * silu(z));
        place = place < AHEAD ? place + 1 : 0;
    }
}

template <typename S>
__device__ __forceinline__ void by_rows(const Update& u, void* room) {
    Ring<S>& ring = *static_cast<Ring<S>*>(room);
    u.y_td.dtype == BF16 ? update<uint16_t, S>(u, ring) : update<float, S>(u, ring);
}

extern "C" __global__ void __launch_bounds__(THREADS, 5)
state_update(Update u) {
    __shared__ alignas(16) unsigned char room[sizeof(Ring<float>)];
    u.state.dtype == BF16 ? by_rows<uint16_t>(u, room) : by_rows<float>(u, room);
}
