// The call of attention: its rows, their division, and the operations that all its kernels have in common.
//
//     out[row][head] = sum over visible t of p[t] value[t] / sum of p[t]
//     p[t]           = exp(scale q . key[t]), or exp(cap tanh(scale q . key[t] / cap))
//
// A row at position p sees the positions max(0, p - window + 1)..=p.
//
// Rows      `group` query heads share a kv head. The rows of a sequence are packed: query and head of the group, (0,
//           0), (0, 1), .. (1, 0), .. A sequence is divided into works, of at most 16 packed rows (decode) or 64
//           (prefill).
// Splits    The positions are divided into splits of 256 and tiles of 32, from position 0 on, whatever the row. A
//           split is computed by one warp: an online softmax over its tiles, in order. Splits are merged in order.
//
// The same bits: decode computes each split in a block of its own, and `combine` merges them; prefill goes through
// the splits one after the other and merges each, by the same functions, whose operations are not contracted
// differently. Tiles and splits of which a row sees nothing do not change it. So the bits of a row depend on its query
// and its visible keys and values alone: not on the batch, the other queries of the step (chunks), the division into
// works or the kernel.
//
// Data      qkv [rows][heads + 2 kv heads][head_dim] of float32, where queries are as rope_write_kv leaves them; out
//           [rows][heads][head_dim] of `out_type`: the operand of the next product. Partial results of decode:
//           [split][kv head][row of the work][head_dim + 2] from the work's place on: the weighted sum of values, the
//           largest exponent, the sum of weights.
// Grids     decode: (works, kv heads, most splits of a work), one warp; prefill and combine: (works, kv heads), 4
//           warps.
#pragma once
#include "kv_page.cuh"

constexpr int SPLIT = 256, TILE = 32;
constexpr float LOG2_E = 1.4426950408889634f;

enum FloatType : int { F32, BF16, F16 };

struct Sequence {
    uint32_t first_row, num_queries, start, first_block;
};
struct Work {
    uint32_t sequence, first, partial;  // the first packed row, and the place of its partial results, in rows
};

struct Attention {
    const float* qkv;
    const Sequence* sequences;
    const uint32_t* blocks;  // the block tables of all sequences
    const Work* works;
    float* partials;
    void* out;
    KvCache cache;
    int heads;
    int window;  // 0: none
    float scale;
    float softcap;  // 0: none
    FloatType out_type;
};

// The rows of a work, for one kv head.
template <int MAX_ROWS>
struct WorkRows {
    const Attention& call;
    const Work work;
    const Sequence sequence;
    int group, count;

    DEVICE explicit WorkRows(const Attention& call)
        : call(call), work(call.works[blockIdx.x]), sequence(call.sequences[work.sequence]),
          group(call.heads / call.cache.kv_heads) {
        count = min(MAX_ROWS, int(sequence.num_queries) * group - int(work.first));
    }
    DEVICE int query(int row) const { return (int(work.first) + row) / group; }
    DEVICE int last(int row) const { return int(sequence.start) + query(row); }
    DEVICE int first(int row) const { return call.window > 0 ? max(0, last(row) - call.window + 1) : 0; }
    DEVICE int head(int row) const { return int(blockIdx.y) * group + (int(work.first) + row) % group; }
    DEVICE int first_split() const { return first(0) / SPLIT; }
    DEVICE int last_split() const { return last(count - 1) / SPLIT; }
    DEVICE const float* query_row(int row) const {
        const size_t width = call.heads + 2 * call.cache.kv_heads;
        return call.qkv + ((sequence.first_row + query(row)) * width + head(row)) * call.cache.head_dim;
    }
    DEVICE size_t out_row(int row) const { return size_t(sequence.first_row + query(row)) * call.heads + head(row); }
    DEVICE float* partial(int split, int row) const {
        const size_t part = size_t(split - first_split()) * call.cache.kv_heads + blockIdx.y;
        return call.partials + (work.partial + part * count + row) * (call.cache.head_dim + 2);
    }
};

// ---- Weights

// The scaled exponents of a score: base 2.
DEVICE float exponent(float score, float scale, float softcap) {
    float x = __fmul_rn(score, scale);
    if (softcap > 0) x = __fmul_rn(softcap, tanhf(x / softcap));
    return __fmul_rn(x, LOG2_E);
}

// 2^(x - top), 0 if x is minus infinity.
DEVICE float power(float x, float top) { return exp2f(x == -infinity() ? x : __fadd_rn(x, -top)); }

// The factors that bring two sums to the same exponent.
struct Merge {
    float top, of_total, of_split;

    DEVICE Merge(float total_top, float split_top) : top(fmaxf(total_top, split_top)) {
        of_total = power(total_top, top);
        of_split = power(split_top, top);
    }
    DEVICE float of(float total, float split) const { return __fmaf_rn(total, of_total, __fmul_rn(split, of_split)); }
};

// ---- Results, by one warp

// The results of rotated values are rotated back.
template <class E>
DEVICE void restore(float*, int) {}
template <>
DEVICE void restore<u4>(float* x, int count) {
    hadamard(x, count);
}

template <class T>
DEVICE void store_as(void* out, size_t start, const float* x, int count) {
    T* to = static_cast<T*>(out) + start;
    for (int i = threadIdx.x % 32; i < count; i += 32) to[i] = to_operand<T>(x[i]);
}

// Stores row `row` of the result, of head_dim floats in shared memory.
template <class E>
DEVICE void store_row(const Attention& call, size_t row, float* x, int count) {
    __syncwarp();
    restore<E>(x, count);
    if (call.out_type == F32)
        store_as<f32>(call.out, row * count, x, count);
    else if (call.out_type == BF16)
        store_as<bf16>(call.out, row * count, x, count);
    else
        store_as<f16>(call.out, row * count, x, count);
    __syncwarp();
}
