// Products by a group of four warps: wgmma, for sm_90a only. The tensor cores read the operands asynchronously: both
// from shared memory, or the first one from registers.
//
// A tile in shared memory has rows of 64 columns of 16 bits: 8 words of 16 bytes, of which word w of row r is at
// w ^ r % 8 (PTX ISA, "128-byte swizzle"). It begins at a multiple of 1024 bytes.
//
// The order of a product: the threads that wrote the tiles call products_see_writes() before a barrier; then
// begin_products(), multiply() once or several times, commit_products(), wait_for_products(). Between begin_products()
// and the end of the wait, the sums must not be read or written, nor the tiles and registers of operands written.
#pragma once
#include "common.cuh"

constexpr int TILE_COLUMNS = 64, TILE_WORDS = 8, TILE_ALIGNMENT = 1024;

// The first tile in dynamic shared memory, which has TILE_ALIGNMENT bytes more than the tiles.
DEVICE uint4* first_tile() {
    DYNAMIC_SHARED(unsigned char, bytes);
    return reinterpret_cast<uint4*>(bytes + -size_t(bytes) % TILE_ALIGNMENT);
}

// The place of a 16-byte word of a row of a tile.
DEVICE int place_in_tile(int row, int word) { return word ^ row % TILE_WORDS; }

#ifndef PENSTOCK_HOST
#ifndef __CUDA_ARCH_FEAT_SM90_ALL
#error "wgmma exists on sm_90a only"
#endif

// The registers %(10 t) to %(10 t + 9).
#define TEN(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define SUMS_32 TEN() ",%10,%11,%12,%13,%14,%15"
#define SUMS_64 TEN() "," TEN(1) "," TEN(2) ",%30,%31"
#define SUMS_128 TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) ",%60,%61,%62,%63"
#define SUMS_256                                                                                            \
    TEN() "," TEN(1) "," TEN(2) "," TEN(3) "," TEN(4) "," TEN(5) "," TEN(6) "," TEN(7) "," TEN(8) "," TEN(9) \
    "," TEN(10) "," TEN(11) ",%120,%121,%122,%123,%124,%125,%126,%127"
// The sums as operands of type C.
#define OF_TILE(C, i) C(d[i][0]), C(d[i][1]), C(d[i][2]), C(d[i][3])
#define OF_4(C, i) OF_TILE(C, i), OF_TILE(C, i + 1), OF_TILE(C, i + 2), OF_TILE(C, i + 3)
#define OF_16(C, i) OF_4(C, i), OF_4(C, i + 4), OF_4(C, i + 8), OF_4(C, i + 12)
#define OF_32(C) OF_4(C, 0)
#define OF_64(C) OF_4(C, 0), OF_4(C, 4)
#define OF_128(C) OF_16(C, 0)
#define OF_256(C) OF_16(C, 0), OF_16(C, 16)

// The matrix descriptor of a tile: its address, and 1024 bytes from 8 rows to the next 8 (PTX ISA).
DEVICE uint64_t descriptor(const uint4* tile, int part) {
    const uint64_t address = uint32_t(__cvta_generic_to_shared(tile)) + part * 32;
    return address >> 4 | uint64_t(1) << 16 | uint64_t(TILE_ALIGNMENT >> 4) << 32 | uint64_t(1) << 62;
}

template <class T, int ROWS>
struct Instruction;
#define INSTRUCTION(T, ROWS, A, B)                                                                              \
    template <>                                                                                                 \
    struct Instruction<T, ROWS> {                                                                               \
        DEVICE static void multiply(float (&d)[ROWS / 8][4], uint64_t a, uint64_t b) {                          \
            asm volatile("{.reg .pred adds; setp.eq.u32 adds, 0, 0; wgmma.mma_async.sync.aligned.m64n" #ROWS    \
                         "k16.f32." #T "." #T " {" SUMS_##ROWS "}, " A ", " B ", adds, 1, 1, 0, 0;}"            \
                         : OF_##ROWS("+f")                                                                      \
                         : "l"(a), "l"(b));                                                                     \
        }                                                                                                       \
    };
#define INSTRUCTIONS(T)                    \
    INSTRUCTION(T, 32, "%16", "%17")       \
    INSTRUCTION(T, 64, "%32", "%33")       \
    INSTRUCTION(T, 128, "%64", "%65")      \
    INSTRUCTION(T, 256, "%128", "%129")
INSTRUCTIONS(bf16)
INSTRUCTIONS(f16)

// The same with the first operand in registers.
#define REGISTER_INSTRUCTION(T, SUM, C, TYPE, FLAGS, ROWS, A, B, ADDS)                                          \
    DEVICE void multiply_registers(T, SUM (&d)[ROWS / 8][4], const uint32_t (&a)[4], uint64_t b, int adds) {     \
        asm volatile("{.reg .pred adds; setp.ne.s32 adds, " ADDS ", 0; wgmma.mma_async.sync.aligned.m64n" #ROWS  \
                     TYPE " {" SUMS_##ROWS "}, {" A "}, " B ", adds" FLAGS ";}"                                  \
                     : OF_##ROWS("+" C)                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds));                           \
    }                                                                                                           \
    DEVICE void multiply_registers(T, SUM (&d)[ROWS / 8][4], const uint32_t (&a)[4], uint64_t b) {               \
        asm volatile("{.reg .pred adds; setp.ne.s32 adds, 0, 0; wgmma.mma_async.sync.aligned.m64n" #ROWS         \
                     TYPE " {" SUMS_##ROWS "}, {" A "}, " B ", adds" FLAGS ";}"                                  \
                     : OF_##ROWS("=" C)                                                                         \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                      \
    }
#define REGISTER_INSTRUCTIONS(T, SUM, C, TYPE, FLAGS)                                           \
    REGISTER_INSTRUCTION(T, SUM, C, TYPE, FLAGS, 64, "%32, %33, %34, %35", "%36", "%37")        \
    REGISTER_INSTRUCTION(T, SUM, C, TYPE, FLAGS, 128, "%64, %65, %66, %67", "%68", "%69")
REGISTER_INSTRUCTIONS(bf16, float, "f", "k16.f32.bf16.bf16", ", 1, 1, 0")
REGISTER_INSTRUCTIONS(f16, float, "f", "k16.f32.f16.f16", ", 1, 1, 0")
REGISTER_INSTRUCTIONS(int8_t, int, "r", "k32.s32.s8.s8", "")
#endif

// d[64][ROWS] += a[64][16] * b[ROWS][16], of the columns 16 part to 16 part + 15 of both tiles. Warp w of the four has
// rows 16 w to 16 w + 15 of d: d[j] is the fragment of mma of these rows and columns 8 j to 8 j + 7. `a` begins at
// the group's rows.
template <class T, int ROWS>
DEVICE void multiply(float (&d)[ROWS / 8][4], const uint4* a, const uint4* b, int part) {
#ifdef PENSTOCK_HOST
    emu::multiply_tiles(d[0], ROWS, a, b, part, std::is_same_v<T, f16>);
#else
    Instruction<T, ROWS>::multiply(d, descriptor(a, part), descriptor(b, part));
#endif
}

// d[64][8 N] += a[64][32 bytes] * b[8 N][32 bytes], or = if not `adds`: of bf16 and f16 for sums of float32, of int8_t
// for those of 32-bit integers. `a` is the operand of mma (common.cuh) for the warp's 16 rows; `b` is the bytes
// 32 part to 32 part + 31 of a tile.
template <class T, class Sum, int N>
DEVICE void multiply(Sum (&d)[N][4], const uint32_t (&a)[4], const uint4* b, int part, bool adds) {
#ifdef PENSTOCK_HOST
    emu::multiply_registers(d[0], 8 * N, a, b, part, adds, std::is_same_v<T, f16>);
#else
    multiply_registers(T{}, d, a, descriptor(b, part), adds);
#endif
}
// The same without sums before it. The assembler needs no value of the registers then.
template <class T, class Sum, int N>
DEVICE void multiply_first(Sum (&d)[N][4], const uint32_t (&a)[4], const uint4* b, int part) {
#ifdef PENSTOCK_HOST
    emu::multiply_registers(d[0], 8 * N, a, b, part, false, std::is_same_v<T, f16>);
#else
    multiply_registers(T{}, d, a, descriptor(b, part));
#endif
}

// Lets wgmma see what this thread has written to shared memory, after the next barrier.
DEVICE void products_see_writes() {
#ifdef PENSTOCK_HOST
    emu::products_see_writes();
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
DEVICE void begin_products() {
#ifdef PENSTOCK_HOST
    emu::begin_products();
#else
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
// Makes a group of the products since the last one.
DEVICE void commit_products() {
#ifdef PENSTOCK_HOST
    emu::commit_products();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Waits until all groups but the last PENDING are complete.
template <int PENDING>
DEVICE void wait_for_products() {
#ifdef PENSTOCK_HOST
    emu::wait_for_products(PENDING);
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#endif
}
// The compiler does not move reads or writes of these registers to before or behind this place.
DEVICE void keep_register(float& x) {
#ifndef PENSTOCK_HOST
    asm volatile("" : "+f"(x)::"memory");
#endif
}
template <class Word>
DEVICE void keep_register(Word& x) {
#ifndef PENSTOCK_HOST
    asm volatile("" : "+r"(x)::"memory");
#endif
}
template <class Word, int N>
DEVICE void keep_registers(Word (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < N; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) keep_register(d[i][e]);
}
