// The gated activations of feed-forward layers.
//
//     out[row][i] = activation(gate[row][i]) * up[row][i]
//     silu(x)     = x / (1 + exp(-x))
//     gelu(x)     = x / 2 (1 + tanh(u)) = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) (x + 0.044715 x^3)
//
// Data      a row of gate_up has `width` gates, then `width` ups, as one product computes them: [rows][2 width] of
//           float32. out [rows][width] of T is the operand of the next product.
// Shape     grid (rows, ceil(width / 1024)); a thread computes 4 values at once, or, if the width is not a multiple
//           of 4, 256 apart.
// Limit     bytes: 8 read and 2 written for each value.
// Source    Shazeer, "GLU Variants Improve Transformer", section 2; Hendrycks and Gimpel, "Gaussian Error Linear
//           Units", section 2 (the approximation with tanh).
#include "quantised_rows.cuh"

constexpr int THREADS = QUANTISER_THREADS;

struct Silu {
    DEVICE static float of(float x) { return x / (1 + expf(-x)); }
};
struct GeluTanh {
    DEVICE static float of(float x) {
        const float cubic = x + 0.044715f * (x * x) * x;
        return x / (1 + expf(-2 * 0.7978845608f * cubic));
    }
};

template <class Activation, class T, int N>
DEVICE void gated(const float* gate_up, T* out, int width) {
    const float* gate = gate_up + size_t(blockIdx.x) * 2 * width;
    const float* up = gate + width;
    T* to = out + size_t(blockIdx.x) * width;
#pragma unroll
    for (int part = 0; part < 4 / N; part++) {
        const int i = (blockIdx.y * (4 / N) + part) * THREADS + threadIdx.x;
        if (i >= width / N) break;
        const Values<float, N> gates = reinterpret_cast<const Values<float, N>*>(gate)[i];
        const Values<float, N> ups = reinterpret_cast<const Values<float, N>*>(up)[i];
        Values<T, N> result;
#pragma unroll
        for (int j = 0; j < N; j++)
            result.values[j] = to_operand<T>(Activation::of(gates.values[j]) * ups.values[j]);
        reinterpret_cast<Values<T, N>*>(to)[i] = result;
    }
}

#define KERNEL(name, Activation, T)                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                  \
    name##_##T(const float* gate_up, T* out, int width) {                  \
        dependency_wait();                                                 \
        dependency_launch();                                               \
        if (width % 4 == 0)                                                \
            gated<Activation, T, 4>(gate_up, out, width);                  \
        else                                                               \
            gated<Activation, T, 1>(gate_up, out, width);                  \
    }                                                                      \
    EXPORT(name##_##T)
#define KERNELS(T)               \
    KERNEL(silu_mul, Silu, T)    \
    KERNEL(gelu_mul, GeluTanh, T)
KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)

// The width is a multiple of 4.
template <class Numbers>
DEVICE void quantised_silu_mul(const float* gate_up, const QuantisedRows& to) {
    using Floats = Values<float, 4>;
    const float* gate = gate_up + size_t(blockIdx.x) * 2 * to.columns;
    const int first = blockIdx.y * QUANTISER_COLUMNS, distance = gridDim.y * QUANTISER_COLUMNS;
    quantise_row<Numbers>(to, blockIdx.x, first, distance, [&](int column) {
        const Floats gates = *reinterpret_cast<const Floats*>(gate + column);
        Floats four = *reinterpret_cast<const Floats*>(gate + to.columns + column);
#pragma unroll
        for (int j = 0; j < 4; j++) four.values[j] *= Silu::of(gates.values[j]);
        return four;
    });
}

#define QUANTISED(NAME, NUMBERS)                              \
    extern "C" __global__ void __launch_bounds__(THREADS)     \
    silu_mul_##NAME(const float* gate_up, QuantisedRows to) { \
        dependency_wait();                                    \
        dependency_launch();                                  \
        quantised_silu_mul<NUMBERS>(gate_up, to);             \
    }                                                         \
    EXPORT(silu_mul_##NAME)
QUANTISED(int8, Int8Numbers)
QUANTISED(fp8, Fp8Numbers)
