// Sums whose order is that of their terms.
#pragma once

#include <cstdint>

// sum + term(0) + term(1) + ... + term(count - 1), one after another. The terms of DEPTH steps are
// all asked for before the first is added, so that their loads overlap.
template <int DEPTH, typename Term>
__device__ __forceinline__ float add_in_order(float sum, uint64_t count, Term term) {
    uint64_t done = 0;
    for (; done + DEPTH <= count; done += DEPTH) {
        float terms[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) terms[k] = term(done + k);
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) sum = sum + terms[k];
    }
    for (; done < count; ++done) sum = sum + term(done);
    return sum;
}
