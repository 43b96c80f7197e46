// The product of activations and a weight matrix, both of float32 (gemm.cu: the same of 16-bit floats).
//
//     out[m][n] = (out[m][n] if `accumulates`) + sum over k of x[m][k] w[n][k] + (bias[n] if there is one)
//
// Data      x [rows][inner], w [outputs][inner] and out as in gemm.cu, of float32; inner is a multiple of 4.
//
// The order of the sum is the same for every number of rows and both kernels: a chain of fused multiply-adds goes
// through 256 columns, then the next one begins, and the chains are added in order. So the rounding error grows with
// 256 + inner / 256, not with inner.
//
// Kernels   gemv_f32         tiles of 16 outputs x 8 rows, grid (outputs / 16, rows / 8), rounded up
//           gemm_narrow_f32  tiles of 64 outputs x 32 rows, a block per tile
//           Both have 128 threads, 16 by 8, and a ring of stages of 32 columns that cp.async fills. A row of a stage
//           is 36 floats apart from the next, so 8 lanes that read 16 bytes of 8 rows meet in no bank.
// Limit     gemv: bytes of w; gemm: flops of float32, at 16 fused multiply-adds per 2 reads of shared memory. Tensor
//           cores have no float32 of 24 bits.
// Source    Thakkar et al., "CUTLASS: efficient GEMM" (tiles, stages).
#include "product.cuh"

constexpr int STEP = 32, CHAIN_COLUMNS = 256, THREADS = 128;

// A thread computes OUTPUTS x ROWS elements, 16 outputs and 8 rows apart.
template <int OUTPUTS, int ROWS, int STAGES>
struct Tile {
    static constexpr int thread_outputs = OUTPUTS, thread_rows = ROWS, stages = STAGES;
    static constexpr int outputs = 16 * OUTPUTS, rows = 8 * ROWS;
};
using Few = Tile<1, 1, 8>;
using Narrow = Tile<4, 4, 3>;

template <class Shape>
DEVICE void gemm(const Product<float>& product, TilePlace place) {
    constexpr int STAGES = Shape::stages, OUTPUTS = Shape::thread_outputs, ROWS = Shape::thread_rows;
    constexpr int PITCH = 9;  // 16-byte words
    __shared__ uint4 w_stages[STAGES][Shape::outputs][PITCH], x_stages[STAGES][Shape::rows][PITCH];
    const Columns columns = {0, product.inner};
    const int thread_output = threadIdx.x % 16, thread_row = threadIdx.x / 16;
    TileCopy<float, Shape::outputs, STEP, PITCH, THREADS> w_copy(product.w, place.output, product.outputs,
                                                                 product.inner, columns);
    TileCopy<float, Shape::rows, STEP, PITCH, THREADS> x_copy(product.x, place.row, product.rows, product.inner,
                                                              columns);
    for (int stage = 0; stage < STAGES - 1; stage++) w_copy.copy(w_stages[stage]);
    dependency_wait();
    dependency_launch();
    for (int stage = 0; stage < STAGES - 1; stage++) {
        x_copy.copy(x_stages[stage]);
        copy_commit();
    }
    float chains[OUTPUTS][ROWS] = {}, sums[OUTPUTS][ROWS] = {};
    int stage = 0, free_stage = STAGES - 1;
    for (int column = STEP; column < product.inner + STEP; column += STEP) {  // the end of a step
        copy_wait<STAGES - 2>();
        __syncthreads();  // the stage is complete, and the one before it has been read
        w_copy.copy(w_stages[free_stage]);
        x_copy.copy(x_stages[free_stage]);
        copy_commit();
#pragma unroll
        for (int word = 0; word < STEP / 4; word++) {
            float4 w[OUTPUTS], x[ROWS];
#pragma unroll
            for (int i = 0; i < OUTPUTS; i++)
                w[i] = reinterpret_cast<const float4&>(w_stages[stage][thread_output + 16 * i][word]);
#pragma unroll
            for (int j = 0; j < ROWS; j++)
                x[j] = reinterpret_cast<const float4&>(x_stages[stage][thread_row + 8 * j][word]);
#pragma unroll
            for (int i = 0; i < OUTPUTS; i++)
#pragma unroll
                for (int j = 0; j < ROWS; j++) {
                    float& chain = chains[i][j];
                    chain = __fmaf_rn(w[i].x, x[j].x, chain);
                    chain = __fmaf_rn(w[i].y, x[j].y, chain);
                    chain = __fmaf_rn(w[i].z, x[j].z, chain);
                    chain = __fmaf_rn(w[i].w, x[j].w, chain);
                }
        }
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        if (column % CHAIN_COLUMNS != 0 && column < product.inner) continue;
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++)
#pragma unroll
            for (int j = 0; j < ROWS; j++) sums[i][j] = __fadd_rn(sums[i][j], chains[i][j]), chains[i][j] = 0;
    }
    copy_wait<0>();  // zeros, behind the last step
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++) {
        const int output = place.output + thread_output + 16 * i;
        if (output >= product.outputs) break;
        const float bias = product.bias != nullptr ? product.bias[output] : 0;
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            const int row = place.row + thread_row + 8 * j;
            if (row >= product.rows) break;
            float& out = product.out[size_t(row) * product.pitch + output];
            out = __fadd_rn(__fadd_rn(product.accumulates ? out : 0, sums[i][j]), bias);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemv_f32(Product<float> product) {
    gemm<Few>(product, {int(blockIdx.x) * Few::outputs, int(blockIdx.y) * Few::rows});
}
EXPORT(gemv_f32)

extern "C" __global__ void __launch_bounds__(THREADS) gemm_narrow_f32(Product<float> product) {
    gemm<Narrow>(product, place_of_block<Narrow>(product.rows, product.outputs));
}
EXPORT(gemm_narrow_f32)
