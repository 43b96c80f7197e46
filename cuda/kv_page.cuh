// The pages of the KV cache: where the keys and values of a token and head are, and how they are encoded.
//
//     cache of a layer   [block][kv head] page
//     page               keys     [token][head_dim]
//                        values   [token][head_dim]
//                        int8:    scales of keys, scales of values (bf16, one per token each),
//                                 offsets of keys, offsets of values (float32)
//                        uint4:   fifth bits of the slow part of keys, [token][bits]
//                                 scales of the fast part, of the slow part, of values (bf16)
//
// A row of keys or values is contiguous in every encoding, so attention copies it by words of 16 or 8 bytes and a
// token is written without reading its neighbours. The number of dimensions is even, with uint4 a multiple of 8. A
// block has a multiple of 16 tokens.
//
// f32         the values
// bf16, f16   the values, rounded
// int8        x ~ offset + scale q,  q in 0..255,  offset = min(x),  scale = (max(x) - min(x)) / 255 (bf16, up)
// uint4       The head is rotated by Hadamard transforms, which distribute its few large dimensions over all; then
//             x ~ scale (q - levels / 2),  q in 0..levels.  A key has two parts: "slow", the half that the rotary
//             embedding rotates slowest and that has most of the energy, 5 bits; "fast", the rest, 4 bits. Values
//             have 4 bits. The scale is the best of a few representable ones. A row has 8 values per 32-bit word, the
//             first in the low bits: the fast part, then the slow one.
// A row of int8 or uint4 with a NaN or an infinity is restored as NaN. A token of floats with a value that is not
// finite after rounding has a value of 0 and a key of NaN. So in attention it makes the rows NaN that see it, and
// no other: tensor cores multiply the values of hidden tokens, too, by 0.
//
// The encodings are those of the CPU (rust/kernels: quantiser.rs, rotated.rs), which has another order in memory: the
// same bits for int8; the same integers for uint4, if the scale is the same one. Scales of nearly the same error may be
// confused, because the CPU adds the squares in another order.
// Sources: DashInfer's documentation of its quantised KV cache (int8); Ashkboos et al., "QuaRot", section 4.2
// (rotation).
#pragma once
#include "common.cuh"

// The encodings without a type of their own.
struct int8 {};
struct u4 {};

template <class E>
constexpr int BITS = 16;
template <>
constexpr int BITS<f32> = 32;
template <>
constexpr int BITS<int8> = 8;
template <>
constexpr int BITS<u4> = 4;

// The parts of a rotated key: dimensions in the order of the parts, fast[0..q], fast[half..half + q], then the
// others.
struct KeyParts {
    int half, fast;

    DEVICE explicit KeyParts(int head_dim)
        : half(head_dim / 2), fast(head_dim < 64 ? 0 : head_dim - head_dim / 64 * 32) {}
    DEVICE int dimension(int step) const {
        const int quarter = fast / 2, slow = step - fast, rest = half - quarter;
        if (slow < 0) return step < quarter ? step : half + step - quarter;
        return slow < rest ? quarter + slow : half + quarter + slow - rest;
    }
};

// The page of a block and head.
struct Page {
    uint8_t* start;
    int block_size, head_dim;

    template <class E>
    DEVICE static size_t bytes(int block_size, int head_dim);
    template <class E>
    DEVICE int row_bytes() const {
        return head_dim * BITS<E> / 8;
    }
    template <class E>
    DEVICE uint8_t* key(int token) const {
        return start + token * row_bytes<E>();
    }
    template <class E>
    DEVICE uint8_t* value(int token) const {
        return key<E>(block_size + token);
    }
    // What follows the values.
    template <class E>
    DEVICE uint8_t* parameters() const {
        return key<E>(2 * block_size);
    }
    // int8: the scales and the offsets of keys (`part` 0) and values (`part` 1).
    DEVICE bf16* scale(int part, int token) const {
        return reinterpret_cast<bf16*>(parameters<int8>()) + part * block_size + token;
    }
    DEVICE float* offset(int part, int token) const {
        return reinterpret_cast<float*>(parameters<int8>() + 4 * block_size) + part * block_size + token;
    }
    // u4: fifth bits of a key's slow part, and the scales of fast keys (`part` 0), slow keys (1) and values (2).
    DEVICE int slow_bytes() const { return (head_dim - KeyParts(head_dim).fast) / 8; }
    DEVICE uint8_t* slow_bits(int token) const { return parameters<u4>() + token * slow_bytes(); }
    DEVICE bf16* rotated_scale(int part, int token) const {
        return reinterpret_cast<bf16*>(slow_bits(block_size)) + part * block_size + token;
    }
};

template <class E>
DEVICE size_t Page::bytes(int block_size, int head_dim) {
    return size_t(block_size) * head_dim * 2 * BITS<E> / 8;
}
template <>
DEVICE size_t Page::bytes<int8>(int block_size, int head_dim) {
    return size_t(block_size) * (2 * head_dim + 12);
}
template <>
DEVICE size_t Page::bytes<u4>(int block_size, int head_dim) {
    return size_t(block_size) * (head_dim + (head_dim - KeyParts(head_dim).fast) / 8 + 6);
}

// The pages of a layer.
struct KvCache {
    uint8_t* pages;
    int kv_heads, block_size, head_dim;

    template <class E>
    DEVICE Page page(uint32_t block, int head) const {
        const size_t index = size_t(block) * kv_heads + head;
        return {pages + index * Page::bytes<E>(block_size, head_dim), block_size, head_dim};
    }
};

// ---- Rotation, by one warp, of `count` floats in shared memory

// The length of the blocks in which `count` floats are transformed: the largest power of two that divides it.
DEVICE int transform_block(int count) { return count & -count; }

// The Hadamard transform: orthonormal, its own inverse.
DEVICE void hadamard(float* x, int count) {
    const int lane = threadIdx.x % 32, block = transform_block(count);
    const uint32_t log2 = 31 - __clz(block);  // unit: 1 / sqrt(block)
    const float unit = __uint_as_float((127 - (log2 + 1) / 2) << 23 | (log2 % 2 ? 0x3504f3u : 0));
    for (int i = lane; i < count; i += 32) x[i] *= unit;
    __syncwarp();
    for (int half = 1; half < block; half *= 2) {
        for (int pair = lane; pair < count / 2; pair += 32) {
            const int i = pair + (pair & -half);  // half is a power of two
            const float low = x[i], high = x[i + half];
            x[i] = low + high;
            x[i + half] = low - high;
        }
        __syncwarp();
    }
}
