// Rows of float32 as 8-bit integers or e4m3 with scales.
//
// Data      x [rows][columns] of float32; `to` as in quantised_rows.cuh, without rows of floats.
// Shape     grid (rows, parts): blocks share the columns of a row, 1024 at a time; 1 part if a row is a group.
// Limit     bytes: 4 read and 1.25 written for each value.
#include "quantised_rows.cuh"

template <class Numbers>
DEVICE void quantise(const float* x, const QuantisedRows& to) {
    dependency_wait();
    dependency_launch();
    const float* from = x + size_t(blockIdx.x) * to.columns;
    quantise_row<Numbers>(to, blockIdx.x, blockIdx.y * QUANTISER_COLUMNS, gridDim.y * QUANTISER_COLUMNS,
                          [&](int column) { return *reinterpret_cast<const Values<float, 4>*>(from + column); });
}

#define KERNELS(NAME, NUMBERS)                                              \
    extern "C" __global__ void __launch_bounds__(QUANTISER_THREADS)         \
    quantise_##NAME(const float* x, QuantisedRows to) {                     \
        quantise<NUMBERS>(x, to);                                           \
    }                                                                       \
    EXPORT(quantise_##NAME)
KERNELS(int8, Int8Numbers)
KERNELS(fp8, Fp8Numbers)
