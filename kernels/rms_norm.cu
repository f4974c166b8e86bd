// RMSNorm and its backward, bit-equal to `ops::rms_norm` on the CPU.
//
// Shape letters: T rows, H width. Order: the 16 lanes of `lanes.cuh` over one row.
#include "arrays.cuh"
#include "lanes.cuh"
#include "ordered.cuh"

__device__ __forceinline__ float inverse_root(float sum, uint32_t width, float eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fdiv_rn(sum, (float)width) + eps));
}

// Where there is a `delta`, x = round(x + delta) first, to x's dtype. Then y[T, H] =
// round(round(x * inverse rms) * w). One block a row, which it keeps in shared memory, [H] floats.
template <typename X, typename T, uint32_t N>
__device__ __forceinline__ void norm(Rows x_th, Rows delta_th, const float* w_h, float eps,
                                     uint32_t width, Rows y_th) {
    extern __shared__ float row[];
    __shared__ float total;
    X* x = row_of<X>(x_th, blockIdx.x);
    // A block is as wide as most rows: what it needs later is on its way before it waits.
    const uint32_t mine = threadIdx.x * N;
    float w[N];
    if (mine < width) read_n<N>(w_h + mine, w);
    for (uint32_t i = mine; i < width; i += blockDim.x * N) {
        float v[N];
        read_n<N>(x + i, v);
        if (delta_th.at != nullptr) {
            float delta[N];
            read_n<N>(row_of<T>(delta_th, blockIdx.x) + i, delta);
#pragma unroll
            for (uint32_t k = 0; k < N; ++k) v[k] = rounded<X>(v[k] + delta[k]);
            write_n<N>(x + i, v);
        }
#pragma unroll
        for (uint32_t k = 0; k < N; ++k) row[i + k] = v[k];
    }
    __syncthreads();
    if (threadIdx.x < warpSize) {
        float lane = 0.0f;
        if (threadIdx.x < LANES) {
            uint32_t i = threadIdx.x;
            // The terms of many additions at once: only those wait for one another.
            for (; i + 15 * LANES < width; i += 16 * LANES) {
                float terms[16];
#pragma unroll
                for (uint32_t k = 0; k < 16; ++k) terms[k] = row[i + k * LANES];
#pragma unroll
                for (uint32_t k = 0; k < 16; ++k) lane = fused(terms[k], terms[k], lane);
            }
            for (; i < width; i += LANES) lane = fused(row[i], row[i], lane);
        }
        lane = fold_lanes(lane);
        if (threadIdx.x == 0) total = inverse_root(lane, width, eps);
    }
    __syncthreads();
    const float scale = total;
    T* y = row_of<T>(y_th, blockIdx.x);
    for (uint32_t i = mine; i < width; i += blockDim.x * N) {
        if (i != mine) read_n<N>(w_h + i, w);
        float v[N];
#pragma unroll
        for (uint32_t k = 0; k < N; ++k) v[k] = rounded<T>(row[i + k] * scale) * w[k];
        write_n<N>(y + i, v);
    }
}

// The residual stream x may be wider than what is computed.
template <typename X, uint32_t N>
__device__ __forceinline__ void forward(Rows x_th, Rows delta_th, const float* w_h, float eps,
                                        uint32_t width, Rows y_th) {
    if (y_th.dtype == BF16) {
        norm<X, uint16_t, N>(x_th, delta_th, w_h, eps, width, y_th);
    } else {
        norm<X, float, N>(x_th, delta_th, w_h, eps, width, y_th);
    }
}

extern "C" __global__ void rms_norm_forward(Rows x_th, Rows delta_th, const float* w_h, float eps,
                                            uint32_t width, uint32_t even, Rows y_th) {
    BY_DTYPE_AND_WIDTH(x_th.dtype, even, forward, x_th, delta_th, w_h, eps, width, y_th);
}

// Field for field `PartArgument` of src/ops/rms_norm/cuda.rs.
struct Part {
    Rows x;
    Rows y;
    const float* w;
    uint64_t width;
};

// Elements of a row that a lane of a narrow norm holds.
constexpr uint32_t HELD = 16;

// Three narrow norms of each of T rows. 16 threads are the lanes of one norm of one row; what they
// hold and its weights are all on their way before any is used.
template <typename T>
__device__ __forceinline__ void narrow(const Part& part, uint64_t row, bool inside, float eps) {
    const uint32_t first = threadIdx.x % LANES;
    const uint32_t width = inside ? part.width : 0;
    const T* x = row_of<T>(part.x, row);
    float held[HELD], w[HELD];
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
        const uint32_t i = first + k * LANES;
        held[k] = i < width ? read(x[i]) : 0.0f;
        w[k] = i < width ? part.w[i] : 0.0f;
    }
    float lane = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
        if (first + k * LANES < width) lane = fused(held[k], held[k], lane);
    }
    for (uint32_t i = first + HELD * LANES; i < width; i += LANES) {
        const float last = read(x[i]);
        lane = fused(last, last, lane);
    }
    lane = __shfl_sync(0xffffffffu, fold_lanes(lane), 0, LANES);
    const float scale = inverse_root(lane, part.width, eps);
    T* y = row_of<T>(part.y, row);
#pragma unroll
    for (uint32_t k = 0; k < HELD; ++k) {
        const uint32_t i = first + k * LANES;
        if (i < width) write(y + i, rounded<T>(held[k] * scale) * w[k]);
    }
    for (uint32_t i = first + HELD * LANES; i < width; i += LANES) {
        write(y + i, rounded<T>(read(x[i]) * scale) * part.w[i]);
    }
}

extern "C" __global__ void rms_norm_three(Part a, Part b, Part c, uint64_t rows, float eps) {
    const uint64_t index = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    const uint64_t row = index / 3;
    const uint32_t which = index % 3;
    const Part part = which == 0 ? a : which == 1 ? b : c;
    BY_DTYPE(part.x.dtype, narrow, part, row, row < rows, eps);
}

// dx[T, H] += gradient by x, and scale[T] = inverse rms for the gradient by w; one block a row.
extern "C" __global__ void rms_norm_backward_x(const float* x_th, const float* w_h, float eps,
                                               const float* dy_th, uint64_t width, float* dx_th,
                                               float* scale_t) {
    uint64_t row = (uint64_t)blockIdx.x * width;
    const float *x = x_th + row, *dy = dy_th + row;
    float* dx = dx_th + row;
    float sum = block_lanes(
        width, [&](uint64_t i) { return x[i]; },
        [](float lane, float one) { return fused(one, one, lane); });
    float scale = inverse_root(sum, width, eps);
    float inner = block_sum(width, [&](uint64_t i) { return dy[i] * w_h[i] * x[i]; });
    float shrink = __fdiv_rn(scale * scale * scale * inner, (float)width);
    for (uint64_t i = threadIdx.x; i < width; i += blockDim.x) {
        float direct = scale * dy[i] * w_h[i];
        dx[i] = dx[i] + (direct - shrink * x[i]);
    }
    if (threadIdx.x == 0) {
        scale_t[blockIdx.x] = scale;
    }
}

// partials[blocks, H]: each block of rows' sum of dy * x * scale, rows ascending. Grid (tiles of H,
// blocks of `at_once` rows); one thread a column.
extern "C" __global__ void rms_norm_backward_w(const float* __restrict__ x_th,
                                               const float* __restrict__ dy_th,
                                               const float* __restrict__ scale_t, uint64_t rows,
                                               uint64_t at_once, uint64_t width,
                                               float* __restrict__ partials) {
    const uint64_t h = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (h >= width) return;
    const uint64_t first = blockIdx.y * at_once;
    const uint64_t count = min(at_once, rows - first);
    const auto term = [&](uint64_t t) {
        const uint64_t at = (first + t) * width + h;
        return dy_th[at] * x_th[at] * scale_t[first + t];
    };
    partials[blockIdx.y * width + h] = add_in_order<32>(0.0f, count, term);
}
