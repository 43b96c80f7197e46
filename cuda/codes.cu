// Products of activations and a matrix of codes, and rows of a table of codes.
//
//     out[m][n] = (out[m][n] if `accumulates`) + sum over k of x[m][k] w[n][k] + (bias[n] if there is one)
//
// Data      x [rows][columns] of bf16, w a matrix of codes (codes.cuh), out of float32 with rows at a distance of
//           `pitch`, so that it can be some columns of a wider matrix. The number of columns is a multiple of 8.
//
// The order of the sum is the same for every number of rows and in all kernels:
//
// - A chunk is the columns of a scale in a block of 64: 16, 32 or 64. Its chain is `mma` after `mma` of x and the codes
//   less their centre; if there are minima, another chain has the sum of x, as the product with ones.
// - The sum of a segment of 512 columns is a chain over its chunks: a fused multiply-add of the scale and the chunk's
//   chain, then of the minimum and the sum of x.
// - Segments are added in order; the total is added to out, or replaces it; then the bias is added.
//
// Kernels   gemv    up to 8 rows, 16 outputs: a warp per segment, at most 8. Limit: bytes of w.
//           narrow  32 rows, 32 outputs, otherwise the same, for matrices that have few tiles of middle. Limit: bytes
//                   of x, which each block reads for 32 outputs from the L2 cache: for 32 rows, 4 times the bytes of w
//                   of 4 bits.
//           middle  32 rows, 128 outputs; w and x pass through a ring of stages of 64 columns that cp.async fills: 6
//                   for codes of 4 bits, 4 for 8 bits. Limit: bytes of x, for 32 rows as many as of w of 4 bits.
//           wide    64 rows, 128 outputs, otherwise the same; 4 stages for codes of 4 bits, 3 for others. Limit: flops.
//                   For 32 mma, a lane reads 128 bytes of x and the codes of 2 tiles from shared memory.
//           In gemv and narrow, a lane reads its codes from global memory into registers, in the order of the operand,
//           some blocks ahead; in gemv also x, a block ahead. Segments are short so that these two have enough loads in
//           flight: 4096 x 4096 of int4 is 2048 warps of gemv with at least 2 KiB each. A block of middle has 20 KiB of
//           int4 in flight, one of wide 12 KiB (estimates from the sizes of stages). All kernels read the first weights
//           before the launch's dependency is complete.
//           embed   rows of a table: a thread has 16 columns. Limit: bytes. The weights are rounded as the CPU's.
// Sources   codes.cuh; gemm.cu; Frantar et al., "MARLIN", section 3 (a division of k among warps).
#include "codes.cuh"
#include "tokens.cuh"

constexpr int SEGMENT_BLOCKS = 8;
constexpr int SHARED_BYTES = 48 << 10;  // of the stages of a block

struct CodesProduct {
    Codes w;
    const bf16* x;
    const float* bias;  // or null
    float* out;
    int rows, pitch, accumulates;
};

// ---- The product of a block of columns

// The operands of a row of x: of 4 mma.
struct LaneRow {
    uint2 pairs[4];
};

// Reads them with `words`, which returns the 16-byte word of 8 columns by its index in the block.
template <class F, class Read>
DEVICE LaneRow read_row(int quad, Read read) {
    LaneRow row;
    if constexpr (F::chunk == 16) {
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const uint4 word = read(2 * m + quad / 2);
            row.pairs[m] = quad % 2 ? uint2{word.z, word.w} : uint2{word.x, word.y};
        }
    } else {
#pragma unroll
        for (int step = 0; step < 2; step++) {
            const uint4 word = read(4 * step + quad);
            row.pairs[2 * step] = {word.x, word.y}, row.pairs[2 * step + 1] = {word.z, word.w};
        }
    }
    return row;
}

// The sums of a chunk of rows 2 quad and 2 quad + 1 of two tiles of 8 rows: the product of x, as the first operand, and
// ones has them in the lanes of those rows.
template <class F>
DEVICE void sum_rows(float (&sums)[2][2], const LaneRow& first, const LaneRow& second, int chunk, int quad) {
    constexpr int STEPS = F::chunk / 16;
    float d[4] = {};
#pragma unroll
    for (int m = chunk * STEPS; m < (chunk + 1) * STEPS; m++)
        mma<bf16>(d, {first.pairs[m].x, second.pairs[m].x, first.pairs[m].y, second.pairs[m].y}, {ONES, ONES});
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++) sums[tile][i] = __shfl_sync(ALL_LANES, d[2 * tile], 4 * (2 * quad + i));
}

// Adds the products of a block of columns, of OUTPUTS tiles of 16 outputs and ROWS tiles of 8 rows.
template <class F, int OUTPUTS, int ROWS>
DEVICE void add_block(float (&d)[OUTPUTS][ROWS][4], const Codes& codes, const LaneBlock<F> (&w)[OUTPUTS],
                      const LaneRow (&x)[ROWS], int quad) {
    constexpr int STEPS = F::chunk / 16;
#pragma unroll
    for (int chunk = 0; chunk < F::chunks; chunk++) {
        uint32_t operands[OUTPUTS][STEPS][4];
        Factors factors[OUTPUTS];
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) {
            factors[i] = factors_of<F>(codes, w[i], chunk);
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int r = 0; r < 4; r++)
                    operands[i][step][r] = F::Code::pair(w[i].codes, chunk * STEPS + step, r);
        }
        float sums[2][2];
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            if constexpr (F::has_minima)
                if (j % 2 == 0) sum_rows<F>(sums, x[j], j + 1 < ROWS ? x[j + 1] : LaneRow{}, chunk, quad);
#pragma unroll
            for (int i = 0; i < OUTPUTS; i++) {
                float chain[4] = {};
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    const uint2 pair = x[j].pairs[chunk * STEPS + step];
                    mma<bf16>(chain, operands[i][step], {pair.x, pair.y});
                }
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    d[i][j][e] = __fmaf_rn(factors[i].scale[e / 2], chain[e], d[i][j][e]);
                    if constexpr (F::has_minima)
                        d[i][j][e] = __fmaf_rn(factors[i].minimum[e / 2], sums[j % 2][e % 2], d[i][j][e]);
                }
            }
        }
    }
}

// Writes the total of an element to `out`.
DEVICE void finish(const CodesProduct& call, int row, int output, float total) {
    float& out = call.out[size_t(row) * call.pitch + output];
    if (call.accumulates) total = out + total;
    out = call.bias != nullptr ? total + call.bias[output] : total;
}

// ---- gemv, narrow: grid (outputs / (16 OUTPUTS), rows / (8 ROWS)), rounded up; a warp per segment, at most 8 warps

constexpr int MAX_WARPS = 8;

template <int OUTPUTS, int ROWS, int REGISTERS>
struct Stream {
    static constexpr int output_tiles = OUTPUTS, row_tiles = ROWS, registers = REGISTERS;
    static constexpr int outputs = OUTPUTS * TILE_OUTPUTS, rows = ROWS * 8;
};
using Gemv = Stream<1, 1, 28>;
using Narrow = Stream<2, 4, 40>;

// The blocks that a lane loads while it multiplies as many before them: at most 16 words of codes, and no more than the
// shape has registers for, with their scales.
template <class F, class Shape>
constexpr int stream_depth() {
    constexpr int codes = (F::Code::bits == 8 ? 2 : 4) / Shape::output_tiles;
    constexpr int room = Shape::registers / (int(sizeof(LaneBlock<F>) / 4) * Shape::output_tiles);
    static_assert(codes > 0 && room > 0, "at least one block");
    return room < codes ? room : codes;
}

template <class F, class Shape>
DEVICE void stream(const CodesProduct& call) {
    constexpr int OUTPUTS = Shape::output_tiles, ROWS = Shape::row_tiles;
    constexpr int DEPTH = stream_depth<F, Shape>();
    constexpr int PADDED = Shape::outputs + 4;  // the lanes of a warp write to different banks
    __shared__ float sums[MAX_WARPS][Shape::rows][PADDED], totals[Shape::rows][PADDED];
    const Codes& codes = call.w;
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    const int first_output = blockIdx.x * Shape::outputs, first_row = blockIdx.y * Shape::rows;
    const int num_blocks = ceil_div(codes.columns, BLOCK), num_segments = ceil_div(num_blocks, SEGMENT_BLOCKS);
    const uint8_t* tiles[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++)
        tiles[i] = tile_of<F>(codes, min(int(blockIdx.x) * OUTPUTS + i, (codes.rows - 1) / TILE_OUTPUTS));

    struct Blocks {
        LaneBlock<F> w[DEPTH][OUTPUTS];
    };
    auto load = [&](Blocks& blocks, int block) {
#pragma unroll
        for (int n = 0; n < DEPTH; n++)
            if (block + n < num_blocks)
#pragma unroll
                for (int i = 0; i < OUTPUTS; i++)
                    blocks.w[n][i] = load_block<F>(codes, tiles[i], block + n, lane);
    };
    auto load_x = [&](LaneRow(&x)[ROWS], int block) {
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            const int row = first_row + j * 8 + group;
            const uint4* from = reinterpret_cast<const uint4*>(call.x + size_t(row) * codes.columns + block * BLOCK);
            const int words = row < call.rows ? (codes.columns - block * BLOCK) / 8 : 0;
            x[j] = read_row<F>(quad, [&](int word) { return word < words ? from[word] : uint4{0, 0, 0, 0}; });
        }
    };

    Blocks now = {}, next = {};
    load(now, warp * SEGMENT_BLOCKS);
    dependency_wait();
    dependency_launch();
    LaneRow x[ROWS];  // of the next block that is multiplied, if they are few
    if (ROWS == 1) load_x(x, warp * SEGMENT_BLOCKS);
    for (int first = 0; first < num_segments; first += num_warps) {
        const int segment = first + warp;
        if (segment < num_segments) {
            const int end = min((segment + 1) * SEGMENT_BLOCKS, num_blocks);
            float d[OUTPUTS][ROWS][4] = {};
            for (int block = segment * SEGMENT_BLOCKS; block < end; block += DEPTH) {
                const bool is_last = block + DEPTH >= end;
                const int following = is_last ? (segment + num_warps) * SEGMENT_BLOCKS : block + DEPTH;
                load(next, following);
#pragma unroll
                for (int n = 0; n < DEPTH; n++) {
                    if (block + n >= end) break;
                    LaneRow x_now[ROWS];
                    if (ROWS > 1) load_x(x, block + n);
#pragma unroll
                    for (int j = 0; j < ROWS; j++) x_now[j] = x[j];
                    if (ROWS == 1) load_x(x, n + 1 < DEPTH && block + n + 1 < end ? block + n + 1 : following);
                    add_block<F>(d, codes, now.w[n], x_now, quad);
                }
                now = next;
            }
#pragma unroll
            for (int i = 0; i < OUTPUTS; i++)
#pragma unroll
                for (int j = 0; j < ROWS; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sums[warp][j * 8 + quad * 2 + e % 2][i * 16 + group + e / 2 * 8] = d[i][j][e];
        }
        __syncthreads();
        const int count = min(num_warps, num_segments - first);
        for (int i = threadIdx.x; i < Shape::outputs * Shape::rows; i += blockDim.x) {
            const int n = i % Shape::outputs, m = i / Shape::outputs;
            float total = first > 0 ? totals[m][n] : 0;
            for (int k = 0; k < count; k++) total += sums[k][m][n];
            totals[m][n] = total;
            if (first + count == num_segments && first_output + n < codes.rows && first_row + m < call.rows)
                finish(call, first_row + m, first_output + n, total);
        }
        __syncthreads();  // the sums may be overwritten
    }
}

// ---- middle, wide: grid (outputs / 128, rows / 32 or 64), rounded up; a warp has 32 outputs x 32 rows

template <int OUTPUT_WARPS, int ROW_WARPS>
struct Tile {
    static constexpr int output_tiles = 2, row_tiles = 4, output_warps = OUTPUT_WARPS, row_warps = ROW_WARPS;
    static constexpr int outputs = output_warps * output_tiles * TILE_OUTPUTS, rows = row_warps * row_tiles * 8;
    static constexpr int threads = 32 * output_warps * row_warps;
};
using Middle = Tile<4, 1>;
using Wide = Tile<4, 2>;

// A block of columns of both operands, without scales.
template <class F, class Shape>
struct Stage {
    uint4 x[Shape::rows][BLOCK / 8], w[Shape::outputs / TILE_OUTPUTS][F::block_bytes / 16];
};

template <class F, class Shape>
DEVICE void gemm(const CodesProduct& call) {
    constexpr int OUTPUTS = Shape::output_tiles, ROWS = Shape::row_tiles;
    constexpr int STAGES = SHARED_BYTES / sizeof(Stage<F, Shape>);
    constexpr int WORDS = BLOCK / 8;  // 16-byte words of a row of a stage
    static_assert(STAGES >= 3, "two blocks are copied while one is multiplied");
    __shared__ Stage<F, Shape> stages[STAGES];
    const Codes& codes = call.w;
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const int warp_tile = warp % Shape::output_warps * OUTPUTS, row_warp = warp / Shape::output_warps;
    const int first_output = blockIdx.x * Shape::outputs + warp_tile * TILE_OUTPUTS;
    const int first_row = blockIdx.y * Shape::rows, warp_row = row_warp * ROWS * 8;
    const int num_blocks = ceil_div(codes.columns, BLOCK);
    const uint8_t* tiles[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++)
        tiles[i] = tile_of<F>(codes, min(first_output / TILE_OUTPUTS + i, (codes.rows - 1) / TILE_OUTPUTS));

    // The warps that have the same outputs copy a tile of codes each.
    auto copy_codes = [&](int block, int stage) {
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) {
            if (block >= num_blocks) break;
            if (Shape::row_warps > 1 && i % Shape::row_warps != row_warp) continue;
            const uint8_t* from = tiles[i] + block * F::block_bytes;
#pragma unroll
            for (int n = 0; n < F::block_bytes / 16; n += 32)
                if (n + lane < F::block_bytes / 16)
                    copy_async16(&stages[stage].w[warp_tile + i][n + lane], from + (n + lane) * 16);
        }
    };
    // The word of 8 columns of a row in a stage: rows that are read at the same time are in different banks.
    auto place = [](int row, int word) { return word ^ row % 2 * 4; };
    auto copy_x = [&](int block, int stage) {
#pragma unroll
        for (int n = 0; n < Shape::rows * WORDS / Shape::threads; n++) {
            if (block >= num_blocks) break;
            const int i = n * Shape::threads + threadIdx.x, row = i / WORDS, word = i % WORDS;
            const int column = block * BLOCK + word * 8;
            const bool exists = first_row + row < call.rows && column < codes.columns;
            const bf16* from = exists ? call.x + size_t(first_row + row) * codes.columns + column : call.x;
            copy_async16(&stages[stage].x[row][place(row, word)], from, exists ? 16 : 0);
        }
        copy_commit();
    };
    auto load = [&](LaneBlock<F>(&w)[OUTPUTS], int block) {
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++)
            if (block < num_blocks) load_scales(w[i], codes, tiles[i], block, lane);
    };

    LaneBlock<F> now[OUTPUTS] = {}, next[OUTPUTS] = {}, last[OUTPUTS] = {};
    load(now, 0);
    load(next, 1);
    for (int block = 0; block < STAGES - 1; block++) copy_codes(block, block);
    dependency_wait();
    dependency_launch();
    for (int block = 0; block < STAGES - 1; block++) copy_x(block, block);
    float d[OUTPUTS][ROWS][4] = {}, totals[OUTPUTS][ROWS][4] = {};
    int stage = 0, free_stage = STAGES - 1;
    for (int block = 0; block < num_blocks; block++) {
        load(last, block + 2);
        copy_wait<STAGES - 2>();
        __syncthreads();  // the stage is complete, and the one before it has been read
        copy_codes(block + STAGES - 1, free_stage);
        copy_x(block + STAGES - 1, free_stage);
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++)
            load_codes(now[i], reinterpret_cast<const uint8_t*>(stages[stage].w[warp_tile + i]), lane);
        LaneRow x[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; j++) {
            const int row = warp_row + j * 8 + group;
            const uint4* words = stages[stage].x[row];
            x[j] = read_row<F>(quad, [&](int word) { return words[place(row, word)]; });
        }
        add_block<F>(d, codes, now, x, quad);
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) now[i] = next[i], next[i] = last[i];
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        if ((block + 1) % SEGMENT_BLOCKS != 0 && block + 1 < num_blocks) continue;
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++)
#pragma unroll
            for (int j = 0; j < ROWS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) totals[i][j][e] += d[i][j][e], d[i][j][e] = 0;
    }
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++)
#pragma unroll
        for (int j = 0; j < ROWS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int output = first_output + i * 16 + group + e / 2 * 8;
                const int row = first_row + warp_row + j * 8 + quad * 2 + e % 2;
                if (output < codes.rows && row < call.rows) finish(call, row, output, totals[i][j][e]);
            }
}

// ---- embed: grid (rows); a thread has the 16 columns of a lane in a block, for one of the lane's rows

struct CodesRows {
    Codes table;
    const uint32_t *tokens, *last_tokens;
    float* out;
};

template <class F>
DEVICE void embed(const CodesRows& call) {
    dependency_wait();
    dependency_launch();
    const Codes& table = call.table;
    const uint32_t token = token_of(call.tokens[blockIdx.x], call.last_tokens);
    const uint8_t* tile = tile_of<F>(table, token / TILE_OUTPUTS);
    const int group = token % 8, half = token / 8 % 2;
    float* out = call.out + size_t(blockIdx.x) * table.columns;
    for (int i = threadIdx.x; i < ceil_div(table.columns, BLOCK) * 4; i += blockDim.x) {
        const int block = i / 4, quad = i % 4;
        const LaneBlock<F> part = load_block<F>(table, tile, block, group * 4 + quad);
#pragma unroll
        for (int m = 0; m < 4; m++) {
            const int first = first_column<F>(block, m, quad);
            float weights[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const uint32_t upper = F::Code::pair(part.codes, m, n / 2 * 2);
                const uint32_t lower = F::Code::pair(part.codes, m, n / 2 * 2 + 1);
                const uint32_t pair = half ? lower : upper;
                const float number = __uint_as_float(n % 2 ? pair & 0xffff0000u : pair << 16);
                weights[n] = weight_of<F>(table, part, m * 16 / F::chunk, half, number);
            }
            if (first < table.columns)
                *reinterpret_cast<float4*>(out + first) = {weights[0], weights[1], weights[2], weights[3]};
        }
    }
}

// Of gemv on a multiprocessor.
constexpr int MIN_BLOCKS = 2;

#define KERNELS(CODE, CHUNK, SCALE, MINIMUM)                                                              \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)                              \
    gemv_##CODE##_##CHUNK##_##SCALE##_##MINIMUM(CodesProduct product) {                                   \
        stream<Format<CODE, CHUNK, SCALE, MINIMUM>, Gemv>(product);                                       \
    }                                                                                                     \
    EXPORT(gemv_##CODE##_##CHUNK##_##SCALE##_##MINIMUM)                                                   \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, 1)                                       \
    gemm_narrow_##CODE##_##CHUNK##_##SCALE##_##MINIMUM(CodesProduct product) {                            \
        stream<Format<CODE, CHUNK, SCALE, MINIMUM>, Narrow>(product);                                     \
    }                                                                                                     \
    EXPORT(gemm_narrow_##CODE##_##CHUNK##_##SCALE##_##MINIMUM)                                            \
    extern "C" __global__ void __launch_bounds__(Middle::threads, 2)                                      \
    gemm_middle_##CODE##_##CHUNK##_##SCALE##_##MINIMUM(CodesProduct product) {                            \
        gemm<Format<CODE, CHUNK, SCALE, MINIMUM>, Middle>(product);                                       \
    }                                                                                                     \
    EXPORT(gemm_middle_##CODE##_##CHUNK##_##SCALE##_##MINIMUM)                                            \
    extern "C" __global__ void __launch_bounds__(Wide::threads, 1)                                        \
    gemm_wide_##CODE##_##CHUNK##_##SCALE##_##MINIMUM(CodesProduct product) {                              \
        gemm<Format<CODE, CHUNK, SCALE, MINIMUM>, Wide>(product);                                         \
    }                                                                                                     \
    EXPORT(gemm_wide_##CODE##_##CHUNK##_##SCALE##_##MINIMUM)                                              \
    extern "C" __global__ void __launch_bounds__(256)                                                     \
    embed_##CODE##_##CHUNK##_##SCALE##_##MINIMUM(CodesRows rows) {                                        \
        embed<Format<CODE, CHUNK, SCALE, MINIMUM>>(rows);                                                 \
    }                                                                                                     \
    EXPORT(embed_##CODE##_##CHUNK##_##SCALE##_##MINIMUM)
// For a model, its variants alone are compiled: -DVARIANT=code4,64,scale16,affine. Without it, those of the tests are.
#define INSTANTIATE(...) KERNELS(__VA_ARGS__)
#ifdef VARIANT
INSTANTIATE(VARIANT)
#else
KERNELS(code4, 32, scale16, centred)
KERNELS(code4, 32, scale16, affine)
KERNELS(code4, 32, nested, affine)
KERNELS(code4, 64, scale16, centred)
KERNELS(code4, 64, scale16, affine)
KERNELS(code5, 32, scale16, centred)
KERNELS(code5, 32, scale16, affine)
KERNELS(code5, 32, nested, affine)
KERNELS(code6, 16, nested, centred)
KERNELS(code8, 32, scale16, centred)
KERNELS(code8, 32, scale16, affine)
KERNELS(code8, 64, scale16, centred)
KERNELS(code8, 64, scale16, affine)
KERNELS(code8, 64, scale32, centred)
KERNELS(e4m3, 64, scale16, centred)
KERNELS(e4m3, 64, scale32, centred)
#endif
