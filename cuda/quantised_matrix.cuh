// Matrices of quantised weights: codes with scales (`Grid` of rust/types/src/weight.rs). Their layout in device memory,
// and the way of a code into the operand of a tensor core.
//
//     weight = scale (code - centre) + minimum          centre = 2^(bits - 1), or 0 for e4m3
//
// Codes less their centre are exact in bf16, and so are the numbers of e4m3. Operands are bf16, 8-bit integers or e4m3.
// In memory, a code is stored minus its centre, in two's complement: its highest bit is flipped. Those of e4m3 are
// stored as they are.
//
// Layout    A matrix is tiles of 16 rows, one behind the other; the last one is filled with zeros. Tiles are
//           independent, so matrices of the same format with multiples of 16 rows can be one behind the other, too. A
//           tile has
//
//           - its codes, in blocks of 64 columns. Block: 16 bytes of each of the 32 lanes, then the other bytes of each
//             lane: 0, 4, 8 or 16 for codes of 4, 5, 6 or 8 bits. A lane has the codes of its operands of 4 mma
//             (common.cuh): of rows `group` and `group + 8`, and of 4 columns for each mma.
//           - the scales: units of 8 records, one for each `group` of lanes. A unit belongs to a block, or to a group
//             of columns if that is larger. A record has, for each group of columns in its unit, the scales of rows
//             `group` and `group + 8`, then, if the format is `affine`, their minima or zero points.
//           - the outer factors, if the scales are `nested`: units of 256 columns, with records as above of f16.
//
//           and ends at a multiple of 64 bytes.
//
// Columns   The 4 columns of lane `quad` in mma m of a block are 32 (m / 2) + 8 quad + 4 (m % 2) onwards, so that its
//           operands of activations are 16 contiguous bytes of a row; with groups of 16 columns, 16 m + 4 quad.
//
// Bits      Word m of a lane has the low 4 bits of its codes of mma m: of register r of the operand at 4 r
//           and 4 r + 16. The fifth bits are at 4 m + r (and 16 more) of word 4; the fifth and sixth of codes of 6 bits
//           at 2 (4 (m % 2) + r) of word 4 + m / 2. Codes of 8 bits: register r has bytes r / 2 and r / 2 + 2 of word
//           2 m + r % 2.
//
// Sources   Frantar et al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models",
//           section 3 (codes in the order of the operands); Kim et al., "Who Says Elephants Can't Run", section 3
//           (integers into the mantissa of a float); Micikevicius et al., "FP8 Formats for Deep Learning" (e4m3).
#pragma once
#include "common.cuh"

constexpr int BLOCK = 64, TILE_OUTPUTS = 16, OUTER_GROUP = 256, MATRIX_ALIGNMENT = 64;

constexpr uint32_t ONES = twice(ONE<bf16>), MINUS_ZEROS = twice(0x8000);

// Shifts the bit at `from` to `to`. The caller masks the others.
DEVICE uint32_t move_bits(uint32_t word, int from, int to) {
    return from < to ? word << (to - from) : word >> (from - to);
}

// ---- Codes, of the words of a lane: `pair` is register `r` of the operand of mma `m`. `four` is the 4 columns of mma
// `m` and row `half` of the lane as bytes with signs, in the order 0 2 1 3: codes less their centre, times
// 2^(8 - bits), or e4m3.

// The exclusive or with a stored code makes 128 + code as a bf16: INTEGER, with the highest bit of a code.
template <int BITS>
constexpr uint32_t INTEGER_FLIPS = twice(INTEGER<bf16> ^ 1 << (BITS - 1));

struct code4 {
    static constexpr int bits = 4, centre = 8;
    // The low 4 bits of a pair, with `flips`.
    static DEVICE uint32_t low(const uint32_t* words, int m, int r, uint32_t flips) {
        return and_xor(words[m] >> 4 * r, twice(15), flips);
    }
    static DEVICE uint32_t pair(const uint32_t* words, int m, int r) {
        return less_centre<bf16, bits>(low(words, m, r, INTEGER_FLIPS<bits>));
    }
    // The low 4 bits, `shift` bits above those of bytes.
    static DEVICE uint32_t low_four(const uint32_t* words, int m, int half, int shift) {
        return move_bits(words[m], 4 * half, shift) & 0x0f0f0f0fu << shift;
    }
    static DEVICE uint32_t four(const uint32_t* words, int m, int half) { return low_four(words, m, half, 4); }
};
struct code5 {
    static constexpr int bits = 5, centre = 16;
    static DEVICE uint32_t pair(const uint32_t* words, int m, int r) {
        const uint32_t high = move_bits(words[4], 4 * m + r, 4);
        return less_centre<bf16, bits>(and_xor(high, twice(1 << 4), code4::low(words, m, r, INTEGER_FLIPS<bits>)));
    }
    static DEVICE uint32_t four(const uint32_t* words, int m, int half) {
        const uint32_t low = code4::low_four(words, m, half, 3), from = 4 * m + half;
        return and_xor(move_bits(words[4], from, 7), twice(1 << 7),
                       and_xor(move_bits(words[4], from + 2, 15), twice(1 << 15), low));
    }
};
struct code6 {
    static constexpr int bits = 6, centre = 32;
    static DEVICE uint32_t pair(const uint32_t* words, int m, int r) {
        const uint32_t high = move_bits(words[4 + m / 2], 2 * (4 * (m % 2) + r), 4);
        return less_centre<bf16, bits>(and_xor(high, twice(3 << 4), code4::low(words, m, r, INTEGER_FLIPS<bits>)));
    }
    static DEVICE uint32_t four(const uint32_t* words, int m, int half) {
        const uint32_t low = code4::low_four(words, m, half, 2), from = 8 * (m % 2) + 2 * half;
        return and_xor(move_bits(words[4 + m / 2], from, 6), twice(3 << 6),
                       and_xor(move_bits(words[4 + m / 2], from + 4, 14), twice(3 << 14), low));
    }
};
struct code8 {
    static constexpr int bits = 8, centre = 128;
    // The codes of a pair in the low 8 of 16 bits; the others are not 0.
    static DEVICE uint32_t low(const uint32_t* words, int m, int r) { return words[2 * m + r % 2] >> 8 * (r / 2); }
    // As centred_pair (common.cuh), of codes whose highest bit is flipped.
    static DEVICE uint32_t pair(const uint32_t* words, int m, int r) {
        const uint32_t codes = low(words, m, r);
        return fma_pairs<bf16>(and_xor(codes, twice(0x7f), twice(INTEGER<bf16>)), twice(ONE<bf16>),
                               and_xor(codes, twice(0x80), twice(0x8000 | INTEGER<bf16>)));
    }
    static DEVICE uint32_t four(const uint32_t* words, int m, int half) { return words[2 * m + half]; }
};
struct e4m3 {
    static constexpr int bits = 8, centre = 0;
    // Exponent and mantissa become those of a bf16 that is 2^-120 of the number, also if it is subnormal. The two codes
    // that are not numbers are +-480.
    static DEVICE uint32_t pair(const uint32_t* words, int m, int r) {
        const uint32_t codes = code8::low(words, m, r);
        const uint32_t small = (codes & twice(0x80)) << 8 | (codes & twice(0x7f)) << 4;
        return fma_pairs<bf16>(small, twice(0x7b80), MINUS_ZEROS);
    }
    static DEVICE uint32_t four(const uint32_t* words, int m, int half) { return code8::four(words, m, half); }
};

// ---- Scales

struct scale32 {
    static constexpr int bytes = 4;
};
struct scale16 {
    static constexpr int bytes = 2;
};
struct nested {
    static constexpr int bytes = 1;
};
struct centred {
    static constexpr int values = 2;
};
struct affine {
    static constexpr int values = 4;
};

// The types of quantised rows, with those of their sums.
struct int8 {
    uint8_t bits;
    using Sum = int;
};
struct fp8 {
    uint8_t bits;
    using Sum = float;
};
template <class X>
struct SumOf {
    using Type = typename X::Sum;
};
template <>
struct SumOf<bf16> {
    using Type = float;
};

// A format: its codes, columns of the smallest unit that has a scale (16, 32, or 64 for all larger groups), the type of
// scales, whether there are minima, and the type of the rows that it is multiplied by.
template <class CODE, int CHUNK, class SCALE, class MINIMUM, class X>
struct Format {
    using Code = CODE;
    using Scale = SCALE;
    using Sum = typename SumOf<X>::Type;
    static constexpr bool has_quantised_rows = sizeof(X) == 1;
    static constexpr bool has_minima = MINIMUM::values == affine::values, is_nested = SCALE::bytes == nested::bytes;
    static constexpr int chunk = CHUNK, chunks = BLOCK / CHUNK, values = MINIMUM::values;
    static constexpr float four_step = 1.f / (1 << (8 - CODE::bits));  // the number of 1 in Code::four
    static constexpr int block_bytes = 32 * 4 * CODE::bits;
    static constexpr int record_bytes = chunks * values * SCALE::bytes, outer_bytes = is_nested ? values * 2 : 0;
};

// A matrix. Scales of 16 bits are f16 or bf16; the last values of an affine record are minima, or zero points: then the
// minimum is scale (centre - zero point).
struct QuantisedMatrix {
    const uint8_t* data;
    int rows, columns;
    int group_shift;  // of groups of 64 columns and more: 2^group_shift columns; 31 if a row is a group
    uint16_t has_bf16_scales, has_zero_points;
};

DEVICE int count_blocks(const QuantisedMatrix& matrix) { return ceil_div(matrix.columns, BLOCK); }
template <class F>
DEVICE int count_units(const QuantisedMatrix& matrix) {
    return F::chunk < BLOCK ? count_blocks(matrix) : ((matrix.columns - 1) >> matrix.group_shift) + 1;
}
template <class F>
DEVICE const uint8_t* tile_of(const QuantisedMatrix& matrix, int tile) {
    const int outers = F::is_nested ? ceil_div(matrix.columns, OUTER_GROUP) : 0;
    const int scales = 8 * (count_units<F>(matrix) * F::record_bytes + outers * F::outer_bytes);
    const int bytes = count_blocks(matrix) * F::block_bytes + scales;
    return matrix.data + size_t(tile) * (ceil_div(bytes, MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT);
}

// The first of the 4 columns of a lane for mma `m` of a block.
template <class F>
DEVICE int first_column(int block, int m, int quad) {
    return block * BLOCK + (F::chunk == 16 ? 16 * m + 4 * quad : 32 * (m / 2) + 8 * quad + 4 * (m % 2));
}

// ---- The part of a lane in a block of columns

constexpr int ceil_words(int bytes) { return (bytes + 3) / 4; }

template <int BYTES>
DEVICE void load(uint32_t* words, const uint8_t* from) {
    if constexpr (BYTES == 2) words[0] = *reinterpret_cast<const uint16_t*>(from);
    if constexpr (BYTES == 4) words[0] = *reinterpret_cast<const uint32_t*>(from);
    if constexpr (BYTES == 8) {
        const uint2 pair = *reinterpret_cast<const uint2*>(from);
        words[0] = pair.x, words[1] = pair.y;
    }
#pragma unroll
    for (int i = 0; i < BYTES / 16; i++) {
        const uint4 part = reinterpret_cast<const uint4*>(from)[i];
        words[4 * i] = part.x, words[4 * i + 1] = part.y, words[4 * i + 2] = part.z, words[4 * i + 3] = part.w;
    }
}

// The scales of some chunks.
template <class F, int CHUNKS>
struct LaneScales {
    uint32_t scales[ceil_words(CHUNKS * F::record_bytes / F::chunks)], outers[ceil_words(F::outer_bytes + 4)];
};
template <class F>
struct LaneBlock : LaneScales<F, F::chunks> {
    uint32_t codes[F::Code::bits];
};

// Loads the codes of a lane from a block.
template <class F>
DEVICE void load_codes(LaneBlock<F>& part, const uint8_t* block, int lane) {
    constexpr int REST = 4 * (F::Code::bits - 4);
    load<16>(part.codes, block + lane * 16);
    if constexpr (REST > 0) load<REST>(part.codes + 4, block + 32 * 16 + lane * REST);
}

// Loads its scales from a tile.
template <class F>
DEVICE void load_scales(LaneScales<F, F::chunks>& part, const QuantisedMatrix& matrix, const uint8_t* tile, int block,
                        int lane) {
    const uint8_t* from = tile + count_blocks(matrix) * F::block_bytes;
    const int unit = F::chunk < BLOCK ? block : block * BLOCK >> matrix.group_shift;
    load<F::record_bytes>(part.scales, from + (unit * 8 + lane / 4) * F::record_bytes);
    if constexpr (F::is_nested) {
        from += count_units<F>(matrix) * 8 * F::record_bytes;
        load<F::outer_bytes>(part.outers, from + (block / (OUTER_GROUP / BLOCK) * 8 + lane / 4) * F::outer_bytes);
    }
}

template <class F>
DEVICE LaneBlock<F> load_block(const QuantisedMatrix& matrix, const uint8_t* tile, int block, int lane) {
    LaneBlock<F> part = {};
    load_codes(part, tile + block * F::block_bytes, lane);
    load_scales(part, matrix, tile, block, lane);
    return part;
}

// Value `i` of a chunk's record.
template <class F, int CHUNKS>
DEVICE float record_value(const QuantisedMatrix& matrix, const LaneScales<F, CHUNKS>& part, int chunk, int i) {
    const int index = chunk * F::values + i;
    if constexpr (F::is_nested) {
        const int inner = int8_t(part.scales[index / 4] >> 8 * (index % 4));
        return float(inner) * to_float(f16{uint16_t(part.outers[i / 2] >> 16 * (i % 2))});
    } else if constexpr (F::Scale::bytes == 2) {
        const uint32_t bits = part.scales[index / 2] >> 16 * (index % 2);
        return matrix.has_bf16_scales ? __uint_as_float(bits << 16) : to_float(f16{uint16_t(bits)});
    } else {
        return __uint_as_float(part.scales[index]);
    }
}

// The weight of a number, a code less its centre, in row `half` of the lane: exactly that of the CPU.
template <class F>
DEVICE float weight_of(const QuantisedMatrix& matrix, const LaneScales<F, F::chunks>& part, int chunk, int half,
                       float number) {
    const float scale = half ? record_value(matrix, part, chunk, 1) : record_value(matrix, part, chunk, 0);
    if constexpr (F::has_minima) {
        const float value = half ? record_value(matrix, part, chunk, 3) : record_value(matrix, part, chunk, 2);
        const float code = number + F::Code::centre;
        return matrix.has_zero_points ? __fmul_rn(scale, code - value) : __fadd_rn(__fmul_rn(scale, code), value);
    }
    return __fmul_rn(scale, number);
}

// weight = scale * (code - centre) + minimum, for the two rows of a lane.
struct Factors {
    float scale[2], minimum[2];
};

template <class F, int CHUNKS>
DEVICE Factors factors_of(const QuantisedMatrix& matrix, const LaneScales<F, CHUNKS>& part, int chunk) {
    Factors factors = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float scale = record_value(matrix, part, chunk, half);
        factors.scale[half] = scale;
        if constexpr (F::has_minima) {
            const float value = record_value(matrix, part, chunk, 2 + half), centre = F::Code::centre;
            factors.minimum[half] =
                matrix.has_zero_points ? __fmul_rn(scale, centre - value) : __fmaf_rn(scale, centre, value);
        }
    }
    return factors;
}

// The factors of all chunks, with one branch for each property of the matrix.
template <class F, int CHUNKS>
DEVICE void factors_of_chunks(Factors (&factors)[CHUNKS], const QuantisedMatrix& matrix,
                              const LaneScales<F, CHUNKS>& part) {
    auto set = [&](bool has_bf16_scales, bool has_zero_points) {
        QuantisedMatrix known = matrix;
        known.has_bf16_scales = has_bf16_scales, known.has_zero_points = has_zero_points;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++) factors[chunk] = factors_of(known, part, chunk);
    };
    auto set_scales = [&](bool has_zero_points) {
        if (F::Scale::bytes == 2 && matrix.has_bf16_scales)
            set(true, has_zero_points);
        else
            set(false, has_zero_points);
    };
    if (F::has_minima && matrix.has_zero_points)
        set_scales(true);
    else
        set_scales(false);
}
