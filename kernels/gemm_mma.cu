// The bf16 product: the definition that a library's answer is held to, and the kernel for shapes
// that the library refuses.
//
// Every output is one f32 accumulator of mma.m16n8k16, k ascending by 16, zeros beyond K. The bits
// of an output depend on its row of x and its row of w alone.
//
// Shape letters: M rows of activations, N outputs, K inner.
#include "arrays.cuh"

// A block of 4 warps makes 64 x 64 outputs, 32 x 32 a warp, from 32 inner elements at a time.
constexpr int SIDE = 64;
constexpr int DEPTH = 32;
constexpr int THREADS = 128;
// Words (pairs of bf16) of a staged line. The 4 beyond DEPTH / 2 put the 8 lines and 4 words that a
// warp reads at once into 32 different banks.
constexpr int WORDS = DEPTH / 2 + 4;

// Copies SIDE x DEPTH of a row-major [lines, inner] matrix; zero beyond its edges.
__device__ void stage(const uint16_t* data, uint64_t pitch, uint64_t lines, uint64_t inner,
                      uint64_t line, uint64_t k, uint32_t (*tile)[WORDS]) {
    for (int i = threadIdx.x; i < SIDE * DEPTH; i += THREADS) {
        int l = i / DEPTH, d = i % DEPTH;
        bool inside = line + l < lines && k + d < inner;
        reinterpret_cast<uint16_t*>(tile[l])[d] = inside ? data[(line + l) * pitch + k + d] : 0;
    }
}

__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// y[M, N] = x[M, K] * w[N, K]^T: the f32 accumulators, or rounded to bf16.
extern "C" __global__ void __launch_bounds__(THREADS)
gemm_forward_mma(Rows x_mk, const uint16_t* w_nk, uint64_t m, uint64_t n, uint64_t k, Rows y_mn) {
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
        stage(row_of<uint16_t>(x_mk, 0), x_mk.pitch, m, k, first_row, start, x_tile);
        stage(w_nk, k, n, k, first_column, start, w_tile);
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
                if (r >= m || c >= n) continue;
                if (y_mn.dtype == BF16) {
                    write(row_of<uint16_t>(y_mn, r) + c, sums[i][j][v]);
                } else {
                    write(row_of<float>(y_mn, r) + c, sums[i][j][v]);
                }
            }
        }
    }
}

// Adds to `count` in how many of `len` elements a and b differ, a NaN being any other.
template <typename T>
__device__ __forceinline__ void count_differing(Rows a, Rows b, uint64_t len, uint32_t* count) {
    const uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= len) return;
    const float x = read(row_of<T>(a, 0)[i]), y = read(row_of<T>(b, 0)[i]);
    const bool both_nan = x != x && y != y;
    if (__float_as_uint(x) != __float_as_uint(y) && !both_nan) atomicAdd(count, 1u);
}

extern "C" __global__ void gemm_count_differing(Rows a, Rows b, uint64_t len, uint32_t* count) {
    BY_DTYPE(a.dtype, count_differing, a, b, len, count);
}
