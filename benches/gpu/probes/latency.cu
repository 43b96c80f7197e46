// The latency of products that depend on each other: each adds to the sums of the one before.
#include "warpgroup.cuh"

struct Latency {
    uint64_t* clocks;  // of all steps; 0 on the host
    float* out;
    int steps;  // a multiple of 4
};

DEVICE uint64_t clocks() {
#ifdef PENSTOCK_HOST
    return 0;
#else
    return clock64();
#endif
}

// One block of one warp.
extern "C" __global__ void __launch_bounds__(32) latency_mma(Latency call) {
    float d[4] = {1, 1, 1, 1};
    const uint32_t ones = twice(ONE<bf16>), zeros = threadIdx.x >> 5;
    const uint64_t start = clocks();
    for (int i = 0; i < call.steps; i += 4)
#pragma unroll
        for (int n = 0; n < 4; n++) mma<bf16>(d, {ones, ones, ones, ones}, {zeros, zeros});
    if (threadIdx.x == 0) call.clocks[0] = clocks() - start;
    call.out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
EXPORT(latency_mma)

#ifndef PENSTOCK_HOST
#define SUMS_8 "%0,%1,%2,%3"
#define OF_8(C) OF_TILE(C, 0)
INSTRUCTION(bf16, 8, "%4", "%5")
#endif

// One block of a group of four warps. Dynamic shared memory: a tile of 64 rows and one of N, which are 0.
template <int N>
DEVICE void chain(const Latency& call) {
    uint4 *const a = first_tile(), *const b = a + 64 * TILE_WORDS;
    for (int i = threadIdx.x; i < (64 + N) * TILE_WORDS; i += 128) a[i] = {0, 0, 0, 0};
    products_see_writes();
    __syncthreads();
    float d[N / 8][4];
    for (int i = 0; i < N / 2; i++) d[i / 4][i % 4] = 1;
    keep_registers(d);
    const uint64_t start = clocks();
    for (int i = 0; i < call.steps; i += 4) {
        begin_products();
#pragma unroll
        for (int part = 0; part < 4; part++) multiply<bf16, N>(d, a, b, part);
        commit_products();
        wait_for_products<1>();
    }
    wait_for_products<0>();
    keep_registers(d);
    if (threadIdx.x == 0) call.clocks[0] = clocks() - start;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N / 2; i++) sum += d[i / 4][i % 4];
    call.out[threadIdx.x] = sum;
}

#define KERNEL(N)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128) latency_wgmma_##N(Latency call) { chain<N>(call); } \
    EXPORT(latency_wgmma_##N)
KERNEL(8)
KERNEL(64)
KERNEL(256)
