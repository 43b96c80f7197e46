// The step between the product of queries, keys and values and attention, in one pass over the heads of a row.
//
//     head = head / sqrt(mean(head^2) + epsilon) * weight      queries and keys, of families with head norms
//     (a, b) -> (a cos - b sin, b cos + a sin)                 queries and keys; a = head[i], b = head[i + angles]
//     query = query * scale of the row                         of families that scale queries by their position
//     the page of the row's block = encoded key, value
//
// Data      a row of qkv has `heads` query heads, then `kv_heads` keys, then as many values, of float32. Queries are
//           replaced (by their rotated parts if the keys in the cache are rotated, so that the products are the
//           same); keys and values go to the cache only (kv_page.cuh). The table of rotations has a row per position:
//           the cosines of its `angles` angles, then the sines. A position EXTRA | index is a row of
//           `extra_rotations`.
// Shape     one warp per head; grid (rows, ceil((heads + 2 kv_heads) / 4)), blocks of 4 warps, 8 head_dim floats of
//           dynamic shared memory. The head is in shared memory, where every lane reaches the partner of a rotation.
// Limit     bytes: each value is read once and written once, in the cache's encoding; the values of a cache of floats
//           are read twice, because the key depends on them.
// Sources   Su et al., "RoFormer", section 3.4.2; Henry et al., "Query-Key Normalization for Transformers";
//           kv_page.cuh.
#include "kv_page.cuh"
#include "norm.cuh"

constexpr int WARPS = 4;
constexpr uint32_t EXTRA = 1u << 31;

struct RopeWriteKv {
    float* qkv;
    const float* query_norm;  // the weights of the norms, or null
    const float* key_norm;
    const float* rotations;
    const float* extra_rotations;
    const uint32_t* positions;  // of each row, as are these
    const float* query_scales;  // or null
    const uint32_t* blocks;
    const uint32_t* offsets;
    KvCache cache;
    int heads, angles;
    float epsilon;
};

// ---- The steps for one head, by one warp

DEVICE void normalise(float* x, const float* weight, int count, float epsilon) {
    const int lane = threadIdx.x % 32;
    const float factor = norm_factor(count, epsilon, [&](auto sum) {
        for (int i = lane; i < count; i += 32) sum += decltype(sum)(x[i]) * x[i];
        return warp_sum(sum);
    });
    for (int i = lane; i < count; i += 32) x[i] = x[i] * factor * weight[i];
    __syncwarp();
}

DEVICE void rotate(float* x, const float* rotation, int angles) {
    for (int i = threadIdx.x % 32; i < angles; i += 32) {
        const float a = x[i], b = x[i + angles], cosine = rotation[i], sine = rotation[angles + i];
        x[i] = a * cosine - b * sine;
        x[i + angles] = b * cosine + a * sine;
    }
    __syncwarp();
}

DEVICE bool all_finite(const float* x, int count) {
    bool finite = true;
    for (int i = threadIdx.x % 32; i < count; i += 32) finite = finite && fabsf(x[i]) < infinity();
    return __all_sync(ALL_LANES, finite);
}

DEVICE float not_a_number() { return __uint_as_float(0x7fc00000u); }

// True if all of them are finite after they have been rounded to E.
template <class E>
DEVICE bool all_representable(const float* x, int count) {
    bool finite = true;
    for (int i = threadIdx.x % 32; i < count; i += 32)
        finite = finite && fabsf(to_float(from_float<E>(x[i]))) < infinity();
    return __all_sync(ALL_LANES, finite);
}

// A key or a query as attention over rotated keys takes it: its parts, transformed, behind x.
DEVICE float* rotate_parts(float* x, int count) {
    const KeyParts parts(count);
    float* out = x + count;
    for (int i = threadIdx.x % 32; i < count; i += 32) out[i] = x[parts.dimension(i)];
    __syncwarp();
    if (parts.fast > 0) hadamard(out, parts.fast);
    hadamard(out + parts.fast, count - parts.fast);
    return out;
}

// The query as attention takes it.
template <class E>
DEVICE const float* query_of(float* x, int) {
    return x;
}
template <>
DEVICE const float* query_of<u4>(float* x, int count) {
    return rotate_parts(x, count);
}

// Added to a float in 0..2^22, it leaves the nearest integer, ties to even, in the low bits.
constexpr float ROUND = 1.5f * (1 << 23);

// ---- Encodings of the head x. `part` is 0 for a key and 1 for a value. Behind x are as many floats of scratch.

template <class E>
DEVICE void write(const Page& page, int part, int token, float* x) {
    auto* row = reinterpret_cast<Values<E, 2>*>(part == 0 ? page.key<E>(token) : page.value<E>(token));
    for (int i = threadIdx.x % 32; i < page.head_dim / 2; i += 32)
        row[i] = {from_float<E>(x[2 * i]), from_float<E>(x[2 * i + 1])};
}

// The least bf16 that is not below x, which is between 0 and the largest float32.
DEVICE bf16 round_up(double x) {
    const float nearest = float(x);
    const uint32_t bits = __float_as_uint(nearest) + (double(nearest) < x ? 1 : 0);
    return {uint16_t((bits + 0xffffu) >> 16)};
}

template <>
DEVICE void write<int8>(const Page& page, int part, int token, float* x) {
    const int lane = threadIdx.x % 32, count = page.head_dim;
    float least = infinity(), largest = -infinity();
    for (int i = lane; i < count; i += 32) least = fminf(least, x[i]), largest = fmaxf(largest, x[i]);
    least = -warp_max(-least) + 0.0f;  // -0 becomes 0
    largest = warp_max(largest);
    const bool finite = all_finite(x, count);
    const bf16 scale = finite ? round_up((double(largest) - double(least)) / 255) : bf16{0};
    uint8_t* row = part == 0 ? page.key<int8>(token) : page.value<int8>(token);
    // Halved, because x - min may overflow.
    const float half_scale = 0.5f * to_float(scale), half_offset = 0.5f * least;
    for (int i = lane; i < count; i += 32) {
        const float steps = half_scale > 0 ? (0.5f * x[i] - half_offset) / half_scale : 0;
        row[i] = uint8_t(__float_as_uint(steps + ROUND));
    }
    if (lane == 0) {
        *page.scale(part, token) = scale;
        *page.offset(part, token) = finite ? least : not_a_number();
    }
}

// The best of the representable scales: those with the mantissa's lowest `dropped` bits zero.
struct ScaleChoice {
    int levels, dropped, candidates;
};
constexpr ScaleChoice FAST = {15, 22, 2}, SLOW = {31, 20, 4}, VALUES = {15, 20, 4};

// Each operation is rounded, as on the CPU: the compiler makes no fused operation of these intrinsics.
DEVICE float nearest_level(float x, float inverse, float levels, float& exact) {
    exact = __fadd_rn(__fmul_rn(x, inverse), 0.5f * levels);
    return (fminf(fmaxf(exact, 0.0f), levels) + ROUND) - ROUND;
}

// The one with the least squared error of `count` floats.
DEVICE float choose_scale(const ScaleChoice& choice, const float* x, int count) {
    const int lane = threadIdx.x % 32;
    if (!all_finite(x, count)) return not_a_number();
    const float levels = float(choice.levels);
    float largest = 0;
    for (int i = lane; i < count; i += 32) largest = fmaxf(largest, fabsf(x[i]));
    const float exact_scale = warp_max(largest) / (0.5f * levels);
    if (exact_scale < 1e-37f) return 0;  // its inverse may overflow
    const uint32_t unit = 1u << choice.dropped;
    const uint32_t first = (__float_as_uint(exact_scale) + unit - 1) & ~(unit - 1);
    float best = 0, least_error = infinity();
    for (int candidate = 0; candidate < choice.candidates; candidate++) {
        const float scale = __uint_as_float(first - candidate * unit);
        float error = 0;
        for (int i = lane; i < count; i += 32) {
            float exact;
            const float difference = nearest_level(x[i], 1 / scale, levels, exact) - exact;
            error += difference * difference;
        }
        const float ratio = scale / exact_scale;
        error = warp_sum(error) * ratio * ratio;
        if (error < least_error) best = scale, least_error = error;
    }
    return best;
}

DEVICE uint32_t quantised(float x, float scale, int levels) {
    float exact;
    return scale > 0 ? uint32_t(nearest_level(x, 1 / scale, float(levels), exact)) : 0;
}

DEVICE void write_nibbles(uint8_t* row, const float* x, int count, float scale, int levels) {
    for (int i = threadIdx.x % 32; i < count / 2; i += 32) {
        const uint32_t low = quantised(x[2 * i], scale, levels), high = quantised(x[2 * i + 1], scale, levels);
        row[i] = uint8_t((low & 15) | high << 4);
    }
}

DEVICE void write_fifth_bits(uint8_t* row, const float* x, int count, float scale) {
    for (int i = threadIdx.x % 32; i < count / 8; i += 32) {
        uint32_t bits = 0;
        for (int j = 0; j < 8; j++) bits |= (quantised(x[8 * i + j], scale, SLOW.levels) >> 4) << j;
        row[i] = uint8_t(bits);
    }
}

template <>
DEVICE void write<u4>(const Page& page, int part, int token, float* x) {
    const int lane = threadIdx.x % 32, count = page.head_dim, fast = KeyParts(count).fast, slow = count - fast;
    if (part == 1) {
        hadamard(x, count);
        const float scale = choose_scale(VALUES, x, count);
        write_nibbles(page.value<u4>(token), x, count, scale, VALUES.levels);
        if (lane == 0) *page.rotated_scale(2, token) = from_float<bf16>(scale);
        return;
    }
    const float *fast_part = rotate_parts(x, count), *slow_part = fast_part + fast;
    const float fast_scale = choose_scale(FAST, fast_part, fast), slow_scale = choose_scale(SLOW, slow_part, slow);
    uint8_t* row = page.key<u4>(token);
    write_nibbles(row, fast_part, fast, fast_scale, FAST.levels);
    write_nibbles(row + fast / 2, slow_part, slow, slow_scale, SLOW.levels);
    write_fifth_bits(page.slow_bits(token), slow_part, slow, slow_scale);
    if (lane == 0) {
        *page.rotated_scale(0, token) = from_float<bf16>(fast_scale);
        *page.rotated_scale(1, token) = from_float<bf16>(slow_scale);
    }
}

template <class E>
DEVICE void rope_write_kv(const RopeWriteKv& call) {
    DYNAMIC_SHARED(float, shared);
    const KvCache& cache = call.cache;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = cache.head_dim;
    const int row = blockIdx.x, head = blockIdx.y * WARPS + warp, first_value = call.heads + cache.kv_heads;
    const bool is_query = head < call.heads, is_value = head >= first_value;
    const float* norm = is_query ? call.query_norm : call.key_norm;
    auto rotation = [&] {  // is computed again after the wait, so that no register keeps the pointer
        const uint32_t position = call.positions[row];
        const float* table = position & EXTRA ? call.extra_rotations : call.rotations;
        return table + size_t(position & ~EXTRA) * 2 * call.angles;
    };
    if (!is_value) prefetch(rotation(), 2 * call.angles, lane, 32);
    if (!is_value && norm != nullptr) prefetch(norm, count, lane, 32);
    prefetch(call.blocks + row), prefetch(call.offsets + row);
    dependency_wait();
    dependency_launch();
    if (head >= first_value + cache.kv_heads) return;
    float* from = call.qkv + (size_t(row) * (first_value + cache.kv_heads) + head) * count;
    float* x = shared + warp * 2 * count;
    for (int i = lane; i < count; i += 32) x[i] = from[i];
    __syncwarp();
    if (!is_value) {
        if (norm != nullptr) normalise(x, norm, count, call.epsilon);
        rotate(x, rotation(), call.angles);
    }
    if (is_query) {
        const float scale = call.query_scales != nullptr ? call.query_scales[row] : 1;
        const float* query = query_of<E>(x, count);
        for (int i = lane; i < count; i += 32) from[i] = query[i] * scale;
        return;
    }
    const int kv_head = is_value ? head - first_value : head - call.heads;
    const Page page = cache.page<E>(call.blocks[row], kv_head);
    if constexpr (BITS<E> >= 16) {
        const float* value = is_value ? from : from + cache.kv_heads * count;
        if (!all_representable<E>(value, count)) {
            for (int i = lane; i < count; i += 32) x[i] = is_value ? 0 : not_a_number();
            __syncwarp();
        }
    }
    write<E>(page, is_value, int(call.offsets[row]), x);
}

#define KERNELS(E, name)                            \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) rope_write_kv_##name(RopeWriteKv call) { \
        rope_write_kv<E>(call);                     \
    }                                               \
    EXPORT(rope_write_kv_##name)
KERNELS(f32, f32)
KERNELS(bf16, bf16)
KERNELS(f16, f16)
KERNELS(int8, int8)
KERNELS(u4, uint4)
