// Rows of the embedding by token, and the gradient back to them. Bit for bit src/ops/embedding.rs.
//
// Shape letters: T rows, V vocabulary, H hidden.
#include "elements.cuh"
#include "pages.cuh"

// x[T, H] from the table's bytes [V, H] in the compute dtype, widened.
extern "C" __global__ void embedding_forward(
    const unsigned char* __restrict__ table_vh,
    const uint32_t* __restrict__ tokens,
    uint64_t len,
    uint64_t width,
    uint32_t dtype,
    float* __restrict__ x_th) {
    const uint64_t i = this_element();
    if (i < len) x_th[i] = load_element(table_vh, dtype, tokens[i / width] * width + i % width);
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
