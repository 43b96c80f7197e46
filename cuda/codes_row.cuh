// The product of one row of activations and a matrix of codes.
//
// An mma has room for 8 rows. Here its 8 columns of x are one row, in 8 chunks: in the mma of a chunk, the other
// columns are 0, so that their sums keep their bits. After 8 chunks, a unit, a lane has the sums of 2 outputs in chunks
// 2 quad and 2 quad + 1, and reads and applies the scales of these only. A kernel of 8 rows applies those of every
// chunk, which for groups of 32 are most of its instructions: for int4 with minima, a block of 64 columns takes a warp
// 180 instructions there and about 60 here with 8-bit activations, 190 and 100 with bf16.
//
// Limit     bytes of w, if these instructions are fewer than a multiprocessor issues in the time: about 170 (an H100).
#pragma once
#include "codes_product.cuh"

constexpr int MAX_WARPS = 8;

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

// The part of a lane in a unit. Behind the last block, x and the spans are 0.
template <class F>
struct LaneUnit {
    static constexpr int chunks = 8, blocks = chunks / F::chunks;
    Four<F> x[F::chunk / 16];  // of chunk `group`
    LaneScales<F, 2> scales;   // of chunks 2 quad and 2 quad + 1
    Span spans[2];             // of x in these, if it is quantised
};

// Reads the units of a tile, each by its first block.
template <class F>
struct UnitReader {
    static constexpr int RECORD = F::record_bytes / F::chunks;  // bytes of a chunk
    const CodesProduct& call;
    int num_blocks, group, quad, scales_block;  // the block of chunk 2 quad in a unit
    const uint8_t *scales, *outers;

    DEVICE UnitReader(const CodesProduct& call, const uint8_t* tile, int group, int quad)
        : call(call), num_blocks(count_blocks(call.w)), group(group), quad(quad), scales_block(2 * quad / F::chunks) {
        const uint8_t* const records = tile + size_t(num_blocks) * F::block_bytes;
        scales = records + group * F::record_bytes + 2 * quad % F::chunks * RECORD;
        outers = records + size_t(count_units<F>(call.w)) * (8 * F::record_bytes) + group * F::outer_bytes;
    }

    DEVICE const uint8_t* record(int block) const {
        const unsigned unit = F::chunk < BLOCK ? block : block * BLOCK >> call.w.group_shift;
        return scales + size_t(unit) * (8 * F::record_bytes);
    }

    DEVICE void read_scales(LaneUnit<F>& unit, int first_block) const {
        const int block = first_block + scales_block;
        if (block >= num_blocks) return;
        uint32_t(&words)[2 * RECORD / 4] = unit.scales.scales;
        if constexpr (F::chunk < BLOCK) {
            load<2 * RECORD>(words, record(block));
        } else {
            const uint8_t* const second = record(min(block + 1, num_blocks - 1));
            load<RECORD>(words, record(block));
            if constexpr (RECORD < 4)
                words[0] |= uint32_t(*reinterpret_cast<const uint16_t*>(second)) << 16;
            else
                load<RECORD>(words + RECORD / 4, second);
        }
        if constexpr (F::is_nested)
            load<F::outer_bytes>(unit.scales.outers, outers + block / (OUTER_GROUP / BLOCK) * (8 * F::outer_bytes));
    }

    DEVICE Values<Span, 2> spans_of(int block) const {
        return *reinterpret_cast<const Values<Span, 2>*>(call.x + size_t(unsigned(block)) * X_BYTES<F> +
                                                         QUANTISED_BLOCK);
    }
    DEVICE void read_x(LaneUnit<F>& unit, int first_block) const {
        const unsigned x_block = first_block + group / F::chunks;
        const int bytes = int(row_bytes<F>(call.w)) - int(x_block) * X_BYTES<F>;
        const uint8_t* const x = call.x + size_t(x_block) * X_BYTES<F>;
        read_chunk<F>(unit.x, group % F::chunks, quad, [&](auto zero, int byte) {
            return byte < bytes ? *reinterpret_cast<const decltype(zero)*>(x + byte) : zero;
        });
        if constexpr (F::has_quantised_rows) {
            const int block = first_block + scales_block;
            unit.spans[0] = unit.spans[1] = {0, 0};
#pragma unroll
            for (int i = 0; i < (F::chunk < BLOCK ? 1 : 2); i++) {
                if (block + i >= num_blocks) continue;
                const Values<Span, 2> spans = spans_of(block + i);
                const Span &first = spans.values[0], &second = spans.values[1];
                if constexpr (F::chunk == BLOCK) unit.spans[i] = {first.scale, first.scaled_sum + second.scaled_sum};
                if constexpr (F::chunk == 32) unit.spans[0] = first, unit.spans[1] = second;
                if constexpr (F::chunk == 16) unit.spans[0] = unit.spans[1] = quad % 2 ? second : first;
            }
        }
    }
};

// The sums of the two outputs of a lane in a segment. Of a chunk of quantised rows that is several blocks: its chains
// and the sum of x so far.
template <class F>
struct RowSums {
    float d[2];
    typename F::Sum chains[2];
    float scaled_sum;
};

// Adds the sums of a unit, in the order of its chunks: the lanes of a quad take turns.
template <class F>
DEVICE void add_unit(RowSums<F>& to, const CodesProduct& call, const LaneUnit<F>& unit,
                     const typename F::Sum (&chains)[4], int first_block, int quad) {
    constexpr bool HAS_SPANS = F::has_quantised_rows, MAY_CONTINUE = HAS_SPANS && F::chunk == BLOCK;
    constexpr float STEP = 1.f / (1 << (8 - F::Code::bits));  // of `four`
    Factors factors[2];
    factors_of_chunks<F>(factors, call.w, unit.scales);
    float sums[2] = {};
    bool is_end[2] = {true, true};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if constexpr (HAS_SPANS) {
#pragma unroll
            for (float& scale : factors[i].scale) scale = __fmul_rn(scale * STEP, unit.spans[i].scale);
            sums[i] = unit.spans[i].scaled_sum;
        }
        if constexpr (MAY_CONTINUE) {
            const int next = first_block + 2 * quad + i + 1;
            is_end[i] = (next & (chunk_blocks<F>(call) - 1)) == 0 || next == count_blocks(call.w);
        }
    }
    if constexpr (F::has_minima && !HAS_SPANS) {
        float d[4] = {};
#pragma unroll
        for (const uint2& four : unit.x) mma<bf16>(d, {four.x, 0, four.y, 0}, {ONES, ONES});
#pragma unroll
        for (int i = 0; i < 2; i++) sums[i] = __shfl_sync(ALL_LANES, d[0], 4 * (2 * quad + i));
    }
#pragma unroll
    for (int turn = 0; turn < 4; turn++) {
        RowSums<F> next = to;
        auto from_turn = [&](auto value) { return __shfl_sync(ALL_LANES, value, turn, 4); };
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (MAY_CONTINUE) next.scaled_sum += sums[i];
            const float sum = MAY_CONTINUE ? next.scaled_sum : sums[i];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                typename F::Sum chain = chains[2 * half + i];
                if constexpr (MAY_CONTINUE) chain += next.chains[half];
                float d = __fmaf_rn(factors[i].scale[half], chain, next.d[half]);
                if constexpr (F::has_minima) d = __fmaf_rn(factors[i].minimum[half], sum, d);
                if (is_end[i]) next.d[half] = d;
                next.chains[half] = is_end[i] ? 0 : chain;
            }
            if (is_end[i]) next.scaled_sum = 0;
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            to.d[half] = from_turn(next.d[half]);
            if constexpr (MAY_CONTINUE) to.chains[half] = from_turn(next.chains[half]);
        }
        if constexpr (MAY_CONTINUE && F::has_minima) to.scaled_sum = from_turn(next.scaled_sum);
    }
}

// Grid (outputs / 16), rounded up; a warp per segment, at most 8 warps.
template <class F>
DEVICE void multiply_row(const CodesProduct& call) {
    using Unit = LaneUnit<F>;
    constexpr int MOST = F::Code::bits == 8 ? 2 : 4, DEPTH = Unit::blocks < MOST ? Unit::blocks : MOST;
    static_assert(SEGMENT_BLOCKS % (2 * DEPTH) == 0, "a segment ends with the second part of two");
    __shared__ float sums[2][MAX_WARPS][TILE_OUTPUTS];  // of every other round
    const Codes& codes = call.w;
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int warp = threadIdx.x / 32, num_warps = blockDim.x / 32;
    const int num_blocks = count_blocks(codes), num_segments = ceil_div(num_blocks, SEGMENT_BLOCKS);
    const uint8_t* tile = tile_of<F>(codes, blockIdx.x);
    const UnitReader<F> reader(call, tile, group, quad);

    struct Part {
        LaneBlock<F> blocks[DEPTH];
    };
    Part parts[2] = {};
    auto load = [&](Part& part, int block) {
#pragma unroll
        for (int n = 0; n < DEPTH; n++)
            if (block + n < num_blocks)
                load_codes(part.blocks[n], tile + size_t(unsigned(block)) * F::block_bytes + n * F::block_bytes, lane);
    };

    Unit unit = {};
    load(parts[0], warp * SEGMENT_BLOCKS);
    load(parts[1], warp * SEGMENT_BLOCKS + DEPTH);
    reader.read_scales(unit, warp * SEGMENT_BLOCKS);
    dependency_wait();
    dependency_launch();
    reader.read_x(unit, warp * SEGMENT_BLOCKS);
    float total = 0;  // of output `threadIdx.x`, for the first threads
    for (int first = 0, round = 0; first < num_segments; first += num_warps, round ^= 1) {
        const int segment = first + warp;
        if (segment < num_segments) {
            RowSums<F> of_segment = {};
            // The block that is `n` blocks behind the first one of this segment, in the order of this warp.
            auto block_at = [&](int n) {
                return n < SEGMENT_BLOCKS ? segment * SEGMENT_BLOCKS + n
                                          : (segment + num_warps) * SEGMENT_BLOCKS + n - SEGMENT_BLOCKS;
            };
#pragma unroll
            for (int first_block = 0; first_block < SEGMENT_BLOCKS; first_block += Unit::blocks) {
                Unit next = unit;
                reader.read_scales(next, block_at(first_block + Unit::blocks));
                reader.read_x(next, block_at(first_block + Unit::blocks));
                typename F::Sum chains[4] = {};
#pragma unroll
                for (int n = 0; n < Unit::blocks; n++) {
                    const int block = first_block + n;
                    Part& part = parts[block / DEPTH % 2];
#pragma unroll
                    for (int chunk = 0; chunk < F::chunks; chunk++) {
                        const int column = n * F::chunks + chunk;
                        // The chain of a chunk of two blocks of e4m3 goes on in the second one.
                        if constexpr (F::has_quantised_rows && F::Code::centre == 0)
                            if (column % 2 == 1 && quad == column / 2 && chunk_blocks<F>(call) == 2 &&
                                block_at(block) < num_blocks)
                                chains[1] = chains[0], chains[3] = chains[2], chains[0] = chains[2] = 0;
                        Four<F> x[F::chunk / 16];
#pragma unroll
                        for (int m = 0; m < F::chunk / 16; m++) x[m] = value_or_zero(group == column, unit.x[m]);
                        add_products<F>(chains, part.blocks[block % DEPTH].codes, chunk, x);
                    }
                    if ((block + 1) % DEPTH == 0) load(part, block_at(block + 1 + DEPTH));
                }
                add_unit<F>(of_segment, call, unit, chains, block_at(first_block), quad);
                unit = next;
            }
            if (quad == 0) {
                sums[round][warp][group] = of_segment.d[0];
                sums[round][warp][group + 8] = of_segment.d[1];
            }
        }
        __syncthreads();
        if (threadIdx.x < TILE_OUTPUTS) {
            const int count = min(num_warps, num_segments - first);
            for (int k = 0; k < count; k++) total += sums[round][k][threadIdx.x];
        }
    }
    const int output = blockIdx.x * TILE_OUTPUTS + threadIdx.x;
    if (threadIdx.x < TILE_OUTPUTS && output < codes.rows) finish(call, 0, output, total);
}
