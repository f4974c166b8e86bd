// Matrix products in f32 with the one order of `ops::gemm`: every output is a single accumulator,
// the inner index ascends, multiply and add are rounded once. Bit-equal to the CPU.
//
// Shape letters: M rows of activations, N outputs, K inner (of the forward product).
#include "arrays.cuh"

// A block of 256 threads makes 64 x 64 outputs, 4 x 4 a thread, from 16 inner elements at a time.
constexpr int SIDE = 64;
constexpr int DEPTH = 16;
constexpr int EACH = 4;
constexpr int THREADS = (SIDE / EACH) * (SIDE / EACH);

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(__nv_bfloat16 x) { return __bfloat162float(x); }

// Element (line, inner) of an operand, stored [lines, inner] or, if `TURNED`, [inner, lines]; zero
// beyond its edges, which adds nothing to a sum.
template <typename T, bool TURNED>
struct Operand {
    const T* data;
    uint64_t lines;
    uint64_t inner;
    // Elements from one stored row to the next.
    uint64_t pitch;
    __device__ float at(uint64_t line, uint64_t k) const {
        if (line >= lines || k >= inner) {
            return 0.0f;
        }
        return widened(TURNED ? data[k * pitch + line] : data[line * pitch + k]);
    }
    // Copies a SIDE x DEPTH piece; neighbouring threads read neighbouring addresses.
    __device__ void stage(uint64_t line, uint64_t k, float (*tile)[SIDE + EACH]) const {
        for (int i = threadIdx.x; i < SIDE * DEPTH; i += THREADS) {
            int l = TURNED ? i % SIDE : i / DEPTH;
            int d = TURNED ? i / SIDE : i % DEPTH;
            tile[d][l] = at(line + l, k + d);
        }
    }
};

// out[rows, columns] (+)= sum over k of left(row, k) * right(column, k).
template <typename Left, typename Right>
__device__ void product(const Left& left, const Right& right, bool add, float* out) {
    __shared__ __align__(16) float l_tile[DEPTH][SIDE + EACH];
    __shared__ __align__(16) float r_tile[DEPTH][SIDE + EACH];
    uint64_t first_row = (uint64_t)blockIdx.y * SIDE;
    uint64_t first_column = (uint64_t)blockIdx.x * SIDE;
    int row = threadIdx.x / (SIDE / EACH) * EACH;
    int column = threadIdx.x % (SIDE / EACH) * EACH;
    float sums[EACH][EACH] = {};
    for (uint64_t k = 0; k < left.inner; k += DEPTH) {
        left.stage(first_row, k, l_tile);
        right.stage(first_column, k, r_tile);
        __syncthreads();
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            for (int i = 0; i < EACH; i++) {
                for (int j = 0; j < EACH; j++) {
                    sums[i][j] = fused(l_tile[d][row + i], r_tile[d][column + j], sums[i][j]);
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < EACH; i++) {
        for (int j = 0; j < EACH; j++) {
            uint64_t r = first_row + row + i, c = first_column + column + j;
            if (r < left.lines && c < right.lines) {
                float* to = out + r * right.lines + c;
                *to = add ? __fadd_rn(*to, sums[i][j]) : sums[i][j];
            }
        }
    }
}

// y[M, N] = x[M, K] * w[N, K]^T.
extern "C" __global__ void __launch_bounds__(THREADS)
gemm_forward_f32(Rows x_mk, const float* w_nk, uint64_t m, uint64_t n, uint64_t k, float* y_mn) {
    const float* x = row_of<float>(x_mk, 0);
    product(Operand<float, false>{x, m, k, x_mk.pitch}, Operand<float, false>{w_nk, n, k, k},
            false, y_mn);
}

// dx[M, K] (+)= dy[M, N] * w[N, K], for a weight of either dtype.
extern "C" __global__ void __launch_bounds__(THREADS)
gemm_input_gradient_f32(const float* dy_mn, const float* w_nk, uint64_t m, uint64_t n, uint64_t k,
                        uint32_t add, float* dx_mk) {
    product(Operand<float, false>{dy_mn, m, n, n}, Operand<float, true>{w_nk, k, n, k}, add, dx_mk);
}

extern "C" __global__ void __launch_bounds__(THREADS)
gemm_input_gradient_bf16(const float* dy_mn, const __nv_bfloat16* w_nk, uint64_t m, uint64_t n,
                         uint64_t k, uint32_t add, float* dx_mk) {
    product(Operand<float, false>{dy_mn, m, n, n}, Operand<__nv_bfloat16, true>{w_nk, k, n, k}, add,
            dx_mk);
}

// dw[N, K] += dy[M, N]^T * x[M, K]; rows ascend.
extern "C" __global__ void __launch_bounds__(THREADS)
gemm_weight_gradient(const float* dy_mn, const float* x_mk, uint64_t m, uint64_t n, uint64_t k,
                     float* dw_nk) {
    product(Operand<float, true>{dy_mn, n, m, n}, Operand<float, true>{x_mk, k, m, k}, true, dw_nk);
}

// dbias[N] += the rows' sum, rows ascending from dbias itself; one thread a column.
extern "C" __global__ void gemm_bias_gradient(const float* dy_mn, uint64_t m, uint64_t n,
                                              float* dbias_n) {
    uint64_t column = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= n) {
        return;
    }
    float sum = dbias_n[column];
#pragma unroll 8
    for (uint64_t row = 0; row < m; row++) {
        sum = sum + dy_mn[row * n + column];
    }
    dbias_n[column] = sum;
}

// y[M, N] = round(sums + bias).
template <typename T>
__device__ __forceinline__ void finish(
    const float* sums_mn, const float* bias_n, uint64_t len, uint64_t n, Rows y_mn) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < len) write(row_of<T>(y_mn, 0) + i, sums_mn[i] + bias_n[i % n]);
}

extern "C" __global__ void gemm_add_bias(
    const float* sums_mn, const float* bias_n, uint64_t len, uint64_t n, Rows y_mn) {
    BY_DTYPE(y_mn.dtype, finish, sums_mn, bias_n, len, n, y_mn);
}
