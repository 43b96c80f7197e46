// Quantised GEMM: products of activations and a matrix of quantised weights (gemm_quantised.cuh), and rows of a
// quantised table.
//
// Kernels   gemv_row, gemv_few, gemv  1, up to 4 and up to 8 rows (gemm_quantised_few.cuh), 16 outputs: a warp per
//                   split, at most 8. Limit: bytes of w.
//           narrow  32 rows, 32 outputs, a warp per split, at most 8, for matrices that have few tiles of middle.
//                   Limit: bytes of x, which each block reads for 32 outputs from the L2 cache: for 32 rows, 4 times
//                   the bytes of w of 4 bits.
//           middle  32 rows, 128 outputs; w and x pass through a ring of stages of 64 columns that cp.async fills: 6
//                   for codes of 4 bits, 4 for 8 bits. Limit: bytes of x, for 32 rows as many as of w of 4 bits.
//           wide    64 rows, 128 outputs, otherwise the same; 4 stages for codes of 4 bits, 3 for others. Limit: flops.
//                   For 32 mma, a lane reads 128 bytes of x and the codes of 2 tiles from shared memory.
//           In the first four, a lane reads its codes from global memory into registers, in the order of the operand,
//           some blocks ahead. Splits are short so that these have enough loads in flight: 4096 x 4096 of int4 is
//           2048 warps of gemv_row with 4 KiB each. A block of middle has 20 KiB of int4 in flight, one of wide 12 KiB
//           (estimates from the sizes of stages). All kernels of products load their first weights before
//           dependency_wait().
//           embed   rows of a table: a thread has 16 columns. Limit: bytes. The weights are rounded as the CPU's.
//
//           On sm_90a, gemm_quantised_warpgroup.cu replaces middle for many rows and most formats. For the formats that
//           it has, wide takes longer than middle on an H100; for the others, it is not measured.
// Sources   gemm_quantised.cuh; gemm.cu; Frantar et al., "MARLIN", section 3 (split-K among the warps of a block).
#include "gemm_quantised_few.cuh"
#include "tokens.cuh"

constexpr int SHARED_BYTES = 48 << 10;  // of the stages of a block

// ---- The product of a block of columns

// The part of a lane in 8 rows of x: its columns of row `group` for 4 mma of bf16, or as many of bytes, and then the
// scales of rows 2 quad and 2 quad + 1: of halves of the block, or one for the block.
template <class F, bool = F::has_quantised_rows>
struct LaneRows {
    Four<F> fours[4];
};
template <class F>
struct LaneRows<F, true> {
    static constexpr int halves = F::chunk < BLOCK ? 2 : 1;
    Four<F> fours[4];
    RowScale row_scales[2][halves];
};

// Reads them. `read(zero, row, byte)` returns a value of the type of `zero` from a row, by its first byte in the block.
template <class F, class Read>
DEVICE LaneRows<F> read_rows(int group, int quad, Read read) {
    LaneRows<F> rows;
#pragma unroll
    for (int chunk = 0; chunk < F::chunks; chunk++)
        read_chunk<F>(rows.fours + chunk * F::chunk / 16, chunk, quad,
                      [&](auto zero, int byte) { return read(zero, group, byte); });
    if constexpr (F::has_quantised_rows) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            RowScale row_scales[2];
#pragma unroll
            for (int half = 0; half < 2; half++)
                row_scales[half] = read(RowScale{0, 0}, 2 * quad + i, QUANTISED_BLOCK + half * int(sizeof(RowScale)));
            if constexpr (F::chunk < BLOCK)
                rows.row_scales[i][0] = row_scales[0], rows.row_scales[i][1] = row_scales[1];
            else
                rows.row_scales[i][0] = {row_scales[0].scale, row_scales[0].scaled_sum + row_scales[1].scaled_sum};
        }
    }
    return rows;
}

// The sums of OUTPUTS tiles of 16 outputs and ROWS tiles of 8 rows.
template <class F, int OUTPUTS, int ROWS>
struct Sums {
    float d[OUTPUTS][ROWS][4];
    // Of a chunk of quantised rows that began in an earlier block: the chains, and the sums of x.
    typename F::Sum chains[OUTPUTS][ROWS][4];
    float scaled_sums[ROWS][2];
};

// The sums of a chunk of rows 2 quad and 2 quad + 1 of two tiles of 8 rows: the product of x, as the first operand, and
// ones has them in the lanes of those rows.
template <class F>
DEVICE void sum_rows(float (&sums)[2][2], const LaneRows<F>& first, const LaneRows<F>& second, int chunk, int quad) {
    constexpr int STEPS = F::chunk / 16;
    float d[4] = {};
#pragma unroll
    for (int m = chunk * STEPS; m < (chunk + 1) * STEPS; m++)
        mma<bf16>(d, {first.fours[m].x, second.fours[m].x, first.fours[m].y, second.fours[m].y}, {ONES, ONES});
#pragma unroll
    for (int tile = 0; tile < 2; tile++)
#pragma unroll
        for (int i = 0; i < 2; i++) sums[tile][i] = __shfl_sync(ALL_LANES, d[2 * tile], 4 * (2 * quad + i));
}

// Adds the products of a block of columns.
template <class F, int OUTPUTS, int ROWS>
DEVICE void add_floats(Sums<F, OUTPUTS, ROWS>& to, const QuantisedMatrix& matrix, const LaneBlock<F> (&w)[OUTPUTS],
                       const LaneRows<F> (&x)[ROWS], int quad) {
    constexpr int STEPS = F::chunk / 16;
#pragma unroll
    for (int chunk = 0; chunk < F::chunks; chunk++) {
        uint32_t operands[OUTPUTS][STEPS][4];
        Factors factors[OUTPUTS];
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) {
            factors[i] = factors_of<F>(matrix, w[i], chunk);
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
                if (j % 2 == 0) sum_rows<F>(sums, x[j], j + 1 < ROWS ? x[j + 1] : LaneRows<F>{}, chunk, quad);
#pragma unroll
            for (int i = 0; i < OUTPUTS; i++) {
                float chain[4] = {};
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    const uint2 pair = x[j].fours[chunk * STEPS + step];
                    mma<bf16>(chain, operands[i][step], {pair.x, pair.y});
                }
                float(&d)[4] = to.d[i][j];
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    d[e] = __fmaf_rn(factors[i].scale[e / 2], chain[e], d[e]);
                    if constexpr (F::has_minima) d[e] = __fmaf_rn(factors[i].minimum[e / 2], sums[j % 2][e % 2], d[e]);
                }
            }
        }
    }
}

// The same for quantised rows. A chunk of 64 columns and more ends with the block if `is_end`.
template <class F, int OUTPUTS, int ROWS>
DEVICE void add_bytes(Sums<F, OUTPUTS, ROWS>& to, const QuantisedMatrix& matrix, const LaneBlock<F> (&w)[OUTPUTS],
                      const LaneRows<F> (&x)[ROWS], bool is_end) {
    constexpr int FOURS = F::chunk == 16 ? 1 : 2;             // of columns, of an operand
    constexpr int STEPS = F::chunk / (16 * FOURS);            // of a chunk
#pragma unroll
    for (int chunk = 0; chunk < F::chunks; chunk++) {
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++)
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const int first = (chunk * STEPS + step) * FOURS;
                uint32_t operand[2 * FOURS];
#pragma unroll
                for (int r = 0; r < 2 * FOURS; r++) operand[r] = F::Code::four(w[i].codes, first + r / 2, r % 2);
#pragma unroll
                for (int j = 0; j < ROWS; j++) {
                    uint32_t fours[FOURS];
#pragma unroll
                    for (int n = 0; n < FOURS; n++) fours[n] = x[j].fours[first + n];
                    mma_bytes(to.chains[i][j], operand, fours);
                }
            }
        const int half = F::chunk < BLOCK ? chunk * F::chunk / QUANTISED_HALF : 0;
        auto row_scale = [&](int j, int row) { return x[j].row_scales[row][half]; };
        if constexpr (F::has_minima)
#pragma unroll
            for (int j = 0; j < ROWS; j++)
#pragma unroll
                for (int row = 0; row < 2; row++) to.scaled_sums[j][row] += row_scale(j, row).scaled_sum;
        if (F::chunk == BLOCK && !is_end) continue;
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) {
            const Factors factors = factors_of<F>(matrix, w[i], chunk);
#pragma unroll
            for (int j = 0; j < ROWS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    const float scale = __fmul_rn(factors.scale[e / 2] * F::four_step, row_scale(j, e % 2).scale);
                    float& d = to.d[i][j][e];
                    d = __fmaf_rn(scale, to.chains[i][j][e], d);
                    if constexpr (F::has_minima) d = __fmaf_rn(factors.minimum[e / 2], to.scaled_sums[j][e % 2], d);
                    to.chains[i][j][e] = 0;
                }
        }
        if constexpr (F::has_minima)
#pragma unroll
            for (int j = 0; j < ROWS; j++) to.scaled_sums[j][0] = to.scaled_sums[j][1] = 0;
    }
}

template <class F, int OUTPUTS, int ROWS>
DEVICE void add_block(Sums<F, OUTPUTS, ROWS>& to, const QuantisedProduct& call, const LaneBlock<F> (&w)[OUTPUTS],
                      const LaneRows<F> (&x)[ROWS], int block, int quad) {
    if constexpr (F::has_quantised_rows)
        add_bytes<F>(to, call.w, w, x, ends_chunk<F>(call, block));
    else
        add_floats<F>(to, call.w, w, x, quad);
}

// ---- narrow: grid (outputs / 32, rows / 32), rounded up; a warp per split, at most 8 warps

struct Narrow {
    static constexpr int output_tiles = 2, row_tiles = 4;
    static constexpr int outputs = output_tiles * TILE_OUTPUTS, rows = row_tiles * 8;
};

// The blocks that a lane loads while it multiplies as many before them: at most 8 words of codes, and no more than
// there are registers for, with their scales.
template <class F>
constexpr int narrow_depth() {
    constexpr int depth = F::Code::bits == 8 ? 1 : 2;
    constexpr int registers = 40 - (F::chunk == 16 ? 6 : 0);  // which has more operands of x
    constexpr int room = registers / (int(sizeof(LaneBlock<F>) / 4) * Narrow::output_tiles);
    static_assert(room > 0, "at least one block");
    return room < depth ? room : depth;
}

template <class F>
DEVICE void multiply_narrow(const QuantisedProduct& call) {
    using Shape = Narrow;
    constexpr int OUTPUTS = Shape::output_tiles, ROWS = Shape::row_tiles, DEPTH = narrow_depth<F>();
    constexpr int PADDED = Shape::outputs + 4;  // the lanes of a warp write to different banks
    __shared__ float sums[MAX_WARPS][Shape::rows][PADDED], totals[Shape::rows][PADDED];
    const QuantisedMatrix& matrix = call.w;
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    const int first_output = blockIdx.x * Shape::outputs, first_row = blockIdx.y * Shape::rows;
    const int num_blocks = ceil_div(matrix.columns, BLOCK), num_splits = ceil_div(num_blocks, SPLIT_BLOCKS);
    const uint8_t* tiles[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++)
        tiles[i] = tile_of<F>(matrix, min(int(blockIdx.x) * OUTPUTS + i, (matrix.rows - 1) / TILE_OUTPUTS));

    struct Blocks {
        LaneBlock<F> w[DEPTH][OUTPUTS];
    };
    auto load = [&](Blocks& blocks, int block) {
#pragma unroll
        for (int n = 0; n < DEPTH; n++)
            if (block + n < num_blocks)
#pragma unroll
                for (int i = 0; i < OUTPUTS; i++)
                    blocks.w[n][i] = load_block<F>(matrix, tiles[i], block + n, lane);
    };
    auto load_x = [&](LaneRows<F>(&x)[ROWS], int block) {
#pragma unroll
        for (int j = 0; j < ROWS; j++)
            x[j] = read_rows<F>(group, quad, [&](auto zero, int in_tile, int byte) {
                const int row = first_row + j * 8 + in_tile;
                const int bytes = row < call.rows ? int(row_bytes<F>(matrix)) - block * X_BYTES<F> : 0;
                const uint8_t* from = call.x + size_t(row) * row_bytes<F>(matrix) + block * X_BYTES<F> + byte;
                return byte < bytes ? *reinterpret_cast<const decltype(zero)*>(from) : zero;
            });
    };

    Blocks now = {}, next = {};
    load(now, warp * SPLIT_BLOCKS);
    dependency_wait();
    dependency_launch();
    for (int first = 0; first < num_splits; first += num_warps) {
        const int split = first + warp;
        if (split < num_splits) {
            const int end = min((split + 1) * SPLIT_BLOCKS, num_blocks);
            Sums<F, OUTPUTS, ROWS> of_split = {};
            for (int block = split * SPLIT_BLOCKS; block < end; block += DEPTH) {
                const bool is_last = block + DEPTH >= end;
                const int following = is_last ? (split + num_warps) * SPLIT_BLOCKS : block + DEPTH;
                load(next, following);
#pragma unroll
                for (int n = 0; n < DEPTH; n++) {
                    if (block + n >= end) break;
                    LaneRows<F> x[ROWS];
                    load_x(x, block + n);
                    add_block<F>(of_split, call, now.w[n], x, block + n, quad);
                }
                now = next;
            }
#pragma unroll
            for (int i = 0; i < OUTPUTS; i++)
#pragma unroll
                for (int j = 0; j < ROWS; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        sums[warp][j * 8 + quad * 2 + e % 2][i * 16 + group + e / 2 * 8] =
                            of_split.d[i][j][e];
        }
        __syncthreads();
        const int count = min(num_warps, num_splits - first);
        for (int i = threadIdx.x; i < Shape::outputs * Shape::rows; i += blockDim.x) {
            const int n = i % Shape::outputs, m = i / Shape::outputs;
            float total = first > 0 ? totals[m][n] : 0;
            for (int k = 0; k < count; k++) total += sums[k][m][n];
            totals[m][n] = total;
            if (first + count == num_splits && first_output + n < matrix.rows && first_row + m < call.rows)
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
    static constexpr int x_words = X_BYTES<F> / 16;
    // Quantised rows have a word that is not used.
    uint4 x[Shape::rows][(x_words + 1) / 2 * 2], w[Shape::outputs / TILE_OUTPUTS][F::block_bytes / 16];
};

template <class F, class Shape>
DEVICE void gemm(const QuantisedProduct& call) {
    constexpr int OUTPUTS = Shape::output_tiles, ROWS = Shape::row_tiles;
    constexpr int STAGES = SHARED_BYTES / sizeof(Stage<F, Shape>);
    constexpr int WORDS = Stage<F, Shape>::x_words;
    static_assert(STAGES >= 3, "two blocks are copied while one is multiplied");
    __shared__ Stage<F, Shape> stages[STAGES];
    const QuantisedMatrix& matrix = call.w;
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const int warp_tile = warp % Shape::output_warps * OUTPUTS, row_warp = warp / Shape::output_warps;
    const int first_output = blockIdx.x * Shape::outputs + warp_tile * TILE_OUTPUTS;
    const int first_row = blockIdx.y * Shape::rows, warp_row = row_warp * ROWS * 8;
    const int num_blocks = ceil_div(matrix.columns, BLOCK);
    const uint8_t* tiles[OUTPUTS];
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++)
        tiles[i] = tile_of<F>(matrix, min(first_output / TILE_OUTPUTS + i, (matrix.rows - 1) / TILE_OUTPUTS));

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
                    copy_async<16>(&stages[stage].w[warp_tile + i][n + lane], from + (n + lane) * 16);
        }
    };
    // The place of a word of a row in a stage: rows that are read at the same time are in different banks.
    auto place = [](int row, int word) {
        if constexpr (F::has_quantised_rows) return word ^ row / 4 % 2;
        return word ^ row % 2 * 4;
    };
    auto copy_x = [&](int block, int stage) {
#pragma unroll
        for (int n = 0; n < ceil_div(Shape::rows * WORDS, Shape::threads); n++) {
            const int i = n * Shape::threads + threadIdx.x, row = i / WORDS, word = i % WORDS;
            if (block >= num_blocks || i >= Shape::rows * WORDS) break;
            const size_t byte = block * X_BYTES<F> + word * 16;
            const bool exists = first_row + row < call.rows && byte < row_bytes<F>(matrix);
            const uint8_t* from = exists ? call.x + (first_row + row) * row_bytes<F>(matrix) + byte : call.x;
            copy_async<16>(&stages[stage].x[row][place(row, word)], from, exists ? 16 : 0);
        }
        copy_commit();
    };
    auto load = [&](LaneBlock<F>(&w)[OUTPUTS], int block) {
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++)
            if (block < num_blocks) load_scales(w[i], matrix, tiles[i], block, lane);
    };

    LaneBlock<F> now[OUTPUTS] = {}, next[OUTPUTS] = {}, last[OUTPUTS] = {};
    load(now, 0);
    load(next, 1);
    for (int block = 0; block < STAGES - 1; block++) copy_codes(block, block);
    dependency_wait();
    dependency_launch();
    for (int block = 0; block < STAGES - 1; block++) copy_x(block, block);
    Sums<F, OUTPUTS, ROWS> sums = {};
    float totals[OUTPUTS][ROWS][4] = {};
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
        LaneRows<F> x[ROWS];
#pragma unroll
        for (int j = 0; j < ROWS; j++)
            x[j] = read_rows<F>(group, quad, [&](auto zero, int in_tile, int byte) {
                const int row = warp_row + j * 8 + in_tile;
                const uint4* word = &stages[stage].x[row][place(row, byte / 16)];
                return *reinterpret_cast<const decltype(zero)*>(reinterpret_cast<const uint8_t*>(word) + byte % 16);
            });
        add_block<F>(sums, call, now, x, block, quad);
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++) now[i] = next[i], next[i] = last[i];
        free_stage = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        if ((block + 1) % SPLIT_BLOCKS != 0 && block + 1 < num_blocks) continue;
#pragma unroll
        for (int i = 0; i < OUTPUTS; i++)
#pragma unroll
            for (int j = 0; j < ROWS; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) totals[i][j][e] += sums.d[i][j][e], sums.d[i][j][e] = 0;
    }
#pragma unroll
    for (int i = 0; i < OUTPUTS; i++)
#pragma unroll
        for (int j = 0; j < ROWS; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int output = first_output + i * 16 + group + e / 2 * 8;
                const int row = first_row + warp_row + j * 8 + quad * 2 + e % 2;
                if (output < matrix.rows && row < call.rows) finish(call, row, output, totals[i][j][e]);
            }
}

// ---- embed: grid (rows); a thread has the 16 columns of a lane in a block, for one of the lane's rows

struct QuantisedTableRows {
    QuantisedMatrix table;
    const uint32_t *tokens, *last_tokens;
    float* out;
};

template <class F>
DEVICE void embed(const QuantisedTableRows& call) {
    dependency_wait();
    dependency_launch();
    const QuantisedMatrix& table = call.table;
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

constexpr int FEW = 4, GEMV_ROWS = 8;  // most rows of gemv_few and of gemv
constexpr int MIN_BLOCKS = 2;          // of the three kernels on a multiprocessor

#define KERNELS(CODE, CHUNK, SCALE, MINIMUM, X)                                          \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)             \
    gemv_row_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X(QuantisedProduct product) {    \
        multiply_few<Format<CODE, CHUNK, SCALE, MINIMUM, X>, 1>(product);                \
    }                                                                                    \
    EXPORT(gemv_row_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X)                        \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)             \
    gemv_few_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X(QuantisedProduct product) {    \
        multiply_few<Format<CODE, CHUNK, SCALE, MINIMUM, X>, FEW>(product);              \
    }                                                                                    \
    EXPORT(gemv_few_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X)                        \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, MIN_BLOCKS)             \
    gemv_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X(QuantisedProduct product) {        \
        multiply_few<Format<CODE, CHUNK, SCALE, MINIMUM, X>, GEMV_ROWS>(product);        \
    }                                                                                    \
    EXPORT(gemv_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X)                            \
    extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, 1)                      \
    gemm_narrow_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X(QuantisedProduct product) { \
        multiply_narrow<Format<CODE, CHUNK, SCALE, MINIMUM, X>>(product);                \
    }                                                                                    \
    EXPORT(gemm_narrow_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X)                     \
    extern "C" __global__ void __launch_bounds__(Middle::threads, 2)                     \
    gemm_middle_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X(QuantisedProduct product) { \
        gemm<Format<CODE, CHUNK, SCALE, MINIMUM, X>, Middle>(product);                   \
    }                                                                                    \
    EXPORT(gemm_middle_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X)                     \
    extern "C" __global__ void __launch_bounds__(Wide::threads, 1)                       \
    gemm_wide_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X(QuantisedProduct product) {   \
        gemm<Format<CODE, CHUNK, SCALE, MINIMUM, X>, Wide>(product);                     \
    }                                                                                    \
    EXPORT(gemm_wide_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X)                       \
    extern "C" __global__ void __launch_bounds__(256)                                    \
    embed_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X(QuantisedTableRows rows) {        \
        embed<Format<CODE, CHUNK, SCALE, MINIMUM, X>>(rows);                             \
    }                                                                                    \
    EXPORT(embed_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X)
// For a model, its variants alone are compiled: -DVARIANT=code4,64,scale16,affine,bf16; otherwise those of the tests.
#define INSTANTIATE(...) KERNELS(__VA_ARGS__)
#ifdef VARIANT
INSTANTIATE(VARIANT)
#else
TESTED_VARIANTS(KERNELS)
KERNELS(code6, 16, nested, centred, bf16)
KERNELS(e4m3, 64, scale16, centred, fp8)
KERNELS(e4m3, 64, scale32, centred, fp8)
KERNELS(code6, 16, nested, centred, int8)
#endif
