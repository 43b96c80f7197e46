// Data of probes: random numbers, and the comparison of two results.
#include "common.cuh"

struct Fill {
    uint16_t* out;
    uint64_t count;
    uint32_t seed;
    int spread;
};

// Fills memory with bf16 numbers of random signs and mantissas, and of exponents from -spread to spread: with a large
// spread, sums that are rounded at other places have other bits. Grid: any.
extern "C" __global__ void __launch_bounds__(256) fill_random(Fill call) {
    const uint64_t step = uint64_t(gridDim.x) * 256;
    for (uint64_t i = blockIdx.x * 256 + threadIdx.x; i < call.count; i += step) {
        // The mixing of a 32-bit counter ("lowbias32").
        uint32_t x = uint32_t(i) ^ uint32_t(i >> 32) * 0x9e3779b9u ^ call.seed * 0x85ebca6bu;
        x = (x ^ x >> 16) * 0x7feb352du;
        x = (x ^ x >> 15) * 0x846ca68bu;
        x ^= x >> 16;
        const uint32_t exponent = 127 - call.spread + (x >> 8) % (2 * call.spread + 1);
        call.out[i] = uint16_t((x & 1) << 15 | exponent << 7 | (x >> 1 & 127));
    }
}
EXPORT(fill_random)

struct Compare {
    const uint32_t* a;
    const uint32_t* b;
    uint32_t* found;  // differences, and words that are the poison
    uint64_t count;
    uint32_t poison;
};

// Counts the words that differ, and those of `a` that nothing has written. Grid: any.
extern "C" __global__ void __launch_bounds__(256) compare_words(Compare call) {
    __shared__ int partial[2][8];
    int differences = 0, poisoned = 0;
    const uint64_t step = uint64_t(gridDim.x) * 256;
    for (uint64_t i = blockIdx.x * 256 + threadIdx.x; i < call.count; i += step) {
        const uint32_t word = call.a[i];
        differences += word != call.b[i];
        poisoned += word == call.poison;
    }
    differences = block_sum(differences, partial[0]);
    poisoned = block_sum(poisoned, partial[1]);
    if (threadIdx.x == 0) {
        atomicAdd(&call.found[0], uint32_t(differences));
        atomicAdd(&call.found[1], uint32_t(poisoned));
    }
}
EXPORT(compare_words)
