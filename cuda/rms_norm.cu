// RMSNorm: divides a row by the root of its mean square.
//
//     out[row][i] = x[row][i] / sqrt(mean over j of x[row][j]^2 + epsilon) * weight[i]
//
// Data      x [rows][width] and weight [width] of float32; out [rows][width] of T: the operand of the next product,
//           or float32; of rms_norm_int8 and rms_norm_fp8, numbers with scales (quantised_rows.cuh). The residual
//           connection before the norm is the epilogue of the product before it (gemm.cu), and a family with the factor
//           1 + weight adds the 1 when the weight is loaded: neither needs a variant here.
// Shape     one block of 256 threads per row, which take 4 values at a time, or 1 if the width is not a multiple of 4.
//           The sum is 256 chains, thread i adding the squares of values 4 i .. 4 i + 3, 4 (i + 256) ..; then
//           butterflies in the warps, then the 8 warps in order: an order that depends on the width alone.
// Limit     bytes: x is read twice, the second time from a cache, and out is written once.
// Source    Zhang and Sennrich, "Root Mean Square Layer Normalization", section 4.
#include "norm.cuh"
#include "quantised_rows.cuh"

constexpr int THREADS = QUANTISER_THREADS;

// The factor of a row, by all threads of a block.
template <int N>
DEVICE float row_factor(const float* row, int width, float epsilon) {
    __shared__ float partial[THREADS / 32];
    __shared__ double exact_partial[THREADS / 32];
    using Floats = Values<float, N>;
    const Floats* from = reinterpret_cast<const Floats*>(row);
    return norm_factor(width, epsilon, [&](auto sum) {
#pragma unroll 4
        for (int i = threadIdx.x; i < width / N; i += THREADS) {
            const Floats v = from[i];
#pragma unroll
            for (int j = 0; j < N; j++) sum += decltype(sum)(v.values[j]) * v.values[j];
        }
        if constexpr (sizeof sum == sizeof(double))
            return block_sum(sum, exact_partial);
        else
            return block_sum(sum, partial);
    });
}

template <class T, int N>
DEVICE void rms_norm(const float* x, const float* __restrict__ weight, T* out, int width, float epsilon) {
    using Floats = Values<float, N>;
    const Floats* from = reinterpret_cast<const Floats*>(x + size_t(blockIdx.x) * width);
    const float factor = row_factor<N>(from->values, width, epsilon);
    Values<T, N>* to = reinterpret_cast<Values<T, N>*>(out + size_t(blockIdx.x) * width);
    transform(from, to, width / N, [&](const Floats& v, int i) {
        const Floats factors = reinterpret_cast<const Floats*>(weight)[i];
        Values<T, N> result;
#pragma unroll
        for (int j = 0; j < N; j++) result.values[j] = to_operand<T>(v.values[j] * factor * factors.values[j]);
        return result;
    });
}

#define KERNELS(T)                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS)                                            \
    rms_norm_##T(const float* x, const float* __restrict__ weight, T* out, int width,                \
                 float epsilon) {                                                                    \
        dependency_wait();                                                                           \
        dependency_launch();                                                                         \
        if (width % 4 == 0)                                                                          \
            rms_norm<T, 4>(x, weight, out, width, epsilon);                                          \
        else                                                                                         \
            rms_norm<T, 1>(x, weight, out, width, epsilon);                                          \
    }                                                                                                \
    EXPORT(rms_norm_##T)
KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)

// The width is a multiple of 4.
template <class Numbers>
DEVICE void quantised_norm(const float* x, const float* __restrict__ weight, const QuantisedRows& to, float epsilon) {
    using Floats = Values<float, 4>;
    const float* row = x + size_t(blockIdx.x) * to.columns;
    const float factor = row_factor<4>(row, to.columns, epsilon);
    quantise_row<Numbers>(to, blockIdx.x, 0, QUANTISER_COLUMNS, [&](int column) {
        const Floats factors = *reinterpret_cast<const Floats*>(weight + column);
        Floats four = *reinterpret_cast<const Floats*>(row + column);
#pragma unroll
        for (int j = 0; j < 4; j++) four.values[j] = four.values[j] * factor * factors.values[j];
        return four;
    });
}

#define QUANTISED(NAME, NUMBERS)                                                                      \
    extern "C" __global__ void __launch_bounds__(THREADS)                                             \
    rms_norm_##NAME(const float* x, const float* __restrict__ weight, QuantisedRows to, float epsilon) { \
        dependency_wait();                                                                            \
        dependency_launch();                                                                          \
        quantised_norm<NUMBERS>(x, weight, to, epsilon);                                              \
    }                                                                                                 \
    EXPORT(rms_norm_##NAME)
QUANTISED(int8, Int8Numbers)
QUANTISED(fp8, Fp8Numbers)
