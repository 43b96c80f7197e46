// Rows of 8-bit integers with scales, as a product with a matrix of codes reads them.
//
//     value = scale * integer        scale = (largest magnitude of a span) / 127, integer = round(127 value / largest)
//
// Span      Consecutive columns with one scale: 32 to 1024, a power of two, or a whole row. It is as wide as the groups
//           of the matrix, if those are 32 to 1024 columns. A span with a value that is not finite has the scale NaN,
//           so its products are NaN. A span of magnitudes below 1e-30 is 0.
//
// Layout    A row is blocks of 64 columns, the last one filled with zeros. A block is 80 bytes:
//
//           - 64 integers. Each four of them is in the order 0 2 1 3, as codes.cuh has the codes of 4 columns.
//           - a Span for each half: the scale, and the scale times the sum of the half's integers.
//
// Sources   Dettmers et al., "LLM.int8()", section 2 (scales of absolute maxima); Xiao et al., "SmoothQuant", section
//           2.
#pragma once
#include "common.cuh"

constexpr int QUANTISED_BLOCK = 64, QUANTISED_HALF = QUANTISED_BLOCK / 2, QUANTISED_BYTES = 80;

struct __align__(8) Span {
    float scale, scaled_sum;
};

// Rows that are written. The number of columns is a multiple of 4.
struct QuantisedRows {
    uint8_t* rows;
    float* floats;  // the same rows of float32, dense; or null
    int columns;
    int span;  // columns, 0 for whole rows
};

constexpr int QUANTISER_THREADS = 256, QUANTISER_COLUMNS = 4 * QUANTISER_THREADS;

DEVICE uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// The largest of `bits` over the threads of a block; `warps` has an element for each warp.
DEVICE uint32_t block_max(uint32_t bits, uint32_t* warps) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) bits = max(bits, __shfl_xor_sync(ALL_LANES, bits, step));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = bits;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < QUANTISER_THREADS / 32; warp++) bits = max(bits, warps[warp]);
    return bits;
}

// Writes columns `first`, `first` + `distance`, ... of row `row`, 1024 at a time, by a block of 256 threads.
// `values(column)` are 4 values from a column on. Of rows that are a span, a block writes all columns.
template <class Read>
DEVICE void quantise_row(const QuantisedRows& to, int row, int first, int distance, Read values) {
    __shared__ uint32_t warps[2][QUANTISER_THREADS / 32];
    const int num_blocks = ceil_div(to.columns, QUANTISED_BLOCK);
    uint8_t* const blocks = to.rows + size_t(row) * num_blocks * QUANTISED_BYTES;
    uint32_t largest_of_row = 0;
    if (to.span == 0) {
        for (int column = 4 * threadIdx.x; column < to.columns; column += QUANTISER_COLUMNS) {
            const Values<float, 4> four = values(column);
#pragma unroll
            for (int i = 0; i < 4; i++) largest_of_row = max(largest_of_row, magnitude_bits(four.values[i]));
        }
        largest_of_row = block_max(largest_of_row, warps[0]);
    }
    int buffer = 0;  // of `warps`, so that one barrier is enough
    for (; first < num_blocks * QUANTISED_BLOCK; first += distance, buffer ^= 1) {
        const int column = first + 4 * threadIdx.x;
        const Values<float, 4> four = column < to.columns ? values(column) : Values<float, 4>{};
        if (to.floats != nullptr && column < to.columns)
            *reinterpret_cast<Values<float, 4>*>(to.floats + size_t(row) * to.columns + column) = four;

        uint32_t largest = largest_of_row;
        if (to.span != 0) {
#pragma unroll
            for (int i = 0; i < 4; i++) largest = max(largest, magnitude_bits(four.values[i]));
            for (int step = 1; step < min(to.span / 4, 32); step *= 2)
                largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, step));
            if (to.span > 128) {
                const int warp = threadIdx.x / 32, count = to.span / 128;
                if (threadIdx.x % 32 == 0) warps[buffer][warp] = largest;
                __syncthreads();
                for (int i = 0; i < count; i++) largest = max(largest, warps[buffer][warp / count * count + i]);
            }
        }

        const float magnitude = __uint_as_float(largest);
        const bool is_finite = magnitude < infinity(), is_zero = magnitude < 1e-30f;
        const float factor = is_zero ? 0 : __fdiv_rn(127, magnitude);
        const float scale = !is_finite ? __uint_as_float(0x7fffffffu) : is_zero ? 0 : __fdiv_rn(magnitude, 127);
        int integers[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            integers[i] = __float2int_rn(fminf(fmaxf(__fmul_rn(four.values[i], factor), -127), 127));
        int sum = integers[0] + integers[1] + integers[2] + integers[3];
#pragma unroll
        for (int step = 1; step < QUANTISED_HALF / 4; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (column >= num_blocks * QUANTISED_BLOCK) continue;  // only in the last round
        uint8_t* const block = blocks + column / QUANTISED_BLOCK * QUANTISED_BYTES;
        const int place = column % QUANTISED_BLOCK;
        auto byte = [&](int i) { return uint32_t(integers[i] & 0xff); };
        *reinterpret_cast<uint32_t*>(block + place) = byte(0) | byte(2) << 8 | byte(1) << 16 | byte(3) << 24;
        if (place % QUANTISED_HALF == 0)
            reinterpret_cast<Span*>(block + QUANTISED_BLOCK)[place / QUANTISED_HALF] = {scale, scale * sum};
    }
}
