// Rows of 8-bit integers or e4m3 with scales, as a product with quantised weights reads them.
//
//     value = scale * number        scale = (largest magnitude of a group) / most, number = round(most value / largest)
//
//           most = 127 for integers, 448 for e4m3; rounded to the nearest, ties to the even one.
//
// Group     Consecutive columns with one scale: 32 to 1024, a power of two, or a whole row. It is as wide as the groups
//           of the matrix, if those are 32 to 1024 columns. A group with a value that is not finite has the scale NaN,
//           so its products are NaN. A group of magnitudes below 1e-30 is 0.
//
// Layout    A row is blocks of 64 columns, the last one filled with zeros. A block is 80 bytes:
//
//           - 64 numbers. Each four of them is in the order 0 2 1 3, as quantised_matrix.cuh has the codes of 4
//             columns.
//           - a RowScale for each half: the scale, and the scale times the sum of the half's numbers (0 for e4m3).
//
// Sources   Dettmers et al., "LLM.int8()", section 2 (scales of absolute maxima); Xiao et al., "SmoothQuant", section
//           2; Micikevicius et al., "FP8 Formats for Deep Learning", section 3 (e4m3).
#pragma once
#include "common.cuh"

constexpr int QUANTISED_BLOCK = 64, QUANTISED_HALF = QUANTISED_BLOCK / 2, QUANTISED_BYTES = 80;

struct __align__(8) RowScale {
    float scale, scaled_sum;
};

// Rows that are written. The number of columns is a multiple of 4.
struct QuantisedRows {
    uint8_t* rows;
    float* floats;  // the same rows of float32, dense; or null
    int columns;
    int group;  // columns, 0 for whole rows
};

constexpr int QUANTISER_THREADS = 256, QUANTISER_COLUMNS = 4 * QUANTISER_THREADS;

// Types of numbers: the byte of one that is rounded, and the sum of 4 bytes.
struct Int8Numbers {
    static constexpr float most = 127;
    static DEVICE uint32_t encode(float x) { return uint32_t(__float2int_rn(x)) & 0xff; }
    static DEVICE int sum(const uint32_t (&bytes)[4]) {
        return int8_t(bytes[0]) + int8_t(bytes[1]) + int8_t(bytes[2]) + int8_t(bytes[3]);
    }
};
struct Fp8Numbers {
    static constexpr float most = 448;
    static DEVICE uint32_t encode(float x) {
        const uint32_t bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu;
        // Below 2^-6, steps are 2^-9. Otherwise, the low 20 bits of the mantissa are rounded, and the bias becomes 7.
        const uint32_t small = uint32_t(__float2int_rn(__uint_as_float(magnitude) * 512));
        const uint32_t rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
        return (bits >> 24 & 0x80) | (magnitude < 0x3c800000u ? small : rounded - (120 << 3));
    }
    static DEVICE int sum(const uint32_t (&)[4]) { return 0; }
};

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
// `values(column)` are 4 values from a column on. Of rows that are a group, a block writes all columns.
template <class Numbers, class Read>
DEVICE void quantise_row(const QuantisedRows& to, int row, int first, int distance, Read values) {
    __shared__ uint32_t warps[2][QUANTISER_THREADS / 32];
    const int num_blocks = ceil_div(to.columns, QUANTISED_BLOCK);
    uint8_t* const blocks = to.rows + size_t(row) * num_blocks * QUANTISED_BYTES;
    uint32_t largest_of_row = 0;
    if (to.group == 0) {
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
        if (to.group != 0) {
#pragma unroll
            for (int i = 0; i < 4; i++) largest = max(largest, magnitude_bits(four.values[i]));
            for (int step = 1; step < min(to.group / 4, 32); step *= 2)
                largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, step));
            if (to.group > 128) {
                const int warp = threadIdx.x / 32, count = to.group / 128;
                if (threadIdx.x % 32 == 0) warps[buffer][warp] = largest;
                __syncthreads();
                for (int i = 0; i < count; i++) largest = max(largest, warps[buffer][warp / count * count + i]);
            }
        }

        const float magnitude = __uint_as_float(largest);
        const bool is_finite = magnitude < infinity(), is_zero = magnitude < 1e-30f;
        const float factor = is_zero ? 0 : __fdiv_rn(Numbers::most, magnitude);
        const float scale =
            !is_finite ? __uint_as_float(0x7fffffffu) : is_zero ? 0 : __fdiv_rn(magnitude, Numbers::most);
        uint32_t bytes[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float value = __fmul_rn(four.values[i], factor);
            bytes[i] = Numbers::encode(fminf(fmaxf(value, -Numbers::most), Numbers::most));
        }
        int sum = Numbers::sum(bytes);
#pragma unroll
        for (int step = 1; step < QUANTISED_HALF / 4; step *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (column >= num_blocks * QUANTISED_BLOCK) continue;  // only in the last round
        uint8_t* const block = blocks + column / QUANTISED_BLOCK * QUANTISED_BYTES;
        const int place = column % QUANTISED_BLOCK;
        *reinterpret_cast<uint32_t*>(block + place) = bytes[0] | bytes[2] << 8 | bytes[1] << 16 | bytes[3] << 24;
        if (place % QUANTISED_HALF == 0)
            reinterpret_cast<RowScale*>(block + QUANTISED_BLOCK)[place / QUANTISED_HALF] = {scale, scale * sum};
    }
}
