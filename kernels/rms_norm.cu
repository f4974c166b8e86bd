// RMSNorm and its backward, bit-equal to `ops::rms_norm` on the CPU.
//
// Shape letters: T rows, H width. Order: the 16 lanes of `lanes.cuh` over one row.
#include "lanes.cuh"

// 1 / sqrt(mean(x^2) + eps) of one row.
__device__ float inverse_rms(const float* x_h, uint64_t width, float eps) {
    float sum = block_sum(width, [&](uint64_t i) { return x_h[i] * x_h[i]; });
    float mean = __fdiv_rn(sum, (float)width);
    return __fdiv_rn(1.0f, __fsqrt_rn(mean + eps));
}

// y[T, H] = round(round(x * inverse rms) * w); one block a row.
extern "C" __global__ void rms_norm_forward(const float* x_th, const float* w_h, float eps,
                                            uint32_t dtype, uint64_t width, float* y_th) {
    const float* x = x_th + (uint64_t)blockIdx.x * width;
    float* y = y_th + (uint64_t)blockIdx.x * width;
    float scale = inverse_rms(x, width, eps);
    for (uint64_t i = threadIdx.x; i < width; i += blockDim.x) {
        y[i] = to_dtype(to_dtype(x[i] * scale, dtype) * w_h[i], dtype);
    }
}

// dx[T, H] += gradient by x, and scale[T] = inverse rms for the gradient by w; one block a row.
extern "C" __global__ void rms_norm_backward_x(const float* x_th, const float* w_h, float eps,
                                               const float* dy_th, uint64_t width, float* dx_th,
                                               float* scale_t) {
    uint64_t row = (uint64_t)blockIdx.x * width;
    const float *x = x_th + row, *dy = dy_th + row;
    float* dx = dx_th + row;
    float scale = inverse_rms(x, width, eps);
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

// dw[H] += sum over rows of dy * x * scale, rows ascending from dw itself; one thread a column.
extern "C" __global__ void rms_norm_backward_w(const float* x_th, const float* dy_th,
                                               const float* scale_t, uint64_t rows, uint64_t width,
                                               float* dw_h) {
    uint64_t h = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (h >= width) {
        return;
    }
    float sum = dw_h[h];
#pragma unroll 8
    for (uint64_t t = 0; t < rows; t++) {
        sum = sum + dy_th[t * width + h] * x_th[t * width + h] * scale_t[t];
    }
    dw_h[h] = sum;
}
