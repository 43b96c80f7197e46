// Causal attention of query rows over their sequences' pages of the KV cache.
//
//     out[row][head] = sum over visible t of p[t] value[t] / sum of p[t]
//     p[t]           = exp(scale q . key[t]), or exp(cap tanh(scale q . key[t] / cap))
//
// A row at position p sees the positions max(0, p - window + 1)..=p.
//
// Rows      `group` query heads share a kv head. The rows of a sequence are packed: query and head of the group, (0,
//           0), (0, 1), .. (1, 0), ..; a warp has 16 of them, so a step of one query fills group of 16 rows of an
//           mma. A sequence is divided into works, of at most 16 packed rows (decode) or 64 (prefill).
// Splits    The positions are divided into splits of 256 and tiles of 32, from position 0 on, whatever the row. A
//           split is computed by one warp: an online softmax over its tiles, in order. Splits are merged in order.
//
// The same bits: decode computes each split in a block of its own, and `combine` merges them; prefill goes through
// the splits one after the other and merges each, by the same functions, whose operations are not contracted
// differently. Tiles and splits of which a row sees nothing do not change it (their factors are 1 and their weights
// 0, and stored values are finite: kv_page.cuh). So the bits of a row depend on its query and its visible keys and
// values alone: not on the batch, the other queries of the step (chunks), the division into works or the kernel.
//
// Data      qkv [rows][heads + 2 kv heads][D] of float32, where queries are as rope_write_kv leaves them; out
//           [rows][heads][D] of T. Partial results of decode: [split][kv head][row of the work][D + 2] from the
//           work's place on: the weighted sum of values, the largest exponent, the sum of weights.
// Shape     decode: grid (works, kv heads, most splits of a work), one warp. prefill: grid (works, kv heads), 4 warps
//           that share the tiles. combine: grid (works, kv heads), a warp per row. Tiles pass through two stages of
//           shared memory, filled by cp.async.
// Limit     decode: bytes of the cache; prefill: flops (4 D per query and visible key, less what the masks waste).
// Sources   Dao, "FlashAttention-2", section 3; Milakov and Gimelshein, "Online normalizer calculation for softmax";
//           Dao et al., "Flash-Decoding" (splits); Kwon et al., "PagedAttention", section 4; kv_page.cuh.
#include "attention.cuh"

constexpr int SPLIT = 256, PREFILL_WARPS = 4, COMBINE_WARPS = 4;
// Without it, NVRTC 13.2 limits the registers of `combine` on sm_120a until it spills.
constexpr int MIN_COMBINE_BLOCKS = 4;

struct Sequence {
    uint32_t first_row, num_queries, start, first_block;
};
struct Work {
    uint32_t sequence, first, partial;  // the first packed row, and the place of its partial results, in rows
};

template <class T>
struct Attention {
    const float* qkv;
    const Sequence* sequences;
    const uint32_t* blocks;  // the block tables of all sequences
    const Work* works;
    float* partials;
    T* out;
    KvCache cache;
    int heads;
    int window;  // 0: none
    float scale;
    float softcap;  // 0: none
};

// The rows of a work, for one kv head.
template <class T, int MAX_ROWS>
struct WorkRows {
    const Attention<T>& call;
    const Work work;
    const Sequence sequence;
    int group, count;

    DEVICE explicit WorkRows(const Attention<T>& call)
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
    DEVICE const float* query_row(int row, int head_dim) const {
        const size_t width = call.heads + 2 * call.cache.kv_heads;
        return call.qkv + ((sequence.first_row + query(row)) * width + head(row)) * head_dim;
    }
    DEVICE T* out_row(int row, int head_dim) const {
        return call.out + (size_t(sequence.first_row + query(row)) * call.heads + head(row)) * head_dim;
    }
    DEVICE float* partial(int split, int row, int head_dim) const {
        const size_t part = size_t(split - first_split()) * call.cache.kv_heads + blockIdx.y;
        return call.partials + (work.partial + part * count + row) * (head_dim + 2);
    }
};

// The dimension of column `column` of accumulator n.
template <class E>
DEVICE int dimension(int n, int column) {
    return (n / UNIT<E> * 8 + column) * UNIT<E> + n % UNIT<E>;
}

// The results of rotated values are rotated back.
template <class E>
DEVICE void restore(float*, int) {}
template <>
DEVICE void restore<u4>(float* x, int count) {
    hadamard(x, count);
}

template <class T, class E>
DEVICE void store_row(T* out, float* x, int count) {
    __syncwarp();
    restore<E>(x, count);
    for (int i = threadIdx.x % 32; i < count; i += 32) out[i] = from_float<T>(x[i]);
    __syncwarp();
}

template <class T, class E, int D, int WARPS, bool IS_DECODE>
DEVICE void attend(const Attention<T>& call) {
    static_assert(D == 32 || D == 64 || D == 96 || D == 128, "head dimensions: multiples of 32 up to 128");
    __shared__ Stage<E, D> stages[2];
    __shared__ uint4 query_fragments[WARPS][D / 16][32];
    dependency_wait();
    dependency_launch();
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const WorkRows<T, WARPS * ROWS> rows(call);
    const int split = rows.first_split() + int(blockIdx.z);
    if (IS_DECODE && split > rows.last_split()) return;
    const Keys keys = {call.cache, call.blocks + rows.sequence.first_block, int(blockIdx.y), rows.first(0),
                       rows.last(rows.count - 1)};

    Queries<T, D> queries = {query_fragments[warp], {}};
    int first[2], last[2];
    const float* query_rows[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = warp * ROWS + half * 8 + group;
        const bool exists = row < rows.count;
        first[half] = exists ? rows.first(row) : 0;
        last[half] = exists ? rows.last(row) : -1;
        query_rows[half] = exists ? rows.query_row(row, D) : nullptr;
    }
    queries.load(query_rows, Encoding<T, E, D>::FAST);

    constexpr int TILES = SPLIT / TILE;
    int tile = keys.first / TILE, end = keys.last / TILE + 1;
    if (IS_DECODE) tile = max(tile, split * TILES), end = min(end, (split + 1) * TILES);
    Weighted<D> now, total;
    now.clear();
    total.clear();
    copy_tile(stages[tile % 2], keys, tile);
    copy_commit();
    for (; tile < end; tile++) {
        if (tile + 1 < end) copy_tile(stages[(tile + 1) % 2], keys, tile + 1);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        now.template add_tile<T, E>(queries, stages[tile % 2], tile, first, last, call.scale, call.softcap);
        __syncthreads();  // the stage may be filled again
        if (IS_DECODE || ((tile + 1) % TILES != 0 && tile + 1 < end)) continue;
        now.finish();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Merge merge(total.top[half], now.top[half]);
            total.top[half] = merge.top;
            total.sum[half] = merge.of(total.sum[half], now.sum[half]);
#pragma unroll
            for (int i = 0; i < D / 4; i++) {
                float& value = total.values[i / 2][half * 2 + i % 2];
                value = merge.of(value, now.values[i / 2][half * 2 + i % 2]);
            }
        }
        now.clear();
    }
    if (IS_DECODE) {
        now.finish();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = half * 8 + group;
            if (row >= rows.count) continue;
            float* to = rows.partial(split, row, D);
#pragma unroll
            for (int i = 0; i < D / 4; i++)
                to[dimension<E>(i / 2, quad * 2 + i % 2)] = now.values[i / 2][half * 2 + i % 2];
            if (quad == 0) to[D] = now.top[half], to[D + 1] = now.sum[half];
        }
        return;
    }
    // Row by row through shared memory, which gives the dimensions their order.
    float* row_values = reinterpret_cast<float*>(stages) + warp * D;
#pragma unroll
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 8; i++) {
            const int row = warp * ROWS + half * 8 + i;
            if (row >= rows.count) break;
            if (group == i)
#pragma unroll
                for (int j = 0; j < D / 4; j++)
                    row_values[dimension<E>(j / 2, quad * 2 + j % 2)] =
                        total.values[j / 2][half * 2 + j % 2] / total.sum[half];
            store_row<T, E>(rows.out_row(row, D), row_values, D);
        }
}

template <class T, class E, int D>
DEVICE void combine(const Attention<T>& call) {
    __shared__ float row_values[COMBINE_WARPS][D];
    dependency_wait();
    dependency_launch();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const WorkRows<T, ROWS> rows(call);
    for (int row = warp; row < rows.count; row += COMBINE_WARPS) {
        float top = -infinity(), sum = 0, values[D / 32] = {};
        for (int split = rows.first_split(); split <= rows.last_split(); split++) {
            const float* from = rows.partial(split, row, D);
            const Merge merge(top, from[D]);
            top = merge.top;
            sum = merge.of(sum, from[D + 1]);
#pragma unroll
            for (int i = 0; i < D / 32; i++) values[i] = merge.of(values[i], from[lane + 32 * i]);
        }
#pragma unroll
        for (int i = 0; i < D / 32; i++) row_values[warp][lane + 32 * i] = values[i] / sum;
        store_row<T, E>(rows.out_row(row, D), row_values[warp], D);
    }
}

#define KERNELS(T, E, name, D)                                                                                       \
    extern "C" __global__ void __launch_bounds__(32) attention_decode_##T##_##name##_##D(Attention<T> call) {        \
        attend<T, E, D, 1, true>(call);                                                                              \
    }                                                                                                                \
    EXPORT(attention_decode_##T##_##name##_##D)                                                                      \
    extern "C" __global__ void __launch_bounds__(32 * PREFILL_WARPS)                                                 \
    attention_prefill_##T##_##name##_##D(Attention<T> call) {                                                        \
        attend<T, E, D, PREFILL_WARPS, false>(call);                                                                 \
    }                                                                                                                \
    EXPORT(attention_prefill_##T##_##name##_##D)                                                                     \
    extern "C" __global__ void __launch_bounds__(32 * COMBINE_WARPS, MIN_COMBINE_BLOCKS)                             \
    attention_combine_##T##_##name##_##D(Attention<T> call) {                                                        \
        combine<T, E, D>(call);                                                                                      \
    }                                                                                                                \
    EXPORT(attention_combine_##T##_##name##_##D)
// For a model, its variant alone is compiled: -DVARIANT=bf16,u4,uint4,128. Without it, those of the tests are.
#define INSTANTIATE(...) KERNELS(__VA_ARGS__)
#ifdef VARIANT
INSTANTIATE(VARIANT)
#else
#define OF_BF16(D)               \
    KERNELS(bf16, bf16, bf16, D) \
    KERNELS(bf16, int8, int8, D) \
    KERNELS(bf16, u4, uint4, D)
#define OF_F16(D)               \
    KERNELS(f16, f16, f16, D)   \
    KERNELS(f16, int8, int8, D) \
    KERNELS(f16, u4, uint4, D)
OF_BF16(32)
OF_BF16(64)
OF_F16(64)
OF_BF16(128)
#endif
