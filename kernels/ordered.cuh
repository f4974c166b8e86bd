// Sums whose order is that of their terms.
#pragma once

#include <cstdint>

#include "numeric.cuh"

// step(..step(step(sum, term(0)), term(1)).., term(count - 1)). The terms of DEPTH steps are all
// asked for before the first step, so that their loads overlap.
template <int DEPTH, typename Term, typename Step>
__device__ __forceinline__ float step_in_order(float sum, uint64_t count, Term term, Step step) {
    uint64_t done = 0;
    for (; done + DEPTH <= count; done += DEPTH) {
        decltype(term(0)) terms[DEPTH];
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) terms[k] = term(done + k);
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) sum = step(sum, terms[k]);
    }
    for (; done < count; ++done) sum = step(sum, term(done));
    return sum;
}

// sum + term(0) + term(1) + ... + term(count - 1), one after another.
template <int DEPTH, typename Term>
__device__ __forceinline__ float add_in_order(float sum, uint64_t count, Term term) {
    return step_in_order<DEPTH>(sum, count, term, [](float so_far, float one) {
        return so_far + one;
    });
}

// The same of products x * y, which `pair` returns unmultiplied.
template <int DEPTH, typename Pair>
__device__ __forceinline__ float dot_in_order(float sum, uint64_t count, Pair pair) {
    return step_in_order<DEPTH>(sum, count, pair, [](float so_far, float2 one) {
        return fused(one.x, one.y, so_far);
    });
}
