// The prefill of attention.cu, with its bits, by wgmma: for sm_90a, heads of 64 and 128 dimensions with a cache of
// 16-bit floats, and of 128 with int8.
//
// Shape     A block has 128 packed rows, 64 for each of two groups of four warps. It goes through pairs of tiles, 64
//           keys, which cp.async copies. The second operand of wgmma has the columns of the sum in its rows: keys as
//           they are, or converted from int8, and values transposed by ldmatrix. The first operand is in registers:
//           the queries, or the weights, which replace the scores in their registers.
// Order     Tensor cores multiply the keys of the next pair while the weights of a pair's first tile are computed, and
//           the values of the first tile while those of the second tile are; the values of the second tile are
//           multiplied beside the next keys. Accumulators are changed only while no product is in flight: otherwise the
//           assembler waits for each product. (NVRTC 13.0 does so for 64 dimensions anyway, 13.4 does not.)
// Memory    Values of the splits before are in shared memory, because a thread has in registers, for 128 dimensions: 64
//           values, the scores of two pairs, which are 64, 32 pairs of queries and 16 of weights. KiB of a block: 161,
//           or 81 for 64 dimensions; 164 with int8.
// Limit     flops of the tensor cores, and the instructions of other units: about 750 of a warp for a pair with 128
//           dimensions of floats, at least 1.4 times the time of the tensor cores.
// Sources   Shah et al., "FlashAttention-3", section 3 (products beside exponents; values in the order of the second
//           operand); those of attention.cu.
#include "attention.cuh"
#include "warpgroup.cuh"

constexpr int GROUP_ROWS = 64, WARPS = 8, THREADS = 32 * WARPS, PAIR = 2 * TILE, SPLIT_PAIRS = SPLIT / PAIR;
static_assert(PAIR == TILE_COLUMNS, "transposed values of a pair are the columns of a tile of wgmma");

// Keys of a pair as the second operand, and its values as they are stored.
template <int D>
using KeyTiles = uint4[D / TILE_COLUMNS][PAIR][TILE_WORDS];
template <class E, int D>
constexpr int ROW_WORDS = D * BITS<E> / 128;
template <class E, int D>
using StoredRows = uint4[PAIR][ROW_WORDS<E, D>];

// What a cache of int8 needs besides: keys as they are stored, and the parameters from the copy of the keys to the
// weights of the second tile.
template <class E, int D>
struct StoredKeys {
    static constexpr bool converts_keys = false;
    static constexpr int ahead = 2;  // pairs from the copy of keys to the weights
    DEVICE TileParameters<E, D> tile_parameters(int, int) const { return {}; }
};
template <int D>
struct StoredKeys<int8, D> {
    static constexpr bool converts_keys = true;
    static constexpr int ahead = 3;
    StoredRows<int8, D> stored_keys[2];
    TileParameters<int8, D> parameters[4][2];
    DEVICE const TileParameters<int8, D>& tile_parameters(int pair, int tile) const {
        return parameters[pair % 4][tile];
    }
};

// Dynamic shared memory.
template <class E, int D>
struct Shared : StoredKeys<E, D> {
    alignas(TILE_ALIGNMENT) KeyTiles<D> keys[2];
    uint4 transposed[2][D][TILE_WORDS];
    StoredRows<E, D> values[2];
    float4 totals[D / 8][THREADS];  // by thread; before the loop, the fragments of the queries
};

// Copies of pairs. A thread copies some words of 16 tokens, which are in one page. Words have the places of tiles of
// wgmma in stored rows, too, so that neither copies nor ldmatrix meet in a bank.
template <class E, int D>
struct PairCopy {
    static constexpr int WORDS = ROW_WORDS<E, D>, TOKEN_THREADS = THREADS / (PAIR / 16), APART = TOKEN_THREADS / WORDS;
    static_assert(WORDS % TILE_WORDS == 0, "rows are swizzled in whole tiles");
    const Keys& keys;
    int token, word, place;          // this thread's first token in the pair; its word; the place of that word
    const uint8_t* values[2] = {};  // the addresses for the last call of copy_keys, and for the one before it

    DEVICE explicit PairCopy(const Keys& keys) : keys(keys) {
        const int thread = threadIdx.x % TOKEN_THREADS;
        token = threadIdx.x / TOKEN_THREADS * 16 + thread / WORDS, word = thread % WORDS;
        place = place_in_tile(token, word % TILE_WORDS);
    }
    template <class To>
    DEVICE void copy(const uint8_t* from, int pair, To to) const {
        keep_address(from);
        const int position = pair * PAIR + token;
#pragma unroll
        for (int n = 0; n < 16 / APART; n++) {
            const bool is_visible = keys.first <= position + n * APART && position + n * APART <= keys.last;
            // The token's number is less than APART modulo 8, or APART is 8.
            uint4* const target = to(token + n * APART, place ^ n * APART % 8);
            copy_async<16>(target, from + n * APART * WORDS * 16, is_visible ? 16 : 0);
        }
    }
    // Is called for each pair in turn; does nothing from pair `end` on.
    DEVICE void copy_keys(Shared<E, D>& shared, int pair, int end) {
        values[1] = values[0];
        if (pair >= end) return;
        const Tokens tokens = keys.tokens<E>(pair * PAIR + token / 16 * 16);
        const uint8_t* const from = tokens.page.template key<E>(tokens.first + token % 16) + word * 16;
        if constexpr (Shared<E, D>::converts_keys) {
            StoredRows<E, D>& to = shared.stored_keys[pair % 2];
            copy(from, pair, [&](int row, int place) { return &to[row][place]; });
            copy_parameters(shared, pair, tokens);
        } else {
            uint4(&to)[PAIR][TILE_WORDS] = shared.keys[pair % 2][word / TILE_WORDS];
            copy(from, pair, [&](int row, int place) { return &to[row][place]; });
        }
        values[0] = from + keys.cache.block_size * (WORDS * 16);
    }
    // Those of the 16 tokens, by some of their threads.
    DEVICE void copy_parameters(Shared<E, D>& shared, int pair, const Tokens& tokens) const {
        const int word = threadIdx.x % TOKEN_THREADS, first = token / 16 * 16;
        if (word >= PARAMETER_WORDS<E, D>) return;
        uint4* const to = &shared.parameters[pair % 4][first / TILE].parameters[first / 16 % 2][word];
        copy_async<16>(to, parameter_word<E>(tokens.page, tokens.first, word),
                       keys.sees_any(pair * PAIR + first) ? 16 : 0);
    }
    // Those of the pair `ahead - 2` calls of copy_keys ago.
    DEVICE void copy_values(Shared<E, D>& shared, int pair) const {
        StoredRows<E, D>& to = shared.values[pair % 2];
        copy(values[Shared<E, D>::ahead - 2], pair,
             [&](int row, int place) { return &to[row][word / TILE_WORDS * TILE_WORDS + place]; });
    }
};

// Converts the keys of a pair to the second operand, if they are not copied as such: a warp has 8 of them, a lane 8
// dimensions of each 32.
template <class T, class E, int D>
DEVICE void convert_keys(Shared<E, D>& shared, int pair) {
    if constexpr (Shared<E, D>::converts_keys) {
        const int lane = threadIdx.x % 32, quad = lane % 4, token = threadIdx.x / 32 * 8 + lane / 4;
        const uint4(&from)[ROW_WORDS<E, D>] = shared.stored_keys[pair % 2][token];
#pragma unroll
        for (int step = 0; step < D / 16; step++) {  // of 16 dimensions: 4 of these 8
            const int byte = step / 2 * 32 + quad * 8 + step % 2 * 4;
            const uint4& word = from[place_in_tile(token, byte / 16)];
            const uint32_t bytes = reinterpret_cast<const uint32_t*>(&word)[byte % 16 / 4];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                uint4& to = shared.keys[pair % 2][step / 4][token][place_in_tile(token, step % 4 * 2 + r)];
                reinterpret_cast<uint32_t*>(&to)[quad] = KeyFragment<T, E, D>::of_bytes(bytes, r);
            }
        }
    }
}

// Transposes the values of a pair, in the order of the accumulators: a warp has a quarter of the words, of one tile.
template <class T, class E, int D>
DEVICE void transpose_values(Shared<E, D>& shared, int pair) {
    using P = typename WeightType<T, E>::type;
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, tile = threadIdx.x / 32 % 2;
    const int token = tile * TILE + lane, first = threadIdx.x / 64, place = place_in_tile(token, first);
    uint4* const from = shared.values[pair % 2][token];
    uint4(&to)[D][TILE_WORDS] = shared.transposed[pair % 2];
#pragma unroll
    for (int n = 0; n < ROW_WORDS<E, D> / 4; n++) {
        uint32_t units[4];
        load_matrices_transposed(units, from + (place ^ n * 4));
#pragma unroll
        for (int i = 0; i < 4 * UNIT<E>; i++) {
            const int m = i / UNIT<E>, sub = i % UNIT<E>, row = ((n * 4 + first) * UNIT<E> + sub) * 8 + group;
            uint4& word = to[row][place_in_tile(group, tile * 4 + m)];
            reinterpret_cast<uint32_t*>(&word)[quad] = value_fragment<P, E>(units[m], sub);
        }
    }
}

// Begins the products of the queries and the keys of a pair.
template <class T, int D>
DEVICE void begin_scores(float (&scores)[PAIR / 8][4], const uint32_t (&queries)[D / 16][4], const KeyTiles<D>& keys) {
    begin_products();
    multiply_first<T>(scores, queries[0], keys[0][0], 0);
#pragma unroll
    for (int step = 1; step < D / 16; step++)
        multiply<T>(scores, queries[step], keys[step / 4][0], step % 4, true);
    commit_products();
}

// The queries of a lane in registers, and the sums of those of its rows.
template <class T, class E, int D>
struct LaneQueries {
    uint32_t operands[D / 16][4];
    float sums[2];

    // `fragments` is memory of the warp.
    DEVICE LaneQueries(uint4 (*fragments)[32], const LaneRows& rows) {
        Queries<T, D> queries = {fragments, {}};
        queries.template load<E>(rows.queries, Encoding<T, E, D>::FAST);
        sums[0] = queries.sum[1][0], sums[1] = queries.sum[1][1];
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            const uint4 words = fragments[i][threadIdx.x % 32];
            operands[i][0] = words.x, operands[i][1] = words.y, operands[i][2] = words.z, operands[i][3] = words.w;
        }
    }
};

// Begins to add the values of a tile.
template <class T, class E, int D>
DEVICE void begin_values(Weighted<E, D>& sums, const TileWeights& weights, const Shared<E, D>& shared, int pair,
                         int tile) {
    using P = typename WeightType<T, E>::type;
#pragma unroll
    for (int i = 0; i < 4 * (D / 8); i++) {
        float& value = sums.values[i / 4][i % 4];
        value = __fmul_rn(value, weights.keep[i % 4 / 2]);
    }
    begin_products();
#pragma unroll
    for (int step = 0; step < 2; step++)
        multiply<P>(sums.values, weights.p[step], shared.transposed[pair % 2][0], tile * 2 + step, true);
    commit_products();
}

// Waits for all products.
template <class E, int D>
DEVICE void wait_for_sums(Weighted<E, D>& sums, TileWeights (&weights)[2]) {
    wait_for_products<0>();
    keep_registers(sums.values);
    keep_registers(weights[0].p);
    keep_registers(weights[1].p);
}

// The results of the splits so far, with their values in shared memory.
struct Total {
    float top[2] = {-infinity(), -infinity()}, sum[2] = {};
    bool has_values = false;
};

// Appends the sums of the next split to the total. The values of the last split are left in `split`.
template <class E, int D>
DEVICE void append(Total& total, Weighted<E, D>& split, float4 (&totals)[D / 8][THREADS], bool is_last) {
    split.finish();
    const Merge merges[2] = {{total.top[0], split.top[0]}, {total.top[1], split.top[1]}};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total.top[half] = merges[half].top;
        total.sum[half] = merges[half].of(total.sum[half], split.sum[half]);
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        float4& stored = totals[n][threadIdx.x];
        const float4 old = total.has_values ? stored : float4{0, 0, 0, 0};
        float(&values)[4] = split.values[n];
        values[0] = merges[0].of(old.x, values[0]), values[1] = merges[0].of(old.y, values[1]);
        values[2] = merges[1].of(old.z, values[2]), values[3] = merges[1].of(old.w, values[3]);
        if (!is_last) stored = {values[0], values[1], values[2], values[3]};
    }
    total.has_values = true;
}

// Grid (work items, kv heads).
template <class T, class E, int D>
DEVICE void prefill(const Attention& call) {
    static_assert(D == 64 || D == 128, "values of a head are 64 or 128 rows of an operand");
    constexpr bool CONVERTS_KEYS = Shared<E, D>::converts_keys;
    Shared<E, D>& shared = *reinterpret_cast<Shared<E, D>*>(first_tile());
    const int warp = threadIdx.x / 32, group_start = warp / 4 * GROUP_ROWS;
    const WorkItemRows rows(call);
    dependency_wait();
    dependency_launch();
    if (rows.count == 0) return;
    const Keys keys = Keys::of<D>(rows);
    PairCopy<E, D> copy(keys);
    // The pairs that the rows of the block see, and those of the group.
    const int begin = keys.first / PAIR, end = keys.last / PAIR + 1;
    const bool has_rows = group_start < rows.count;
    const int group_last = min(group_start + GROUP_ROWS, rows.count) - 1;
    const int group_begin = has_rows ? rows.first(group_start) / PAIR : 0;
    const int group_end = has_rows ? rows.last(group_last) / PAIR + 1 : 0;
    auto sees = [&](int pair) { return group_begin <= pair && pair < group_end; };

    copy.copy_keys(shared, begin, end);
    if (!CONVERTS_KEYS) copy.copy_values(shared, begin);
    copy_commit();
    copy.copy_keys(shared, begin + 1, end);
    if (CONVERTS_KEYS) copy.copy_values(shared, begin);
    copy_commit();
    const LaneRows lane_rows(rows, warp * ROWS);
    uint4(*const fragments)[32] = reinterpret_cast<uint4(*)[32]>(shared.totals) + warp * (D / 16);
    const LaneQueries<T, E, D> queries(fragments, lane_rows);
    Weighted<E, D> sums;
    sums.clear();
    Total total;
    TileWeights weights[2] = {};
    float next[PAIR / 8][4] = {};  // scores
    if (CONVERTS_KEYS) {
        copy_wait<0>();
        __syncthreads();
        convert_keys<T>(shared, begin);
        if (begin + 1 < end) convert_keys<T>(shared, begin + 1);
    } else {
        copy_wait<1>();
    }
    products_see_writes();
    __syncthreads();
    if (CONVERTS_KEYS) copy.copy_keys(shared, begin + 2, end);
    copy_commit();
    if (sees(begin)) begin_scores<T, D>(next, queries.operands, shared.keys[begin % 2]);
    wait_for_products<0>();
    for (int pair = begin; pair < end; pair++) {
        const bool is_seen = sees(pair);
        keep_registers(next);
        float scores[PAIR / 8][4];
#pragma unroll
        for (int i = 0; i < PAIR / 8 * 4; i++) scores[i / 4][i % 4] = next[i / 4][i % 4];
        copy_wait<0>();
        products_see_writes();
        __syncthreads();  // copies are complete; the keys and the values before have been read
        if (pair + 1 < end) copy.copy_values(shared, pair + 1);
        copy.copy_keys(shared, pair + Shared<E, D>::ahead, end);
        copy_commit();
        if (sees(pair + 1)) begin_scores<T, D>(next, queries.operands, shared.keys[(pair + 1) % 2]);
        if (CONVERTS_KEYS && pair + 2 < end) convert_keys<T>(shared, pair + 2);
        transpose_values<T>(shared, pair);
        products_see_writes();
        // The weights of a tile of the pair.
        auto find = [&](int tile) {
            const TileParameters<E, D>& parameters = shared.tile_parameters(pair, tile);
            float s[4][4], most[2];
#pragma unroll
            for (int i = 0; i < 16; i++) s[i / 4][i % 4] = scores[tile * 4 + i / 4][i % 4];
            Encoding<T, E, D>::scale(s, queries.sums, parameters);
            exponents_of_scores<true>(s, most, 2 * pair + tile, lane_rows, call.scale, call.softcap);
            weights[tile] = weights_of<true, T, E, D>(s, most, sums.top, parameters);
            sums.add_weights(weights[tile]);
        };
        const bool begins_split = is_seen && pair % SPLIT_PAIRS == 0 && pair > group_begin;
        const WeightSums last_split = sums;  // the products of its values are not complete
        if (begins_split) static_cast<WeightSums&>(sums) = {};
        if (is_seen) find(0);
        __syncthreads();  // the transposed values and the converted keys are complete
        wait_for_sums(sums, weights);
        if (is_seen) {
            if (begins_split) {
                const WeightSums first_weights = sums;
                static_cast<WeightSums&>(sums) = last_split;
                append(total, sums, shared.totals, false);
                sums.clear();
                static_cast<WeightSums&>(sums) = first_weights;
            }
            begin_values<T>(sums, weights[0], shared, pair, 0);
            find(1);
            wait_for_sums(sums, weights);
            begin_values<T>(sums, weights[1], shared, pair, 1);
        }
    }
    wait_for_sums(sums, weights);
    append(total, sums, shared.totals, true);
    // The values of the last pair were read before the last barrier.
    float* const row_values = reinterpret_cast<float*>(shared.values) + warp * D;
    store_results(sums, total.sum, rows, warp * ROWS, row_values);
}

// Sizes that the host knows, too (attention.rs).
template <class E, int D>
constexpr int SHARED_BYTES = sizeof(Shared<E, D>) + TILE_ALIGNMENT;
static_assert(SHARED_BYTES<bf16, 64> == 82944 && SHARED_BYTES<bf16, 128> == 164864);
static_assert(SHARED_BYTES<int8, 128> == 167936);

#define KERNELS(T, E, D)                                                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_prefill_warpgroup_##T##_##E##_##D(         \
        Attention call) {                                                                                         \
        prefill<T, E, D>(call);                                                                                   \
    }                                                                                                             \
    EXPORT(attention_prefill_warpgroup_##T##_##E##_##D)
// For a model, its variant alone is compiled: -DVARIANT=bf16,bf16,128.
#define INSTANTIATE(...) KERNELS(__VA_ARGS__)
#ifdef VARIANT
INSTANTIATE(VARIANT)
#else
KERNELS(bf16, bf16, 64)
KERNELS(bf16, bf16, 128)
KERNELS(bf16, int8, 128)
KERNELS(f16, f16, 64)
KERNELS(f16, f16, 128)
KERNELS(f16, int8, 128)
#endif
