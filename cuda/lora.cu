// Low-rank updates of a product, of which each row may have another one.
//
//     hidden[row][update]  = scale * A x[row]                                  (lora_shrink)
//     out[row][of update] += B hidden[row][update]                             (lora_expand)
//
// Data      x [rows][columns] of T is the operand of the product, out [rows][width] of float32 its result. A matrix
//           has up to 3 updates, each of adjacent columns of out: of the query, key and value of a fused matrix, for
//           example. A is [rank][columns]; B is [rows][rank], its rows filled up with zeros to a multiple of 4
//           values. Both are bf16, f16 or float32, whatever x is. hidden is float32, its ranks filled up with zeros to
//           a multiple of 16. If columns is not a multiple of 4, lora_shrink_any takes the place of lora_shrink.
//           The host divides the rows with adapters into tiles: up to 16 adjacent rows with the same adapter. A batch
//           in which each row has an adapter of its own has a tile per row, and a prompt is read 16 rows at a time.
//           A tile of 0 rows is skipped. `updates` says where A and B of an adapter are; it changes between steps only.
//
// The products have the precision of float32 for every type: a value is a sum of bf16 parts, which are exact (1 for
// bf16, 2 for f16, 3 for float32), and the tensor core adds the products of the parts, except those below 2^-24 of the
// largest. An infinite value becomes NaN.
// The order of a sum depends on the columns, or the rank, alone: a row has the same bits in every tile and batch.
//
// Shapes    lora_shrink  grid (tiles, highest rank / 16, updates), rounded up. The columns are divided into pieces of
//                        64, and the pieces among the 16 warps: piece p belongs to warp p % 16, the sums of the warps
//                        are added in order. A warp loads a piece, or half of one, at once.
//           lora_expand  grid (tiles, most rows of an update / 128, updates), rounded up; a warp computes 32 columns of
//                        out.
//           A block beyond the rank or the rows of its update ends at once, so the grid is the same for all adapters.
// Limit     bytes of A and B for few rows; for many rows the bytes of x and out, which are read and written again.
// Sources   Chen et al., "Punica: Multi-Tenant LoRA Serving", section 4 (the two products, rows grouped by adapter);
//           Sheng et al., "S-LoRA", section 5 (ranks that differ within a batch); Henry et al., "Leveraging the
//           bfloat16 Artificial Intelligence Datatype for Higher-Precision Computations" (sums of parts).
#include "common.cuh"

constexpr int MAX_UPDATES = 3, TILE_ROWS = 16, ROW_TILES = TILE_ROWS / 8;
constexpr int RANKS = 16, STEP = 16, PIECE = 64, SHRINK_WARPS = 16;
constexpr int EXPAND_WARPS = 4, OUTPUT_TILES = 2;

// The update of some columns of `out`.
struct Update {
    uint64_t a;  // the first byte of A, behind LowRank::adapters
    uint32_t b;  // bytes from there to B
    FloatType type;
    float scale;
    int rank;  // 0: the adapter has no such update
    int first_column, num_columns;
};

// Rows of x and out with the same adapter.
struct Tile {
    int first, rows, adapter;
};

struct LowRank {
    const void* x;
    float* hidden;  // [rows][MAX_UPDATES][hidden_pitch]
    float* out;
    const Tile* tiles;
    const uint8_t* adapters;
    const Update* updates;  // [adapters][update_pitch], of which the first MAX_UPDATES belong to the matrix
    int columns, width, hidden_pitch, update_pitch;
};

// ---- Four adjacent values, as sums of bf16 parts

template <class T>
struct Parts;
template <>
struct Parts<bf16> {
    typedef uint2 Word;
    static constexpr int COUNT = 1;
};
template <>
struct Parts<f16> {
    typedef uint2 Word;
    static constexpr int COUNT = 2;
};
template <>
struct Parts<f32> {
    typedef uint4 Word;
    static constexpr int COUNT = 3;
};

// The first `count` of the four values at `from`, and zeros. Aligned values exist all four or not at all.
template <bool IS_ALIGNED = true, class T>
DEVICE typename Parts<T>::Word load(const T* from, int count) {
    typename Parts<T>::Word word = {};
    if constexpr (IS_ALIGNED) {
        if (count > 0) word = *reinterpret_cast<const typename Parts<T>::Word*>(from);
    } else {
        T values[4] = {};
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < count) values[i] = from[i];
        memcpy(&word, values, sizeof word);
    }
    return word;
}

template <class T>
struct Vector {
    uint32_t part[Parts<T>::COUNT][2];

    DEVICE explicit Vector(const typename Parts<T>::Word& word) {
        if constexpr (Parts<T>::COUNT == 1) {
            part[0][0] = word.x;
            part[0][1] = word.y;
            return;
        }
        T values[4];
        static_assert(sizeof values == sizeof word, "four values");
        memcpy(values, &word, sizeof word);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float rest = to_float(values[i]);
#pragma unroll
            for (int n = 0; n < Parts<T>::COUNT; n++) {
                const bf16 rounded = from_float<bf16>(rest);
                rest -= to_float(rounded);
                part[n][i / 2] = i % 2 == 0 ? rounded.bits : part[n][i / 2] | uint32_t(rounded.bits) << 16;
            }
        }
    }
};

// d[outputs][rows] += w[outputs][columns] * x[rows][columns], over 16 columns, of which each lane has four: those of
// rows `group` and `group + 8` of w, and of row `group` of x. (Any order of the columns is right if w and x agree.)
template <class W, class X>
DEVICE void multiply(float (&d)[4], const Vector<W> (&w)[2], const Vector<X>& x) {
#pragma unroll
    for (int i = 0; i < Parts<W>::COUNT; i++)
#pragma unroll
        for (int j = 0; j < Parts<X>::COUNT; j++)
            if (i + j < 3)
                mma<bf16>(d, {w[0].part[i][0], w[1].part[i][0], w[0].part[i][1], w[1].part[i][1]},
                          {x.part[j][0], x.part[j][1]});
}

// ---- The first product

template <bool IS_ALIGNED, class T, class W>
DEVICE void shrink(const LowRank& call, const Tile& tile, const Update& update,
                   float (&sums)[SHRINK_WARPS][TILE_ROWS][RANKS]) {
    constexpr int STEPS = 8 / sizeof(T);  // as many as there are registers for
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const int columns = call.columns, first_rank = blockIdx.y * RANKS;
    const W* a = reinterpret_cast<const W*>(call.adapters + update.a) + size_t(first_rank + group) * columns;
    const T* x = static_cast<const T*>(call.x) + size_t(tile.first + group) * columns;
    float d[ROW_TILES][4] = {};
    // The parts of the pieces of this warp.
    int part = warp * PIECE;
    auto next_part = [&] {
        part += STEPS * STEP;
        if (part % PIECE == 0) part += (SHRINK_WARPS - 1) * PIECE;
    };
    for (; part < columns; next_part()) {
        typename Parts<W>::Word a_words[STEPS][2];
        typename Parts<T>::Word x_words[STEPS][ROW_TILES];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const int column = part + step * STEP + quad * 4;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bool exists = first_rank + group + half * 8 < update.rank;
                const W* from = a + size_t(half) * 8 * columns + column;
                a_words[step][half] = load<IS_ALIGNED>(from, exists ? columns - column : 0);
            }
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) {
                const bool exists = i * 8 + group < tile.rows;
                const T* from = x + size_t(i) * 8 * columns + column;
                x_words[step][i] = load<IS_ALIGNED>(from, exists ? columns - column : 0);
            }
        }
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const Vector<W> a_parts[2] = {Vector<W>(a_words[step][0]), Vector<W>(a_words[step][1])};
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++)
                if (i * 8 < tile.rows) multiply(d[i], a_parts, Vector<T>(x_words[step][i]));
        }
    }
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) sums[warp][i * 8 + quad * 2 + e % 2][group + e / 2 * 8] = d[i][e];
}

template <bool IS_ALIGNED, class T>
DEVICE void shrink(const LowRank& call) {
    __shared__ float sums[SHRINK_WARPS][TILE_ROWS][RANKS];
    const Tile tile = call.tiles[blockIdx.x];
    const Update update = call.updates[size_t(tile.adapter) * call.update_pitch + blockIdx.z];
    dependency_wait();
    dependency_launch();
    const int first_rank = blockIdx.y * RANKS;
    if (tile.rows == 0 || first_rank >= update.rank) return;
    if (update.type == F32) shrink<IS_ALIGNED, T, f32>(call, tile, update, sums);
    if (update.type == F16) shrink<IS_ALIGNED, T, f16>(call, tile, update, sums);
    if (update.type == BF16) shrink<IS_ALIGNED, T, bf16>(call, tile, update, sums);
    __syncthreads();
    const int row = threadIdx.x / RANKS, rank = threadIdx.x % RANKS;
    if (row >= tile.rows) return;
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < SHRINK_WARPS; warp++) sum += sums[warp][row][rank];
    float* hidden = call.hidden + (size_t(tile.first + row) * MAX_UPDATES + blockIdx.z) * call.hidden_pitch;
    hidden[first_rank + rank] = update.scale * sum;
}

// ---- The second product

template <class W>
DEVICE void expand(const LowRank& call, const Tile& tile, const Update& update) {
    const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4, warp = threadIdx.x / 32;
    const int first = (blockIdx.y * EXPAND_WARPS + warp) * OUTPUT_TILES * 16;
    const int pitch = ceil_div(update.rank, 4) * 4;
    const W* b = reinterpret_cast<const W*>(call.adapters + update.a + update.b) + size_t(first + group) * pitch;
    const size_t hidden_pitch = size_t(MAX_UPDATES) * call.hidden_pitch;
    const float* hidden = call.hidden + size_t(tile.first + group) * hidden_pitch + blockIdx.z * call.hidden_pitch;
    float* out = call.out + size_t(tile.first + quad * 2) * call.width + update.first_column + first + group;

    // Element e of the tile of 16 columns i and 8 rows j that this lane adds to.
    auto exists = [&](int i, int j, int e) {
        return first + i * 16 + group + e / 2 * 8 < update.num_columns && j * 8 + quad * 2 + e % 2 < tile.rows;
    };
    auto place = [&](int i, int j, int e) {
        return out + size_t(j * 8 + e % 2) * call.width + (i * 16 + e / 2 * 8);
    };
    float old[OUTPUT_TILES][ROW_TILES][4], d[OUTPUT_TILES][ROW_TILES][4] = {};
#pragma unroll
    for (int i = 0; i < OUTPUT_TILES; i++)
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) old[i][j][e] = exists(i, j, e) ? *place(i, j, e) : 0;
#pragma unroll 1
    for (int k = quad * 4; k < pitch + quad * 4; k += STEP) {
        typename Parts<W>::Word b_words[OUTPUT_TILES][2];
#pragma unroll
        for (int i = 0; i < OUTPUT_TILES; i++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int output = i * 16 + half * 8;
                const bool exists = first + group + output < update.num_columns && k < pitch;
                b_words[i][half] = load(b + size_t(output) * pitch + k, exists);
            }
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++) {
            if (j * 8 >= tile.rows) continue;
            const Vector<f32> parts(load(hidden + j * 8 * hidden_pitch + k, j * 8 + group < tile.rows));
#pragma unroll
            for (int i = 0; i < OUTPUT_TILES; i++)
                multiply(d[i][j], {Vector<W>(b_words[i][0]), Vector<W>(b_words[i][1])}, parts);
        }
    }
#pragma unroll
    for (int i = 0; i < OUTPUT_TILES; i++)
#pragma unroll
        for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (exists(i, j, e)) *place(i, j, e) = old[i][j][e] + d[i][j][e];
}

#define SHRINK(T)                                                                                         \
    extern "C" __global__ void __launch_bounds__(32 * SHRINK_WARPS) lora_shrink_##T(LowRank call) {       \
        shrink<true, T>(call);                                                                            \
    }                                                                                                     \
    EXPORT(lora_shrink_##T)                                                                               \
    extern "C" __global__ void __launch_bounds__(32 * SHRINK_WARPS) lora_shrink_any_##T(LowRank call) {   \
        shrink<false, T>(call);                                                                           \
    }                                                                                                     \
    EXPORT(lora_shrink_any_##T)
SHRINK(f32)
SHRINK(bf16)
SHRINK(f16)

extern "C" __global__ void __launch_bounds__(32 * EXPAND_WARPS, 3) lora_expand(LowRank call) {
    const Tile tile = call.tiles[blockIdx.x];
    const Update update = call.updates[size_t(tile.adapter) * call.update_pitch + blockIdx.z];
    dependency_wait();
    dependency_launch();
    // The warps of a block are independent.
    const int first = (blockIdx.y * EXPAND_WARPS + threadIdx.x / 32) * OUTPUT_TILES * 16;
    if (tile.rows == 0 || update.rank == 0 || first >= update.num_columns) return;
    if (update.type == F32) expand<f32>(call, tile, update);
    if (update.type == F16) expand<f16>(call, tile, update);
    if (update.type == BF16) expand<bf16>(call, tile, update);
}
EXPORT(lora_expand)
