// The call of a matrix product, and the order of its blocks, for all kernels that compute one.
#pragma once
#include "common.cuh"

template <class T>
struct Product {
    const T* x;
    const T* w;
    const float* bias;  // or null
    float* out;
    int rows, outputs, inner;
    int accumulates;
};

// The tile of a block. Blocks with consecutive numbers share 8 tiles of rows, so that the weights are read from the
// L2 cache by 7 of 8.
struct TilePlace {
    int output, row;
};
template <class Shape, class T>
DEVICE TilePlace place_of_block(const Product<T>& product) {
    constexpr int GROUP = 8;
    const int output_tiles = ceil_div(product.outputs, Shape::outputs), row_tiles = ceil_div(product.rows, Shape::rows);
    const int group = blockIdx.x / (GROUP * output_tiles), within = blockIdx.x % (GROUP * output_tiles);
    const int height = min(GROUP, row_tiles - group * GROUP);
    return {within / height * Shape::outputs, (group * GROUP + within % height) * Shape::rows};
}
