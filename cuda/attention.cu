// Causal attention of query rows over their sequences' pages of the KV cache, by tensor cores. Its formula, rows,
// splits and results are those of attention_call.cuh.
//
// The same bits need, beyond what is said there, that tiles and splits of which a row sees nothing do not change it:
// their factors are 1 and their weights 0, and stored values are finite (kv_page.cuh).
//
// Types     T, bf16 or f16, is that of the tensor cores: that of the cache, if it has floats. Queries and weights are
//           rounded to it. The result may have another type.
// Shape     A warp of decode or prefill has 16 rows, so a step of one query fills group of 16 rows of an mma; the 4
//           warps of prefill share the tiles. Tiles pass through two stages of shared memory, filled by cp.async.
// Limit     decode: bytes of the cache; prefill: flops (4 D per query and visible key, less what the masks waste).
// Sources   Dao, "FlashAttention-2", section 3; Milakov and Gimelshein, "Online normalizer calculation for softmax";
//           Dao et al., "Flash-Decoding" (splits); Kwon et al., "PagedAttention", section 4; kv_page.cuh.
#include "attention.cuh"
#include "attention_combine.cuh"

constexpr int PREFILL_WARPS = 4;
// Blocks on a multiprocessor. Without them, NVRTC limits registers for more blocks until it spills.
constexpr int MIN_DECODE_BLOCKS = 8, MIN_PREFILL_BLOCKS = 2, MIN_COMBINE_BLOCKS = 4;

template <class T, class E, int D, int WARPS, bool IS_DECODE>
DEVICE void attend(const Attention& call) {
    static_assert(D % 16 == 0 && D >= 32 && D <= 128, "head dimensions: multiples of 16 from 32 to 128");
    __shared__ Stage<E, D> stages[2];
    __shared__ uint4 query_fragments[WARPS][D / 16][32];
    dependency_wait();
    dependency_launch();
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const WorkRows rows(call);
    if (rows.count == 0) return;
    const int split = rows.work.split;
    if (IS_DECODE && split < rows.first_split()) return;  // before the window
    KvCache cache = call.cache;
    cache.head_dim = D;  // a constant, as for the compiler
    const Keys keys = {cache, rows.blocks(), int(blockIdx.y), rows.first(0),
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
        query_rows[half] = exists ? rows.query_row(row) : nullptr;
    }
    queries.template load<E>(query_rows, Encoding<T, E, D>::FAST);

    constexpr int TILES = SPLIT / TILE;
    int tile = keys.first / TILE, end = keys.last / TILE + 1;
    if (IS_DECODE) tile = max(tile, split * TILES), end = min(end, (split + 1) * TILES);
    using Sums = Weighted<E, D>;
    Sums now, total;
    now.clear();
    total.clear();
    copy_tile<32 * WARPS>(stages[tile % 2], keys, tile);
    copy_commit();
    for (; tile < end; tile++) {
        if (tile + 1 < end) copy_tile<32 * WARPS>(stages[(tile + 1) % 2], keys, tile + 1);
        copy_commit();
        copy_wait<1>();
        __syncthreads();
        now.template add_tile<T>(queries, stages[tile % 2], tile, first, last, call.scale, call.softcap);
        __syncthreads();  // the stage may be filled again
        if (IS_DECODE || ((tile + 1) % TILES != 0 && tile + 1 < end)) continue;
        now.finish();
        total.append(now);
        now.clear();
    }
    if (IS_DECODE) now.finish();
    if (IS_DECODE && rows.has_one_split()) total.append(now);
    if (IS_DECODE && !rows.has_one_split()) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = half * 8 + group;
            if (row >= rows.count) continue;
            float* to = rows.partial(split, row);
            // Two adjacent dimensions at a time: of an accumulator, or of two.
#pragma unroll
            for (int i = 0; i < Sums::ACCUMULATORS; i++) {
                const int n = UNIT<E> == 1 ? i : i / 2 * 2, column = UNIT<E> == 1 ? 0 : i % 2;
                const int next_n = UNIT<E> == 1 ? n : i / 2 * 2 + 1, next_column = UNIT<E> == 1 ? 1 : column;
                const float2 pair = {now.values[n][half * 2 + column], now.values[next_n][half * 2 + next_column]};
                if (Sums::has_dimension(n, quad * 2 + column))
                    *reinterpret_cast<float2*>(to + Sums::dimension(n, quad * 2 + column)) = pair;
            }
            if (quad == 0) *reinterpret_cast<float2*>(to + D) = {now.top[half], now.sum[half]};
        }
        return;
    }
    // Row by row through shared memory, which gives the dimensions their order.
    float* row_values = reinterpret_cast<float*>(stages) + warp * D;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float factor = 1 / total.sum[half];
        for (int i = 0; i < 8; i++) {
            const int row = warp * ROWS + half * 8 + i;
            if (row >= rows.count) break;
            if (group == i)
#pragma unroll
                for (int j = 0; j < 2 * Sums::ACCUMULATORS; j++) {
                    const int n = j / 2, column = quad * 2 + j % 2;
                    if (Sums::has_dimension(n, column))
                        row_values[Sums::dimension(n, column)] = total.values[n][half * 2 + j % 2] * factor;
                }
            store_row<E>(call, rows.out_row(row), row_values, D);
        }
    }
}

template <class E, int D>
DEVICE void combine(const Attention& call) {
    combine_splits<E, D>(call, D, [](float value, float sum) { return value * (1 / sum); });
}

#define KERNEL(name, threads, min_blocks, ...)                                                     \
    extern "C" __global__ void __launch_bounds__(threads, min_blocks) name(Attention call) {       \
        __VA_ARGS__(call);                                                                         \
    }                                                                                              \
    EXPORT(name)
#define KERNELS(T, E, name, D)                                                                     \
    KERNEL(attention_decode_##T##_##name##_##D, 32, MIN_DECODE_BLOCKS, attend<T, E, D, 1, true>)   \
    KERNEL(attention_prefill_##T##_##name##_##D, 32 * PREFILL_WARPS, MIN_PREFILL_BLOCKS,           \
           attend<T, E, D, PREFILL_WARPS, false>)                                                  \
    KERNEL(attention_combine_##T##_##name##_##D, 32 * COMBINE_WARPS, MIN_COMBINE_BLOCKS, combine<E, D>)
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
OF_F16(32)
KERNELS(f16, u4, uint4, 48)
OF_BF16(64)
OF_F16(64)
KERNELS(bf16, bf16, bf16, 80)
KERNELS(bf16, u4, uint4, 80)
KERNELS(f16, int8, int8, 80)
KERNELS(bf16, bf16, bf16, 96)
OF_BF16(128)
#endif
