// The call of a matrix product, the order of its blocks and the copies of their tiles, for all kernels of products.
#pragma once
#include "common.cuh"

template <class T>
struct Product {
    const T* x;
    const T* w;
    const float* bias;  // or null
    float* out;
    int rows, outputs, inner;
    int pitch;  // from one row of `out` to the next
    int accumulates;
};

// The tile of a block. Blocks with consecutive numbers share 8 tiles of rows, so that the weights are read from the
// L2 cache by 7 of 8.
struct TilePlace {
    int output, row;
};
template <class Shape>
DEVICE TilePlace place_of_block(int rows, int outputs) {
    constexpr int GROUP = 8;
    const int output_tiles = ceil_div(outputs, Shape::outputs), row_tiles = ceil_div(rows, Shape::rows);
    const int group = blockIdx.x / (GROUP * output_tiles), within = blockIdx.x % (GROUP * output_tiles);
    const int height = min(GROUP, row_tiles - group * GROUP);
    return {within / height * Shape::outputs, (group * GROUP + within % height) * Shape::rows};
}

// Columns of both operands.
struct Columns {
    int begin, end;
};

// The place of a 16-byte word of a row of a stage. Rows of 64 bytes are permuted so that the first halves of 4 rows are
// in different banks, those of 128 bytes by the 128-byte swizzle of wgmma.
template <int PITCH>
DEVICE int place_of_word(int row, int word) {
    return PITCH == 8 ? word ^ (row & 7) : PITCH == 4 ? word ^ (row & 2) : word;
}

// Copies a tile of ROWS rows of a matrix to shared memory, COLUMNS columns at a time, by the THREADS threads of a
// block. A row of a stage begins PITCH 16-byte words after the one before it. What is outside of the matrix, or of the
// columns, becomes 0.
template <class T, int ROWS, int COLUMNS, int PITCH, int THREADS>
struct TileCopy {
    static constexpr int WORDS = COLUMNS * sizeof(T) / 16, APART = THREADS / WORDS;
    static_assert(APART % 8 == 0, "the rows of a thread have their words at the same place");
    const T *matrix, *from;
    int rows, column, end, inner;  // rows from this thread's first one on, its column, limit, columns of the matrix

    DEVICE TileCopy(const T* matrix, int first, int limit, int inner, Columns columns)
        : matrix(matrix), rows(limit - first - threadIdx.x / WORDS),
          column(columns.begin + threadIdx.x % WORDS * (16 / sizeof(T))), end(columns.end), inner(inner) {
        from = matrix + (ptrdiff_t(first) + threadIdx.x / WORDS) * inner + column;
    }

    // Begins to copy the next columns.
    DEVICE void copy(uint4 (*stage)[PITCH]) {
        const int row = threadIdx.x / WORDS;
        uint4* to = &stage[row][place_of_word<PITCH>(row, threadIdx.x % WORDS)];
#pragma unroll
        for (int n = 0; n < (ROWS + APART - 1) / APART; n++) {
            if (ROWS % APART != 0 && int(threadIdx.x) / WORDS >= ROWS - n * APART) break;
            const bool exists = n * APART < rows && column < end;
            copy_async<16>(to + n * APART * PITCH, exists ? from + ptrdiff_t(n) * APART * inner : matrix,
                         exists ? 16 : 0);
        }
        from += COLUMNS;
        column += COLUMNS;
    }
};
