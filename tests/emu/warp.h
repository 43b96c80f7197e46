// Operations of a warp, asynchronous copies and the primitives of cuda/common.cuh, for the host.
#pragma once
#include <cstring>
#include "runtime.h"

namespace emu {

// ------------------------------------------------------------------------------------------- shuffles and votes

template <class T>
T shuffle(unsigned mask, T value, unsigned from, const char* file, int line) {
    struct Slot {
        T in, out;
        unsigned from;
    } mine{value, value, from};
    collective(mask, &mine, [](void** slots, unsigned lanes) {
        for (unsigned m = lanes; m; m &= m - 1) {
            Slot* to = static_cast<Slot*>(slots[__builtin_ctz(m)]);
            if (!(lanes >> to->from & 1)) fail("shuffle from lane %u, which does not take part", to->from);
            to->out = static_cast<Slot*>(slots[to->from])->in;
        }
    }, file, line);
    return mine.out;
}

inline unsigned ballot(unsigned mask, bool vote, const char* file, int line) {
    struct Slot {
        bool vote;
        unsigned votes;
    } mine{vote, 0};
    collective(mask, &mine, [](void** slots, unsigned lanes) {
        unsigned votes = 0;
        for (unsigned m = lanes; m; m &= m - 1) {
            const unsigned lane = __builtin_ctz(m);
            votes |= unsigned(static_cast<Slot*>(slots[lane])->vote) << lane;
        }
        for (unsigned m = lanes; m; m &= m - 1) static_cast<Slot*>(slots[__builtin_ctz(m)])->votes = votes;
    }, file, line);
    return mine.votes;
}

// Combines N values of every lane in butterfly order, as shuffles by 16, 8, 4, 2 and 1 do; all lanes get the same bits.
template <class Combine, class T, int N>
void butterfly(T (&values)[N], const char* file, int line) {
    collective(ALL_LANES, values, [](void** slots, unsigned lanes) {
        if (lanes != ALL_LANES) fail("a reduction of the warp needs all lanes");
        T now[WARP][N], next[WARP][N];
        for (unsigned i = 0; i < WARP; i++) memcpy(now[i], slots[i], sizeof now[i]);
        for (unsigned step = WARP / 2; step; step /= 2) {
            for (unsigned i = 0; i < WARP; i++)
                for (int n = 0; n < N; n++) next[i][n] = Combine()(now[i][n], now[i ^ step][n]);
            memcpy(now, next, sizeof now);
        }
        for (unsigned i = 0; i < WARP; i++) memcpy(slots[i], now[i], sizeof now[i]);
    }, file, line);
}

struct Add {
    template <class T> T operator()(T a, T b) const { return a + b; }
};
struct Larger {
    template <class T> T operator()(T a, T b) const { return a < b ? b : a; }
};

template <class T, int N>
void warp_sum(T (&values)[N], EMU_HERE) { butterfly<Add>(values, file, line); }
template <class T, int N>
void warp_max(T (&values)[N], EMU_HERE) { butterfly<Larger>(values, file, line); }

// ----------------------------------------------------------------------------------- tensor cores, half precision

// d += a (16 x 16, row major) * b (16 x 8, column major); the fragments are those of the PTX instruction
// mma.m16n8k16. Products are exact, sums are in float.
void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_HERE);
void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_HERE);
void mma_fp8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_HERE);
void mma_int8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_HERE);
void mma_int8(int (&d)[4], const uint32_t (&a)[2], const uint32_t (&b)[1], EMU_HERE);

// The fragments of four 8 x 8 matrices of 16-bit elements: ldmatrix. Lane i has the address of row i.
void load_matrices(uint32_t (&fragments)[4], const void* row, EMU_HERE);
void load_matrices_transposed(uint32_t (&fragments)[4], const void* row, EMU_HERE);

// Products of tiles in shared memory, 64 x 16 and rows x 16, by four warps: wgmma, with the sums of mma. `d` has the
// fragments of 8 rows of `b` each. They are executed as late as is legal, by the wait.
void multiply_tiles(float* d, unsigned rows, const void* a, const void* b, unsigned part, bool is_f16, EMU_HERE);
// The same with the first operand in registers, and of 8-bit integers for sums of integers.
void multiply_registers(float* d, unsigned rows, const uint32_t (&a)[4], const void* b, unsigned part, bool adds,
                        bool is_f16, EMU_HERE);
void multiply_registers(int* d, unsigned rows, const uint32_t (&a)[4], const void* b, unsigned part, bool adds,
                        bool is_f16, EMU_HERE);
void commit_products(EMU_HERE);
void products_see_writes();  // of this thread, so far
void begin_products(EMU_HERE);
void wait_for_products(unsigned pending, EMU_HERE);  // until at most this number of groups is pending

inline float f16_to_float(uint16_t bits) {
    _Float16 x;
    memcpy(&x, &bits, sizeof x);
    return float(x);
}

inline uint16_t float_to_f16(float value) {
    const _Float16 x = _Float16(value);
    uint16_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// ------------------------------------------------------------------------------------------- asynchronous copies

// cp.async of 4, 8 or 16 bytes, of which the first `filled` are read; the others become zero. The copy is executed as
// late as is legal, by the wait, and the destination is overwritten at once, so a missing wait shows.
void copy_async(void* to, const void* from, unsigned size, unsigned filled);
void copy_commit();
void copy_wait(unsigned pending);  // until at most this number of groups is pending

// --------------------------------------------------------------------------------------- programmatic launches

inline void dependency_wait() { self->has_waited = block->has_waited = true; }

// The next kernel may begin while this one waits, and then overlap with the one before, too: every block waits first.
inline void dependency_launch() {
    if (!self->has_waited) fail("dependency_launch before dependency_wait");
}

}  // namespace emu
