// Rewrites arrays with the values that they have, as the kernel before the one of a test. The library of checked
// kernels has it beside those of the product.
#include "common.cuh"

constexpr int MAX_ARRAYS = 32;

struct Arrays {
    volatile uint32_t* begin[MAX_ARRAYS];
    uint64_t bytes[MAX_ARRAYS];
};

// A block per array.
extern "C" __global__ void rewrite(Arrays arrays) {
    dependency_wait();
    dependency_launch();
    volatile uint32_t* words = arrays.begin[blockIdx.x];
    const uint64_t bytes = arrays.bytes[blockIdx.x];
    for (uint64_t i = threadIdx.x; i < bytes / 4; i += blockDim.x) words[i] = words[i];
    volatile uint8_t* rest = reinterpret_cast<volatile uint8_t*>(words + bytes / 4);
    if (threadIdx.x < bytes % 4) rest[threadIdx.x] = rest[threadIdx.x];
}
EXPORT(rewrite)
