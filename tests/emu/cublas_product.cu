// The product of the emulated cuBLASLt (cublas.cpp), linked into libkernels.so beside the kernels of `cuda/`.
#include "common.cuh"

struct CublasProduct {
    const void* x;
    const void* w;
    const float* bias;  // or null
    float* out;
    float* workspace;
    int rows, outputs, inner, pitch;
    int is_bf16;
    float beta;  // the factor of `out`
};

template <class T>
DEVICE double product(const CublasProduct& p, int row, int output, int begin, int end) {
    const T* x = static_cast<const T*>(p.x) + size_t(row) * p.inner;
    const T* w = static_cast<const T*>(p.w) + size_t(output) * p.inner;
    double sum = 0;
    for (int k = begin; k < end; k++) sum += double(to_float(x[k])) * double(to_float(w[k]));
    return sum;
}

// The columns are divided in as many parts as there are rows, so a row has other bits in another batch, as it may with
// the real library. Uses the workspace, as some algorithms do.
extern "C" __global__ void cublas_product(CublasProduct p) {
    dependency_wait();
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) p.workspace[0] = float(p.rows);
    const int row = blockIdx.y, output = blockIdx.x * blockDim.x + threadIdx.x;
    if (output >= p.outputs) return;
    const int step = max(ceil_div(p.inner, p.rows), 1);
    float sum = 0;
    for (int k = 0; k < p.inner; k += step) {
        const int end = min(k + step, p.inner);
        sum += float(p.is_bf16 ? product<bf16>(p, row, output, k, end) : product<f16>(p, row, output, k, end));
    }
    float& out = p.out[size_t(row) * p.pitch + output];
    if (p.beta != 0) sum += p.beta * out;
    out = p.bias != nullptr ? sum + p.bias[output] : sum;
}
EXPORT(cublas_product)
