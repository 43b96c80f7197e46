// Causal attention of query rows over their sequences' pages of the KV cache, by tensor cores. Its formula, rows,
// splits and results are those of attention_call.cuh.
//
// The same bits need, beyond what is said there, that tiles and splits of which a row sees nothing do not change it:
// their factors are 1 and their weights 0, and stored values are finite (kv_page.cuh).
//
// Types     T, bf16 or f16, is that of the tensor cores: that of the cache, if it has floats. Queries and weights are
//           rounded to it. The result may have another type.
// Shape     A warp of decode or prefill has 16 rows, so a step of one query fills group of 16 rows of an mma; the 4
//           warps of prefill share the tiles, which cp.async copies. Where shared memory has room for two tiles, one is
//           copied while the one before it is multiplied. Otherwise keys are copied while values are multiplied, and
//           values while keys are.
// Large     Heads of more than 128 dimensions. Their accumulators take up to 128 registers of a thread, so those of the
//           splits before have no room: prefill keeps them in the place of the queries in qkv, which are copied first
//           and not needed again. The queries are in dynamic shared memory: 2 D bytes for each row of the warps.
// Registers Of a thread in decode: 130 to 228 for 32 to 128 dimensions, 218 to 255 for 256. In prefill: 146 to 255, 227
//           to 255. None is spilled by NVRTC 13.0 to 13.4; 13.5 spills 8 bytes of uint4 with 256 dimensions on sm_120a.
// Shared    KiB of a block in decode and in prefill:
//
//               dimensions    16 bits     int8      uint4
//                   80        35, 42     20, 27    12, 19
//                  128        36, 48     21, 33    13, 25
//                  256        40, 64     41, 65    26, 50
//
// Limit     decode: bytes of the cache; prefill: flops (4 D per query and visible key, less what the masks waste).
// Sources   Dao, "FlashAttention-2", section 3; Milakov and Gimelshein, "Online normalizer calculation for softmax";
//           Dao et al., "Flash-Decoding" (splits); Kwon et al., "PagedAttention", section 4; kv_page.cuh.
#include "attention.cuh"
#include "attention_combine.cuh"

constexpr int PREFILL_WARPS = 4;
constexpr int MOST_STAGES = 40 << 10;  // bytes
// Blocks on a multiprocessor. Without them, NVRTC limits registers for more blocks until it spills.
constexpr int MIN_DECODE_BLOCKS = 8, MIN_PREFILL_BLOCKS = 2, MIN_COMBINE_BLOCKS = 4;

// The queries of a warp in shared memory.
template <int D, int WARPS>
DEVICE uint4 (*query_fragments(int warp))[32] {
    if constexpr (D > LARGE) {
        DYNAMIC_SHARED(uint4, fragments);
        return reinterpret_cast<uint4(*)[32]>(fragments) + warp * (D / 16);
    } else {
        __shared__ uint4 fragments[WARPS][D / 16][32];
        return fragments[warp];
    }
}

template <class T, class E, int D, int WARPS, bool IS_DECODE>
DEVICE void attend(const Attention& call) {
    static_assert(D % 16 == 0 && D >= 32 && D <= 256, "head dimensions: multiples of 16 from 32 to 256");
    constexpr int STAGES = 2 * sizeof(Stage<E, D>) <= MOST_STAGES ? 2 : 1, THREADS = 32 * WARPS;
    constexpr bool IN_MEMORY = D > LARGE && !IS_DECODE;
    // Of decode, also with the queries in dynamic shared memory: more has to be allowed by the host.
    static_assert(!IS_DECODE || STAGES * sizeof(Stage<E, D>) + 2 * D * ROWS <= 48 << 10, "shared memory");
    __shared__ Stage<E, D> stages[STAGES];
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

    Queries<T, D> queries = {query_fragments<D, WARPS>(warp), {}};
    int first[2], last[2];
    float* query_rows[2];
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
    copy_tile<THREADS, STAGES == 1 ? KEYS : KEYS | VALUES>(stages[tile % STAGES], keys, tile);
    copy_commit();
    if constexpr (STAGES == 1) {
        copy_tile<THREADS, VALUES>(stages[0], keys, tile);
        copy_commit();
    }
    [[maybe_unused]] bool is_first_split = true;
    for (; tile < end; tile++) {
        const bool is_last = tile + 1 == end;
        Stage<E, D>& stage = stages[tile % STAGES];
        if constexpr (STAGES == 2) {
            if (!is_last) copy_tile<THREADS, KEYS | VALUES>(stages[(tile + 1) % 2], keys, tile + 1);
            copy_commit();
        }
        copy_wait<1>();
        __syncthreads();
        const TileWeights weights =
            now.template add_weights<T>(queries, stage, tile, first, last, call.scale, call.softcap);
        if constexpr (STAGES == 1) {
            __syncthreads();  // the keys may be replaced
            if (!is_last) copy_tile<THREADS, KEYS>(stage, keys, tile + 1);
            copy_commit();
            copy_wait<1>();
            __syncthreads();
        }
        now.template add_values<T>(weights, stage);
        __syncthreads();  // the stage may be filled again
        if constexpr (STAGES == 1) {
            if (!is_last) copy_tile<THREADS, VALUES>(stage, keys, tile + 1);
            copy_commit();
        }
        if (IS_DECODE || ((tile + 1) % TILES != 0 && !is_last)) continue;
        now.finish();
        if constexpr (IN_MEMORY) {
            total.append(now, query_rows, is_first_split, is_last);
            is_first_split = false;
            if (is_last) break;
        } else {
            total.append(now);
        }
        now.clear();
    }
    if (IS_DECODE) now.finish();
    if (IS_DECODE && !rows.has_one_split()) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = half * 8 + group;
            if (row >= rows.count) continue;
            float* to = rows.partial(split, row);
            now.write_row(half, 1, to);
            if (quad == 0) *reinterpret_cast<float2*>(to + D) = {now.top[half], now.sum[half]};
        }
        return;
    }
    if (IS_DECODE) total.append(now);
    Sums& result = IN_MEMORY ? now : total;
    // Row by row through shared memory, which gives the dimensions their order.
    float* row_values = reinterpret_cast<float*>(stages) + warp * D;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float factor = 1 / total.sum[half];
        for (int i = 0; i < 8; i++) {
            const int row = warp * ROWS + half * 8 + i;
            if (row >= rows.count) break;
            if (group == i) result.write_row(half, factor, row_values);
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
KERNELS(f16, u4, uint4, 144)
KERNELS(f16, f16, f16, 160)
KERNELS(bf16, bf16, bf16, 256)
KERNELS(bf16, int8, int8, 256)
KERNELS(f16, u4, uint4, 256)
#endif
