// Causal attention in float32, without tensor cores: for models of float32, and for the head sizes that attention.cu
// does not have. Its rows, splits and results are those of attention_call.cuh.
//
// Data      the cache of any encoding, which restores keys and values as float32; head_dim is at most 256.
// Shape     A warp of decode or prefill computes its rows one after the other. A score is a chain over the dimensions,
//           by the lane of its token; a value is a chain over the tokens, by the lane of its dimension.
// Limit     accesses of the first-level cache: every row reads all keys and values that it sees.
// Sources   those of attention.cu.
#include "attention_combine.cuh"

constexpr int MAX_HEAD_DIM = 256, PREFILL_WARPS = 4;
// Without it, the compiler limits the registers of `prefill` until it spills.
constexpr int MIN_BLOCKS = 4;

// The key (`part` 0) or value (1) of a token.
template <class E>
struct Vector {
    const E* row;

    DEVICE Vector(const Page& page, int part, int token)
        : row(reinterpret_cast<const E*>(part == 0 ? page.key<E>(token) : page.value<E>(token))) {}
    DEVICE float operator[](int i) const { return to_float(row[i]); }
};
template <>
struct Vector<int8> {
    const uint8_t* row;
    float scale, offset;

    DEVICE Vector(const Page& page, int part, int token)
        : row(part == 0 ? page.key<int8>(token) : page.value<int8>(token)), scale(to_float(*page.scale(part, token))),
          offset(*page.offset(part, token)) {}
    DEVICE float operator[](int i) const { return __fmaf_rn(scale, float(row[i]), offset); }
};
template <>
struct Vector<u4> {
    const uint8_t *row, *fifth_bits;
    int fast;  // dimensions of the first part
    float scales[2];

    DEVICE Vector(const Page& page, int part, int token)
        : row(part == 0 ? page.key<u4>(token) : page.value<u4>(token)), fifth_bits(page.slow_bits(token)),
          fast(part == 0 ? KeyParts(page.head_dim).fast : page.head_dim),
          scales{to_float(*page.rotated_scale(2 * part, token)), to_float(*page.rotated_scale(1, token))} {}
    DEVICE float operator[](int i) const {
        const int low = row[i / 2] >> i % 2 * 4 & 15, slow = i - fast;
        if (slow < 0) return scales[0] * (float(low) - 7.5f);
        return scales[1] * (float(low | (fifth_bits[slow / 8] >> slow % 8 & 1) << 4) - 15.5f);
    }
};

// The sum of a row over some positions, with the exponent `top` taken out. A lane has dimensions lane, lane + 32, ..
struct Sums {
    float top, sum, values[MAX_HEAD_DIM / 32];

    DEVICE void clear() {
        top = -infinity(), sum = 0;
#pragma unroll
        for (int i = 0; i < MAX_HEAD_DIM / 32; i++) values[i] = 0;
    }

    // Appends the sum of the next split.
    DEVICE void append(const Sums& split) {
        const Merge merge(top, split.top);
        top = merge.top;
        sum = merge.of(sum, split.sum);
#pragma unroll
        for (int i = 0; i < MAX_HEAD_DIM / 32; i++) values[i] = merge.of(values[i], split.values[i]);
    }

    // Adds the positions first..=last, which are in the same tile.
    template <class E>
    DEVICE void add_tile(const Attention& call, const uint32_t* blocks, const float* query, float* weights, int first,
                         int last) {
        const KvCache& cache = call.cache;
        auto vector = [&](int part, int position) {
            const Page page = cache.page<E>(blocks[position / cache.block_size], blockIdx.y);
            return Vector<E>(page, part, position % cache.block_size);
        };
        const int lane = threadIdx.x % 32, position = first / TILE * TILE + lane;
        float x = -infinity();
        if (first <= position && position <= last) {
            const Vector<E> key = vector(0, position);
            float score = 0;
            for (int i = 0; i < cache.head_dim; i++) score = __fmaf_rn(query[i], key[i], score);
            x = exponent(score, call.scale, call.softcap);
        }
        const float now = fmaxf(top, warp_max(fmaxf(x, -infinity())));  // without NaN
        const float keep = power(top, now), p = power(x, now);
        top = now;
        sum = __fmaf_rn(sum, keep, warp_sum(p));
#pragma unroll
        for (int i = 0; i < MAX_HEAD_DIM / 32; i++) values[i] = __fmul_rn(values[i], keep);
        weights[lane] = p;
        __syncwarp();
        for (int token = first; token <= last; token++) {
            const Vector<E> value = vector(1, token);
            const float weight = weights[token % TILE];
#pragma unroll
            for (int i = 0; i < MAX_HEAD_DIM / 32; i++)
                if (lane + 32 * i < cache.head_dim) values[i] = __fmaf_rn(weight, value[lane + 32 * i], values[i]);
        }
        __syncwarp();  // the weights may be overwritten
    }
};

// The dimensions of a lane, in a row of memory.
template <class F>
DEVICE void for_dimensions(int head_dim, F of) {
#pragma unroll
    for (int i = 0; i < MAX_HEAD_DIM / 32; i++) {
        const int dimension = threadIdx.x % 32 + 32 * i;
        if (dimension < head_dim) of(i, dimension);
    }
}

template <class E, bool IS_DECODE>
DEVICE void attend(const Attention& call) {
    constexpr int WARPS = IS_DECODE ? 1 : PREFILL_WARPS;
    __shared__ float row_values[WARPS][MAX_HEAD_DIM], weights[WARPS][TILE];
    const int warp = threadIdx.x / 32, head_dim = call.cache.head_dim;
    const WorkItemRows rows(call);
    dependency_wait();
    dependency_launch();
    if (rows.count == 0) return;
    const int first_split = IS_DECODE ? int(rows.item.split) : rows.first_split();
    const int last_split = IS_DECODE ? first_split : rows.last_split();
    if (first_split < rows.first_split()) return;  // before the window
    const bool is_partial = IS_DECODE && !rows.has_one_split();
    for (int row = warp; row < rows.count; row += WARPS) {
        float* query = row_values[warp];
        for (int i = threadIdx.x % 32; i < head_dim; i += 32) query[i] = rows.query_row(row)[i];
        __syncwarp();
        Sums total;
        total.clear();
        for (int split = first_split; split <= last_split; split++) {
            Sums now;
            now.clear();
            int first = max(rows.first(row), split * SPLIT);
            const int last = min(rows.last(row), split * SPLIT + SPLIT - 1);
            for (; first <= last; first = (first / TILE + 1) * TILE)
                now.add_tile<E>(call, rows.blocks(), query, weights[warp], first,
                                min(last, first / TILE * TILE + TILE - 1));
            if (is_partial) {
                float* to = rows.partial(split, row);
                for_dimensions(head_dim, [&](int i, int dimension) { to[dimension] = now.values[i]; });
                if (threadIdx.x % 32 == 0) to[head_dim] = now.top, to[head_dim + 1] = now.sum;
            } else {
                total.append(now);
            }
        }
        if (!is_partial) {
            for_dimensions(head_dim, [&](int i, int dimension) { query[dimension] = total.values[i] / total.sum; });
            store_row<E>(call, rows.out_row(row), query, head_dim);
        }
        __syncwarp();
    }
}

template <class E>
DEVICE void combine(const Attention& call) {
    combine_splits<E, MAX_HEAD_DIM>(call, call.cache.head_dim, [](float value, float sum) { return value / sum; });
}

#define KERNEL(operation, name, warps, ...)                                                \
    extern "C" __global__ void __launch_bounds__(32 * (warps), MIN_BLOCKS)                 \
    attention_##operation##_f32_##name(Attention call) {                                   \
        __VA_ARGS__(call);                                                                 \
    }                                                                                      \
    EXPORT(attention_##operation##_f32_##name)
#define KERNELS(E, name)                                                                   \
    KERNEL(decode, name, 1, attend<E, true>)                                               \
    KERNEL(prefill, name, PREFILL_WARPS, attend<E, false>)                                 \
    KERNEL(combine, name, COMBINE_WARPS, combine<E>)
KERNELS(f32, f32)
KERNELS(bf16, bf16)
KERNELS(f16, f16)
KERNELS(int8, int8)
KERNELS(u4, uint4)
