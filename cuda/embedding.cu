// Embedding: the rows of a table.
//
//     out[row] = table[token of row]
//
// Data      table [vocabulary][width] of T; out [rows][width] of float32.
//           tokens.cuh has the meaning of tokens.
// Shape     one block per row; consecutive threads take consecutive values, 4 each if the width is a multiple of 4.
// Limit     bytes: each value is read once and written once.
// Source    Press and Wolf, "Using the Output Embedding to Improve Language Models", section 2 (tied tables).
#include "tokens.cuh"

template <int N, class T>
DEVICE void convert(const T* from, float* to, int width) {
    using Row = Values<T, N>;
    using Floats = Values<float, N>;
    transform(reinterpret_cast<const Row*>(from), reinterpret_cast<Floats*>(to), width / N, [](const Row& x, int) {
        Floats result;
#pragma unroll
        for (int j = 0; j < N; j++) result.values[j] = to_float(x.values[j]);
        return result;
    });
}

template <class T>
DEVICE void embed(const T* table, const uint32_t* tokens, const uint32_t* last_tokens, float* out, int width) {
    dependency_wait();
    dependency_launch();
    const T* from = table + size_t(token_of(tokens[blockIdx.x], last_tokens)) * width;
    float* to = out + size_t(blockIdx.x) * width;
    if (width % 4 == 0)
        convert<4>(from, to, width);
    else
        convert<1>(from, to, width);
}

#define KERNELS(T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                                  \
    embed_##T(const T* __restrict__ table, const uint32_t* tokens, const uint32_t* last_tokens,        \
              float* out, int width) {                                                                 \
        embed(table, tokens, last_tokens, out, width);                                                 \
    }                                                                                                  \
    EXPORT(embed_##T)
KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
