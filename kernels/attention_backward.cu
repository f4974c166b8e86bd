// The backward of causal attention over whole sequences; probabilities are recomputed.
//
// Shape letters: T packed query rows of all sequences, S keys that a row sees, Q query heads, G
// key/value heads, E head width. A block owns one query of one head, or one key of one key/value
// head. Bit for bit src/ops/attention.rs.
#include "attention.cuh"

// The sequence's own rows, k and v [T, G*E].
struct Own {
    const float* k;
    const float* v;
    uint64_t start;
    uint64_t width;

    __device__ uint64_t at(uint32_t s) const { return (start + s) * width; }
};

// out[s] = dot(x[E], key or value s) * scale for s < seen, 16 lanes a key. Whole warps call it.
template <typename Element>
__device__ __forceinline__ void dots(
    const float* x_e, uint32_t width, uint32_t seen, float scale, Element element, float* out_s) {
    const uint32_t lane = threadIdx.x % HALF_WARP;
    const uint32_t keys = blockDim.x / HALF_WARP;
    for (uint32_t from = 0; from < seen; from += keys) {
        const uint32_t s = from + threadIdx.x / HALF_WARP;
        float sum = 0.0f;
        if (s < seen) {
            for (uint32_t e = lane; e < width; e += HALF_WARP) {
                sum = fused(x_e[e], element(s, e), sum);
            }
        }
        sum = fold_lanes(sum);
        if (lane == 0 && s < seen) out_s[s] = sum * scale;
    }
}

// The exact maximum of p[seen] over the block, NaN passed over as f32::max does.
__device__ __forceinline__ float block_max(const float* p_s, uint32_t seen, float* shared) {
    float max = -INFINITY;
    for (uint32_t s = threadIdx.x; s < seen; s += blockDim.x) max = fmaxf(max, p_s[s]);
    for (uint32_t width = 16; width > 0; width /= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, width));
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = max;
    __syncthreads();
    max = shared[0];
    for (uint32_t warp = 1; warp < blockDim.x / 32; ++warp) max = fmaxf(max, shared[warp]);
    __syncthreads();
    return max;
}

// The fold of every lane's step(so far, s) for its own s < seen; the same in every thread.
template <typename Step>
__device__ __forceinline__ float lanes_by(uint32_t seen, float* shared, Step step) {
    if (threadIdx.x < 32) {
        float sum = 0.0f;
        if (threadIdx.x < HALF_WARP) {
            for (uint32_t s = threadIdx.x; s < seen; s += HALF_WARP) sum = step(sum, s);
        }
        sum = fold_lanes(sum);
        if (threadIdx.x == 0) shared[0] = sum;
    }
    __syncthreads();
    const float sum = shared[0];
    __syncthreads();
    return sum;
}

// p[s] = exp(score - max), unnormalised; returns their sum. Ends with p visible to the block.
__device__ __forceinline__ float probabilities(
    const Heads& heads,
    const float* q_e,
    const Own& source,
    uint32_t group,
    uint32_t seen,
    float* p_s,
    float* shared) {
    const uint64_t column = static_cast<uint64_t>(group) * heads.width;
    const auto key = [&](uint32_t s, uint32_t e) { return source.k[source.at(s) + column + e]; };
    dots(q_e, heads.width, seen, heads.scale, key, p_s);
    __syncthreads();
    const float max = block_max(p_s, seen, shared);
    for (uint32_t s = threadIdx.x; s < seen; s += blockDim.x) p_s[s] = exp_f32(p_s[s] - max);
    __syncthreads();
    return lanes_by(seen, shared, [&](float sum, uint32_t s) { return sum + p_s[s]; });
}

// The block's room for p, its own stretch of `all`.
__device__ __forceinline__ float* room(float* all, uint32_t longest) {
    const uint64_t block = static_cast<uint64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
    return all + block * longest;
}

// For the rows from `first`: p and dscore, [rows, Q, longest] each, and dq[T, Q*E]. Grid (rows, Q).
extern "C" __global__ void attention_backward_query(
    const float* q,
    const float* k,
    const float* v,
    const float* dout,
    const uint32_t* starts,
    const uint32_t* span_of_token,
    Heads heads,
    uint32_t first,
    uint32_t longest,
    float* p,
    float* dscore,
    float* dq) {
    __shared__ float shared[32];
    const uint64_t token = static_cast<uint64_t>(first) + blockIdx.x;
    const uint32_t head = blockIdx.y, start = starts[span_of_token[token]];
    const uint32_t seen = static_cast<uint32_t>(token) - start + 1;
    const uint32_t group = group_of(heads, head);
    const uint64_t at = query_at(heads, token, head);
    const Own own{k, v, start, static_cast<uint64_t>(heads.key_value) * heads.width};
    const uint64_t column = static_cast<uint64_t>(group) * heads.width;
    float *p_s = room(p, longest), *dp_s = room(dscore, longest);

    const float total = probabilities(heads, q + at, own, group, seen, p_s, shared);
    for (uint32_t s = threadIdx.x; s < seen; s += blockDim.x) p_s[s] = p_s[s] / total;
    const auto value = [&](uint32_t s, uint32_t e) { return own.v[own.at(s) + column + e]; };
    dots(dout + at, heads.width, seen, 1.0f, value, dp_s);
    __syncthreads();
    const auto add = [&](float sum, uint32_t s) { return fused(p_s[s], dp_s[s], sum); };
    const float mean = lanes_by(seen, shared, add);
    for (uint32_t s = threadIdx.x; s < seen; s += blockDim.x) {
        dp_s[s] = p_s[s] * (dp_s[s] - mean) * heads.scale;
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < heads.width; e += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 4
        for (uint32_t s = 0; s < seen; ++s) {
            sum = fused(dp_s[s], own.k[own.at(s) + column + e], sum);
        }
        dq[at + e] = sum;
    }
}

// dk and dv [T, G*E] += what the queries `first`..`end` send back: queries ascending, then heads. A
// block owns one key of one key/value head, a thread an element of it. Grid (T, G).
extern "C" __global__ void attention_backward_key(
    const float* q,
    const float* dout,
    const float* p,
    const float* dscore,
    const uint32_t* starts,
    const uint32_t* lens,
    const uint32_t* span_of_token,
    Heads heads,
    uint32_t first,
    uint32_t end,
    uint32_t longest,
    float* dk,
    float* dv) {
    const uint64_t key = blockIdx.x;
    const uint32_t group = blockIdx.y, span = span_of_token[key];
    const uint32_t s = static_cast<uint32_t>(key) - starts[span];
    const uint32_t shared_by = heads.query / heads.key_value;
    const uint64_t from = max(static_cast<uint64_t>(first), key);
    const uint64_t span_end = static_cast<uint64_t>(starts[span]) + lens[span];
    const uint64_t to = min(static_cast<uint64_t>(end), span_end);
    if (from >= to) return;
    for (uint32_t e = threadIdx.x; e < heads.width; e += blockDim.x) {
        const uint64_t at = (key * heads.key_value + group) * heads.width + e;
        float dk_e = dk[at], dv_e = dv[at];
        for (uint64_t token = from; token < to; ++token) {
            for (uint32_t head = group * shared_by; head < (group + 1) * shared_by; ++head) {
                const uint64_t query = query_at(heads, token, head) + e;
                const uint64_t weight = ((token - first) * heads.query + head) * longest + s;
                dv_e = fused(p[weight], dout[query], dv_e);
                dk_e = fused(dscore[weight], q[query], dk_e);
            }
        }
        dk[at] = dk_e;
        dv[at] = dv_e;
    }
}
