// RMSNorm: divides a row by the root of its mean square.
//
//     out[row][i] = x[row][i] / sqrt(mean over j of x[row][j]^2 + epsilon) * weight[i]
//
// Data      x [rows][width] and weight [width] of float32; out [rows][width] of T: the operand of the next product,
//           or float32. The residual connection before the norm is the epilogue of the product before it (gemm.cu),
//           and a family with the factor 1 + weight adds the 1 when the weight is loaded: neither needs a variant
//           here.
// Shape     one block of 256 threads per row. The sum is 256 chains, thread i adding the squares of x[i], x[i + 256],
//           ...; then butterflies in the warps, then the 8 warps in order: an order that depends on the width alone.
// Limit     bytes: x is read twice, the second time from a cache, and out is written once.
// Source    Zhang and Sennrich, "Root Mean Square Layer Normalization", section 4.
#include "common.cuh"

constexpr int THREADS = 256;

template <class T>
DEVICE void rms_norm(const float* x, const float* weight, T* out, int width, float epsilon) {
    __shared__ float partial[THREADS / 32];
    dependency_wait();
    dependency_launch();
    const size_t row = size_t(blockIdx.x) * width;
    float squares = 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += THREADS) squares += x[row + i] * x[row + i];
    const float factor = 1 / sqrtf(block_sum(squares, partial) / width + epsilon);
#pragma unroll 4
    for (int i = threadIdx.x; i < width; i += THREADS) out[row + i] = from_float<T>(x[row + i] * factor * weight[i]);
}

#define KERNELS(T)                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS)                                       \
    rms_norm_##T(const float* __restrict__ x, const float* __restrict__ weight,                 \
                 T* __restrict__ out, int width, float epsilon) {                               \
        rms_norm(x, weight, out, width, epsilon);                                               \
    }                                                                                           \
    EXPORT(rms_norm_##T)
KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
