// Merges the partial results of decode (attention_call.cuh): the splits of a row in order, as prefill merges them.
//
// Shape     A warp has a row and 32 dimensions at a time. It reads 16 splits while it merges the 16 before them. Their
//           factors depend on the largest exponent up to each split alone, so the lanes compute them at the same time;
//           what is left in order is one fused operation for a dimension and split.
// Limit     bytes: head_dim + 2 floats for a row and split, from the second-level cache.
#pragma once
#include "attention_call.cuh"

constexpr int COMBINE_WARPS = 4;
constexpr int MOST_ROWS = 16;  // of a work item of decode
constexpr int AHEAD = 16;      // splits

// The partial results of a row that one lane needs: those of a dimension, and of every 16th split the exponent and the
// sum.
struct SplitReader {
    const float* from;
    size_t stride;
    int head_dim, dimension;
    float values[AHEAD], top, sum;

    DEVICE void load(int first, int end) {
        const float* row = from + first * stride;
        const int mine = threadIdx.x % AHEAD;
        top = -infinity(), sum = 0;
        if (first + mine < end) {
            const float2 weights = *reinterpret_cast<const float2*>(row + mine * stride + head_dim);
            top = weights.x, sum = weights.y;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) values[i] = first + i < end ? row[i * stride + dimension] : 0;
    }
};

// The value of a dimension, and the sum of the weights, of the splits first..end of a row.
struct Merged {
    float value = 0, sum = 0;

    DEVICE Merged(SplitReader next, int first, int end) {
        const int lane = threadIdx.x % 32;
        float top = -infinity();
        next.load(first, end);
        for (; first < end; first += AHEAD) {
            const SplitReader now = next;
            if (first + AHEAD < end) next.load(first + AHEAD, end);
            float highest = now.top;  // up to the lane's split
#pragma unroll
            for (int step = 1; step < AHEAD; step *= 2) {
                const float other = __shfl_up_sync(ALL_LANES, highest, step);
                if (lane % AHEAD >= step) highest = fmaxf(highest, other);
            }
            const float other = __shfl_up_sync(ALL_LANES, highest, 1);
            const Merge merge(lane % AHEAD == 0 ? top : fmaxf(top, other), now.top);
            const float added = __fmul_rn(now.sum, merge.of_split);
            top = __shfl_sync(ALL_LANES, merge.top, AHEAD - 1);
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                if (first + i >= end) break;
                const float of_total = __shfl_sync(ALL_LANES, merge.of_total, i);
                const float of_split = __shfl_sync(ALL_LANES, merge.of_split, i);
                value = __fmaf_rn(value, of_total, __fmul_rn(now.values[i], of_split));
                sum = __fmaf_rn(sum, of_total, __shfl_sync(ALL_LANES, added, i));
            }
        }
    }
};

// finish(value, sum) is a result.
template <class E, int MAX_HEAD_DIM, class Finish>
DEVICE void combine_splits(const Attention& call, int head_dim, Finish finish) {
    __shared__ float values[MOST_ROWS][MAX_HEAD_DIM];
    const WorkItemRows rows(call);
    dependency_wait();
    dependency_launch();
    if (rows.count == 0 || rows.has_one_split()) return;
    const int warp = threadIdx.x / 32, parts = ceil_div(head_dim, 32);
    const int first_row = blockIdx.z, step = gridDim.z, count = ceil_div(rows.count - first_row, step);
    const size_t stride = size_t(call.cache.kv_heads) * rows.count * (head_dim + 2);
    for (int i = warp; i < count * parts; i += COMBINE_WARPS) {
        const int index = i / parts, dimension = i % parts * 32 + threadIdx.x % 32;
        const float* from = rows.partial(0, first_row + index * step);
        const SplitReader reader = {from, stride, head_dim, min(dimension, head_dim - 1), {}, 0, 0};
        const Merged merged(reader, rows.first_split(), rows.last_split() + 1);
        if (dimension < head_dim) values[index][dimension] = finish(merged.value, merged.sum);
    }
    __syncthreads();
    for (int index = warp; index < count; index += COMBINE_WARPS)
        store_row<E>(call, rows.out_row(first_row + index * step), values[index], head_dim);
}
