// The product of activations and a weight matrix.
//
//     out[m][n] = (out[m][n] if `accumulates`) + sum over k of x[m][k] w[n][k] + (bias[n] if there is one)
//
// Data      x [rows][inner] and w [outputs][inner] of bf16 or f16 (of float32: gemm_f32.cu), out [rows][outputs] of
//           float32; inner is a multiple of 8.
//
// The order of the sum is the same for every number of rows, so a row has the same bits in every batch, whichever
// kernel computes it:
//
// - The tensor core's 16 x 16 operand holds 16 rows of w, its 16 x 8 operand 8 rows of x, for all kernels. (The other
//   way round, a single row of x would use a sixteenth of the unit; this way, it uses an eighth.)
// - A chain is `mma` after `mma` for ascending steps of 32 columns; a step is two of them. The quarters of 8 columns
//   belong to the four lanes of a quad: the first mma takes the first four columns of each quarter, the second the
//   others. So a lane reads 16 contiguous bytes of each row that it holds, from global or shared memory, without
//   ldmatrix.
// - `inner` is divided into segments of 2048 columns, each with a chain of its own; out, or 0, plus the chains in
//   order, plus the bias. There is no other division of k. The segments give a product with few rows its parallelism
//   (gemv computes them at the same time) at little cost for large products (gemm adds a tile to `out` once per
//   segment).
//
// Kernels   gemv    up to 8 rows: a warp per 16 outputs and segment; no operand is shared, so none passes through
//                   shared memory. Limit: bytes of w. Each lane has 8 loads of weights in flight while it multiplies
//                   the 8 before them; the first ones are issued before the launch's dependency is complete.
//           narrow  tiles of 64 outputs x 32 rows. Limit: bytes of w.
//           wide    tiles of 128 x 128, a warp 64 x 64. Limit: flops. Per step of 32, a warp reads 16 fragments from
//                   shared memory for 64 mma.
//           Both have 128 threads, and a ring of stages of 32 columns that cp.async fills. A row of a stage is 64
//           bytes, so the 8 lanes that read at the same time read 128 contiguous bytes: no bank conflicts.
// Sources   PTX ISA, mma.m16n8k16; Thakkar et al., "CUTLASS: efficient GEMM" (tiles, stages, order of blocks); He et
//           al., "Defeating Nondeterminism in LLM Inference" (invariance to the batch).
#include "product.cuh"

constexpr int STEP = 32;
constexpr int SEGMENT = 2048;

// A step of the chain of 16 outputs x 8 rows: this lane's 8 columns of rows `group` and `group + 8` of w, and of row
// `group` of x.
template <class T>
DEVICE void multiply(float (&d)[4], const uint4 (&w)[2], const uint4& x) {
    mma<T>(d, {w[0].x, w[1].x, w[0].y, w[1].y}, {x.x, x.y});
    mma<T>(d, {w[0].z, w[1].z, w[0].w, w[1].w}, {x.z, x.w});
}

// Adds the chain of a segment to an element of `out`.
template <class T>
DEVICE void add_segment(const Product<T>& product, int row, int output, int segment, float chain) {
    float& out = product.out[size_t(row) * product.outputs + output];
    float sum = (segment > 0 || product.accumulates ? out : 0) + chain;
    if ((segment + 1) * SEGMENT >= product.inner && product.bias != nullptr) sum += product.bias[output];
    out = sum;
}

// ---- gemv: grid (outputs / 16, rows / 8), rounded up; a warp per segment, at most 8 warps

constexpr int MAX_SEGMENTS = 32, DEPTH = 4;

template <class T>
DEVICE void gemv(const Product<T>& product) {
    __shared__ float chains[MAX_SEGMENTS][16][8];
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const int first_output = blockIdx.x * 16, first_row = blockIdx.y * 8, inner = product.inner;
    const uint4 zero = {0, 0, 0, 0};
    const T* w[2];
    for (int half = 0; half < 2; half++)
        w[half] = product.w + size_t(min(first_output + group + 8 * half, product.outputs - 1)) * inner;
    const bool has_row = first_row + group < product.rows;
    const T* x = product.x + size_t(has_row ? first_row + group : 0) * inner;

    struct Steps {
        uint4 w[DEPTH][2], x[DEPTH];
    };
    auto load_weights = [&](Steps& steps, int k) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int column = k + i * STEP + quad * 8;
#pragma unroll
            for (int half = 0; half < 2; half++)
                steps.w[i][half] = column < inner ? *reinterpret_cast<const uint4*>(w[half] + column) : zero;
        }
    };
    auto load_x = [&](Steps& steps, int k) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int column = k + i * STEP + quad * 8;
            steps.x[i] = has_row && column < inner ? *reinterpret_cast<const uint4*>(x + column) : zero;
        }
    };

    const int num_segments = ceil_div(inner, SEGMENT);
    Steps now, next = {};
    load_weights(now, warp * SEGMENT);
    dependency_wait();
    dependency_launch();
    for (int first = 0; first < num_segments; first += MAX_SEGMENTS) {
        const int last = min(first + MAX_SEGMENTS, num_segments);
        for (int segment = first + warp; segment < last; segment += blockDim.x / 32) {
            const int end = min(inner, (segment + 1) * SEGMENT);
            if (segment != warp) load_weights(now, segment * SEGMENT);
            load_x(now, segment * SEGMENT);
            float d[4] = {};
            for (int k = segment * SEGMENT; k < end; k += DEPTH * STEP) {
                if (k + DEPTH * STEP < end) {
                    load_weights(next, k + DEPTH * STEP);
                    load_x(next, k + DEPTH * STEP);
                }
#pragma unroll
                for (int i = 0; i < DEPTH; i++)
                    if (k + i * STEP < end) multiply<T>(d, now.w[i], now.x[i]);
                now = next;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) chains[segment - first][group + i / 2 * 8][quad * 2 + i % 2] = d[i];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * 8; i += blockDim.x) {
            const int output = first_output + i % 16, row = first_row + i / 16;
            if (output >= product.outputs || row >= product.rows) continue;
            for (int segment = first; segment < last; segment++)
                add_segment(product, row, output, segment, chains[segment - first][i % 16][i / 16]);
        }
        __syncthreads();  // the chains may be overwritten
    }
}

// ---- gemm: a block per tile

// A warp computes 16 OUTPUT_TILES outputs x 8 ROW_TILES rows, and a block OUTPUT_WARPS x ROW_WARPS times as much.
template <int OUTPUT_WARPS, int ROW_WARPS, int OUTPUT_TILES, int ROW_TILES, int STAGES>
struct Tile {
    static constexpr int output_warps = OUTPUT_WARPS, stages = STAGES;
    static constexpr int output_tiles = OUTPUT_TILES, row_tiles = ROW_TILES;
    static constexpr int threads = 32 * OUTPUT_WARPS * ROW_WARPS;
    static constexpr int outputs = OUTPUT_WARPS * OUTPUT_TILES * 16, rows = ROW_WARPS * ROW_TILES * 8;
};
using Narrow = Tile<4, 1, 1, 4, 6>;
using Wide = Tile<2, 2, 4, 8, 3>;

template <class Shape, class T>
DEVICE void gemm(const Product<T>& product) {
    constexpr int STAGES = Shape::stages, WORDS = STEP / 8;  // 16-byte words of a row of a stage
    __shared__ uint4 w_stages[STAGES][Shape::outputs][WORDS], x_stages[STAGES][Shape::rows][WORDS];
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const int inner = product.inner, num_steps = ceil_div(inner, STEP);
    const TilePlace place = place_of_block<Shape>(product);

    // Copies the columns of a step of `count` rows of a matrix; what is outside of the matrix becomes 0.
    auto copy_rows = [&](uint4(*to)[WORDS], int count, const T* from, int first, int limit, int step) {
        if (step >= num_steps) return;
#pragma unroll
        for (int i = threadIdx.x; i < count * WORDS; i += Shape::threads) {
            const int row = i / WORDS, word = i % WORDS, column = step * STEP + word * 8;
            const bool exists = first + row < limit && column < inner;
            copy_async16(&to[row][word], exists ? from + size_t(first + row) * inner + column : from, exists ? 16 : 0);
        }
    };
    auto copy_w = [&](int step) {
        copy_rows(w_stages[step % STAGES], Shape::outputs, product.w, place.output, product.outputs, step);
    };
    auto copy_x = [&](int step) {
        copy_rows(x_stages[step % STAGES], Shape::rows, product.x, place.row, product.rows, step);
    };

    for (int step = 0; step < STAGES - 1; step++) copy_w(step);
    dependency_wait();
    dependency_launch();
    for (int step = 0; step < STAGES - 1; step++) {
        copy_x(step);
        copy_commit();
    }
    const int warp_output = warp % Shape::output_warps * Shape::output_tiles * 16;
    const int warp_row = warp / Shape::output_warps * Shape::row_tiles * 8;
    float d[Shape::output_tiles][Shape::row_tiles][4] = {};
    for (int step = 0; step < num_steps; step++) {
        copy_wait<STAGES - 2>();
        __syncthreads();  // the stage is complete, and the one before it has been read
        copy_w(step + STAGES - 1);
        copy_x(step + STAGES - 1);
        copy_commit();
        uint4 w[Shape::output_tiles][2];
#pragma unroll
        for (int i = 0; i < Shape::output_tiles; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                w[i][half] = w_stages[step % STAGES][warp_output + i * 16 + half * 8 + group][quad];
#pragma unroll
        for (int j = 0; j < Shape::row_tiles; j++) {
            const uint4 x = x_stages[step % STAGES][warp_row + j * 8 + group][quad];
#pragma unroll
            for (int i = 0; i < Shape::output_tiles; i++) multiply<T>(d[i][j], w[i], x);
        }
        const int columns = (step + 1) * STEP;
        if (columns % SEGMENT != 0 && columns < inner) continue;
#pragma unroll
        for (int i = 0; i < Shape::output_tiles; i++)
#pragma unroll
            for (int j = 0; j < Shape::row_tiles; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    keep_order();
                    const int output = place.output + warp_output + i * 16 + group + e / 2 * 8;
                    const int row = place.row + warp_row + j * 8 + quad * 2 + e % 2;
                    if (output < product.outputs && row < product.rows)
                        add_segment(product, row, output, step * STEP / SEGMENT, d[i][j][e]);
                    d[i][j][e] = 0;
                }
    }
}

#define KERNELS(T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) gemv_##T(Product<T> product) { gemv(product); }         \
    EXPORT(gemv_##T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(Narrow::threads) gemm_narrow_##T(Product<T> product) {       \
        gemm<Narrow>(product);                                                                                \
    }                                                                                                         \
    EXPORT(gemm_narrow_##T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(Wide::threads) gemm_wide_##T(Product<T> product) {           \
        gemm<Wide>(product);                                                                                  \
    }                                                                                                         \
    EXPORT(gemm_wide_##T)
KERNELS(bf16)
KERNELS(f16)
