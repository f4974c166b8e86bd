// Rounding to the compute dtype and the sums that are rounded, element by element. Bit for bit
// src/ops/round.rs.
#include "arrays.cuh"
#include "elements.cuh"

// to = round(from), each `width` elements a row, `len` in all.
template <typename From, typename To>
__device__ __forceinline__ void copy(Rows from, uint64_t len, uint64_t width, Rows to) {
    const uint64_t i = this_element();
    if (i >= len) return;
    const uint64_t row = i / width, column = i % width;
    write(row_of<To>(to, row) + column, read(row_of<From>(from, row)[column]));
}

extern "C" __global__ void copy_rounded(Rows from, uint64_t len, uint64_t width, Rows to) {
    if (from.dtype == BF16) {
        to.dtype == BF16 ? copy<uint16_t, uint16_t>(from, len, width, to)
                         : copy<uint16_t, float>(from, len, width, to);
    } else {
        to.dtype == BF16 ? copy<float, uint16_t>(from, len, width, to)
                         : copy<float, float>(from, len, width, to);
    }
}

// x = round(x + y), to x's dtype.
template <typename X, typename Y>
__device__ __forceinline__ void add(Rows x, Rows y, uint64_t len, uint64_t width) {
    const uint64_t i = this_element();
    if (i >= len) return;
    const uint64_t row = i / width, column = i % width;
    X* at = row_of<X>(x, row) + column;
    write(at, read(*at) + read(row_of<Y>(y, row)[column]));
}

extern "C" __global__ void add_rounded(Rows x, Rows y, uint64_t len, uint64_t width) {
    if (x.dtype == BF16) {
        y.dtype == BF16 ? add<uint16_t, uint16_t>(x, y, len, width)
                        : add<uint16_t, float>(x, y, len, width);
    } else {
        y.dtype == BF16 ? add<float, uint16_t>(x, y, len, width)
                        : add<float, float>(x, y, len, width);
    }
}
