// The backward of the selective scan, of sequences that start from nothing.
//
// Shape letters: T packed rows of all sequences, D channels, N states a channel. A thread owns one
// channel of one sequence: it recomputes the states, then walks back, p_t = g_t*C_t +
// exp(delta_{t+1}*A)*p_{t+1} (Mamba, Gu and Dao 2023). A warp's 32 channels are a group, whose
// terms of dB and dC it folds itself. Bit for bit src/ops/scan/backward.rs.
//
// As in the forward, `_16` holds 16 states in registers, `_any` keeps N of them in `spill`.
#include "ordered.cuh"
#include "scan.cuh"

constexpr uint32_t GROUP = 32;
constexpr uint32_t ALL = 0xffffffffu;

// The channels `first`..`first + width`, of which a thread has one. Grid (spans, tiles of the
// width). Field for field `BackwardArgument` of src/ops/scan/cuda/backward.rs.
struct Backward : ScanInputs {
    const float* dy_td;
    const uint32_t* starts;
    const uint32_t* lens;
    uint32_t channels;
    uint32_t states;
    uint32_t row_dtype;
    // Whether B and C are read four at a time.
    uint32_t even;
    uint32_t first;
    uint32_t width;
    // Groups of all channels.
    uint32_t groups;
    float* spill;
    // [T, N, width]: the states that each row leaves.
    float* held_tnw;
    // [T, groups, 2, N]: dB and dC, folded over each group.
    float* groups_tgn;
    // Each span's own sums by A_log, the skip and dt's bias, [spans, N + 2, width]: rows descend.
    float* partials;
    float* dx_td;
    float* ddt_td;
    float* dz_td;
};

// What one row is to a channel.
struct Row {
    float delta, input, g;
};

// What one state gives to the row's sums over states, and to its terms of dB and dC.
struct Terms {
    float y, by_b, by_a, db, dc;
};

// One state: `h` as the row read it, `p` the gradient by the state after the row, before it on
// return; the sums begin with `so_far`.
template <bool NORMAL>
__device__ __forceinline__ Terms walk_back(
    const Row& row, float h, float a, float b, float c, const Terms& so_far, float* p, float* da) {
    const float factor = NORMAL ? normal_decay(row.delta, a) : decay(row.delta, a);
    const float now = fused(factor, h, row.input * b);
    const float p_now = fused(row.g, c, *p);
    const float by_decay = p_now * (factor * h);
    *da = fused(by_decay, row.delta, *da);
    *p = p_now * factor;
    return {fused(now, c, so_far.y), fused(p_now, b, so_far.by_b), fused(by_decay, a, so_far.by_a),
            p_now * row.input, row.g * now};
}

// The sum over two halves of a warp, `upper` of a pair of numbers in the upper half's threads.
template <uint32_t APART>
__device__ __forceinline__ float exchange(float lower, float upper) {
    const bool is_upper = threadIdx.x & APART;
    const float kept = is_upper ? upper : lower, sent = is_upper ? lower : upper;
    return kept + __shfl_xor_sync(ALL, sent, APART);
}

// The sums over a row's 16 states, in the order in which `fold` has them, and on the way the
// group's: of 32 numbers a thread, dB and dC of each state, every thread is left with its own one.
struct Folded {
    float y, by_b, by_a, of_group;
};

template <uint32_t WIDTH, uint32_t LANE, typename Term>
__device__ __forceinline__ Folded fold_states(const Term& term) {
    if constexpr (WIDTH == LANES) {
        const Terms one = term(LANE);
        return {one.y, one.by_b, one.by_a, exchange<16>(one.db, one.dc)};
    } else {
        const Folded a = fold_states<2 * WIDTH, LANE>(term);
        const Folded b = fold_states<2 * WIDTH, LANE + WIDTH>(term);
        return {a.y + b.y, a.by_b + b.by_b, a.by_a + b.by_a,
                exchange<WIDTH>(a.of_group, b.of_group)};
    }
}

// The same for any number of states, one after another; the group's sums are stored here.
template <typename Term>
__device__ __forceinline__ Folded fold_any(uint32_t n, float* group, const Term& term) {
    float y[LANES] = {}, by_b[LANES] = {}, by_a[LANES] = {};
    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t lane = i % LANES;
        Terms one = term(i, Terms{y[lane], by_b[lane], by_a[lane], 0.0f, 0.0f});
        y[lane] = one.y, by_b[lane] = one.by_b, by_a[lane] = one.by_a;
        for (uint32_t apart = GROUP / 2; apart > 0; apart /= 2) {
            one.db += __shfl_down_sync(ALL, one.db, apart);
            one.dc += __shfl_down_sync(ALL, one.dc, apart);
        }
        if (threadIdx.x % GROUP == 0) group[i] = one.db, group[n + i] = one.dc;
    }
    return {fold(y), fold(by_b), fold(by_a), 0.0f};
}

// A thread's channel; threads beyond the last one walk along with it and give nothing.
struct Place {
    uint32_t within, channel;
    bool live;

    __device__ explicit Place(const Backward& s) {
        within = blockIdx.y * blockDim.x + threadIdx.x;
        live = within < s.width;
        channel = s.first + (live ? within : s.width - 1);
    }
};

// The states that each row leaves, as the next one reads them.
template <int FIXED, typename T>
__device__ __forceinline__ void recompute(
    const Backward& s, const Place& place, float* h, const float* a, float dt_bias, float least) {
    const uint32_t n = FIXED ? FIXED : s.states, span = blockIdx.x;
    const uint64_t start = s.starts[span], end = start + s.lens[span];
    for (uint64_t row = start; row < end; ++row) {
        const float x = read(row_of<T>(s.c_td, row)[place.channel]);
        const float delta = softplus(read(row_of<T>(s.dt_td, row)[place.channel]) + dt_bias);
        const T* b_n = row_of<T>(s.b_tn, row);
        if constexpr (FIXED > 0) {
            Stored<T, FIXED> b;
            b.read(b_n, s.even);
            // The sum over states is nobody's here.
            delta * least > NEVER_TINY ? step<FIXED, true>(h, a, b, b, n, delta, x)
                                       : step<FIXED>(h, a, b, b, n, delta, x);
        } else {
            const float input = delta * x;
            for (uint32_t i = 0; i < n; ++i) {
                h[i] = fused(decay(delta, a[i]), h[i], input * read(b_n[i]));
            }
        }
        round_states<FIXED>(h, n, s.row_dtype);
        float* held = s.held_tnw + row * n * s.width + place.within;
#pragma unroll
        for (uint32_t i = 0; i < n; ++i) {
            if (place.live) held[static_cast<uint64_t>(i) * s.width] = h[i];
        }
    }
}

// One row of the walk back, of a thread's states.
template <int FIXED, bool NORMAL, typename T>
__device__ __forceinline__ Folded walk_row(
    const Backward& s, const Place& place, uint64_t at, bool is_first, const Row& row,
    const float* a, float* p, float* da) {
    const uint32_t n = FIXED ? FIXED : s.states;
    const T *b_n = row_of<T>(s.b_tn, at), *c_n = row_of<T>(s.c_tn, at);
    // Of the row before; not touched in a sequence's first row.
    const float* held = s.held_tnw + (at - 1) * n * s.width + place.channel - s.first;
    float* group = s.groups_tgn + (at * s.groups + place.channel / GROUP) * 2 * n;
    if constexpr (FIXED > 0) {
        Stored<T, FIXED> b, c;
        b.read(b_n, s.even), c.read(c_n, s.even);
        float h[FIXED];
#pragma unroll
        for (uint32_t i = 0; i < FIXED; ++i) {
            h[i] = is_first ? 0.0f : held[static_cast<uint64_t>(i) * s.width];
        }
        const Folded folded = fold_states<1, 0>([&](uint32_t i) {
            Terms one = walk_back<NORMAL>(row, h[i], a[i], b[i], c[i], Terms{}, p + i, da + i);
            one.db = place.live ? one.db : 0.0f, one.dc = place.live ? one.dc : 0.0f;
            return one;
        });
        group[threadIdx.x % GROUP] = folded.of_group;
        return folded;
    } else {
        return fold_any(n, group, [&](uint32_t i, const Terms& so_far) {
            const float h = is_first ? 0.0f : held[static_cast<uint64_t>(i) * s.width];
            Terms one =
                walk_back<NORMAL>(row, h, a[i], read(b_n[i]), read(c_n[i]), so_far, p + i, da + i);
            one.db = place.live ? one.db : 0.0f, one.dc = place.live ? one.dc : 0.0f;
            return one;
        });
    }
}

template <int FIXED, typename T>
__device__ __forceinline__ void backward(const Backward& s) {
    const Place place(s);
    // A warp has a live thread or none.
    if (place.within - threadIdx.x % GROUP >= s.width) return;
    const uint32_t span = blockIdx.x, n = FIXED ? FIXED : s.states;
    float own[FIXED ? FIXED : 1], a_own[FIXED ? FIXED : 1], da_own[FIXED ? FIXED : 1] = {};
    const float* a_n = s.a_dn + static_cast<uint64_t>(place.channel) * n;
    // First the state, then, on the way back, its gradient.
    const uint64_t threads = static_cast<uint64_t>(gridDim.y) * blockDim.x;
    float* spill = s.spill + (span * threads + place.within) * n * 2;
    float *h = FIXED ? own : spill, *p = h, *da = FIXED ? da_own : spill + n;
    const float* a = FIXED ? a_own : a_n;
    if constexpr (FIXED > 0) {
#pragma unroll
        for (uint32_t i = 0; i < FIXED; ++i) a_own[i] = a_n[i];
    }
#pragma unroll
    for (uint32_t i = 0; i < n; ++i) h[i] = 0.0f;
    const float skip = s.skip_d[place.channel], dt_bias = s.dt_bias_d[place.channel];
    const float least = steepest(a, n);
    recompute<FIXED, T>(s, place, h, a, dt_bias, least);

#pragma unroll
    for (uint32_t i = 0; i < n; ++i) p[i] = 0.0f, da[i] = 0.0f;
    float dskip = 0.0f, ddt_bias = 0.0f;
    const uint64_t start = s.starts[span], end = start + s.lens[span];
    for (uint64_t at = end; at-- > start;) {
        const uint64_t here = at * s.channels + place.channel;
        const float x = read(row_of<T>(s.c_td, at)[place.channel]);
        const float z = read(row_of<T>(s.z_td, at)[place.channel]);
        const float raw = read(row_of<T>(s.dt_td, at)[place.channel]) + dt_bias;
        const float delta = softplus(raw), dy = s.dy_td[here], g = dy * silu(z);
        const Row row{delta, delta * x, g};
        // One answer for the warp, whose threads exchange what they sum.
        const bool normal = FIXED && __all_sync(ALL, delta * least > NEVER_TINY);
        const Folded sums =
            normal ? walk_row<FIXED, true, T>(s, place, at, at == start, row, a, p, da)
                   : walk_row<FIXED, false, T>(s, place, at, at == start, row, a, p, da);
        const float slope = raw > 20.0f ? 1.0f : sigmoid(raw);
        const float ddt = fused(x, sums.by_b, sums.by_a * LN_2) * slope;
        dskip = fused(g, x, dskip);
        ddt_bias += ddt;
        if (!place.live) continue;
        s.dz_td[here] = dy * fused(skip, x, sums.y) * silu_derivative(z);
        s.dx_td[here] = fused(skip, g, delta * sums.by_b);
        s.ddt_td[here] = ddt;
    }
    if (!place.live) return;
    float* sums = s.partials + static_cast<uint64_t>(span) * (n + 2) * s.width + place.within;
#pragma unroll
    for (uint32_t i = 0; i < n; ++i) {
        sums[static_cast<uint64_t>(i) * s.width] = da[i] * (a[i] * LN_2);
    }
    sums[static_cast<uint64_t>(n) * s.width] = dskip;
    sums[static_cast<uint64_t>(n + 1) * s.width] = ddt_bias;
}

extern "C" __global__ void __launch_bounds__(64, 8) scan_backward_16(Backward s) {
    s.c_td.dtype == BF16 ? backward<16, uint16_t>(s) : backward<16, float>(s);
}

extern "C" __global__ void scan_backward_any(Backward s) {
    s.c_td.dtype == BF16 ? backward<0, uint16_t>(s) : backward<0, float>(s);
}

// dB and dC [T, N]: the groups' sums, ascending. A thread owns one of a row's 2 N.
extern "C" __global__ void scan_sum_groups(
    const float* __restrict__ groups_tgn,
    uint64_t rows,
    uint64_t groups,
    uint32_t states,
    float* __restrict__ db_tn,
    float* __restrict__ dc_tn) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t both = 2 * static_cast<uint64_t>(states);
    if (i >= rows * both) return;
    const uint64_t row = i / both, n = i % both;
    const float* of_row = groups_tgn + row * groups * both + n;
    const float sum =
        add_in_order<16>(0.0f, groups, [&](uint64_t group) { return of_row[group * both]; });
    if (n < states) {
        db_tn[row * states + n] = sum;
    } else {
        dc_tn[row * states + n - states] = sum;
    }
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
