// Causal attention: exact maximum, then sum of exp, then sum of p*v with keys ascending.
//
// Shape letters: T packed query rows of all sequences, S keys that a row sees, Q query heads, G
// key/value heads, E head width. Scores are q.k / sqrt(E) in f32; p = exp(score - max) is rounded
// to the compute dtype before p*v, its sum is not. A block owns one query of one head; half a warp
// is the 16 lanes of src/ops/simd.rs. Keys past a row's length are never loaded: a page that comes
// back from state may hold NaN bits there. Bit for bit src/ops/attention.rs, forward and backward.
#include "pages.cuh"

// Field for field `HeadsArgument` of src/ops/attention/cuda.rs.
struct Heads {
    uint32_t query;
    uint32_t key_value;
    uint32_t width;
    // 1 / sqrt(width).
    float scale;
};

// Field for field `KeyValueArgument` of src/ops/pages/cuda.rs: a page is [2, block_tokens, G*E].
struct KeyValuePages {
    unsigned char* pages;
    // The block tables, flat, and where each span's begins: [spans].
    const uint32_t* blocks;
    const uint32_t* block_starts;
    uint32_t block_tokens;
    // Elements of one token's key (or value).
    uint32_t row;
};

// Element offset in the buffer of a token's key; its value lies block_tokens * row further.
__device__ __forceinline__ uint64_t paged_row(
    const KeyValuePages& pages, uint32_t span, uint32_t position) {
    const uint32_t block = pages.blocks[pages.block_starts[span] + position / pages.block_tokens];
    const uint64_t half = static_cast<uint64_t>(pages.block_tokens) * pages.row;
    return block * 2 * half + static_cast<uint64_t>(position % pages.block_tokens) * pages.row;
}

// Where one query's keys and values come from: pages of elements `T` ...
template <typename T>
struct Paged {
    KeyValuePages pages;
    uint32_t span;

    __device__ uint64_t at(uint32_t s) const { return paged_row(pages, span, s); }
    // Keys from s on that lie `row` elements apart.
    __device__ uint32_t run(uint32_t s) const {
        return pages.block_tokens - s % pages.block_tokens;
    }
    __device__ uint64_t row() const { return pages.row; }
    __device__ float key(uint64_t i) const {
        return widen(reinterpret_cast<const T*>(pages.pages)[i]);
    }
    __device__ float value(uint64_t i) const {
        return key(i + static_cast<uint64_t>(pages.block_tokens) * pages.row);
    }
};

// ... or the sequence's own rows, k and v [T, G*E].
struct Own {
    const float* k;
    const float* v;
    uint64_t start;
    uint64_t width;

    __device__ uint64_t at(uint32_t s) const { return (start + s) * width; }
    __device__ uint32_t run(uint32_t) const { return UINT32_MAX; }
    __device__ uint64_t row() const { return width; }
    __device__ float key(uint64_t i) const { return k[i]; }
    __device__ float value(uint64_t i) const { return v[i]; }
};

constexpr uint32_t HALF_WARP = LANES;

// Folds the 16 lanes that half a warp holds, in halves; right in the lowest lane. All 32 threads of
// the warp take part.
__device__ __forceinline__ float fold_half_warp(float sum) {
    for (uint32_t width = HALF_WARP / 2; width > 0; width /= 2) {
        sum += __shfl_down_sync(0xffffffff, sum, width, HALF_WARP);
    }
    return sum;
}

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
            for (uint32_t e = lane; e < width; e += HALF_WARP) sum += x_e[e] * element(s, e);
        }
        sum = fold_half_warp(sum);
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

// sum over s of term(s), in the lane order; the same in every thread.
template <typename Term>
__device__ __forceinline__ float block_sum(uint32_t seen, float* shared, Term term) {
    if (threadIdx.x < 32) {
        float sum = 0.0f;
        if (threadIdx.x < HALF_WARP) {
            for (uint32_t s = threadIdx.x; s < seen; s += HALF_WARP) sum += term(s);
        }
        sum = fold_half_warp(sum);
        if (threadIdx.x == 0) shared[0] = sum;
    }
    __syncthreads();
    const float sum = shared[0];
    __syncthreads();
    return sum;
}

// p[s] = exp(score - max), unnormalised; returns their sum. Ends with p visible to the block.
template <typename Source>
__device__ __forceinline__ float probabilities(
    const Heads& heads,
    const float* q_e,
    const Source& source,
    uint32_t group,
    uint32_t seen,
    float* p_s,
    float* shared) {
    const uint64_t column = static_cast<uint64_t>(group) * heads.width;
    const auto key = [&](uint32_t s, uint32_t e) { return source.key(source.at(s) + column + e); };
    dots(q_e, heads.width, seen, heads.scale, key, p_s);
    __syncthreads();
    const float max = block_max(p_s, seen, shared);
    for (uint32_t s = threadIdx.x; s < seen; s += blockDim.x) p_s[s] = exp_f32(p_s[s] - max);
    __syncthreads();
    return block_sum(seen, shared, [&](uint32_t s) { return p_s[s]; });
}

// out[E] of one query and head: a thread owns an element and walks the keys in order.
template <typename Source>
__device__ __forceinline__ void attend(
    const Heads& heads,
    const float* q_e,
    const Source& source,
    uint32_t group,
    uint32_t seen,
    uint32_t dtype,
    float* p_s,
    float* out_e) {
    __shared__ float shared[32];
    const float total = probabilities(heads, q_e, source, group, seen, p_s, shared);
    for (uint32_t s = threadIdx.x; s < seen; s += blockDim.x) p_s[s] = to_dtype(p_s[s], dtype);
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < heads.width; e += blockDim.x) {
        float sum = 0.0f;
        for (uint32_t s = 0; s < seen;) {
            const uint32_t run = min(source.run(s), seen - s);
            const uint64_t at = source.at(s) + static_cast<uint64_t>(group) * heads.width + e;
#pragma unroll 4
            for (uint32_t i = 0; i < run; ++i) {
                sum += p_s[s + i] * source.value(at + i * source.row());
            }
            s += run;
        }
        out_e[e] = to_dtype(sum / total, dtype);
    }
}

// The block's room for p: shared memory, or its own stretch of `spill`, where S is too long.
__device__ __forceinline__ float* room(float* spill, uint32_t longest) {
    extern __shared__ float in_block[];
    const uint64_t block = static_cast<uint64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
    return spill == nullptr ? in_block : spill + block * longest;
}

__device__ __forceinline__ uint64_t query_at(const Heads& heads, uint64_t token, uint32_t head) {
    return (token * heads.query + head) * heads.width;
}

__device__ __forceinline__ uint32_t group_of(const Heads& heads, uint32_t head) {
    return head / (heads.query / heads.key_value);
}

// out[T, Q*E] over pages. Grid (tokens from `first`, Q). Row at position p sees p + 1 keys.
template <typename T>
__device__ __forceinline__ void paged(
    const float* q,
    const KeyValuePages& pages,
    const uint32_t* positions,
    const uint32_t* span_of_token,
    const Heads& heads,
    uint32_t first,
    uint32_t longest,
    uint32_t dtype,
    float* spill,
    float* out) {
    const uint64_t token = static_cast<uint64_t>(first) + blockIdx.x;
    const uint32_t head = blockIdx.y;
    const uint64_t at = query_at(heads, token, head);
    const Paged<T> source{pages, span_of_token[token]};
    attend(heads, q + at, source, group_of(heads, head), positions[token] + 1, dtype,
           room(spill, longest), out + at);
}

extern "C" __global__ void attention_paged_f32(
    const float* q,
    KeyValuePages pages,
    const uint32_t* positions,
    const uint32_t* span_of_token,
    Heads heads,
    uint32_t first,
    uint32_t longest,
    uint32_t dtype,
    float* spill,
    float* out) {
    paged<float>(q, pages, positions, span_of_token, heads, first, longest, dtype, spill, out);
}

extern "C" __global__ void attention_paged_bf16(
    const float* q,
    KeyValuePages pages,
    const uint32_t* positions,
    const uint32_t* span_of_token,
    Heads heads,
    uint32_t first,
    uint32_t longest,
    uint32_t dtype,
    float* spill,
    float* out) {
    paged<uint16_t>(q, pages, positions, span_of_token, heads, first, longest, dtype, spill, out);
}

// out[T, Q*E] over the sequences' own rows, seen whole. Grid (tokens from `first`, Q).
extern "C" __global__ void attention_own(
    const float* q,
    const float* k,
    const float* v,
    const uint32_t* starts,
    const uint32_t* span_of_token,
    Heads heads,
    uint32_t first,
    uint32_t longest,
    uint32_t dtype,
    float* spill,
    float* out) {
    const uint64_t token = static_cast<uint64_t>(first) + blockIdx.x;
    const uint32_t head = blockIdx.y, start = starts[span_of_token[token]];
    const uint64_t at = query_at(heads, token, head);
    const Own source{k, v, start, static_cast<uint64_t>(heads.key_value) * heads.width};
    const uint32_t seen = static_cast<uint32_t>(token) - start + 1;
    attend(heads, q + at, source, group_of(heads, head), seen, dtype, room(spill, longest),
           out + at);
}

// Keys and values [T, G*E] into pages, at their positions. Grid (T, tiles of a row).
template <typename T>
__device__ __forceinline__ void store(
    const float* k,
    const float* v,
    const KeyValuePages& pages,
    const uint32_t* positions,
    const uint32_t* span_of_token) {
    const uint64_t token = blockIdx.x;
    const uint32_t i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= pages.row) return;
    const uint64_t half = static_cast<uint64_t>(pages.block_tokens) * pages.row;
    T* key = reinterpret_cast<T*>(pages.pages) +
             paged_row(pages, span_of_token[token], positions[token]) + i;
    narrow_into(key, k[token * pages.row + i]);
    narrow_into(key + half, v[token * pages.row + i]);
}

extern "C" __global__ void attention_store_f32(
    const float* k,
    const float* v,
    KeyValuePages pages,
    const uint32_t* positions,
    const uint32_t* span_of_token) {
    store<float>(k, v, pages, positions, span_of_token);
}

extern "C" __global__ void attention_store_bf16(
    const float* k,
    const float* v,
    KeyValuePages pages,
    const uint32_t* positions,
    const uint32_t* span_of_token) {
    store<uint16_t>(k, v, pages, positions, span_of_token);
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
    const auto value = [&](uint32_t s, uint32_t e) { return own.value(own.at(s) + column + e); };
    dots(dout + at, heads.width, seen, 1.0f, value, dp_s);
    __syncthreads();
    const float mean = block_sum(seen, shared, [&](uint32_t s) { return p_s[s] * dp_s[s]; });
    for (uint32_t s = threadIdx.x; s < seen; s += blockDim.x) {
        dp_s[s] = p_s[s] * (dp_s[s] - mean) * heads.scale;
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < heads.width; e += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 4
        for (uint32_t s = 0; s < seen; ++s) sum += dp_s[s] * own.key(own.at(s) + column + e);
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
                dv_e += p[weight] * dout[query];
                dk_e += dscore[weight] * q[query];
            }
        }
        dk[at] = dk_e;
        dv[at] = dv_e;
    }
}
