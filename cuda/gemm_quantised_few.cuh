// Quantised GEMM of up to 8 rows of activations.
//
// An mma has 8 columns of x. They are ROWS rows in 8 / ROWS chunks, a unit: column n has row n % ROWS of chunk n /
// ROWS. In the mma of a chunk, x is 0 in the columns of the other chunks: it adds +0 to their sums, which does not
// change them. After a unit, a lane has the sums of 2 outputs in 2 columns. It loads and applies the scales of these
// only. For groups of 32, those of every chunk would be most of the instructions.
//
// Limit     bytes of w. A warp issues about 60, 90 and 100 instructions for a block of 64 columns of int4 with minima
//           and 8-bit activations, for ROWS = 1, 4 and 8; with bf16, 100, 120 and 130 (counted for NVRTC 13.0, sm_90a).
//           In the time of the block's bytes, a multiprocessor of an H100 can issue 170 (computed from its bandwidth).
#pragma once
#include "gemm_quantised.cuh"

DEVICE uint32_t value_or_zero(bool exists, uint32_t value) { return exists ? value : 0; }
DEVICE uint2 value_or_zero(bool exists, uint2 value) { return {exists ? value.x : 0, exists ? value.y : 0}; }

// Adds the products of the codes of a chunk of a block and `x`.
template <class F>
DEVICE void add_products(typename F::Sum (&chains)[4], const uint32_t* codes, int chunk,
                         const Four<F> (&x)[F::chunk / 16]) {
    constexpr int WIDTH = F::has_quantised_rows && F::chunk > 16 ? 2 : 1;  // fours of columns of an operand
#pragma unroll
    for (int m = 0; m < F::chunk / 16; m += WIDTH) {
        const int first = chunk * F::chunk / 16 + m;
        if constexpr (F::has_quantised_rows) {
            uint32_t w[2 * WIDTH], fours[WIDTH];
#pragma unroll
            for (int n = 0; n < WIDTH; n++) {
                w[2 * n] = F::Code::four(codes, first + n, 0), w[2 * n + 1] = F::Code::four(codes, first + n, 1);
                fours[n] = x[m + n];
            }
            mma_bytes(chains, w, fours);
        } else {
            uint32_t w[4];
#pragma unroll
            for (int r = 0; r < 4; r++) w[r] = F::Code::pair(codes, first, r);
            mma<bf16>(chains, w, {x[m].x, x[m].y});
        }
    }
}

// The columns of an mma: column n is row n % ROWS of x in chunk n / ROWS of a unit. A lane multiplies column `group`
// and has the sums of columns 2 quad and 2 quad + 1: of two chunks, or of two rows.
template <int ROWS>
struct UnitColumns {
    static_assert(8 % ROWS == 0, "a unit has whole chunks");
    static constexpr int chunks = 8 / ROWS;                // of a unit
    static constexpr int lane_chunks = ROWS == 1 ? 2 : 1;  // of a lane's sums
    static constexpr int lane_rows = 2 / lane_chunks;
    static constexpr int turns = chunks / lane_chunks;  // of the lanes of a quad, in which they add their chunks
    static constexpr int lanes = 4 / turns;             // adjacent lanes that take a turn together
    static DEVICE int chunk(int column) { return column / ROWS; }
    static DEVICE int row(int column) { return column % ROWS; }
};

// The part of a lane in a unit. Behind the last block, x and its scales are 0, and the scales of w are any.
template <class F, int ROWS>
struct LaneUnit {
    Four<F> x[F::chunk / 16];                              // of column `group`
    LaneScales<F, UnitColumns<ROWS>::lane_chunks> scales;  // of columns 2 quad and 2 quad + 1
    RowScale row_scales[2];                                // of x in these, if it is quantised
};

// Reads the part of a lane in the units of a tile. The blocks of a tile are in runs, which are unrolled: the first
// chunk of a unit in its run is a constant of the loads. Behind the last row are copies of it.
template <class F, int ROWS>
struct UnitReader {
    using Of = UnitColumns<ROWS>;
    static constexpr int RECORD = F::record_bytes / F::chunks;  // bytes of a chunk
    // Blocks that are loaded at a time, while as many are multiplied; blocks of a run.
    static constexpr int most = F::Code::bits == 4 && F::Scale::bytes < 4 ? 4 : 2;
    static constexpr int depth = ROWS == 1 && F::chunk > 16 ? most : most / 2;  // more rows take more registers
    static constexpr int blocks = 2 * depth * F::chunks < Of::chunks ? Of::chunks / F::chunks : 2 * depth;
    static_assert(SPLIT_BLOCKS % blocks == 0 && blocks % (2 * depth) == 0 && blocks * F::chunks % Of::chunks == 0);
    struct Run {
        int first_block, num_blocks;  // from the first one on
        const uint8_t *codes, *x, *row_scales[2], *scales;
    };
    const QuantisedProduct& call;
    Run first_run;
    const uint8_t* outers;
    int x_bytes, sums_block;  // the end of the row from `x` on; the block of column 2 `quad` in a unit

    DEVICE UnitReader(const QuantisedProduct& call, const uint8_t* tile, int group, int quad) : call(call) {
        const int count = count_blocks(call.w), chunk = Of::chunk(group);
        const uint8_t* const records = tile + size_t(count) * F::block_bytes;
        auto row_of = [&](int column) {
            return call.x + size_t(min(Of::row(column), call.rows - 1)) * row_bytes<F>(call.w);
        };
        const int in_row = chunk / F::chunks * X_BYTES<F> + four_byte<F>(chunk % F::chunks, 0, quad);
        x_bytes = int(row_bytes<F>(call.w)) - in_row;
        first_run = {0, count, tile, row_of(group) + in_row, {}, records + group * F::record_bytes};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int column = 2 * quad + i, of_column = Of::chunk(column);
            const uint8_t* const block = row_of(column) + of_column / F::chunks * X_BYTES<F>;
            first_run.row_scales[i] = block + row_scale_byte(of_column % F::chunks);
        }
        const int sums_chunk = Of::chunk(2 * quad);
        sums_block = sums_chunk / F::chunks;
        if (F::chunk < BLOCK)
            first_run.scales += sums_block * (8 * F::record_bytes) + sums_chunk % F::chunks * RECORD;
        outers = records + size_t(count_units<F>(call.w)) * (8 * F::record_bytes) + group * F::outer_bytes;
    }

    static DEVICE constexpr int row_scale_byte(int chunk) {
        return QUANTISED_BLOCK + chunk * F::chunk / QUANTISED_HALF * int(sizeof(RowScale));
    }

    DEVICE Run run_at(int index) const {
        Run run = first_run;
        run.first_block = index * blocks, run.num_blocks -= index * blocks;
        run.codes += size_t(unsigned(index)) * (blocks * F::block_bytes);
        const size_t x = size_t(unsigned(index)) * (blocks * X_BYTES<F>);
        run.x += x, run.row_scales[0] += x, run.row_scales[1] += x;
        if (F::chunk < BLOCK) run.scales += size_t(unsigned(index)) * (blocks * 8 * F::record_bytes);
        return run;
    }

    DEVICE void read_scales(LaneUnit<F, ROWS>& unit, const Run& run, int first) const {
        const int block = first / F::chunks + sums_block;
        if (block >= run.num_blocks) return;
        auto& words = unit.scales.scales;
        if constexpr (F::chunk < BLOCK) {
            const int record = first / F::chunks * (8 * F::record_bytes) + first % F::chunks * RECORD;
            load<Of::lane_chunks * RECORD>(words, run.scales + record);
        } else {
            auto record_of = [&](int any_block) {
                const unsigned group = (run.first_block + any_block) * BLOCK >> call.w.group_shift;
                return run.scales + size_t(group) * (8 * RECORD);
            };
            load<RECORD>(words, record_of(block));
            if constexpr (Of::lane_chunks == 2) {
                const uint8_t* const second = record_of(min(block + 1, run.num_blocks - 1));
                if constexpr (RECORD < 4)
                    words[0] |= uint32_t(*reinterpret_cast<const uint16_t*>(second)) << 16;
                else
                    load<RECORD>(words + RECORD / 4, second);
            }
        }
        if constexpr (F::is_nested) {
            const unsigned outer = (run.first_block + block) / (OUTER_GROUP / BLOCK);
            load<F::outer_bytes>(unit.scales.outers, outers + outer * (8 * F::outer_bytes));
        }
    }

    DEVICE void read_x(LaneUnit<F, ROWS>& unit, const Run& run, int first) const {
        const int block = first / F::chunks, in_run = block * X_BYTES<F>;
        const int bytes = x_bytes - run.first_block * X_BYTES<F>;
        read_chunk<F>(unit.x, first % F::chunks, 0, [&](auto zero, int byte) {
            const bool exists = in_run + byte < bytes;
            return exists ? *reinterpret_cast<const decltype(zero)*>(run.x + in_run + byte) : zero;
        });
        if constexpr (F::has_quantised_rows)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                // Two chunks of 64 columns are in two blocks.
                const int next_block = F::chunk == BLOCK && Of::lane_chunks == 2 ? i : 0;
                unit.row_scales[i] = {0, 0};
                if (block + sums_block + next_block >= run.num_blocks) continue;
                const uint8_t* const from = run.row_scales[i] + in_run;
                if constexpr (F::chunk == BLOCK) {
                    const auto halves = *reinterpret_cast<const Values<RowScale, 2>*>(from);
                    const float sum = halves.values[0].scaled_sum + halves.values[1].scaled_sum;
                    unit.row_scales[i] = {halves.values[0].scale, sum};
                } else {
                    constexpr int FIRST = row_scale_byte(0);
                    const int byte = row_scale_byte(first % F::chunks) - FIRST;
                    unit.row_scales[i] = *reinterpret_cast<const RowScale*>(from + byte);
                }
            }
    }
};

// The sums of a lane in a split, by output and row. Of a chunk of quantised rows that is several blocks: its chains
// and the sums of x so far.
template <class F, int ROWS>
struct FewSums {
    static constexpr int rows = UnitColumns<ROWS>::lane_rows;
    float d[2][rows];
    typename F::Sum chains[2][rows];
    float scaled_sums[rows];
};

// Adds the sums of a unit, in the order of its chunks: the lanes of a quad that have the same rows take turns.
template <class F, int ROWS>
DEVICE void add_unit(FewSums<F, ROWS>& to, const QuantisedProduct& call, const LaneUnit<F, ROWS>& unit,
                     const typename F::Sum (&chains)[4], int first, int quad) {
    using Of = UnitColumns<ROWS>;
    constexpr bool HAS_ROW_SCALES = F::has_quantised_rows, MAY_CONTINUE = HAS_ROW_SCALES && F::chunk == BLOCK;
    Factors factors[Of::lane_chunks];
    factors_of_chunks<F>(factors, call.w, unit.scales);
#pragma unroll
    for (int c = 0; c < Of::lane_chunks; c++)  // infinite factors times 0 would not be 0
        if ((first + Of::chunk(2 * quad) + c) / F::chunks >= count_blocks(call.w)) factors[c] = {};
    float scales[2][2], sums[2] = {};  // of the columns: by output; of x
    bool is_end[2] = {true, true};
#pragma unroll
    for (int i = 0; i < 2; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float scale = factors[i % Of::lane_chunks].scale[half];
            scales[i][half] = HAS_ROW_SCALES ? __fmul_rn(scale * F::four_step, unit.row_scales[i].scale) : scale;
        }
        if constexpr (HAS_ROW_SCALES) sums[i] = unit.row_scales[i].scaled_sum;
        if constexpr (MAY_CONTINUE) is_end[i] = ends_chunk<F>(call, first + Of::chunk(2 * quad + i));
    }
    if constexpr (F::has_minima && !HAS_ROW_SCALES) {
        float d[4] = {};
#pragma unroll
        for (const uint2& four : unit.x) mma<bf16>(d, {four.x, 0, four.y, 0}, {ONES, ONES});
#pragma unroll
        for (int i = 0; i < 2; i++) sums[i] = __shfl_sync(ALL_LANES, d[0], 4 * (2 * quad + i));
    }
#pragma unroll
    for (int turn = 0; turn < Of::turns; turn++) {
        FewSums<F, ROWS> next = to;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = i % Of::lane_rows;
            float& sum = next.scaled_sums[row];
            sum = MAY_CONTINUE ? sum + sums[i] : sums[i];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                typename F::Sum chain = chains[2 * half + i];
                if constexpr (MAY_CONTINUE && Of::turns > 1) chain += next.chains[half][row];
                float d = __fmaf_rn(scales[i][half], chain, next.d[half][row]);
                if constexpr (F::has_minima) d = __fmaf_rn(factors[i % Of::lane_chunks].minimum[half], sum, d);
                if (is_end[i]) next.d[half][row] = d;
                next.chains[half][row] = is_end[i] ? 0 : chain;
            }
            if (is_end[i]) sum = 0;
        }
        auto from_turn = [&](auto value) {
            if constexpr (Of::turns == 1) return value;
            return __shfl_sync(ALL_LANES, value, turn * Of::lanes + quad % Of::lanes, 4);
        };
#pragma unroll
        for (int row = 0; row < Of::lane_rows; row++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                to.d[half][row] = from_turn(next.d[half][row]);
                if constexpr (MAY_CONTINUE) to.chains[half][row] = from_turn(next.chains[half][row]);
            }
            if constexpr (MAY_CONTINUE && F::has_minima) to.scaled_sums[row] = from_turn(next.scaled_sums[row]);
        }
    }
}

// A chunk of two blocks of e4m3: the chains of the first one go on in the columns of the second one, which is chunk
// `second` of a unit.
template <int ROWS>
DEVICE void move_chains(float (&chains)[4], int second, int quad) {
    using Of = UnitColumns<ROWS>;
    if constexpr (ROWS == 1) {
        if (quad == second / 2) chains[1] = chains[0], chains[3] = chains[2], chains[0] = chains[2] = 0;
    } else {
#pragma unroll
        for (float& chain : chains) {
            const float before = __shfl_sync(ALL_LANES, chain, quad - Of::lanes, 4);
            if (quad / Of::lanes == second) chain = before;
        }
#pragma unroll
        for (float& chain : chains)
            if (quad / Of::lanes == second - 1) chain = 0;
    }
}

// Grid (outputs / 16), rounded up; a warp per split, at most 8 warps. No more than ROWS rows.
template <class F, int ROWS>
DEVICE void multiply_few(const QuantisedProduct& call) {
    using Of = UnitColumns<ROWS>;
    using Reader = UnitReader<F, ROWS>;
    constexpr int DEPTH = Reader::depth, BLOCKS = Reader::blocks, CHUNKS = BLOCKS * F::chunks;
    constexpr int RUNS = SPLIT_BLOCKS / BLOCKS;  // of a split
    __shared__ float sums[2][MAX_WARPS][ROWS][TILE_OUTPUTS];  // rounds alternate
    const QuantisedMatrix& matrix = call.w;
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    const int num_splits = ceil_div(count_blocks(matrix), SPLIT_BLOCKS);
    const Reader reader(call, tile_of<F>(matrix, blockIdx.x), group, quad);

    struct Part {
        LaneBlock<F> blocks[DEPTH];
    };
    Part parts[2] = {};
    auto load = [&](Part& part, const typename Reader::Run& run, int block) {
#pragma unroll
        for (int n = block; n < block + DEPTH; n++)
            if (n < run.num_blocks) load_codes(part.blocks[n % DEPTH], run.codes + n * F::block_bytes, lane);
    };

    auto run = reader.run_at(warp * RUNS);
    LaneUnit<F, ROWS> unit = {};
    load(parts[0], run, 0);
    load(parts[1], run, DEPTH);
    reader.read_scales(unit, run, 0);
    dependency_wait();
    dependency_launch();
    reader.read_x(unit, run, 0);
    // The first warp adds the splits: lane l has output l % 16 of rows l / 16, l / 16 + 2, ..
    constexpr int LANE_ROWS = (ROWS + 1) / 2;
    const int output = lane % TILE_OUTPUTS, first_row = lane / TILE_OUTPUTS;
    float totals[LANE_ROWS] = {};
    for (int first = 0, round = 0; first < num_splits; first += num_warps, round ^= 1) {
        const int split = first + warp;
        if (split < num_splits) {
            FewSums<F, ROWS> of_split = {};
#pragma unroll 1
            for (int i = 0; i < RUNS && run.num_blocks > 0; i++) {
                const int after = i + 1 < RUNS ? split * RUNS + i + 1 : (split + num_warps) * RUNS;
                const auto following = reader.run_at(after);
#pragma unroll
                for (int first_chunk = 0; first_chunk < CHUNKS; first_chunk += Of::chunks) {
                    LaneUnit<F, ROWS> next = unit;
                    const int next_chunk = first_chunk + Of::chunks;
                    const auto& run_of_next = next_chunk < CHUNKS ? run : following;
                    reader.read_scales(next, run_of_next, next_chunk % CHUNKS);
                    reader.read_x(next, run_of_next, next_chunk % CHUNKS);
                    typename F::Sum chains[4] = {};
                    // Continues the chains of a chunk from the unit before. With several turns, add_unit does this.
                    if constexpr (Of::turns == 1)
#pragma unroll
                        for (int e = 0; e < 4; e++) chains[e] = of_split.chains[e / 2][e % 2];
#pragma unroll
                    for (int n = 0; n < Of::chunks; n++) {
                        const int chunk = first_chunk + n, block = chunk / F::chunks;
                        Part& part = parts[block / DEPTH % 2];
                        if constexpr (F::has_quantised_rows && F::Code::centre == 0)
                            if (n % 2 == 1 && chunk_blocks<F>(call) == 2 && block < run.num_blocks)
                                move_chains<ROWS>(chains, n, quad);
                        Four<F> x[F::chunk / 16];
#pragma unroll
                        for (int m = 0; m < F::chunk / 16; m++) x[m] =
                            value_or_zero(Of::chunks == 1 || Of::chunk(group) == n, unit.x[m]);
                        add_products<F>(chains, part.blocks[block % DEPTH].codes, chunk % F::chunks, x);
                        if ((chunk + 1) % (DEPTH * F::chunks) != 0) continue;
                        const int ahead = block + 1 + DEPTH;
                        load(part, ahead < BLOCKS ? run : following, ahead % BLOCKS);
                    }
                    add_unit<F>(of_split, call, unit, chains, run.first_block * F::chunks + first_chunk, quad);
                    unit = next;
                }
                run = following;
            }
            if (quad < Of::lanes)
#pragma unroll
                for (int i = 0; i < Of::lane_rows; i++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        sums[round][warp][quad * Of::lane_rows + i][group + 8 * half] = of_split.d[half][i];
        }
        // One barrier for a round: the next one precedes other sums in the same place, and follows their reads here.
        __syncthreads();
        if (warp == 0) {
            const int count = min(num_warps, num_splits - first);
            for (int k = 0; k < count; k++)
#pragma unroll
                for (int i = 0; i < LANE_ROWS; i++) totals[i] += sums[round][k][(first_row + 2 * i) % ROWS][output];
        }
    }
    const int first_output = blockIdx.x * TILE_OUTPUTS;
    if (warp > 0 || first_output + output >= matrix.rows) return;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        const int row = first_row + 2 * i;
        if (row < call.rows) finish(call, row, first_output + output, totals[i]);
    }
}
