// Causal attention of query rows over their sequences' pages of the KV cache, by tensor cores. Its formula, rows,
// splits and results are those of attention_call.cuh.
//
// The same bits need, beyond what is said there, that tiles and splits of which a row sees nothing do not change it:
// their factors are 1 and their weights 0, and stored values are finite (kv_page.cuh).
//
// Types     T, bf16 or f16, is that of the tensor cores: that of the cache, if it has floats. Queries and weights are
//           rounded to it. The result may have another type.
// Shape     A warp of decode or prefill has 16 rows, so a step of one query fills as many rows of an mma as there are
//           query heads for a key head; the 4 warps of prefill share the tiles, which cp.async copies. decode_wide has
//           4 warps for the rows and the split of decode: one sequence has too few splits to occupy a device, and
//           decode takes 15 us for the 8 tiles of a split, one after the other (an H100). Where shared memory has room
//           for two tiles, one is copied while the one before it is multiplied. Otherwise keys are copied while values
//           are multiplied, and values while keys are. attention_warpgroup.cu has another prefill.
// Large     Heads of more than 128 dimensions. Their accumulators take up to 128 registers of a thread, so those of the
//           splits before have no room: prefill keeps them in the place of the queries in qkv, which are copied first
//           and not needed again. The queries are in dynamic shared memory: 2 D bytes for each row of the warps.
// Registers Of a thread, by NVRTC 13.4 for 32 to 128 dimensions and for more: in decode 121 to 239 and 207 to 255, in
//           prefill 167 to 255 and 190 to 255; in decode_wide up to 154. 13.2 and 13.4 spill none, 13.0 up to 16 bytes
//           of prefill with 128 dimensions on sm_100a and sm_120a.
// Shared    KiB of a block in decode and in prefill; decode_wide has 64, and up to 25 of static shared memory:
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

constexpr int PREFILL_WARPS = 4, WIDE_WARPS = 4;
constexpr int WIDE_SHARED_BYTES = 64 << 10;  // dynamic, of a block of decode_wide
// Parts of dimensions are whole words, and the queries are in static shared memory.
template <class E, int D>
constexpr bool HAS_WIDE = D <= LARGE && Stage<E, D>::WORDS % WIDE_WARPS == 0;
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

// Writes the partial results of a split: each warp its dimensions, the first one the exponent and the sum.
template <class E, int D, int PARTS>
DEVICE void write_partials(Weighted<E, D, PARTS>& sums, const WorkItemRows& rows) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = half * 8 + int(threadIdx.x % 32 / 4);
        if (row >= rows.count) continue;
        float* to = rows.partial(rows.item.split, row);
        sums.write_row(half, 1, to);
        if (threadIdx.x < 32 && threadIdx.x % 4 == 0)
            *reinterpret_cast<float2*>(to + D) = {sums.top[half], sums.sum[half]};
    }
}

template <class T, class E, int D, int WARPS, bool IS_DECODE>
DEVICE void attend(const Attention& call) {
    static_assert(D % 16 == 0 && D >= 32 && D <= 256, "head dimensions: multiples of 16 from 32 to 256");
    constexpr int STAGES = 2 * sizeof(Stage<E, D>) <= MOST_STAGES ? 2 : 1, THREADS = 32 * WARPS;
    constexpr bool IN_MEMORY = D > LARGE && !IS_DECODE, HAS_REGISTERS = D <= LARGE && IS_DECODE;
    // Of decode, also with the queries in dynamic shared memory: more has to be allowed by the host.
    static_assert(!IS_DECODE || STAGES * sizeof(Stage<E, D>) + 2 * D * ROWS <= 48 << 10, "shared memory");
    __shared__ Stage<E, D> stages[STAGES];
    const int warp = threadIdx.x / 32;
    const WorkItemRows rows(call);
    dependency_wait();
    dependency_launch();
    if (rows.count == 0) return;
    const int split = rows.item.split;
    if (IS_DECODE && split < rows.first_split()) return;  // before the window
    const Keys keys = Keys::of<D>(rows);

    Queries<T, D> queries = {query_fragments<D, WARPS>(warp), {}};
    const LaneRows lane_rows(rows, warp * ROWS);
    queries.template load<E>(lane_rows.queries, Encoding<T, E, D>::FAST);

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
        float exponents[4][4] = {}, most[2];
        exponents_of<HAS_REGISTERS>(exponents, most, queries, stage, tile, lane_rows, call.scale, call.softcap);
        const TileWeights weights = weights_of<HAS_REGISTERS, T, E, D>(exponents, most, now.top, stage);
        now.add_weights(weights);
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
            total.append(now, lane_rows.queries, is_first_split, is_last);
            is_first_split = false;
            if (is_last) break;
        } else {
            total.append(now);
        }
        now.clear();
    }
    if (IS_DECODE) now.finish();
    if (IS_DECODE && !rows.has_one_split()) {
        write_partials(now, rows);
        return;
    }
    if (IS_DECODE) total.append(now);
    float* const row_values = reinterpret_cast<float*>(stages) + warp * D;
    store_results(IN_MEMORY ? now : total, total.sum, rows, warp * ROWS, row_values);
}

// A split by WIDE_WARPS warps, as many tiles at a time: each warp computes the weights of a tile, which all warps need,
// then the weighted sum of all values in its part of the dimensions. The operations of an element, and their order, are
// those of `attend`.
template <class T, class E, int D>
DEVICE void attend_wide(const Attention& call) {
    constexpr int WARPS = WIDE_WARPS, THREADS = 32 * WARPS, TILES = SPLIT / TILE;
    using Tile = Stage<E, D>;
    static_assert(WARPS * sizeof(Tile) <= WIDE_SHARED_BYTES, "the host allows no more");
    DYNAMIC_SHARED(Tile, stages);
    __shared__ TileWeights weights[WARPS][32];
    __shared__ float most[WARPS][ROWS];
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const WorkItemRows rows(call);
    const int split = rows.item.split;
    const bool is_empty = rows.count == 0 || split < rows.first_split();
    const Keys keys = Keys::of<D>(rows);
    const int begin = max(keys.first / TILE, split * TILES), end = min(keys.last / TILE + 1, (split + 1) * TILES);
    if (!is_empty)
        for (int tile = begin + warp; tile < end; tile += WARPS) prefetch_tile<E, D>(keys, tile);
    dependency_wait();
    dependency_launch();
    if (is_empty) return;

    auto copy_keys = [&](int first) {
        for (int i = 0; i < min(WARPS, end - first); i++) copy_tile<THREADS, KEYS>(stages[i], keys, first + i);
        copy_commit();
    };
    auto copy_values = [&](int first) {
        for (int i = 0; i < min(WARPS, end - first); i++) copy_tile<THREADS, VALUES>(stages[i], keys, first + i);
        copy_commit();
    };
    copy_keys(begin);
    copy_values(begin);
    Queries<T, D> queries = {query_fragments<D, WARPS>(warp), {}};
    const LaneRows lane_rows(rows, 0);
    queries.template load<E>(lane_rows.queries, Encoding<T, E, D>::FAST);

    using Sums = Weighted<E, D, WARPS>;
    Sums now;
    now.clear();
    for (int first = begin; first < end; first += WARPS) {
        const int count = min(WARPS, end - first);
        float exponents[4][4] = {}, warp_most[2];
        copy_wait<1>();
        __syncthreads();  // the keys are complete
        if (warp < count) {
            exponents_of<true>(exponents, warp_most, queries, stages[warp], first + warp, lane_rows, call.scale,
                         call.softcap);
#pragma unroll
            for (int half = 0; half < 2; half++)
                if (quad == 0) most[warp][half * 8 + group] = warp_most[half];
        }
        __syncthreads();
        if (warp < count) {
            float top[2] = {now.top[0], now.top[1]};  // of the tiles before
            for (int i = 0; i < warp; i++)
#pragma unroll
                for (int half = 0; half < 2; half++) top[half] = fmaxf(top[half], most[i][half * 8 + group]);
            weights[warp][lane] = weights_of<true, T, E, D>(exponents, warp_most, top, stages[warp]);
        }
        copy_wait<0>();
        __syncthreads();  // the weights and the values are complete, and the keys may be replaced
        copy_keys(first + WARPS);
        for (int i = 0; i < count; i++) {
            const TileWeights of_tile = weights[i][lane];
            now.add_weights(of_tile);
            now.template add_values<T>(of_tile, stages[i]);
        }
        __syncthreads();  // the values and the weights may be replaced
        copy_values(first + WARPS);
    }
    now.finish();
    if (!rows.has_one_split()) {
        write_partials(now, rows);
        return;
    }
    Sums total;
    total.clear();
    total.append(now);
    float* row_values = reinterpret_cast<float*>(stages);
#pragma unroll
    for (int half = 0; half < 2; half++)
        total.write_row(half, 1 / total.sum[half], row_values + (half * 8 + group) * D);
    __syncthreads();
    for (int row = warp; row < rows.count; row += WARPS)
        store_row<E>(call, rows.out_row(row), row_values + row * D, D);
}

template <class T, class E, int D>
DEVICE void attend_wide_if_possible(const Attention& call) {
    if constexpr (HAS_WIDE<E, D>) attend_wide<T, E, D>(call);
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
    KERNEL(attention_decode_wide_##T##_##name##_##D, 32 * WIDE_WARPS, 1, attend_wide_if_possible<T, E, D>) \
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
