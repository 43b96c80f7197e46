// Split-K of products of 16-bit numbers (gemm.cu): the sum of an element is that of the chains of its splits.
#pragma once
#include "product.cuh"

constexpr int SPLIT_COLUMNS = 2048;

// The sum of an element of `out` after a split.
template <class T>
DEVICE bool adds_to_out(const Product<T>& product, int split) {
    return split > 0 || product.accumulates;
}
template <class T>
DEVICE float bias_of(const Product<T>& product, int output, int split) {
    const bool is_last = (split + 1) * SPLIT_COLUMNS >= product.inner;
    return is_last && product.bias != nullptr && output < product.outputs ? product.bias[output] : 0;
}

// Adds the chains of a split to `out`. The old values of `batch` tiles of 16 outputs x 8 rows are loaded together,
// before the first is stored: one after the other, each would wait for the store before it.
template <class Shape, class T>
DEVICE void add_split(const Product<T>& product, float (&d)[Shape::output_tiles][Shape::row_tiles][4],
                        int first_output, int first_row, int split) {
    constexpr int BATCH = Shape::batch;
    const bool adds = adds_to_out(product, split);
#pragma unroll
    for (int i = 0; i < Shape::output_tiles; i++) {
        const int output = first_output + i * 16;
        const float bias[2] = {bias_of(product, output, split), bias_of(product, output + 8, split)};
#pragma unroll
        for (int first = 0; first < Shape::row_tiles; first += BATCH) {
            const size_t row = first_row + first * 8 + (Shape::may_split ? size_t(blockIdx.y) * product.rows : 0);
            float* const out = product.out + row * product.pitch + output;
            const int rows = product.rows - first_row - first * 8;
            auto for_elements = [&](auto of) {
                float *even = out, *odd = out + product.pitch;
#pragma unroll
                for (int j = 0; j < BATCH; j++, even += 8 * size_t(product.pitch), odd += 8 * size_t(product.pitch)) {
                    keep_address(even);
                    keep_address(odd);
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (output + e / 2 * 8 < product.outputs && j * 8 + e % 2 < rows)
                            of((e % 2 ? odd : even)[e / 2 * 8], d[i][first + j][e], bias[e / 2]);
                }
            };
            if (adds) for_elements([](float& out, float& sum, float) { sum += out; });
            keep_order();
            for_elements([](float& out, float& sum, float bias) { out = sum + bias, sum = 0; });
            keep_order();
        }
    }
}
