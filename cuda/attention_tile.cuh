// A tile of the cache: the keys and values of 32 tokens in shared memory, and their copies from the pages.
#pragma once
#include "attention_call.cuh"

template <class E, int D>
constexpr int PARAMETER_WORDS = 0;  // 16-byte words of parameters of 16 tokens
template <int D>
constexpr int PARAMETER_WORDS<int8, D> = 12;
template <int D>
constexpr int SLOW = D < 64 ? D : D / 64 * 32;
template <int D>
constexpr int PARAMETER_WORDS<u4, D> = SLOW<D> / 8 + 6;

// The parameters of a tile.
template <int WORDS>
struct Parameters {
    uint4 parameters[TILE / 16][WORDS];

    // That of a token in an array of T that begins at `word`.
    template <class T>
    DEVICE T parameter(int token, int word) const {
        return reinterpret_cast<const T*>(&parameters[token / 16][word])[token % 16];
    }
};
template <>
struct Parameters<0> {};
template <class E, int D>
using TileParameters = Parameters<PARAMETER_WORDS<E, D>>;

// Rows are permuted by 16-byte words, so that neither the 8 lanes that read words of two keys nor the 8 rows of an
// ldmatrix meet in a bank. The second half of a row's last word is 0 if the row does not fill it.
template <class E, int D>
struct Stage : TileParameters<E, D> {
    static constexpr int ROW_BYTES = D * BITS<E> / 8, WORDS = (ROW_BYTES + 15) / 16;
    static constexpr int PITCH = WORDS <= 1 ? 1 : WORDS <= 2 ? 2 : WORDS <= 4 ? 4 : (WORDS + 7) / 8 * 8;
    uint4 keys[TILE][PITCH], values[TILE][PITCH];

    DEVICE static int place(int token, int word) {
        if (PITCH >= 8) return word ^ ((token & 1) << 2 | (token >> 1 & 3));
        return PITCH == 4 ? word ^ (token >> 1 & 3) : PITCH == 2 ? word ^ (token >> 2 & 1) : word;
    }
    // What begins at a dimension of a key.
    template <class V>
    DEVICE V key(int token, int dimension) const {
        const int byte = dimension * BITS<E> / 8;
        const uint4* word = &keys[token][place(token, byte / 16)];
        return *reinterpret_cast<const V*>(reinterpret_cast<const uint8_t*>(word) + byte % 16);
    }
};

template <class E>
DEVICE const void* parameter_word(const Page& page, int token, int word);
template <>
DEVICE const void* parameter_word<int8>(const Page& page, int token, int word) {
    if (word < 4) return page.scale(word / 2, token) + word % 2 * 8;
    return page.offset((word - 4) / 4, token) + word % 4 * 4;
}
template <>
DEVICE const void* parameter_word<u4>(const Page& page, int token, int word) {
    const int scales = page.slow_bytes();  // words before them
    if (word < scales) return page.slow_bits(token) + word * 16;
    return page.rotated_scale((word - scales) / 2, token) + (word - scales) % 2 * 8;
}

// 16 tokens of a tile. They are in one page, from token `first` of its block on.
struct Tokens {
    Page page;
    int first;

    DEVICE static Tokens choose(bool is_second, const Tokens& a, const Tokens& b) {
        const Page page = {is_second ? b.page.start : a.page.start, a.page.block_size, a.page.head_dim};
        return {page, is_second ? b.first : a.first};
    }
};

// A sequence's pages of one head, and the positions that any row of a block sees.
struct Keys {
    KvCache cache;
    const uint32_t* blocks;
    int kv_head, first, last;

    // Those that the rows of a work item see. The number of dimensions is a constant, as for the compiler.
    template <int D>
    DEVICE static Keys of(const WorkItemRows& rows) {
        KvCache cache = rows.call.cache;
        cache.head_dim = D;
        return {cache, rows.blocks(), int(blockIdx.y), rows.first(0), rows.last(rows.count - 1)};
    }
    DEVICE bool sees_any(int position) const { return first < position + 16 && position <= last; }
    // The tokens from a position on; if no row sees any of them, those of some page, which is not read.
    template <class E>
    DEVICE Tokens tokens(int position) const {
        const int block = position / cache.block_size;
        const uint32_t number = sees_any(position) ? blocks[block] : 0;
        return {cache.page<E>(number, kv_head), position - block * cache.block_size};
    }
};

// Parts of a tile; the parameters are copied with the keys.
constexpr int KEYS = 1, VALUES = 2;

// Prefetches the keys and values of a tile, without their parameters, by a warp.
template <class E, int D>
DEVICE void prefetch_tile(const Keys& keys, int tile) {
    constexpr int ROW_BYTES = Stage<E, D>::ROW_BYTES;
    const int lane = threadIdx.x % 32, position = tile * TILE + lane;
    if (position < keys.first || position > keys.last) return;
    const Tokens tokens = keys.tokens<E>(position / 16 * 16);
    const uint8_t* key = tokens.page.key<E>(tokens.first + lane % 16);
    const uint8_t* value = key + keys.cache.block_size * tokens.page.row_bytes<E>();
#pragma unroll
    for (int byte = 0; byte < ROW_BYTES; byte += 128) prefetch(key + byte), prefetch(value + byte);
}

// Begins to copy these parts of a tile, by the THREADS threads of a block. What no row sees becomes 0: it may be
// another sequence's, or not a number.
template <int THREADS, int PARTS, class E, int D>
DEVICE void copy_tile(Stage<E, D>& stage, const Keys& keys, int tile) {
    // Rows of 40 bytes, for example, are not aligned to 16.
    constexpr int BYTES = Stage<E, D>::ROW_BYTES % 16 == 0 ? 16 : 8, ROW_COPIES = Stage<E, D>::WORDS * 16 / BYTES;
    constexpr int KEY_COPIES = TILE * ROW_COPIES;
    constexpr int PARAMETERS = PARAMETER_WORDS<E, D>, PARAMETER_COPIES = TILE / 16 * PARAMETERS;
    const int start = tile * TILE;
    const Tokens first = keys.tokens<E>(start), second = keys.tokens<E>(start + 16);
#pragma unroll 2  // registers are short
    for (int n = 0; n < (KEY_COPIES + THREADS - 1) / THREADS; n++) {
        const int i = n * THREADS + threadIdx.x, token = i / ROW_COPIES, byte = i % ROW_COPIES * BYTES;
        if (KEY_COPIES % THREADS != 0 && i >= KEY_COPIES) break;
        const bool is_visible = keys.first <= start + token && start + token <= keys.last;
        const Tokens tokens = Tokens::choose(token >= 16, first, second);
        const uint8_t* key = tokens.page.key<E>(tokens.first + token % 16) + byte;
        const uint8_t* value = key + keys.cache.block_size * tokens.page.row_bytes<E>();
        const int place = Stage<E, D>::place(token, byte / 16);
        if constexpr (BYTES == 16) {
            if (PARTS & KEYS) copy_async<16>(&stage.keys[token][place], key, is_visible ? 16 : 0);
            if (PARTS & VALUES) copy_async<16>(&stage.values[token][place], value, is_visible ? 16 : 0);
        } else {
            const uint32_t filled = is_visible && byte < Stage<E, D>::ROW_BYTES ? 8 : 0;
            auto half = [&](uint4& word) { return reinterpret_cast<uint2*>(&word) + byte / 8 % 2; };
            if (PARTS & KEYS) copy_async<8>(half(stage.keys[token][place]), key, filled);
            if (PARTS & VALUES) copy_async<8>(half(stage.values[token][place]), value, filled);
        }
    }
    if constexpr (PARAMETERS > 0 && (PARTS & KEYS) != 0) {
#pragma unroll
        for (int n = 0; n < (PARAMETER_COPIES + THREADS - 1) / THREADS; n++) {
            const int i = n * THREADS + threadIdx.x, part = i / PARAMETERS, word = i % PARAMETERS;
            if (i >= PARAMETER_COPIES) break;
            const Tokens tokens = Tokens::choose(part == 1, first, second);
            copy_async<16>(&stage.parameters[part][word], parameter_word<E>(tokens.page, tokens.first, word),
                           keys.sees_any(start + part * 16) ? 16 : 0);
        }
    }
}
