// Quantised GEMM (gemm_quantised.cuh) by wgmma, in the order of gemm_quantised.cu: for sm_90a, and as many rows as make
// it faster than `middle` of gemm_quantised.cu.
//
// Operands  The first operand is the codes, which each lane unpacks into registers, as quantised_matrix.cuh packs them.
//           The second one is x, in shared memory. The registers of a lane hold other columns than wgmma expects, so x
//           is permuted accordingly when it is copied, in quarters of 16-byte words. Quarter i of a row of a stage goes
//           to
//
//               8-bit integers    i = 8 a + 2 quad + b            to    8 a + 4 b + quad
//               bf16              i = 16 a + 4 quad + b           to    16 a + 4 b + quad
//
// Tiles     of 128 outputs, 64 for each of two groups of four warps, and 128 rows. (With 64 rows, it takes longer than
//           `middle` for every size.) A stage has 128 bytes of a row of x: a block of 64 columns of bf16, or two blocks
//           of 8-bit integers, with their codes. cp.async copies it.
// Slices    The columns of a chunk in a block are a slice: its products are begun together. If the chunk ends with it,
//           its chains are scaled and added before the products of the next slice begin. In the meantime, the tensor
//           cores compute those of the other group.
// Limits    Few rows: bytes of w. Many rows: flops of the tensor cores, or of the other units: for each sum and chunk,
//           bf16 takes one fused multiply-add, two with minima; 8-bit integers a conversion and a multiplication more.
//           For 128 columns in groups of 32, with minima and integers, that is 16 operations instead of 3. On an H100,
//           512 rows x 28672 outputs x 4096 columns take 797 us for int4 with minima and bf16, 851 us for int4 with
//           minima and integers, 461 us for int8: 0.82, 0.98 and 0.83 of the time of `middle`.
// Sources   PTX ISA, "Asynchronous warpgroup level matrix instructions" (first operand in registers); Frantar et al.,
//           "MARLIN", section 3 (codes in the order of the operands); gemm_quantised.cuh.
#include "gemm_quantised.cuh"
#include "product.cuh"
#include "warpgroup.cuh"

// The type of the operands.
template <bool IS_QUANTISED>
struct OperandOf {
    using Type = bf16;
};
template <>
struct OperandOf<true> {
    using Type = int8_t;
};

struct Tile {
    static constexpr int warps = 8, threads = 32 * warps, outputs = warps * TILE_OUTPUTS, rows = 128;
};

// The factors of a row of x for a chunk: of the chain, its scale; of the minimum of w, the scaled sum.
struct __align__(8) RowFactors {
    float scale, sum;
};
struct __align__(16) RowScales {
    RowScale halves[2];
};

// The stages of a block.
template <class F>
struct Ring {
    static constexpr int blocks = F::has_quantised_rows ? 2 : 1, stages = F::has_quantised_rows ? 4 : 6;
    static constexpr int slices = blocks * F::chunks, parts = 4 / slices;  // parts of 32 bytes, of a slice
    uint4 x[stages][Tile::rows][TILE_WORDS], w[stages][blocks][Tile::warps][F::block_bytes / 16];
};
// The scales of x in the stages, if it has any.
template <class F, bool = F::has_quantised_rows>
struct StageRowScales {};
template <class F>
struct StageRowScales<F, true> {
    using Stages = Ring<F>;
    RowScales row_scales[Stages::stages][Stages::blocks][Tile::rows];
};
// The factors of the slices of this stage and the one before it, if they are needed.
template <class F, bool = F::has_quantised_rows || F::has_minima>
struct SliceFactors {
    static constexpr bool has_factors = false;
};
template <class F>
struct SliceFactors<F, true> {
    static constexpr bool has_factors = true;
    RowFactors factors[2][Ring<F>::slices][Tile::rows];
};
// Dynamic shared memory.
template <class F>
struct Shared : Ring<F>, StageRowScales<F>, SliceFactors<F> {
    float4 totals[Tile::rows / 8][Tile::threads];  // of each thread
};

// The place of a quarter of a word in a row of a stage.
template <class F>
DEVICE int place_of_quarter(int quarter) {
    if constexpr (F::has_quantised_rows) return (quarter & ~7) + quarter % 2 * 4 + quarter % 8 / 2;
    return (quarter & ~15) + quarter % 4 * 4 + quarter % 16 / 4;
}

// The quarter at a place of a row of x.
template <class Row>
DEVICE uint32_t quarter_at(const Row& x, int row, int place) {
    return reinterpret_cast<const uint32_t*>(&x[row][place_of_word<TILE_WORDS>(row, place / 4)])[place % 4];
}

// Copies stages of a tile of x, with their scales, and of w.
template <class F>
struct StageCopy {
    using Memory = Shared<F>;
    static constexpr int BLOCKS = Memory::blocks, ROWS_APART = Tile::threads / 32;
    static_assert(ROWS_APART == 8, "the rows of a thread have their words at the same place");
    const QuantisedProduct& call;
    const uint8_t *tile, *from;  // the tile of w of this warp; the quarter of this thread in its first row and block
    int first_row, num_blocks, quarter;

    DEVICE StageCopy(const QuantisedProduct& call, TilePlace place) : call(call), first_row(place.row) {
        num_blocks = count_blocks(call.w);
        quarter = threadIdx.x % 32;
        const int warp = threadIdx.x / 32, last = (call.w.rows - 1) / TILE_OUTPUTS;
        tile = tile_of<F>(call.w, min(place.output / TILE_OUTPUTS + warp, last));
        from = call.x + (first_row + warp) * row_bytes<F>(call.w);
        from += quarter / (32 / BLOCKS) * X_BYTES<F> + quarter % (32 / BLOCKS) * 4;
    }

    DEVICE void copy_codes(Memory& to, int stage, int slot) const {
        if (stage * BLOCKS >= num_blocks) return;
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
            // The block behind the last one is multiplied by zeros.
            const uint8_t* codes = tile + min(stage * BLOCKS + b, num_blocks - 1) * F::block_bytes;
#pragma unroll
            for (int n = lane; n < F::block_bytes / 16; n += 32)
                copy_async<16>(&to.w[slot][b][warp][n], codes + n * 16);
        }
    }

    DEVICE void copy_x(Memory& to, int stage, int slot) const {
        const int block = stage * BLOCKS + quarter / (32 / BLOCKS);
        const bool has_columns =
            F::has_quantised_rows ? block < num_blocks : block * BLOCK + quarter * 2 < call.w.columns;
        const uint8_t* source = from + stage * BLOCKS * X_BYTES<F>;
        const int first = threadIdx.x / 32, place = place_of_quarter<F>(quarter);
        uint4* const word = &to.x[slot][first][place_of_word<TILE_WORDS>(first, place / 4)];
#pragma unroll
        for (int n = 0; n < Tile::rows / ROWS_APART; n++) {
            const bool exists = has_columns && first_row + first + n * ROWS_APART < call.rows;
            uint32_t* const target = reinterpret_cast<uint32_t*>(word + n * ROWS_APART * TILE_WORDS) + place % 4;
            copy_async<4>(target, exists ? source + n * ROWS_APART * row_bytes<F>(call.w) : call.x, exists ? 4 : 0);
        }
        if constexpr (F::has_quantised_rows) {
            const int row = threadIdx.x;
#pragma unroll
            for (int b = 0; b < BLOCKS; b++) {
                if (row >= Tile::rows) break;
                const int block = stage * BLOCKS + b;
                const bool exists = block < num_blocks && first_row + row < call.rows;
                const uint8_t* source = call.x + (first_row + row) * row_bytes<F>(call.w) + block * X_BYTES<F> + BLOCK;
                copy_async<16>(&to.row_scales[slot][b][row], exists ? source : call.x, exists ? 16 : 0);
            }
        }
        copy_commit();
    }
};

// The factors of the rows for the slices of a stage. The sums of x are those of gemm_quantised.cu: chains of products
// with ones, or, of quantised rows, the sums of the blocks of the chunk in order, of which `scaled_sum` has those
// before.
template <class F, class IsEnd>
DEVICE void find_factors(Shared<F>& shared, int stage, int slot, float& scaled_sum, IsEnd is_end) {
    using Memory = Shared<F>;
    RowFactors(&to)[Memory::slices][Tile::rows] = shared.factors[stage % 2];
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    if constexpr (F::has_quantised_rows) {
        const int row = threadIdx.x;
        if (row >= Tile::rows) return;
#pragma unroll
        for (int slice = 0; slice < Memory::slices; slice++) {
            const RowScale(&halves)[2] = shared.row_scales[slot][slice / F::chunks][row].halves;
            const int chunk = slice % F::chunks;
            scaled_sum += F::chunks > 1 ? halves[chunk].scaled_sum : halves[0].scaled_sum + halves[1].scaled_sum;
            if (!is_end(slice)) continue;
            to[slice][row] = {halves[F::chunks > 1 ? chunk : 0].scale, scaled_sum};
            scaled_sum = 0;
        }
    } else {
        if (warp >= Tile::rows / 16) return;
#pragma unroll
        for (int slice = 0; slice < Memory::slices; slice++) {
            float d[4] = {};
#pragma unroll
            for (int part = slice * Memory::parts; part < (slice + 1) * Memory::parts; part++) {
                uint32_t a[4];
#pragma unroll
                for (int r = 0; r < 4; r++)
                    a[r] = quarter_at(shared.x[slot], warp * 16 + group + r % 2 * 8, part * 8 + r / 2 * 4 + quad);
                mma<bf16>(d, a, {ONES, ONES});
            }
            if (quad != 0) continue;
            to[slice][warp * 16 + group] = {1, d[0]};
            to[slice][warp * 16 + group + 8] = {1, d[2]};
        }
    }
}

// Adds the chains of a chunk to the sums of its split. `rows` are the factors, if there are any.
template <class F, int N>
DEVICE void add_chunk(float (&sums)[N][4], typename F::Sum (&chains)[N][4], const Factors& factors,
                      const RowFactors* rows) {
#pragma unroll
    for (int j = 0; j < N; j++) {
        RowFactors pair[2] = {};
        if constexpr (F::has_quantised_rows || F::has_minima) {
            const float4 both = *reinterpret_cast<const float4*>(rows + j * 8 + threadIdx.x % 4 * 2);
            pair[0] = {both.x, both.y}, pair[1] = {both.z, both.w};
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float scale = factors.scale[e / 2];
            if constexpr (F::has_quantised_rows) scale = __fmul_rn(scale * F::four_step, pair[e % 2].scale);
            sums[j][e] = __fmaf_rn(scale, chains[j][e], sums[j][e]);
            if constexpr (F::has_minima) sums[j][e] = __fmaf_rn(factors.minimum[e / 2], pair[e % 2].sum, sums[j][e]);
        }
    }
}

// Unpacks the codes of block `number` of a stage to operands.
template <class F>
DEVICE void unpack(uint32_t (&operands)[4][4], int number, const uint8_t* codes, int lane) {
    LaneBlock<F> block;
    load_codes(block, codes, lane);
    constexpr int BLOCK_PARTS = F::has_quantised_rows ? 2 : 4;
#pragma unroll
    for (int part = 0; part < BLOCK_PARTS; part++)
#pragma unroll
        for (int r = 0; r < 4; r++)
            operands[number * BLOCK_PARTS + part][r] = F::has_quantised_rows
                                                     ? F::Code::four(block.codes, 2 * part + r / 2, r % 2)
                                                     : F::Code::pair(block.codes, part, r);
}

// Grid (tiles).
template <class F>
DEVICE void gemm(const QuantisedProduct& call) {
    using Memory = Shared<F>;
    using Operand = typename OperandOf<F::has_quantised_rows>::Type;
    constexpr int STAGES = Memory::stages, BLOCKS = Memory::blocks, SLICES = Memory::slices, PARTS = Memory::parts;
    constexpr int TILES = Tile::rows / 8;
    Memory& shared = *reinterpret_cast<Memory*>(first_tile());
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const TilePlace place = place_of_block<Tile>(call.rows, call.w.rows);
    const StageCopy<F> copy(call, place);
    const int num_blocks = copy.num_blocks, num_stages = ceil_div(num_blocks, BLOCKS);
    using Scales = LaneBlock<F>[BLOCKS];  // without codes
    auto load = [&](Scales& scales, int stage) {
#pragma unroll
        for (int b = 0; b < BLOCKS; b++)
            if (stage * BLOCKS + b < num_blocks) load_scales(scales[b], call.w, copy.tile, stage * BLOCKS + b, lane);
    };

    Scales scales = {};
    for (int stage = 0; stage < STAGES - 2; stage++) copy.copy_codes(shared, stage, stage);
    dependency_wait();
    dependency_launch();
    for (int stage = 0; stage < STAGES - 2; stage++) copy.copy_x(shared, stage, stage);
    typename F::Sum chains[TILES][4] = {};
    float sums[TILES][4] = {}, scaled_sum = 0;
    uint32_t operands[4][4];
#pragma unroll
    for (int j = 0; j < TILES; j++) shared.totals[j][threadIdx.x] = {0, 0, 0, 0};

    bool is_new = true;  // the next products begin a chunk
    auto block_of = [&](int stage, int slice) { return stage * BLOCKS + slice / F::chunks; };
    auto is_end = [&](int block) {
        if (!F::has_quantised_rows || F::chunks > 1) return true;
        return ends_chunk<F>(call, block);
    };
    // After a slice: waits for the products, if the stage or a chunk ends with it, and adds the chains of the chunk.
    auto end_slice = [&](int stage, int slice, const LaneBlock<F>& scales) {
        const int block = block_of(stage, slice), chunk = slice % F::chunks;
        const bool has_chunk = stage >= 0 && block < num_blocks && is_end(block);
        if (slice == SLICES - 1 || has_chunk) {
            wait_for_products<0>();
            keep_registers(chains);
            keep_registers(operands);
        }
        if (!has_chunk) return;
        const RowFactors* rows = nullptr;
        if constexpr (Memory::has_factors) rows = shared.factors[stage % 2][slice];
        add_chunk<F>(sums, chains, factors_of<F>(call.w, scales, chunk), rows);
        is_new = true;
        if (chunk < F::chunks - 1 || ((block + 1) % SPLIT_BLOCKS != 0 && block + 1 < num_blocks)) return;
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            float4& total = shared.totals[j][threadIdx.x];
            total = {total.x + sums[j][0], total.y + sums[j][1], total.z + sums[j][2], total.w + sums[j][3]};
#pragma unroll
            for (int e = 0; e < 4; e++) sums[j][e] = 0;
        }
    };
    int slot = 0, free_slot = STAGES - 2;
    for (int stage = 0; stage < num_stages; stage++) {
        const LaneBlock<F> last_scales = scales[BLOCKS - 1];
        load(scales, stage);
        copy_wait<STAGES - 3>();
        products_see_writes();
        __syncthreads();  // the stage is complete, and the one before the last has been read
        copy.copy_codes(shared, stage + STAGES - 2, free_slot);
        copy.copy_x(shared, stage + STAGES - 2, free_slot);
        if constexpr (Memory::has_factors) {
            find_factors(shared, stage, slot, scaled_sum, [&](int slice) { return is_end(block_of(stage, slice)); });
            __syncthreads();
        }
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++) {
            if (slice == 0)
                end_slice(stage - 1, SLICES - 1, last_scales);
            else
                end_slice(stage, slice - 1, scales[(slice - 1) / F::chunks]);
            if (slice == 0)
#pragma unroll
                for (int b = 0; b < BLOCKS; b++)
                    unpack<F>(operands, b, reinterpret_cast<const uint8_t*>(shared.w[slot][b][warp]), lane);
            begin_products();
#pragma unroll
            for (int part = slice * PARTS; part < (slice + 1) * PARTS; part++)
                multiply<Operand>(chains, operands[part], shared.x[slot][0], part, !is_new || part > slice * PARTS);
            commit_products();
            is_new = false;
        }
        slot = slot + 1 == STAGES ? 0 : slot + 1;
        free_slot = free_slot + 1 == STAGES ? 0 : free_slot + 1;
    }
    end_slice(num_stages - 1, SLICES - 1, scales[BLOCKS - 1]);
    copy_wait<0>();  // zeros, behind the last stage
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        const float4 total = shared.totals[j][threadIdx.x];
        const float elements[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int output = place.output + warp * TILE_OUTPUTS + group + e / 2 * 8;
            const int row = place.row + j * 8 + quad * 2 + e % 2;
            if (output < call.w.rows && row < call.rows) finish(call, row, output, elements[e]);
        }
    }
}

// Blocks on a multiprocessor: two, if shared memory and 128 registers of a thread are enough. Integers, minima, small
// chunks and scales of float32 need more registers.
template <class F>
constexpr int blocks_at_a_time() {
    constexpr int MULTIPROCESSOR = 228 << 10, SYSTEM = 1 << 10;  // bytes of shared memory; those that a block loses
    constexpr bool is_simple = !F::has_quantised_rows && !F::has_minima && F::chunk == BLOCK;
    constexpr bool has_registers = is_simple && F::Scale::bytes < scale32::bytes;
    constexpr bool has_memory = 2 * (sizeof(Shared<F>) + TILE_ALIGNMENT + SYSTEM) <= MULTIPROCESSOR;
    return has_registers && has_memory ? 2 : 1;
}

// Sizes that the host knows, too (tile_shape.rs).
template <class Code, int CHUNK, class X>
constexpr int SHARED_BYTES = sizeof(Shared<Format<Code, CHUNK, scale16, centred, X>>) + TILE_ALIGNMENT;
static_assert(SHARED_BYTES<code4, 32, int8> == 189440 && SHARED_BYTES<code8, 32, int8> == 222208);
static_assert(SHARED_BYTES<code4, 64, bf16> == 189440 && SHARED_BYTES<code8, 64, bf16> == 214016);

#define KERNELS(CODE, CHUNK, SCALE, MINIMUM, X)                                                    \
    extern "C" __global__ void                                                                     \
    __launch_bounds__(Tile::threads, (blocks_at_a_time<Format<CODE, CHUNK, SCALE, MINIMUM, X>>())) \
    gemm_warpgroup_wide_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X(QuantisedProduct product) {   \
        gemm<Format<CODE, CHUNK, SCALE, MINIMUM, X>>(product);                                     \
    }                                                                                              \
    EXPORT(gemm_warpgroup_wide_##CODE##_##CHUNK##_##SCALE##_##MINIMUM##_##X)
// For a model, its variants alone are compiled, as in gemm_quantised.cu.
#define INSTANTIATE(...) KERNELS(__VA_ARGS__)
#ifdef VARIANT
INSTANTIATE(VARIANT)
#else
TESTED_VARIANTS(KERNELS)
#endif
