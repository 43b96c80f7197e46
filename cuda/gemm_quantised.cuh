// Quantised GEMM, the product of activations and a matrix of quantised weights: its call and the order of its sums, for
// all kernels.
//
//     out[m][n] = (out[m][n] if `accumulates`) + sum over k of x[m][k] w[n][k] + (bias[n] if there is one)
//
// Data      x [rows][columns] of bf16, or of 8-bit integers or e4m3 with scales (quantised_rows.cuh); w a matrix of
//           codes with scales (quantised_matrix.cuh), of e4m3 if x is; out of float32 with rows at a distance of
//           `pitch`, so that it can be some columns of a wider matrix. The number of columns is a multiple of 8.
//
// The order of the sum is the same for every number of rows and in all kernels:
//
// - A chunk is the columns of a scale in a block of 64: 16, 32 or 64. Its chain is `mma` after `mma` of x and the codes
//   less their centre; if there are minima, another chain has the sum of x, as the product with ones.
// - Columns are divided into splits of 512 (split-K). The sum of a split is a chain over its chunks: a fused
//   multiply-add of the scale and the chunk's chain, then of the minimum and the sum of x.
// - If x is quantised, a chunk is the columns of a split that have the same scales of w and x, and the factor of its
//   chain is the product of the two. Chains of integers are exact. A chunk of e4m3 is at most 128 columns, because the
//   sums of its mma have fewer bits than float32 on some devices.
// - Splits are added in order; the total is added to out, or replaces it; then the bias is added.
//
// Sources   Lin et al., "QServe: W4A8KV4 Quantization and System Co-design for Efficient LLM Serving", section 5
//           (products of integers, scaled by group); DeepSeek-AI, "DeepSeek-V3 Technical Report", section 3.3.2 (the
//           precision of sums of e4m3).
#pragma once
#include "quantised_matrix.cuh"
#include "quantised_rows.cuh"

constexpr int SPLIT_BLOCKS = 8;
constexpr int MAX_WARPS = 8;  // of a block of the kernels in which a warp has a split

struct QuantisedProduct {
    QuantisedMatrix w;
    const uint8_t* x;
    const float* bias;  // or null
    float* out;
    int rows, pitch, accumulates;
    int x_group_shift;  // if x is quantised: its groups are 2^x_group_shift columns; 31 if a row is a group
};

// Bytes of a block of a row of x, and of a row.
template <class F>
constexpr int X_BYTES = F::has_quantised_rows ? QUANTISED_BYTES : BLOCK * 2;
template <class F>
DEVICE size_t row_bytes(const QuantisedMatrix& matrix) {
    return F::has_quantised_rows ? size_t(count_blocks(matrix)) * QUANTISED_BYTES : size_t(matrix.columns) * 2;
}

// The activations of 4 columns: two registers of bf16, or one of bytes.
template <bool IS_QUANTISED>
struct FourOf {
    using Type = uint2;
};
template <>
struct FourOf<true> {
    using Type = uint32_t;
};
template <class F>
using Four = typename FourOf<F::has_quantised_rows>::Type;

// The place of a lane in a chunk of a block of a row of x, for mma `m` of bf16: ADJACENT mma have theirs together.
template <class F>
constexpr int ADJACENT = F::chunk == 16 ? 1 : 2;
template <class F>
DEVICE int four_byte(int chunk, int m, int quad) {
    return (4 * (chunk * F::chunk / 16 + m) + ADJACENT<F> * quad) * int(sizeof(Four<F>));
}

// Reads the part of a lane in a chunk. `read(zero, byte)` returns a value of the type of `zero`, by its first byte in
// the block.
template <class F, class Read>
DEVICE void read_chunk(Four<F>* fours, int chunk, int quad, Read read) {
#pragma unroll
    for (int m = 0; m < F::chunk / 16; m += ADJACENT<F>) {
        const auto values = read(Values<Four<F>, ADJACENT<F>>{}, four_byte<F>(chunk, m, quad));
#pragma unroll
        for (int n = 0; n < ADJACENT<F>; n++) fours[m + n] = values.values[n];
    }
}

DEVICE void mma_bytes(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_fp8(d, a, b); }
template <int A>
DEVICE void mma_bytes(int (&d)[4], const uint32_t (&a)[A], const uint32_t (&b)[A / 2]) {
    mma_int8(d, a, b);
}

// Blocks of a chunk of quantised rows, of 64 columns and more: a power of two.
template <class F>
DEVICE int chunk_blocks(const QuantisedProduct& call) {
    constexpr int MOST = F::Code::centre == 0 ? 2 : SPLIT_BLOCKS;  // e4m3
    const int blocks = 1 << (max(min(call.w.group_shift, call.x_group_shift), 6) - 6);
    return min(blocks, MOST);
}

// Whether a chunk of quantised rows, of 64 columns and more, ends with a block.
template <class F>
DEVICE bool ends_chunk(const QuantisedProduct& call, int block) {
    return ((block + 1) & (chunk_blocks<F>(call) - 1)) == 0 || block + 1 == count_blocks(call.w);
}

// Writes the total of an element to `out`.
DEVICE void finish(const QuantisedProduct& call, int row, int output, float total) {
    float& out = call.out[size_t(row) * call.pitch + output];
    if (call.accumulates) total = out + total;
    out = call.bias != nullptr ? total + call.bias[output] : total;
}

// The variants that the tests use in all files: with chunks of 32 and 64 columns, for bf16 and 8-bit integers.
#define TESTED_VARIANTS(K) \
    K(code4, 32, scale16, centred, bf16) \
    K(code4, 32, scale16, affine, bf16) \
    K(code4, 32, nested, affine, bf16) \
    K(code4, 64, scale16, centred, bf16) \
    K(code4, 64, scale16, affine, bf16) \
    K(code4, 64, nested, affine, bf16) \
    K(code5, 32, scale16, centred, bf16) \
    K(code5, 32, scale16, affine, bf16) \
    K(code5, 32, nested, affine, bf16) \
    K(code8, 32, scale16, centred, bf16) \
    K(code8, 32, scale16, affine, bf16) \
    K(code8, 64, scale16, centred, bf16) \
    K(code8, 64, scale16, affine, bf16) \
    K(code8, 64, scale32, centred, bf16) \
    K(e4m3, 64, scale16, centred, bf16) \
    K(e4m3, 64, scale32, centred, bf16) \
    K(code4, 32, scale16, centred, int8) \
    K(code4, 32, scale16, affine, int8) \
    K(code4, 32, nested, affine, int8) \
    K(code4, 64, scale16, centred, int8) \
    K(code4, 64, scale16, affine, int8) \
    K(code4, 64, nested, centred, int8) \
    K(code5, 32, scale16, centred, int8) \
    K(code5, 32, scale16, affine, int8) \
    K(code5, 32, nested, affine, int8) \
    K(code8, 32, scale16, centred, int8) \
    K(code8, 32, scale16, affine, int8) \
    K(code8, 64, scale16, centred, int8) \
    K(code8, 64, scale16, affine, int8) \
    K(code8, 64, scale32, centred, int8)
