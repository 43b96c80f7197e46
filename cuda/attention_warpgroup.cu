// The prefill of attention.cu, with its bits, by wgmma: for sm_90a, caches of 16-bit floats and heads of 64 and 128
// dimensions.
//
// Shape     A block has 128 packed rows, 64 for each of two groups of four warps. It goes through pairs of tiles, 64
//           keys, which cp.async copies. The second operand of wgmma has the columns of the sum in its rows. So do
//           keys; values are transposed on their way, by ldmatrix. The first operand is in registers: the queries, and
//           the weights, which have the places of the scores.
// Order     The products of the next pair's keys begin before the weights of a pair are computed, and those of the
//           first tile's values before the weights of the second tile: tensor cores compute meanwhile. (wgmma completes
//           in order.) The sums of a pair before the first product of its values, of a tile before the second.
// Memory    Results of the splits before are in shared memory: a thread has 64 registers of values, 64 of two pairs'
//           scores, 32 of queries and 16 of weights, for 128 dimensions. 161 KiB of a block, or 81 for 64 dimensions.
// Limit     flops of the tensor cores, and as many cycles of other units: for each score, about 20 instructions; for
//           each value and tile, a multiplication.
// Sources   Shah et al., "FlashAttention-3", section 3 (products beside exponents; values in the order of the second
//           operand); those of attention.cu.
#include "attention.cuh"
#include "warpgroup.cuh"

constexpr int GROUPS = 2, GROUP_ROWS = 64, THREADS = 128 * GROUPS, PAIR = 2 * TILE, SPLIT_PAIRS = SPLIT / PAIR;
static_assert(PAIR == TILE_COLUMNS, "transposed values of a pair are the columns of a tile of wgmma");

// Dynamic shared memory.
template <int D>
struct Shared {
    static constexpr int WORDS = D / 8;
    uint4 keys[2][D / TILE_COLUMNS][PAIR][TILE_WORDS], transposed[2][D][TILE_WORDS], values[2][PAIR][WORDS];
    float4 totals[WORDS][THREADS];  // of each thread; before the first, the queries
};

// Copies of pairs, of which keys are copied before values. A thread copies some words of 16 tokens, which are in one
// page. Words have the places of tiles of wgmma in values, too, so that neither copies nor ldmatrix meet in a bank.
template <class E, int D>
struct PairCopy {
    static constexpr int WORDS = D / 8, TOKEN_THREADS = THREADS / (PAIR / 16), APART = TOKEN_THREADS / WORDS;
    const Keys& keys;
    int token, word, place;  // of the pair's tokens, this thread's first one; its word, and the word's place
    const uint8_t* values;   // those of the keys that were copied last

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
            copy_async<16>(target, from + n * APART * (D * BITS<E> / 8), is_visible ? 16 : 0);
        }
    }
    DEVICE void copy_keys(Shared<D>& shared, int pair) {
        const Tokens tokens = keys.tokens<E>(pair * PAIR + token / 16 * 16);
        const uint8_t* const from = tokens.page.template key<E>(tokens.first + token % 16) + word * 16;
        uint4(&tile)[PAIR][TILE_WORDS] = shared.keys[pair % 2][word / TILE_WORDS];
        copy(from, pair, [&](int row, int place) { return &tile[row][place]; });
        values = from + keys.cache.block_size * (D * BITS<E> / 8);
    }
    DEVICE void copy_values(Shared<D>& shared, int pair) const {
        uint4(&to)[PAIR][WORDS] = shared.values[pair % 2];
        copy(values, pair, [&](int row, int place) { return &to[row][word / TILE_WORDS * TILE_WORDS + place]; });
    }
};

// Transposes the values of a pair: a warp has a quarter of the words, of one tile.
template <int D>
DEVICE void transpose_values(Shared<D>& shared, int pair) {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, tile = threadIdx.x / 32 % 2;
    const int token = tile * TILE + lane, first = threadIdx.x / 64, place = place_in_tile(token, first);
    uint4* const from = shared.values[pair % 2][token];
    uint4(&to)[D][TILE_WORDS] = shared.transposed[pair % 2];
#pragma unroll
    for (int n = 0; n < D / 8 / 4; n++) {
        uint32_t pairs[4];
        load_matrices_transposed(pairs, from + (place ^ n * 4));
#pragma unroll
        for (int m = 0; m < 4; m++) {
            uint4& word = to[(n * 4 + first) * 8 + group][place_in_tile(group, tile * 4 + m)];
            reinterpret_cast<uint32_t*>(&word)[quad] = pairs[m];
        }
    }
}

// Begins the products of the queries and the keys of a pair.
template <class T, int D>
DEVICE void begin_scores(float (&scores)[PAIR / 8][4], const uint32_t (&queries)[D / 16][4], const Shared<D>& shared,
                         int pair) {
    begin_products();
#pragma unroll
    for (int step = 0; step < D / 16; step++)
        multiply<T>(scores, queries[step], shared.keys[pair % 2][step / 4][0], step % 4, step > 0);
    commit_products();
}

// The weights of a tile of a pair, from its scores, which are added to the sums of weights.
template <class T, class E, int D>
DEVICE void find_weights(TileWeights& weights, Weighted<E, D>& sums, const float (&scores)[PAIR / 8][4], int pair,
                         int tile, const LaneRows& rows, const Attention& call) {
    float s[4][4], most[2];
#pragma unroll
    for (int i = 0; i < 16; i++) s[i / 4][i % 4] = scores[tile * 4 + i / 4][i % 4];
    exponents_of_scores(s, most, 2 * pair + tile, rows, call.scale, call.softcap);
    weights = weights_of<T, E, D>(s, most, sums.top, TileParameters<E, D>{});
    sums.add_weights(weights);
}

// Begins to add the values of a tile.
template <class T, class E, int D>
DEVICE void begin_values(Weighted<E, D>& sums, const TileWeights& weights, const Shared<D>& shared, int pair,
                         int tile) {
#pragma unroll
    for (int i = 0; i < 4 * (D / 8); i++) {
        float& value = sums.values[i / 4][i % 4];
        value = __fmul_rn(value, weights.keep[i % 4 / 2]);
    }
    begin_products();
#pragma unroll
    for (int step = 0; step < 2; step++)
        multiply<T>(sums.values, weights.p[step], shared.transposed[pair % 2][0], tile * 2 + step, true);
    commit_products();
}

// The results of the splits so far, with their values in shared memory.
struct Total {
    float top[2] = {-infinity(), -infinity()}, sum[2] = {};
    bool has_values = false;
};

// Appends the sums of the next split to the total. The values of the last split are left in `split`.
template <class E, int D>
DEVICE void append(Total& total, Weighted<E, D>& split, Shared<D>& shared, bool is_last) {
    split.finish();
    const Merge merges[2] = {{total.top[0], split.top[0]}, {total.top[1], split.top[1]}};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total.top[half] = merges[half].top;
        total.sum[half] = merges[half].of(total.sum[half], split.sum[half]);
    }
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
        float4& stored = shared.totals[n][threadIdx.x];
        const float4 old = total.has_values ? stored : float4{0, 0, 0, 0};
        float(&values)[4] = split.values[n];
        values[0] = merges[0].of(old.x, values[0]), values[1] = merges[0].of(old.y, values[1]);
        values[2] = merges[1].of(old.z, values[2]), values[3] = merges[1].of(old.w, values[3]);
        if (!is_last) stored = {values[0], values[1], values[2], values[3]};
    }
    total.has_values = true;
}

// Waits for all products.
template <class E, int D>
DEVICE void wait_for_sums(Weighted<E, D>& sums, TileWeights (&weights)[2]) {
    wait_for_products<0>();
    keep_registers(sums.values);
    keep_registers(weights[0].p);
    keep_registers(weights[1].p);
}

// Grid (works, kv heads).
template <class T, class E, int D>
DEVICE void prefill(const Attention& call) {
    static_assert(D == 64 || D == 128, "values of a head are 64 or 128 rows of an operand");
    Shared<D>& shared = *reinterpret_cast<Shared<D>*>(first_tile());
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group_start = warp / 4 * GROUP_ROWS;
    const WorkRows rows(call);
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
    copy.copy_keys(shared, begin);
    copy_commit();

    const LaneRows lane_rows(rows, warp * ROWS);
    Queries<T, D> in_memory = {reinterpret_cast<uint4(*)[32]>(shared.totals) + warp * (D / 16), {}};
    in_memory.template load<E>(lane_rows.queries, Encoding<T, E, D>::FAST);
    uint32_t queries[D / 16][4];
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        const uint4 words = in_memory.fragments[i][lane];
        queries[i][0] = words.x, queries[i][1] = words.y, queries[i][2] = words.z, queries[i][3] = words.w;
    }

    Weighted<E, D> sums;
    sums.clear();
    Total total;
    TileWeights weights[2] = {};
    float scores[PAIR / 8][4] = {}, next[PAIR / 8][4] = {};
    copy.copy_values(shared, begin);
    if (begin + 1 < end) copy.copy_keys(shared, begin + 1);
    copy_commit();
    copy_wait<1>();
    products_see_writes();
    __syncthreads();
    if (sees(begin)) begin_scores<T>(scores, queries, shared, begin);
    wait_for_products<0>();
    keep_registers(scores);
    for (int pair = begin; pair < end; pair++) {
        const bool is_seen = sees(pair), has_next = sees(pair + 1);
        copy_wait<0>();
        products_see_writes();
        __syncthreads();  // the next keys and the values are complete; the keys and the values before have been read
        if (pair + 1 < end) copy.copy_values(shared, pair + 1);
        if (pair + 2 < end) copy.copy_keys(shared, pair + 2);
        copy_commit();
        if (has_next) begin_scores<T>(next, queries, shared, pair + 1);
        transpose_values(shared, pair);
        products_see_writes();
        if (is_seen) {
            if (pair % SPLIT_PAIRS == 0 && pair > group_begin) {
                wait_for_sums(sums, weights);
                append(total, sums, shared, false);
                sums.clear();
            }
            find_weights<T>(weights[0], sums, scores, pair, 0, lane_rows, call);
        }
        __syncthreads();  // the transposed values are complete
        if (is_seen) {
            wait_for_sums(sums, weights);
            begin_values<T>(sums, weights[0], shared, pair, 0);
            find_weights<T>(weights[1], sums, scores, pair, 1, lane_rows, call);
            wait_for_sums(sums, weights);
            begin_values<T>(sums, weights[1], shared, pair, 1);
        }
        if (!is_seen) wait_for_products<0>();
        keep_registers(next);
#pragma unroll
        for (int i = 0; i < PAIR / 8 * 4; i++) scores[i / 4][i % 4] = next[i / 4][i % 4];
    }
    wait_for_sums(sums, weights);
    append(total, sums, shared, true);
    // Of this place, the values of the last pair have been read before the last barrier.
    float* const row_values = reinterpret_cast<float*>(shared.values) + warp * D;
    store_results(sums, total.sum, rows, warp * ROWS, row_values);
}

// Sizes that the host knows, too (attention.rs).
static_assert(sizeof(Shared<64>) + TILE_ALIGNMENT == 82944 && sizeof(Shared<128>) + TILE_ALIGNMENT == 164864);

#define KERNELS(T, D)                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_prefill_warpgroup_##T##_##T##_##D(         \
        Attention call) {                                                                                         \
        prefill<T, T, D>(call);                                                                                   \
    }                                                                                                             \
    EXPORT(attention_prefill_warpgroup_##T##_##T##_##D)
// For a model, its variant alone is compiled: -DVARIANT=bf16,128.
#define INSTANTIATE(...) KERNELS(__VA_ARGS__)
#ifdef VARIANT
INSTANTIATE(VARIANT)
#else
KERNELS(bf16, 64)
KERNELS(bf16, 128)
KERNELS(f16, 64)
KERNELS(f16, 128)
#endif
