// Causal attention: exact maximum, then sum of exp, then sum of p*v with keys ascending.
//
// Shape letters: T packed query rows of all sequences, S keys that a row sees, Q query heads, G
// key/value heads, E head width. Scores are q.k / sqrt(E) in f32; p = exp(score - max) is rounded
// to the compute dtype before p*v, its sum is not. A block owns one query of a few heads that share
// keys. Keys past a row's length are never loaded:
// a page that comes back from state may hold NaN bits there. Bit for bit src/ops/attention.rs.
#include "attention.cuh"
#include "pages.cuh"

// Field for field `KeyValueArgument` of src/ops/pages/cuda/tables.rs. A page is
// [2, block_tokens, G*E].
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

    __device__ const T* key(uint32_t s) const {
        return reinterpret_cast<const T*>(pages.pages) + paged_row(pages, span, s);
    }
    __device__ const T* value(uint32_t s) const {
        return key(s) + static_cast<uint64_t>(pages.block_tokens) * pages.row;
    }
    // Keys from s on that lie `row` elements apart.
    __device__ uint32_t run(uint32_t s) const {
        return pages.block_tokens - s % pages.block_tokens;
    }
    __device__ uint64_t row() const { return pages.row; }
};

// ... or the sequence's own rows, k and v [T, G*E].
template <typename T>
struct Own {
    const T* k;
    const T* v;
    uint64_t start;
    uint64_t pitch;

    __device__ const T* key(uint32_t s) const { return k + (start + s) * pitch; }
    __device__ const T* value(uint32_t s) const { return v + (start + s) * pitch; }
    __device__ uint32_t run(uint32_t) const { return UINT32_MAX; }
    __device__ uint64_t row() const { return pitch; }
};

// HEADS numbers side by side: a query's element, or the probability of a key, of each head.
template <uint32_t HEADS>
__device__ __forceinline__ void read_heads(const float* at, float* x) {
    if constexpr (HEADS == 4) {
        const float4 four = *reinterpret_cast<const float4*>(at);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
        static_assert(HEADS == 1);
        x[0] = at[0];
    }
}

// q.k of one key and HEADS queries, in the lane order: all 16 lanes are this thread's.
template <typename T, uint32_t HEADS, bool EVEN>
__device__ __forceinline__ void scores(
    const T* key, const float* q_eh, uint32_t width, float scale, float* out) {
    float lanes[HEADS][LANES] = {};
#pragma unroll 2
    for (uint32_t base = 0; base < width; base += LANES) {
        float k[LANES];
        if constexpr (EVEN) {
            read8(key + base, k), read8(key + base + EIGHT, k + EIGHT);
        }
#pragma unroll
        for (uint32_t lane = 0; lane < LANES; ++lane) {
            const uint32_t e = base + lane;
            if (!EVEN && e >= width) break;
            if constexpr (!EVEN) k[lane] = read(key[e]);
            float q[HEADS];
            read_heads<HEADS>(q_eh + e * HEADS, q);
#pragma unroll
            for (uint32_t h = 0; h < HEADS; ++h) {
                lanes[h][lane] = fused(q[h], k[lane], lanes[h][lane]);
            }
        }
    }
#pragma unroll
    for (uint32_t h = 0; h < HEADS; ++h) out[h] = fold(lanes[h]) * scale;
}

// One warp's softmax of one head, whose p lie HEADS apart: round(exp(score - max)) for s < seen;
// the sum, which is of what is not rounded, in every thread.
template <typename T, uint32_t HEADS>
__device__ __forceinline__ float warp_softmax(float* p_sh, uint32_t seen) {
    const uint32_t lane = threadIdx.x % 32;
    const auto p = [&](uint32_t s) -> float& { return p_sh[static_cast<uint64_t>(s) * HEADS]; };
    float max = -INFINITY;
    for (uint32_t s = lane; s < seen; s += 32) max = fmaxf(max, p(s));
    for (uint32_t width = 16; width > 0; width /= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, width));
    }
    for (uint32_t s = lane; s < seen; s += 32) p(s) = exp_f32(p(s) - max);
    __syncwarp();
    float sum = 0.0f;
    if (lane < HALF_WARP) {
#pragma unroll 4
        for (uint32_t s = lane; s < seen; s += HALF_WARP) sum += p(s);
    }
    sum = __shfl_sync(0xffffffff, fold_lanes(sum), 0);
    for (uint32_t s = lane; s < seen; s += 32) p(s) = rounded<T>(p(s));
    return sum;
}

// out[HEADS, E] of one query: HEADS neighbouring heads of one group, so that a key and a value are
// loaded once for all of them. A thread owns a key, a warp a head's softmax, then a thread an
// element of the output, for which it walks the keys in order. `q_eh` is room for the query in f32.
template <typename T, uint32_t HEADS, typename Source>
__device__ __forceinline__ void attend(
    const Heads& heads,
    const T* q,
    const Source& source,
    uint32_t group,
    uint32_t seen,
    bool even,
    float* q_eh,
    float* p_sh,
    T* out) {
    __shared__ float totals[HEADS];
    const uint32_t width = heads.width;
    const uint64_t column = static_cast<uint64_t>(group) * width;
    for (uint32_t i = threadIdx.x; i < HEADS * width; i += blockDim.x) {
        q_eh[i % width * HEADS + i / width] = read(q[i]);
    }
    __syncthreads();
    for (uint32_t s = threadIdx.x; s < seen; s += blockDim.x) {
        const T* key = source.key(s) + column;
        float* p = p_sh + static_cast<uint64_t>(s) * HEADS;
        even ? scores<T, HEADS, true>(key, q_eh, width, heads.scale, p)
             : scores<T, HEADS, false>(key, q_eh, width, heads.scale, p);
    }
    __syncthreads();
    for (uint32_t h = threadIdx.x / 32; h < HEADS; h += blockDim.x / 32) {
        const float total = warp_softmax<T, HEADS>(p_sh + h, seen);
        if (threadIdx.x % 32 == 0) totals[h] = total;
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < width; e += blockDim.x) {
        float sums[HEADS] = {};
        for (uint32_t s = 0; s < seen;) {
            const uint32_t run = min(source.run(s), seen - s);
            const T* value = source.value(s) + column + e;
#pragma unroll 16
            for (uint32_t i = 0; i < run; ++i) {
                const float v = read(value[i * source.row()]);
                float p[HEADS];
                read_heads<HEADS>(p_sh + static_cast<uint64_t>(s + i) * HEADS, p);
#pragma unroll
                for (uint32_t h = 0; h < HEADS; ++h) sums[h] = fused(p[h], v, sums[h]);
            }
            s += run;
        }
#pragma unroll
        for (uint32_t h = 0; h < HEADS; ++h) write(out + h * width + e, sums[h] / totals[h]);
    }
}

// What the forward kernels share. Blocks: (tokens from `first`, groups of a few heads).
struct Queries {
    Rows q;
    // Null where keys and values are in pages.
    Rows k;
    Rows v;
    KeyValuePages pages;
    // First rows of the spans, and every row's span and place in its sequence.
    const uint32_t* starts;
    const uint32_t* span_of_token;
    const uint32_t* positions;
    Heads heads;
    uint32_t first;
    // Keys that any of the rows may see.
    uint32_t longest;
    // Whether keys are read eight elements at a time, and are of whole sixteens.
    uint32_t even;
    // Room for p beyond the block's own, or null.
    float* spill;
    Rows out;
};

template <typename T, uint32_t HEADS>
__device__ __forceinline__ void forward(const Queries& a) {
    extern __shared__ __align__(16) float in_block[];
    const uint64_t token = static_cast<uint64_t>(a.first) + blockIdx.x;
    const uint32_t head = blockIdx.y * HEADS, group = group_of(a.heads, head);
    const uint32_t span = a.span_of_token[token];
    const T* q = row_of<T>(a.q, token) + static_cast<uint64_t>(head) * a.heads.width;
    T* out = row_of<T>(a.out, token) + static_cast<uint64_t>(head) * a.heads.width;
    float* q_eh = in_block;
    const uint64_t block = static_cast<uint64_t>(blockIdx.x) * gridDim.y + blockIdx.y;
    float* p_sh = a.spill == nullptr ? in_block + HEADS * a.heads.width
                                     : a.spill + block * HEADS * a.longest;
    if (a.pages.pages != nullptr) {
        const Paged<T> source{a.pages, span};
        attend<T, HEADS>(a.heads, q, source, group, a.positions[token] + 1, a.even, q_eh, p_sh,
                         out);
    } else {
        const uint32_t start = a.starts[span];
        const Own<T> source{row_of<T>(a.k, 0), row_of<T>(a.v, 0), start, a.k.pitch};
        const uint32_t seen = static_cast<uint32_t>(token) - start + 1;
        attend<T, HEADS>(a.heads, q, source, group, seen, a.even, q_eh, p_sh, out);
    }
}

// out[T, Q*E]. Row at position p sees p + 1 keys.
extern "C" __global__ void attention_forward(Queries a) {
    a.q.dtype == BF16 ? forward<uint16_t, 1>(a) : forward<float, 1>(a);
}

extern "C" __global__ void attention_forward_4(Queries a) {
    a.q.dtype == BF16 ? forward<uint16_t, 4>(a) : forward<float, 4>(a);
}

// Keys and values [T, G*E] into pages of their dtype, at their positions. Grid (T, tiles of a row).
template <typename T>
__device__ __forceinline__ void store(
    Rows k,
    Rows v,
    const KeyValuePages& pages,
    const uint32_t* positions,
    const uint32_t* span_of_token) {
    const uint64_t token = blockIdx.x;
    const uint32_t i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= pages.row) return;
    const uint64_t half = static_cast<uint64_t>(pages.block_tokens) * pages.row;
    T* key = reinterpret_cast<T*>(pages.pages) +
             paged_row(pages, span_of_token[token], positions[token]) + i;
    *key = row_of<T>(k, token)[i];
    key[half] = row_of<T>(v, token)[i];
}

extern "C" __global__ void attention_store(
    Rows k,
    Rows v,
    KeyValuePages pages,
    const uint32_t* positions,
    const uint32_t* span_of_token) {
    BY_DTYPE(k.dtype, store, k, v, pages, positions, span_of_token);
}
