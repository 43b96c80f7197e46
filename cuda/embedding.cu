// Embedding: the rows of a table.
//
//     out[row] = table[token of row]
//
// Data      table [vocabulary][width] of T; out [rows][width] of float32.
//           tokens.cuh has the meaning of tokens.
// Shape     one block per row; consecutive threads take consecutive values.
// Limit     bytes: each value is read once and written once.
// Source    Press and Wolf, "Using the Output Embedding to Improve Language Models", section 2 (tied tables).
#include "tokens.cuh"

template <class T>
DEVICE void embed(const T* table, const uint32_t* tokens, const uint32_t* last_tokens, float* out, int width) {
    dependency_wait();
    dependency_launch();
    const T* from = table + size_t(token_of(tokens[blockIdx.x], last_tokens)) * width;
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
