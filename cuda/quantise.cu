// Rows of float32 as 8-bit integers with scales.
//
// Data      x [rows][columns] of float32; `to` as in quantised.cuh, without rows of floats.
// Shape     grid (rows, parts): blocks share the columns of a row, 1024 at a time; 1 part if a row is a span.
// Limit     bytes: 4 read and 1.25 written for each value.
#include "quantised.cuh"

extern "C" __global__ void __launch_bounds__(QUANTISER_THREADS) quantise_int8(const float* x, QuantisedRows to) {
    dependency_wait();
    dependency_launch();
    const float* from = x + size_t(blockIdx.x) * to.columns;
    quantise_row(to, blockIdx.x, blockIdx.y * QUANTISER_COLUMNS, gridDim.y * QUANTISER_COLUMNS,
                 [&](int column) { return *reinterpret_cast<const Values<float, 4>*>(from + column); });
}
EXPORT(quantise_int8)
