// Embedding: the rows of a table.
//
//     out[row] = table[token of row]
//
// Data      table [vocabulary][width] of T; out [rows][width] of float32.
//           A token FOLLOWS | slot is the last token of that slot, which the sampler of an earlier step left in
//           `last_tokens`: the host has not seen it yet, so steps are launched one ahead.
// Shape     one block per row; consecutive threads take consecutive values.
// Limit     bytes: each value is read once and written once.
// Source    Press and Wolf, "Using the Output Embedding to Improve Language Models", section 2 (tied tables).
#include "common.cuh"

constexpr uint32_t FOLLOWS = 1u << 31;

template <class T>
DEVICE void embed(const T* table, const uint32_t* tokens, const uint32_t* last_tokens, float* out, int width) {
    dependency_wait();
    dependency_launch();
    uint32_t token = tokens[blockIdx.x];
    if (token & FOLLOWS) token = last_tokens[token ^ FOLLOWS];
    const T* from = table + size_t(token) * width;
    float* to = out + size_t(blockIdx.x) * width;
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = to_float(from[i]);
}

#define KERNELS(T)                                                                                    \
    extern "C" __global__ void __launch_bounds__(256)                                                 \
    embed_##T(const T* __restrict__ table, const uint32_t* __restrict__ tokens,                       \
              const uint32_t* __restrict__ last_tokens, float* __restrict__ out, int width) {         \
        embed(table, tokens, last_tokens, out, width);                                                \
    }                                                                                                 \
    EXPORT(embed_##T)
KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
