// A thread an element: the grid is one-dimensional and covers all of them, and perhaps some more.
#pragma once

#include <cstdint>

#include "numeric.cuh"

__device__ __forceinline__ uint64_t this_element() {
    return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
