// The call of attention: its rows, their division, and the operations that all its kernels have in common.
//
//     out[row][head] = sum over visible t of p[t] value[t] / sum of p[t]
//     p[t]           = exp(scale q . key[t]), or exp(cap tanh(scale q . key[t] / cap))
//
// A row at position p sees the positions max(0, p - window + 1)..=p.
//
// Rows      `group` query heads share a kv head. The rows of a sequence are packed: query and head of the group, (0,
//           0), (0, 1), .. (1, 0), .. They are divided into parts, of at most 16 packed rows (decode) or 64 (prefill;
//           128 for that of attention_warpgroup.cu).
// Splits    The positions are divided into splits of 256 and tiles of 32, from position 0 on, whatever the row. A
//           split is an online softmax over its tiles, in order. Splits are merged in order.
// Work items  of decode and decode_wide: a part and one split; of prefill and combine: a part, with all its splits.
//           Work items without rows may be anywhere, and do nothing: they give steps of different sizes the same number
//           of work items.
//
// The same bits: decode computes each split in a block of its own, and `combine` merges them; prefill goes through
// the splits one after the other and merges each, by the same functions, whose operations are not contracted
// differently. Decode appends a part's only split to an empty total itself, and combine leaves out such parts. Tiles
// and splits of which a row sees nothing do not change it. So the bits of a row depend on its query and its visible
// keys and values alone: not on the batch, the other queries of the step (chunks), the division into work items or
// the kernel.
//
// Data      qkv [rows][heads + 2 kv heads][head_dim] of float32, where queries are as rope_write_kv leaves them; out
//           [rows][heads][head_dim] of `out_type`: the operand of the next product. Prefill of attention.cu overwrites
//           the queries if heads are large. Partial results of decode:
//           [split][kv head][row of the part][head_dim + 2] from the part's place on: the weighted sum of values, the
//           largest exponent, the sum of weights.
// Grids     decode: (work items, kv heads), one warp; decode_wide of attention.cu: the same, 4 warps; prefill: (work
//           items, kv heads), 4 warps, or 8 in attention_warpgroup.cu; combine: (work items, kv heads, any number), 4
//           warps: the blocks of a work item share its rows. decode_wide, prefill of attention_warpgroup.cu, and for
//           large heads decode and prefill of attention.cu, have dynamic shared memory.
#pragma once
#include "kv_page.cuh"

constexpr int SPLIT = 256, TILE = 32;
constexpr float LOG2_E = 1.4426950408889634f;

struct __align__(16) WorkItem {
    uint32_t first_row, start, first_block;  // of the sequence: its first query, the position of that, its block table
    uint32_t first, count;                   // of the packed rows; no rows: the item does not exist
    uint32_t split;                          // of decode
    uint32_t partial;                        // the place of the part's partial results, in rows
    uint32_t reserved;
};

struct Attention {
    float* qkv;
    const uint32_t* blocks;  // the block tables of all sequences
    const WorkItem* work_items;
    float* partials;
    void* out;
    KvCache cache;
    int heads;
    int window;  // 0: none
    float scale;
    float softcap;  // 0: none
    FloatType out_type;
};

// The rows of a work item, for one kv head.
struct WorkItemRows {
    const Attention& call;
    const WorkItem item;
    int group, count;

    DEVICE explicit WorkItemRows(const Attention& call)
        : call(call), item(call.work_items[blockIdx.x]), group(call.heads / call.cache.kv_heads), count(item.count) {}
    DEVICE int query(int row) const { return (int(item.first) + row) / group; }
    DEVICE int last(int row) const { return int(item.start) + query(row); }
    DEVICE int first(int row) const { return call.window > 0 ? max(0, last(row) - call.window + 1) : 0; }
    DEVICE int head(int row) const { return int(blockIdx.y) * group + (int(item.first) + row) % group; }
    DEVICE int first_split() const { return first(0) / SPLIT; }
    DEVICE int last_split() const { return last(count - 1) / SPLIT; }
    DEVICE bool has_one_split() const { return first_split() == last_split(); }
    DEVICE const uint32_t* blocks() const { return call.blocks + item.first_block; }
    DEVICE float* query_row(int row) const {
        const size_t width = call.heads + 2 * call.cache.kv_heads;
        return call.qkv + ((item.first_row + query(row)) * width + head(row)) * call.cache.head_dim;
    }
    DEVICE size_t out_row(int row) const { return size_t(item.first_row + query(row)) * call.heads + head(row); }
    DEVICE float* partial(int split, int row) const {
        const size_t block = size_t(split) * call.cache.kv_heads + blockIdx.y;
        return call.partials + (item.partial + block * count + row) * (call.cache.head_dim + 2);
    }
};

// ---- Weights

// The scaled exponents of a score: base 2.
DEVICE float exponent(float score, float scale, float softcap) {
    if (softcap > 0) return __fmul_rn(__fmul_rn(softcap, LOG2_E), tanhf(__fmul_rn(score, scale / softcap)));
    return __fmul_rn(score, __fmul_rn(scale, LOG2_E));
}

// 2^x, or 0 below 2^-126: one instruction, where exp2f has four.
DEVICE float power_of_two(float x) {
#ifdef PENSTOCK_HOST
    return x < -126 ? 0 : exp2f(x);
#else
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

// 2^(x - top), 0 if x is minus infinity: with an operation for each top, which takes a register, or for each x.
template <bool HAS_REGISTERS = true>
DEVICE float power(float x, float top) {
    if (HAS_REGISTERS) return power_of_two(__fadd_rn(x, top == -infinity() ? 0 : -top));
    return power_of_two(x == -infinity() ? x : __fadd_rn(x, -top));
}

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
