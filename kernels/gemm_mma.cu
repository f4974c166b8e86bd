// The bf16 product: the definition that a library's answer is held to, and the kernel for shapes
// that the library refuses.
//
// Every output is one f32 accumulator of mma.m16n8k16, k ascending by 16, zeros beyond K. The bits
// of an output depend on its row of x and its row of w alone.
//
// Shape letters: M rows of activations, N outputs, K inner.
#include <cuda_bf16.h>

#include <cstdint>

// A block of 4 warps makes 64 x 64 outputs, 32 x 32 a warp, from 32 inner elements at a time.
constexpr int SIDE = 64;
constexpr int DEPTH = 32;
constexpr int THREADS = 128;
// Words (pairs of bf16) of a staged line. The 4 beyond DEPTH / 2 put the 8 lines and 4 words that a
// warp reads at once into 32 different banks.
constexpr int WORDS = DEPTH / 2 + 4;

// Element (line, k) of a row-major [lines, inner] matrix; zero beyond its edges.
__device__ __forceinline__ __nv_bfloat16 element(const __nv_bfloat16* data, uint64_t at) {
    return data[at];
}
// x holds bf16 values: the upper half of the float is the number, exactly.
__device__ __forceinline__ __nv_bfloat16 element(const float* data, uint64_t at) {
    return __ushort_as_bfloat16((unsigned short)(__float_as_uint(data[at]) >> 16));
}

template <typename T>
__device__ void stage(const T* data, uint64_t lines, uint64_t inner, uint64_t line, uint64_t k,
                      uint32_t (*tile)[WORDS]) {
    for (int i = threadIdx.x; i < SIDE * DEPTH; i += THREADS) {
        int l = i / DEPTH, d = i % DEPTH;
        bool inside = line + l < lines && k + d < inner;
        __nv_bfloat16 value =
            inside ? element(data, (line + l) * inner + k + d) : __ushort_as_bfloat16(0);
        reinterpret_cast<__nv_bfloat16*>(tile[l])[d] = value;
    }
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// y[M, N] = x[M, K] * w[N, K]^T, the bare f32 accumulators.
extern "C" __global__ void __launch_bounds__(THREADS)
gemm_forward_mma(const float* x_mk, const __nv_bfloat16* w_nk, uint64_t m, uint64_t n, uint64_t k,
                 float* y_mn) {
    __shared__ uint32_t x_tile[SIDE][WORDS];
    __shared__ uint32_t w_tile[SIDE][WORDS];
    uint64_t first_row = (uint64_t)blockIdx.y * SIDE;
    uint64_t first_column = (uint64_t)blockIdx.x * SIDE;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Fragment layout of the PTX manual: 8 groups of 4 threads, a group a line.
    int group = lane / 4, word = lane % 4;
    int row = warp / 2 * 32, column = warp % 2 * 32;
    float sums[2][4][4] = {};
    for (uint64_t start = 0; start < k; start += DEPTH) {
        stage(x_mk, m, k, first_row, start, x_tile);
        stage(w_nk, n, k, first_column, start, w_tile);
        __syncthreads();
        for (int step = 0; step < DEPTH / 2 && start + 2 * step < k; step += 8) {
            uint32_t a[2][4], b[4][2];
            for (int i = 0; i < 2; i++) {
                int line = row + 16 * i + group;
                a[i][0] = x_tile[line][step + word];
                a[i][1] = x_tile[line + 8][step + word];
                a[i][2] = x_tile[line][step + word + 4];
                a[i][3] = x_tile[line + 8][step + word + 4];
            }
            for (int j = 0; j < 4; j++) {
                b[j][0] = w_tile[column + 8 * j + group][step + word];
                b[j][1] = w_tile[column + 8 * j + group][step + word + 4];
            }
            for (int i = 0; i < 2; i++) {
                for (int j = 0; j < 4; j++) {
                    mma(sums[i][j], a[i], b[j]);
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < 4; j++) {
            for (int v = 0; v < 4; v++) {
                uint64_t r = first_row + row + 16 * i + group + 8 * (v / 2);
                uint64_t c = first_column + column + 8 * j + 2 * word + v % 2;
                if (r < m && c < n) {
                    y_mn[r * n + c] = sums[i][j][v];
                }
            }
        }
    }
}

// The upper halves of x, which holds bf16 values: what the library reads.
extern "C" __global__ void gemm_to_bf16(const float* x, uint64_t len, __nv_bfloat16* y) {
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < len) {
        y[i] = element(x, i);
    }
}
