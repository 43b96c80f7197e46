// The product of activations and a weight matrix.
//
//     out[m][n] = (out[m][n] if `accumulates`) + sum over k of x[m][k] w[n][k] + (bias[n] if there is one)
//
// Data      x [rows][inner] and w [outputs][inner] of bf16 or f16 (of float32: gemm_f32.cu), out of float32 with rows
//           at a distance of `pitch`, so that it can be some columns of a wider matrix; inner is a multiple of 8.
//
// The order of the sum is the same for every number of rows, so a row has the same bits in every batch, whichever
// kernel computes it:
//
// - The tensor core's 16 x 16 operand holds 16 rows of w, its 16 x 8 operand 8 rows of x, for all kernels. (The other
//   way round, a single row of x would use a sixteenth of the unit; this way, it uses an eighth.)
// - A chain is `mma` after `mma` for ascending columns, 16 at a time. Of the 16, a lane has four adjacent ones, in the
//   order of lanes 0, 2, 1, 3 of a quad: gemv reads 16 bytes of a row per lane, and lanes exchange words; the other
//   kernels read 8 bytes of a row from shared memory.
// - `inner` is divided into splits of 2048 columns (split-K), each with a chain of its own; out, or 0, plus the chains
//   in order, plus the bias. k is divided in no other way. The splits give a product with few rows its parallelism
//   (gemv computes them at the same time) at little cost for large products (gemm adds a tile to `out` once per
//   split).
//
// Kernels   gemv    up to 8 rows: a warp per 16 outputs and split; no operand is shared, so none passes through
//                   shared memory. Limit: bytes of w. Each lane has 12 loads of weights in flight while it multiplies
//                   the 12 before them; the first ones are issued before the launch's dependency is complete.
//           narrow  tiles of 64 outputs x 32 rows, 7 steps of weights in flight. Limit: bytes of w.
//           middle  tiles of 64 x 64, 5 steps. Limit: bytes of w up to about 128 rows, then accesses of shared memory.
//           wide    tiles of 128 x 128, a warp 64 x 64. Limit: flops. Per step of 32, a warp reads 16 fragments from
//                   shared memory for 64 mma.
//           These have 128 threads, and a ring of stages of 32 columns that cp.async fills. For sm_90a, all but gemv
//           are replaced by those of gemm_warpgroup.cu.
//
// Split-K   If there are fewer tiles of narrow or middle than multiprocessors, a block computes one split of a tile
//           and writes its chains to scratch memory; add_chains adds them in the same order. Estimates from the sizes,
//           for 4096 outputs, tiles of 64 outputs and 132 multiprocessors, of which 4.8 TB/s and a latency of 0.8 us
//           require 3.8 MB in flight: 32 rows x 4096 columns has 64 tiles with 1.8 MB in flight, and 128 blocks with
//           3.7 MB; 128 rows x 14336 columns has 128 tiles with 2.6 MB, half of it twice, and 896 blocks, as many at a
//           time as multiprocessors have room for, with at least 10 MB. The chains of the latter are 15 MB.
// Sources   PTX ISA, mma.m16n8k16; Thakkar et al., "CUTLASS: efficient GEMM" (tiles, stages, order of blocks); He et
//           al., "Defeating Nondeterminism in LLM Inference" (invariance to the batch).
#include "split_k.cuh"

constexpr int STEP = 32;

// A step of the chain of 16 outputs x 8 rows: this lane's four of 16 columns, of rows `group` and `group + 8` of w, and
// of row `group` of x.
template <class T>
DEVICE void multiply(float (&d)[4], const uint2 (&w)[2], const uint2& x) {
    mma<T>(d, {w[0].x, w[1].x, w[0].y, w[1].y}, {x.x, x.y});
}

// ---- gemv: grid (outputs / 16, rows / 8), rounded up; a warp per split, at most 8 warps

constexpr int MAX_SPLITS = 32, DEPTH = 6;

// Exchanges words of lanes 0 and 2, and 1 and 3, of a quad, which have read 8 of 32 columns each: then the first two
// words of each lane are of the first 16 columns, and the others of the last 16.
DEVICE uint4 exchanged(const uint4& words) {
    const bool is_upper = threadIdx.x & 2;
    const uint32_t first = __shfl_xor_sync(ALL_LANES, is_upper ? words.x : words.z, 2);
    const uint32_t second = __shfl_xor_sync(ALL_LANES, is_upper ? words.y : words.w, 2);
    return is_upper ? uint4{first, second, words.z, words.w} : uint4{words.x, words.y, first, second};
}

template <class T>
DEVICE void gemv(const Product<T>& product) {
    __shared__ float chains[MAX_SPLITS][16][8];
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
    // Load the steps from column k on, up to the end of the split.
    auto load_weights = [&](Steps& steps, int k, int end) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int column = k + i * STEP + quad * 8;
#pragma unroll
            for (int half = 0; half < 2; half++)
                steps.w[i][half] = column < end ? *reinterpret_cast<const uint4*>(w[half] + column) : zero;
        }
    };
    auto load_x = [&](Steps& steps, int k, int end) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int column = k + i * STEP + quad * 8;
            steps.x[i] = has_row && column < end ? *reinterpret_cast<const uint4*>(x + column) : zero;
        }
    };

    const int num_splits = ceil_div(inner, SPLIT_COLUMNS);
    Steps now, next = {};
    load_weights(now, warp * SPLIT_COLUMNS, min(inner, (warp + 1) * SPLIT_COLUMNS));
    dependency_wait();
    dependency_launch();
    for (int first = 0; first < num_splits; first += MAX_SPLITS) {
        const int last = min(first + MAX_SPLITS, num_splits);
        for (int split = first + warp; split < last; split += blockDim.x / 32) {
            const int end = min(inner, (split + 1) * SPLIT_COLUMNS);
            if (split != warp) load_weights(now, split * SPLIT_COLUMNS, end);
            load_x(now, split * SPLIT_COLUMNS, end);
            float d[4] = {};
            for (int k = split * SPLIT_COLUMNS; k < end; k += DEPTH * STEP) {
                if (k + DEPTH * STEP < end) {
                    load_weights(next, k + DEPTH * STEP, end);
                    load_x(next, k + DEPTH * STEP, end);
                }
#pragma unroll
                for (int i = 0; i < DEPTH; i++)
                    if (k + i * STEP < end) {
                        const uint4 w[2] = {exchanged(now.w[i][0]), exchanged(now.w[i][1])}, x = exchanged(now.x[i]);
                        multiply<T>(d, {{w[0].x, w[0].y}, {w[1].x, w[1].y}}, {x.x, x.y});
                        multiply<T>(d, {{w[0].z, w[0].w}, {w[1].z, w[1].w}}, {x.z, x.w});
                    }
                now = next;
            }
#pragma unroll
            for (int i = 0; i < 4; i++) chains[split - first][group + i / 2 * 8][quad * 2 + i % 2] = d[i];
        }
        __syncthreads();
        for (int i = threadIdx.x; i < 16 * 8; i += blockDim.x) {
            const int output = first_output + i % 16, row = first_row + i / 16;
            if (output >= product.outputs || row >= product.rows) continue;
            float& out = product.out[size_t(row) * product.pitch + output];
            float sum = adds_to_out(product, first) ? out : 0;
            for (int split = first; split < last; split++)
                sum = sum + chains[split - first][i % 16][i / 16] + bias_of(product, output, split);
            out = sum;
        }
        __syncthreads();  // the chains may be overwritten
    }
}

// ---- gemm: grid (tiles), or (tiles, splits): then block y writes the chains of split y, to row y `rows` of `out`
// and those after it

// A warp computes 16 OUTPUT_TILES outputs x 8 ROW_TILES rows, and a block OUTPUT_WARPS x ROW_WARPS times as much.
template <int OUTPUT_WARPS, int ROW_WARPS, int OUTPUT_TILES, int ROW_TILES, int STAGES>
struct Tile {
    static constexpr bool may_split = OUTPUT_TILES * ROW_TILES <= 8;  // more leave no registers for it
    static constexpr int output_warps = OUTPUT_WARPS, stages = STAGES;
    static constexpr int output_tiles = OUTPUT_TILES, row_tiles = ROW_TILES;
    static constexpr int batch = 4;  // tiles of rows that are added together; with more, registers are spilled
    static constexpr int threads = 32 * OUTPUT_WARPS * ROW_WARPS;
    static constexpr int outputs = OUTPUT_WARPS * OUTPUT_TILES * 16, rows = ROW_WARPS * ROW_TILES * 8;
};
using Narrow = Tile<4, 1, 1, 4, 8>;
using Middle = Tile<2, 2, 2, 4, 6>;
using Wide = Tile<2, 2, 4, 8, 3>;

template <class Shape, class T>
DEVICE void gemm(const Product<T>& product) {
    constexpr int STAGES = Shape::stages, WORDS = STEP / 8;  // 16-byte words of a row of a stage
    __shared__ uint4 w_stages[STAGES][Shape::outputs][WORDS], x_stages[STAGES][Shape::rows][WORDS];
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const TilePlace place = place_of_block<Shape>(product.rows, product.outputs);
    const int split = Shape::may_split ? blockIdx.y : 0, first = split * SPLIT_COLUMNS;
    const bool is_split = Shape::may_split && gridDim.y > 1;
    const Columns columns = {first, is_split ? min(product.inner, first + SPLIT_COLUMNS) : product.inner};
    TileCopy<T, Shape::outputs, STEP, WORDS, Shape::threads> w_copy(product.w, place.output, product.outputs,
                                                                    product.inner, columns);
    TileCopy<T, Shape::rows, STEP, WORDS, Shape::threads> x_copy(product.x, place.row, product.rows, product.inner,
                                                                 columns);
    for (int stage = 0; stage < STAGES - 1; stage++) w_copy.copy(w_stages[stage]);
    dependency_wait();
    dependency_launch();
    for (int stage = 0; stage < STAGES - 1; stage++) {
        x_copy.copy(x_stages[stage]);
        copy_commit();
    }
    const int warp_output = warp % Shape::output_warps * Shape::output_tiles * 16;
    const int warp_row = warp / Shape::output_warps * Shape::row_tiles * 8;
    float d[Shape::output_tiles][Shape::row_tiles][4] = {};
    int stage = 0, free_stage = STAGES - 1;
    for (int column = first + STEP; column < columns.end + STEP; column += STEP) {  // the end of a step
        copy_wait<STAGES - 2>();
        __syncthreads();  // the stage is complete, and the one before it has been read
        w_copy.copy(w_stages[free_stage]);
        x_copy.copy(x_stages[free_stage]);
        copy_commit();
        // The part of this lane in 16 columns of a row of a stage.
        auto part_of = [&](const uint4(&row)[WORDS], int number, int half) {
            return reinterpret_cast<const uint2*>(&row[place_of_word<WORDS>(number, 2 * half + quad % 2)])[quad / 2];
        };
        auto x_part = [&](int row, int half) { return part_of(x_stages[stage][row], row, half); };
        auto w_part = [&](int output, int half) { return part_of(w_stages[stage][output], output, half); };
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint2 x[Shape::row_tiles];
#pragma unroll
            for (int j = 0; j < Shape::row_tiles; j++) x[j] = x_part(warp_row + j * 8 + group, half);
#pragma unroll
            for (int i = 0; i < Shape::output_tiles; i++) {
                const int output = warp_output + i * 16 + group;
                const uint2 w[2] = {w_part(output, half), w_part(output + 8, half)};
#pragma unroll
                for (int j = 0; j < Shape::row_tiles; j++) multiply<T>(d[i][j], w, x[j]);
            }
        }
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        if (column % SPLIT_COLUMNS == 0 || column >= columns.end)
            add_split<Shape>(product, d, place.output + warp_output + group, place.row + warp_row + quad * 2,
                               (column - first - 1) / SPLIT_COLUMNS);
    }
    copy_wait<0>();  // zeros, behind the last step
}

// ---- add_chains: grid (outputs / 256, rows), rounded up; a thread per element

// The chains of a product by split-K: [splits][rows][outputs].
struct Chains {
    const float* chains;
    const float* bias;  // or null
    float* out;
    int rows, outputs, splits, pitch, accumulates;
};

extern "C" __global__ void __launch_bounds__(256) add_chains(Chains call) {
    dependency_wait();
    dependency_launch();
    const int output = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y;
    if (output >= call.outputs) return;
    const float* chain = call.chains + size_t(row) * call.outputs + output;
    const size_t apart = size_t(call.rows) * call.outputs;
    float& out = call.out[size_t(row) * call.pitch + output];
    float sum = call.accumulates ? out : 0;
#pragma unroll 8
    for (int split = 0; split < call.splits; split++) sum = __fadd_rn(sum, chain[split * apart]);
    out = __fadd_rn(sum, call.bias != nullptr ? call.bias[output] : 0);
}
EXPORT(add_chains)

#define KERNELS(T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) gemv_##T(Product<T> product) { gemv(product); }         \
    EXPORT(gemv_##T)                                                                                          \
    extern "C" __global__ void __launch_bounds__(Narrow::threads) gemm_narrow_##T(Product<T> product) {       \
        gemm<Narrow>(product);                                                                                \
    }                                                                                                         \
    EXPORT(gemm_narrow_##T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(Middle::threads) gemm_middle_##T(Product<T> product) {       \
        gemm<Middle>(product);                                                                                \
    }                                                                                                         \
    EXPORT(gemm_middle_##T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(Wide::threads) gemm_wide_##T(Product<T> product) {           \
        gemm<Wide>(product);                                                                                  \
    }                                                                                                         \
    EXPORT(gemm_wide_##T)
KERNELS(bf16)
KERNELS(f16)
