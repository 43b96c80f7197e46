// The factor of RMSNorm.
#pragma once
#include "common.cuh"

// 1 / sqrt(mean of squares + epsilon). `sum_squares(zero)` adds the squares of `count` values in the type of `zero`, by
// all threads that share the row; they get the same bits. The sum is of float32, or of float64, as on the CPU, if
// squares of float32 are infinite or vanish.
template <class SumSquares>
DEVICE float norm_factor(int count, float epsilon, SumSquares sum_squares) {
    const float sum = sum_squares(float(0));
    if (0x1p-100f < sum && sum < infinity()) return 1 / sqrtf(sum / count + epsilon);
    return float(1 / sqrt(sum_squares(double(0)) / count + double(epsilon)));
}
