// One chain of products over all columns: the order of a sum without split-K, by mma and by wgmma.
//
//     out[row][column] = sum over k of a[row][k] b[column][k], 16 columns after 16 columns, from the first one on
//
// `a` is the first operand of the instruction, 16 or 64 rows of it, and `b` the second, 8 or N rows. `out` has a pitch
// of its own in both directions, so that the operands can be exchanged. `inner` is a multiple of 64.
//
// Nothing here is made for speed.
#include "warpgroup.cuh"

struct Chain {
    const bf16* a;
    const bf16* b;
    float* out;
    int rows, columns, inner;
    int row_pitch, column_pitch;  // of `out`
};

DEVICE void store(const Chain& call, int row, int column, float value) {
    if (row < call.rows && column < call.columns)
        call.out[size_t(row) * call.row_pitch + size_t(column) * call.column_pitch] = value;
}

// ---- mma: grid (columns / 8, rows / 16), rounded up; one warp

// Two numbers of a row, or zeros.
DEVICE uint32_t pair_of(const bf16* matrix, int row, int limit, int inner, int k) {
    return row < limit ? *reinterpret_cast<const uint32_t*>(matrix + size_t(row) * inner + k) : 0;
}

extern "C" __global__ void __launch_bounds__(32) chain_mma(Chain call) {
    const int group = threadIdx.x / 4, quad = threadIdx.x % 4;
    const int row = blockIdx.y * 16 + group, column = blockIdx.x * 8;
    float d[4] = {};
    for (int k = quad * 2; k < call.inner; k += 16) {
        auto a = [&](int below, int behind) { return pair_of(call.a, row + below, call.rows, call.inner, k + behind); };
        auto b = [&](int behind) { return pair_of(call.b, column + group, call.columns, call.inner, k + behind); };
        mma<bf16>(d, {a(0, 0), a(8, 0), a(0, 8), a(8, 8)}, {b(0), b(8)});
    }
#pragma unroll
    for (int i = 0; i < 4; i++) store(call, row + i / 2 * 8, column + quad * 2 + i % 2, d[i]);
}
EXPORT(chain_mma)

// ---- wgmma: grid (columns / N, rows / 64), rounded up; a group of four warps

#ifndef PENSTOCK_HOST
#define SUMS_8 "%0,%1,%2,%3"
#define SUMS_24 TEN() ",%10,%11"
#define SUMS_96 TEN() "," TEN(1) "," TEN(2) "," TEN(3) ",%40,%41,%42,%43,%44,%45,%46,%47"
#define SUMS_192                                                                                           \
    TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) "," TEN(7) "," TEN(8) ",%90,%91,%92,%93," \
    "%94,%95"
#define OF_8(C) OF_TILE(C, 0)
#define OF_24(C) OF_TILE(C, 0), OF_TILE(C, 1), OF_TILE(C, 2)
#define OF_96(C) OF_4(C, 0), OF_4(C, 4), OF_4(C, 8)
#define OF_192(C) OF_16(C, 0), OF_4(C, 16), OF_4(C, 20)
INSTRUCTION(bf16, 8, "%4", "%5")
INSTRUCTION(bf16, 24, "%12", "%13")
INSTRUCTION(bf16, 96, "%48", "%49")
INSTRUCTION(bf16, 192, "%96", "%97")
#endif

// Copies 64 columns of ROWS rows of a matrix to a tile. Rows behind the last one become 0.
template <int ROWS>
DEVICE void load_tile(uint4* tile, const bf16* matrix, int first, int limit, int inner, int column) {
    for (int i = threadIdx.x; i < ROWS * TILE_WORDS; i += 128) {
        const int row = i / TILE_WORDS, word = i % TILE_WORDS;
        const bf16* from = matrix + size_t(first + row) * inner + column + word * 8;
        const uint4 zero = {0, 0, 0, 0};
        tile[row * TILE_WORDS + place_in_tile(row, word)] =
            first + row < limit ? *reinterpret_cast<const uint4*>(from) : zero;
    }
}

// Dynamic shared memory: a tile of 64 rows and one of N.
template <int N>
DEVICE void chain(const Chain& call) {
    uint4 *const a = first_tile(), *const b = a + 64 * TILE_WORDS;
    const int lane = threadIdx.x % 32, first_row = blockIdx.y * 64, first_column = blockIdx.x * N;
    float d[N / 8][4] = {};
    for (int column = 0; column < call.inner; column += TILE_COLUMNS) {
        load_tile<64>(a, call.a, first_row, call.rows, call.inner, column);
        load_tile<N>(b, call.b, first_column, call.columns, call.inner, column);
        products_see_writes();
        __syncthreads();
        keep_registers(d);
        begin_products();
#pragma unroll
        for (int part = 0; part < TILE_COLUMNS / 16; part++) multiply<bf16, N>(d, a, b, part);
        commit_products();
        wait_for_products<0>();
        keep_registers(d);
        __syncthreads();  // the tiles have been read
    }
    const int row = first_row + threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < N / 2; i++)
        store(call, row + i % 4 / 2 * 8, first_column + i / 4 * 8 + lane % 4 * 2 + i % 2, d[i / 4][i % 4]);
}

#define KERNEL(N)                                                                               \
    extern "C" __global__ void __launch_bounds__(128) chain_wgmma_##N(Chain call) { chain<N>(call); } \
    EXPORT(chain_wgmma_##N)
KERNEL(8)
KERNEL(24)
KERNEL(32)
KERNEL(64)
KERNEL(96)
KERNEL(128)
KERNEL(192)
KERNEL(256)
