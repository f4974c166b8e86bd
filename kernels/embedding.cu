// Rows of the embedding by token, and the gradient back to them. Bit for bit src/ops/embedding.rs.
//
// Shape letters: T rows, V vocabulary, H hidden.
#include "arrays.cuh"
#include "elements.cuh"

// x[T, H] from the table's bytes [V, H] in the compute dtype; x is of that dtype or wider.
template <typename From, typename To, uint32_t N>
__device__ __forceinline__ void look_up(
    const From* table_vh, const uint32_t* tokens, uint64_t len, uint64_t width, Rows x_th) {
    const uint64_t i = this_element() * N;
    if (i >= len) return;
    const uint64_t row = i / width, column = i % width;
    float x[N];
    read_n<N>(table_vh + tokens[row] * width + column, x);
    write_n<N>(row_of<To>(x_th, row) + column, x);
}

template <typename T, uint32_t N>
__device__ __forceinline__ void forward(
    const T* table_vh, const uint32_t* tokens, uint64_t len, uint64_t width, Rows x_th) {
    if (x_th.dtype == BF16) {
        look_up<T, uint16_t, N>(table_vh, tokens, len, width, x_th);
    } else {
        look_up<T, float, N>(table_vh, tokens, len, width, x_th);
    }
}

extern "C" __global__ void embedding_forward(
    const unsigned char* __restrict__ table_vh,
    const uint32_t* __restrict__ tokens,
    uint64_t len,
    uint64_t width,
    uint32_t dtype,
    uint32_t even,
    Rows x_th) {
    if (dtype == BF16) {
        const uint16_t* table = reinterpret_cast<const uint16_t*>(table_vh);
        even ? forward<uint16_t, EIGHT>(table, tokens, len, width, x_th)
             : forward<uint16_t, 1>(table, tokens, len, width, x_th);
    } else {
        const float* table = reinterpret_cast<const float*>(table_vh);
        even ? forward<float, EIGHT>(table, tokens, len, width, x_th)
             : forward<float, 1>(table, tokens, len, width, x_th);
    }
}

// Adds each row of dx[T, H] to its token's row of dtable[V, H]. `rows` lists the rows of one token
// after those of another, each token's ascending; token `tokens[u]` has those from ends[u - 1] to
// ends[u]. A thread owns one element of one token's row.
extern "C" __global__ void embedding_backward(
    const float* __restrict__ dx_th,
    const uint32_t* __restrict__ tokens,
    const uint32_t* __restrict__ ends,
    const uint32_t* __restrict__ rows,
    uint32_t unique,
    uint64_t width,
    float* __restrict__ dtable_vh) {
    const uint64_t i = this_element();
    if (i >= unique * width) return;
    const uint32_t token = static_cast<uint32_t>(i / width);
    const uint64_t column = i % width;
    float* at = dtable_vh + tokens[token] * width + column;
    float sum = *at;
    for (uint32_t row = token == 0 ? 0 : ends[token - 1]; row < ends[token]; ++row) {
        sum += dx_th[rows[row] * width + column];
    }
    *at = sum;
}
