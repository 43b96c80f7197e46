// One tile of attention: 16 query rows of a warp times 32 keys in shared memory, for every encoding of the cache.
//
// A query is held as the 16 x 16 operand of mma. Of keys of 16-bit floats, mma after mma has 16 dimensions in their
// order. Of int8 and u4, a lane has 8 contiguous dimensions of a key for two mma, and their pairs are those of `order`.
// Keys k and values v of int8 and u4 are multiplied as integers, codes less the centre of their range, which bf16 and
// f16 hold exactly; scales and offsets, one per token, are applied in float32:
//
//     int8   score = scale (q . k) + middle sum(q)          value = p scale v + p middle
//            where middle = offset + 128 scale
//     u4     score = fast scale (q . k + sum(q) / 2) of the fast dimensions + the same of the slow ones
//                                                           value = p scale v + p scale / 2
//
// Values are transposed by ldmatrix, in units of 16 bits: a column of 8 x 8 units is one dimension of 16-bit floats,
// two of int8, four of u4. The accumulator of unit column c of word w and sub-column s has dimension
// (8 w + c) UNIT + s.
#pragma once
#include "attention_tile.cuh"

constexpr int ROWS = 16;
constexpr int LARGE = 128;  // dimensions: heads of more need nearly all registers

// Dimensions in 16 bits.
template <class E>
constexpr int UNIT = 16 / BITS<E>;

// The assembler begins many loads at once, for which large heads have no registers. It does not move them across this
// barrier.
template <int D>
DEVICE void limit_loads() {
    if (D > LARGE) __syncwarp();
}

DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// ---- Rows

// The rows `group` and `group + 8` of a warp that has the rows from `start` on: the positions that they see, which are
// none if there is no row, and their queries, or null.
struct LaneRows {
    int first[2], last[2];
    float* queries[2];

    DEVICE LaneRows(const WorkItemRows& rows, int start) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = start + half * 8 + int(threadIdx.x % 32 / 4);
            const bool exists = row < rows.count;
            first[half] = exists ? rows.first(row) : 0;
            last[half] = exists ? rows.last(row) : -1;
            queries[half] = exists ? rows.query_row(row) : nullptr;
        }
    }
};

// ---- Fragments

// A step of scores has 32 dimensions, or 16 at the end of a part of the key: a lane has 2 N of them, in N registers.
// Floats: 2 of each 8. Codes: 2 N contiguous ones. Of these, the one in half `half` of register r: pairs of codes are
// where one shift brings them to the low bits of the halves of a word.
template <class E, int N>
DEVICE int order(int r, int half) {
    return UNIT<E> == 1 ? 2 * r + half : UNIT<E> == 2 ? r / 2 * 4 + r % 2 + 2 * half : r + N * half;
}

// The part of a lane in the dimensions `first` ..+ 8 N of the keys `token` ..+ 8.
template <class T, class E, int D>
struct KeyFragment {
    template <int N>
    static DEVICE void load(uint32_t (&k)[N], const Stage<E, D>& stage, int token, int first) {
        const int lane = threadIdx.x % 32;
        if constexpr (N == 4) {
            const int row = token + lane % 8;
            load_matrices(k, &stage.keys[row][stage.place(row, first / 8 + lane / 8)]);
        } else {
#pragma unroll
            for (int r = 0; r < N; r++)
                k[r] = stage.template key<uint32_t>(token + lane / 4, first + 8 * r + lane % 4 * 2);
        }
    }
};
template <class T, int D>
struct KeyFragment<T, int8, D> {
    template <int N>
    static DEVICE void load(uint32_t (&k)[N], const Stage<int8, D>& stage, int token, int first) {
        token += threadIdx.x % 32 / 4, first += threadIdx.x % 4 * 2 * N;
        const auto bytes = stage.template key<Values<uint32_t, N / 2>>(token, first);
#pragma unroll
        for (int r = 0; r < N; r++) k[r] = of_bytes(bytes.values[r / 2], r);
    }
    // Register `r`, of 4 bytes.
    static DEVICE uint32_t of_bytes(uint32_t bytes, int r) {
        return centred_pair<T, 8>(bytes >> r % 2 * 8 & twice(0xff));
    }
};
template <class T, int D>
struct KeyFragment<T, u4, D> {
    template <int N>
    static DEVICE void load(uint32_t (&k)[N], const Stage<u4, D>& stage, int token, int first) {
        token += threadIdx.x % 32 / 4, first += threadIdx.x % 4 * 2 * N;
        uint32_t nibbles;
        if constexpr (N == 4)
            nibbles = stage.template key<uint32_t>(token, first);
        else
            nibbles = stage.template key<uint16_t>(token, first), nibbles |= nibbles << 8;
        const int slow = first - (D - SLOW<D>), bytes = SLOW<D> / 8;
        if (slow < 0) {
#pragma unroll
            for (int r = 0; r < N; r++) k[r] = centred_pair<T, 4>(nibbles >> 4 * r & twice(15));
            return;
        }
        const uint8_t* fifth_bits = reinterpret_cast<const uint8_t*>(stage.parameters[token / 16]);
        const uint32_t byte = fifth_bits[token % 16 * bytes + slow / 8];
        const uint32_t fifth = N == 4 ? byte : byte >> slow % 8 & 15;
        const uint32_t spread = (fifth & ((1 << N) - 1)) << 4 | fifth >> N << 20;
#pragma unroll
        for (int r = 0; r < N; r++)
            k[r] = centred_pair<T, 5>((nibbles >> 4 * r & twice(15)) | (spread >> r & twice(16)));
    }
};

// Sub-column `sub` of two units of 16 bits.
template <class T, class E>
DEVICE uint32_t value_fragment(uint32_t units, int sub) {
    if constexpr (UNIT<E> == 1)
        return units;
    else
        return centred_pair<T, BITS<E>>(units >> sub * BITS<E> & twice((1 << BITS<E>) - 1));
}

// The queries of a warp, as fragments in shared memory: each lane reads its own. Registers are short.
template <class T, int D>
struct Queries {
    uint4 (*fragments)[32];  // [D / 16][lane]
    float sum[2][2];         // of the fast and the slow dimensions, of rows `group` and `group + 8`

    // For keys of type E, of which `fast` dimensions are fast. `rows` are null where there is no row.
    template <class E>
    DEVICE void load(float* const (&rows)[2], int fast) {
        load_part<E>(rows, 0, fast, sum[0]);
        load_part<E>(rows, fast, D, sum[1]);
    }

    template <class E>
    DEVICE void load_part(float* const (&rows)[2], int first, int end, float (&part_sum)[2]) {
        part_sum[0] = part_sum[1] = 0;
#pragma unroll
        for (int step = first; step < end; step += 32) {
            if (end - step >= 32)
                load_step<E, 4>(rows, step, part_sum);
            else
                load_step<E, 2>(rows, step, part_sum);
        }
        part_sum[0] = quad_sum(part_sum[0]), part_sum[1] = quad_sum(part_sum[1]);
    }

    template <class E, int N>
    DEVICE void load_step(float* const (&rows)[2], int first, float (&part_sum)[2]) {
        const int lane = threadIdx.x % 32, quad = lane % 4;
        float x[2][2 * N] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (rows[half] == nullptr) continue;
            const float* from = rows[half] + first + (UNIT<E> == 1 ? 2 : 2 * N) * quad;
#pragma unroll
            for (int r = 0; r < N; r++) {
                const float2 pair = *reinterpret_cast<const float2*>(from + (UNIT<E> == 1 ? 8 : 2) * r);
                x[half][2 * r] = pair.x, x[half][2 * r + 1] = pair.y;
            }
        }
        uint32_t words[2 * N];
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            const int half = i % 2, r = i / 2;
            const T low = to_operand<T>(x[half][order<E, N>(r, 0)]), high = to_operand<T>(x[half][order<E, N>(r, 1)]);
            words[i] = uint32_t(low.bits) | uint32_t(high.bits) << 16;
            part_sum[half] += to_float(low) + to_float(high);
        }
#pragma unroll
        for (int i = 0; i < 2 * N; i += 4)
            fragments[first / 16 + i / 4][lane] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
    }
};

// ---- Scores and values. s[j]: keys 8 j + 2 quad, + 1 of both rows

// Adds the products of 8 N dimensions.
template <int N, class T, class E, int D>
DEVICE void multiply_step(float (&s)[4][4], const Queries<T, D>& queries, const Stage<E, D>& stage, int first) {
    uint4 q[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; i++) q[i] = queries.fragments[first / 16 + i][threadIdx.x % 32];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t k[N];
        KeyFragment<T, E, D>::load(k, stage, 8 * j, first);
#pragma unroll
        for (int i = 0; i < N / 2; i++) mma<T>(s[j], {q[i].x, q[i].y, q[i].z, q[i].w}, {k[2 * i], k[2 * i + 1]});
    }
}

// Adds the products of the dimensions first..end.
template <class T, class E, int D>
DEVICE void multiply_keys(float (&s)[4][4], const Queries<T, D>& queries, const Stage<E, D>& stage, int first,
                          int end) {
#pragma unroll
    for (int step = first; step < end; step += 32) {
        if (end - step >= 32)
            multiply_step<4>(s, queries, stage, step);
        else
            multiply_step<2>(s, queries, stage, step);
    }
}

template <class T, class E, int D>
struct Encoding {
    static constexpr int FAST = 0;
    static DEVICE void scores(float (&s)[4][4], const Queries<T, D>& queries, const Stage<E, D>& stage) {
        multiply_keys<T, E, D>(s, queries, stage, 0, D);
    }
    // Turns products of stored keys into scores: `sums` are those of the queries.
    static DEVICE void scale(float (&)[4][4], const float (&)[2], const TileParameters<E, D>&) {}
    static constexpr float HALF = 0;  // is added to stored values
    // Turns the weight p of a token into the factor of its stored value, and returns what is added to all dimensions.
    static DEVICE float weight(float&, const TileParameters<E, D>&, int) { return 0; }
};

template <class T, int D>
struct Encoding<T, int8, D> {
    static constexpr int FAST = 0;
    static constexpr float HALF = 0;
    using Parameters = TileParameters<int8, D>;
    static DEVICE float middle(const Parameters& parameters, int token, int part) {
        return __fmaf_rn(128, to_float(parameters.template parameter<bf16>(token, 2 * part)),
                         parameters.template parameter<float>(token, 4 + 4 * part));
    }
    static DEVICE void scores(float (&s)[4][4], const Queries<T, D>& queries, const Stage<int8, D>& stage) {
        multiply_keys<T, int8, D>(s, queries, stage, 0, D);
        scale(s, queries.sum[1], stage);
    }
    static DEVICE void scale(float (&s)[4][4], const float (&sums)[2], const Parameters& parameters) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int token = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
            const float scale = to_float(parameters.template parameter<bf16>(token, 0));
            const float added = __fmul_rn(middle(parameters, token, 0), sums[i % 4 / 2]);
            s[i / 4][i % 4] = __fmaf_rn(scale, s[i / 4][i % 4], added);
        }
    }
    static DEVICE float weight(float& p, const Parameters& parameters, int token) {
        const float added = __fmul_rn(p, middle(parameters, token, 1));
        p = __fmul_rn(p, to_float(parameters.template parameter<bf16>(token, 2)));
        return added;
    }
};

template <class T, int D>
struct Encoding<T, u4, D> {
    static constexpr int FAST = D - SLOW<D>, SCALES = SLOW<D> / 8;
    static constexpr float HALF = 0.5f;
    static DEVICE void scores(float (&s)[4][4], const Queries<T, D>& queries, const Stage<u4, D>& stage) {
        float slow[4][4] = {};
        multiply_keys<T, u4, D>(s, queries, stage, 0, FAST);
        multiply_keys<T, u4, D>(slow, queries, stage, FAST, D);
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const int token = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2, half = i % 4 / 2;
            const float fast_scale = to_float(stage.template parameter<bf16>(token, SCALES));
            const float slow_scale = to_float(stage.template parameter<bf16>(token, SCALES + 2));
            const float fast = __fmaf_rn(HALF, queries.sum[0][half], s[i / 4][i % 4]);
            const float rest = __fmaf_rn(HALF, queries.sum[1][half], slow[i / 4][i % 4]);
            s[i / 4][i % 4] = __fmaf_rn(fast_scale, fast, __fmul_rn(slow_scale, rest));
        }
    }
    static DEVICE float weight(float& p, const TileParameters<u4, D>& parameters, int token) {
        p = __fmul_rn(p, to_float(parameters.template parameter<bf16>(token, SCALES + 4)));
        return 0;
    }
};

// The type in which the weights of values are multiplied. Those of quantised values are as small as scales, for which
// f16 has too few exponents. The error of bf16 is at most 2^-9 of a factor, of codes up to 128: half of the largest one
// of int8.
template <class T, class E>
struct WeightType {
    typedef T type;
};
template <class T>
struct WeightType<T, int8> {
    typedef bf16 type;
};
template <class T>
struct WeightType<T, u4> {
    typedef bf16 type;
};

// The weights of a tile's values, of rows `group` and `group + 8`: p[step] is the operand of mma for the tokens 16 step
// ..+ 16.
struct TileWeights {
    uint32_t p[2][4];
    float top[2];   // the largest exponent up to this tile
    float keep[2];  // the factors of the sums before
    float sum[2], added[2];
};

// The exponents of a tile's scores, in their place, and the largest ones of its rows in `most`.
template <bool HAS_HIDDEN>
DEVICE void exponents_of_rows(float (&s)[4][4], float (&most)[2], int tile, const LaneRows& rows, float scale,
                              float softcap) {
    const int quad = threadIdx.x % 4;
    most[0] = most[1] = -infinity();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int half = i % 4 / 2, position = tile * TILE + i / 4 * 8 + quad * 2 + i % 2;
        float& x = s[i / 4][i % 4];
        const bool is_visible = !HAS_HIDDEN || (rows.first[half] <= position && position <= rows.last[half]);
        x = is_visible ? exponent(x, scale, softcap) : -infinity();
        most[half] = fmaxf(most[half], x);
    }
    most[0] = quad_max(most[0]), most[1] = quad_max(most[1]);
}
// The same, with fewer instructions if all rows of the warp see all keys, and there are registers for both.
template <bool HAS_REGISTERS>
DEVICE void exponents_of_scores(float (&s)[4][4], float (&most)[2], int tile, const LaneRows& rows, float scale,
                                float softcap) {
    const int first = tile * TILE, last = first + TILE - 1;
    const bool sees_all = max(rows.first[0], rows.first[1]) <= first && last <= min(rows.last[0], rows.last[1]);
    if (HAS_REGISTERS && __all_sync(ALL_LANES, sees_all))
        exponents_of_rows<false>(s, most, tile, rows, scale, softcap);
    else
        exponents_of_rows<true>(s, most, tile, rows, scale, softcap);
}

// The exponents of a tile, in s, which is 0 before.
template <bool HAS_REGISTERS, class T, class E, int D>
DEVICE void exponents_of(float (&s)[4][4], float (&most)[2], const Queries<T, D>& queries, const Stage<E, D>& stage,
                         int tile, const LaneRows& rows, float scale, float softcap) {
    Encoding<T, E, D>::scores(s, queries, stage);
    exponents_of_scores<HAS_REGISTERS>(s, most, tile, rows, scale, softcap);
}

// The weights of these exponents, if the largest ones of the tiles before are `top`.
template <bool HAS_REGISTERS, class T, class E, int D>
DEVICE TileWeights weights_of(float (&s)[4][4], const float (&most)[2], const float (&top)[2],
                              const TileParameters<E, D>& parameters) {
    using P = typename WeightType<T, E>::type;
    const int quad = threadIdx.x % 4;
    TileWeights weights;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        weights.top[half] = fmaxf(top[half], most[half]);
        weights.keep[half] = power(top[half], weights.top[half]);
        weights.sum[half] = weights.added[half] = 0;
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        if (i % 4 == 0) limit_loads<D>();
        const int half = i % 4 / 2, token = i / 4 * 8 + quad * 2 + i % 2;
        float& p = s[i / 4][i % 4];
        const bool is_visible = p != -infinity();
        p = power<HAS_REGISTERS>(p, weights.top[half]);
        weights.sum[half] = __fadd_rn(weights.sum[half], p);
        float added = Encoding<T, E, D>::weight(p, parameters, token);
        // The parameters of other tokens may be anything.
        if (PARAMETER_WORDS<E, D> > 0 && !is_visible) p = added = 0;
        weights.added[half] = __fadd_rn(weights.added[half], added);
    }
    if constexpr (Encoding<T, E, D>::HALF != 0) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float factor = to_float(from_float<P>(s[i / 4][i % 4]));  // as the mma multiplies it
            float& added = weights.added[i % 4 / 2];
            added = __fmaf_rn(Encoding<T, E, D>::HALF, factor, added);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        weights.p[i / 4][i % 4] = pack<P>(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
    return weights;
}

// The sums of weights of rows `group` and `group + 8` so far, with the exponent `top` taken out.
struct WeightSums {
    float top[2] = {-infinity(), -infinity()}, sum[2] = {}, added[2] = {};

    // Adds a tile.
    DEVICE void add_weights(const TileWeights& weights) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            top[half] = weights.top[half];
            sum[half] = __fmaf_rn(sum[half], weights.keep[half], weights.sum[half]);
            added[half] = __fmaf_rn(added[half], weights.keep[half], weights.added[half]);
        }
    }
};

// The weighted sum of values so far, with the exponent `top` taken out: of rows `group` and `group + 8`, and of all
// dimensions, or of the warp's part of PARTS.
template <class E, int D, int PARTS = 1>
struct Weighted : WeightSums {
    static_assert(Stage<E, D>::WORDS % PARTS == 0, "parts are whole words");
    static constexpr int WORDS = Stage<E, D>::WORDS / PARTS, ACCUMULATORS = WORDS * UNIT<E>;
    float values[ACCUMULATORS][4];

    // The first word of a value of this warp's part.
    DEVICE static int first_word() { return PARTS == 1 ? 0 : threadIdx.x / 32 * WORDS; }
    // A lane has pairs of adjacent dimensions, in one accumulator or in two. This is the first dimension of pair i.
    DEVICE static int pair_dimension(int i) {
        const int n = UNIT<E> == 1 ? i : i / 2 * 2, column = threadIdx.x % 4 * 2 + (UNIT<E> == 1 ? 0 : i % 2);
        return ((first_word() + n / UNIT<E>) * 8 + column) * UNIT<E> + n % UNIT<E>;
    }
    // Accumulators of uint4 may have more columns than there are dimensions.
    DEVICE static bool has_dimension(int dimension) { return PARTS * ACCUMULATORS * 8 == D || dimension < D; }
    // Of pair i and row `half`, the first value (`second` 0) or the second one (1).
    DEVICE float& pair_value(int i, int second, int half) {
        return UNIT<E> == 1 ? values[i][half * 2 + second] : values[i / 2 * 2 + second][half * 2 + i % 2];
    }

    DEVICE void clear() {
        static_cast<WeightSums&>(*this) = {};
#pragma unroll
        for (int n = 0; n < ACCUMULATORS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[n][i] = 0;
    }

    // Adds the values of a tile.
    template <class T>
    DEVICE void add_values(const TileWeights& weights, const Stage<E, D>& stage) {
        using P = typename WeightType<T, E>::type;
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int word = 0; word < WORDS; word++) {
            if (word * UNIT<E> % 2 == 0) limit_loads<D>();
            uint32_t units[4];
            load_matrices_transposed(units, &stage.values[lane][stage.place(lane, first_word() + word)]);
#pragma unroll
            for (int sub = 0; sub < UNIT<E>; sub++) {
                if (sub == 2) limit_loads<D>();
                float(&d)[4] = values[word * UNIT<E> + sub];
#pragma unroll
                for (int i = 0; i < 4; i++) d[i] = __fmul_rn(d[i], weights.keep[i / 2]);
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    const uint32_t low = value_fragment<P, E>(units[2 * step], sub);
                    mma<P>(d, weights.p[step], {low, value_fragment<P, E>(units[2 * step + 1], sub)});
                }
            }
        }
    }

    // Writes the values of row `half`, times a factor.
    DEVICE void write_row(int half, float factor, float* row) {
#pragma unroll
        for (int i = 0; i < ACCUMULATORS; i++)
            if (has_dimension(pair_dimension(i)))
                *reinterpret_cast<float2*>(row + pair_dimension(i)) = {pair_value(i, 0, half) * factor,
                                                                       pair_value(i, 1, half) * factor};
    }

    // Appends the sum of the next split, after its finish().
    DEVICE void append(const Weighted& split) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const Merge merge(top[half], split.top[half]);
            top[half] = merge.top;
            sum[half] = merge.of(sum[half], split.sum[half]);
#pragma unroll
            for (int i = 0; i < 2 * ACCUMULATORS; i++) {
                float& value = values[i / 2][half * 2 + i % 2];
                value = merge.of(value, split.values[i / 2][half * 2 + i % 2]);
            }
        }
    }

    // The same, if the values so far are in memory, of row `half` at rows[half]. The values of the new sum replace them
    // or, after the last split, those of `split`.
    DEVICE void append(Weighted& split, float* const (&rows)[2], bool is_first, bool is_last) {
        const Merge merges[2] = {{top[0], split.top[0]}, {top[1], split.top[1]}};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            top[half] = merges[half].top;
            sum[half] = merges[half].of(sum[half], split.sum[half]);
        }
#pragma unroll
        for (int i = 0; i < 2 * ACCUMULATORS; i++) {
            const int half = i % 2, n = i / 2;
            if (i % 16 == 0) limit_loads<D>();
            const bool exists = rows[half] != nullptr && has_dimension(pair_dimension(n));
            auto stored = [&]() -> float2& { return *reinterpret_cast<float2*>(rows[half] + pair_dimension(n)); };
            const float2 total = exists && !is_first ? stored() : float2{0, 0};
            float &x = split.pair_value(n, 0, half), &y = split.pair_value(n, 1, half);
            x = merges[half].of(total.x, x), y = merges[half].of(total.y, y);
            if (exists && !is_last) stored() = {x, y};
        }
    }

    // After the last tile of a split: adds what the lanes of a quad have.
    DEVICE void finish() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            sum[half] = quad_sum(sum[half]);
            added[half] = quad_sum(added[half]);
        }
#pragma unroll
        for (int n = 0; n < ACCUMULATORS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[n][i] = __fadd_rn(values[n][i], added[i / 2]);
    }
};

// Stores the results of the rows of a warp from `start` on: the values over the sums of weights. Rows pass through D
// floats of shared memory, which give their dimensions their order.
template <class E, int D>
DEVICE void store_results(Weighted<E, D>& result, const float (&sums)[2], const WorkItemRows& rows, int start,
                          float* row_values) {
    const int group = threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float factor = 1 / sums[half];
        for (int i = 0; i < 8; i++) {
            const int row = start + half * 8 + i;
            if (row >= rows.count) break;
            if (group == i) result.write_row(half, factor, row_values);
            store_row<E>(rows.call, rows.out_row(row), row_values, D);
        }
    }
}
