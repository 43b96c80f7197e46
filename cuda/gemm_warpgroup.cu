// The product of gemm.cu, with its bits, by wgmma: for sm_90a, and more than 8 rows.
//
//     out[m][n] = (out[m][n] if `accumulates`) + sum over k of x[m][k] w[n][k] + (bias[n] if there is one)
//
// Chains    as in gemm.cu: 16 columns after 16 columns, in splits of 2048. wgmma has the bits of mma (common.cuh).
// Tiles     of 64 outputs for each group of four warps, and ROWS rows. A stage has 64 columns of both operands, which
//           cp.async copies. A group begins the products of a stage, and waits for those of the stage before; so the
//           stage before that one can be filled again, and STAGES - 2 of them are on their way.
// Limits    Few rows: bytes of w. Many rows: bytes that multiprocessors read from the L2 cache, 48 KiB for the 4.2
//           MFLOP of a stage of the widest tile: 5.5 TB/s at 470 TFLOP/s.
// Split-K   as in gemm.cu: block y computes split y of a tile, if the launch has several; add_chains adds the chains.
// Sources   PTX ISA, "Asynchronous warpgroup level matrix instructions"; NVIDIA, CUTLASS documentation (sm_90 tiles).
#include "split_k.cuh"
#include "warpgroup.cuh"

// BATCH: tiles of 8 rows whose sums are added to `out` together.
template <int GROUPS, int ROWS, int STAGES, int BATCH = 8>
struct Tile {
    static constexpr bool may_split = true;
    static constexpr int outputs = 64 * GROUPS, rows = ROWS, stages = STAGES, threads = 128 * GROUPS;
    static constexpr int output_tiles = 1, row_tiles = ROWS / 8, batch = BATCH < ROWS / 8 ? BATCH : ROWS / 8;
};

// Dynamic shared memory: the stages, of w then x, from an address that is a multiple of TILE_ALIGNMENT on.
template <class Shape, class T>
DEVICE void gemm(const Product<T>& product) {
    constexpr int STAGES = Shape::stages, STAGE_WORDS = (Shape::outputs + Shape::rows) * TILE_WORDS;
    using Row = uint4[TILE_WORDS];
    uint4* const stages = first_tile();
    const TilePlace place = place_of_block<Shape>(product.rows, product.outputs);
    const int first = blockIdx.y * SPLIT_COLUMNS;
    const Columns columns = {first, gridDim.y > 1 ? min(product.inner, first + SPLIT_COLUMNS) : product.inner};
    constexpr int THREADS = Shape::threads;
    TileCopy<T, Shape::outputs, TILE_COLUMNS, TILE_WORDS, THREADS> w_copy(product.w, place.output, product.outputs,
                                                                          product.inner, columns);
    TileCopy<T, Shape::rows, TILE_COLUMNS, TILE_WORDS, THREADS> x_copy(product.x, place.row, product.rows,
                                                                       product.inner, columns);
    auto w_of = [&](int stage) { return stages + stage * STAGE_WORDS; };
    auto x_of = [&](int stage) { return w_of(stage) + Shape::outputs * TILE_WORDS; };
    for (int stage = 0; stage < STAGES - 2; stage++) w_copy.copy(reinterpret_cast<Row*>(w_of(stage)));
    dependency_wait();
    dependency_launch();
    for (int stage = 0; stage < STAGES - 2; stage++) {
        x_copy.copy(reinterpret_cast<Row*>(x_of(stage)));
        copy_commit();
    }
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = warp / 4;
    int stage = 0, free_stage = STAGES - 2;
    float d[Shape::row_tiles][4] = {};
    for (int column = first, split = 0; column < columns.end; split++) {
        const int end = min(columns.end, column + SPLIT_COLUMNS);
        keep_registers(d);
        for (; column < end; column += TILE_COLUMNS) {
            copy_wait<STAGES - 3>();
            products_see_writes();
            __syncthreads();  // the stage is complete, and the one before the last has been read
            w_copy.copy(reinterpret_cast<Row*>(w_of(free_stage)));
            x_copy.copy(reinterpret_cast<Row*>(x_of(free_stage)));
            copy_commit();
            const uint4 *w = w_of(stage) + group * 64 * TILE_WORDS, *x = x_of(stage);
            begin_products();
#pragma unroll
            for (int part = 0; part < TILE_COLUMNS / 16; part++) multiply<T, Shape::rows>(d, w, x, part);
            commit_products();
            wait_for_products<1>();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            free_stage = free_stage + 1 == STAGES ? 0 : free_stage + 1;
        }
        wait_for_products<0>();
        keep_registers(d);
        add_split<Shape>(product, reinterpret_cast<float(&)[1][Shape::row_tiles][4]>(d),
                           place.output + warp * 16 + lane / 4, place.row + lane % 4 * 2, split);
    }
    copy_wait<0>();  // zeros, behind the last step
}

using Narrow = Tile<1, 32, 8>;
using Middle = Tile<1, 64, 6>;
using Wide = Tile<2, 128, 6>;
using Widest = Tile<2, 256, 4>;

#define KERNEL(T, name, Shape, blocks)                                                                     \
    extern "C" __global__ void __launch_bounds__(Shape::threads, blocks) name##_##T(Product<T> product) {  \
        gemm<Shape>(product);                                                                              \
    }                                                                                                      \
    EXPORT(name##_##T)
#define KERNELS(T)                                  \
    KERNEL(T, gemm_warpgroup_narrow, Narrow, 2)     \
    KERNEL(T, gemm_warpgroup_middle, Middle, 2)     \
    KERNEL(T, gemm_warpgroup_wide, Wide, 1)         \
    KERNEL(T, gemm_warpgroup_widest, Widest, 1)
KERNELS(bf16)
KERNELS(f16)
