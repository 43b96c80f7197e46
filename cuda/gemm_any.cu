// The product of activations and a weight matrix, of any number of columns: for rows that are not multiples of 16
// bytes, which gemm.cu and gemm_f32.cu do not read. No common model has them.
//
//     out[m][n] = (out[m][n] if `accumulates`) + sum over k of x[m][k] w[n][k] + (bias[n] if there is one)
//
// Data      x [rows][inner] and w [outputs][inner] of T, out as in gemm.cu.
// Shape     grid (rows, ceil(outputs / 8)), a warp per element of `out`. The sum is 32 chains, lane i adding the
//           products of columns i, i + 32, ...; then butterflies: an order that depends on `inner` alone.
// Limit     accesses of the caches: every row reads all weights.
#include "product.cuh"

constexpr int WARPS = 8;

template <class T>
DEVICE void gemm_any(const Product<T>& product) {
    dependency_wait();
    dependency_launch();
    const int lane = threadIdx.x % 32, output = blockIdx.y * WARPS + threadIdx.x / 32;
    if (output >= product.outputs) return;
    const T *x = product.x + size_t(blockIdx.x) * product.inner, *w = product.w + size_t(output) * product.inner;
    float sum = 0;
    for (int i = lane; i < product.inner; i += 32) sum = __fmaf_rn(to_float(x[i]), to_float(w[i]), sum);
    sum = warp_sum(sum);
    if (lane != 0) return;
    float& out = product.out[size_t(blockIdx.x) * product.pitch + output];
    const float bias = product.bias != nullptr ? product.bias[output] : 0;
    out = __fadd_rn(__fadd_rn(product.accumulates ? out : 0, sum), bias);
}

#define KERNELS(T)                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) gemm_any_##T(Product<T> product) {   \
        gemm_any(product);                                                                        \
    }                                                                                             \
    EXPORT(gemm_any_##T)
KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
