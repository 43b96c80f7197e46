// The primitives of kernels: types, conversions, sums over a warp, tensor-core products, asynchronous copies.
//
// A kernel is compiled twice from one text: by NVRTC for a GPU, without any header of the toolkit, and by a host C++
// compiler (PENSTOCK_HOST) for the tests. Only the primitives in this file differ; their host twins are in shim.h.
//
// Conventions of all kernels:
// - Activations are float32, rows of `width` values, dense. Rows that a matrix product reads ("operands") and weights
//   are bf16, f16 or float32, or integers with scales (quantised_rows.cuh, quantised_matrix.cuh). Every sum of floats
//   is of float32.
// - A row of the output depends on its own row of the input alone. No sum is divided by the size of the batch, and no
//   float is added by an atomic, so the bits of a row do not depend on the other rows.
// - Memory that other kernels write is not `const __restrict__`: the compiler would read it by ld.global.nc, which
//   requires that nothing writes it while the kernel is resident, also before dependency_wait().
// - NVRTC makes fused operations of products and sums, the host compiler does not. A result that must have the same
//   bits on both, or on the CPU, is computed by intrinsics such as __fmul_rn and __fadd_rn, which are not fused.
// - With programmatic dependent launch, the blocks of a kernel may be resident before the kernel before it is complete.
//   So a kernel calls dependency_wait() before it reads results, and then dependency_launch(), so that the next one's
//   blocks may become resident. What the kernel before cannot have written is read, or prefetched, before the wait.
#pragma once

#ifdef PENSTOCK_HOST
#include "shim.h"
#else
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
// Registers a kernel, with the number and the sizes of its parameters, in the library of the tests.
#define EXPORT(kernel)
#define DYNAMIC_SHARED(T, name)                                           \
    extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[]; \
    T* name = reinterpret_cast<T*>(dynamic_shared_bytes)
#endif

#define DEVICE __device__ __forceinline__

constexpr uint32_t ALL_LANES = 0xffffffffu;

DEVICE float infinity() { return __uint_as_float(0x7f800000u); }
DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Keeps the compiler from moving accesses to memory from one side to the other: where it would rather load a whole
// tile at once, and has no registers for it.
DEVICE void keep_order() { asm volatile("" ::: "memory"); }
// Keeps the compiler from computing what follows from an address of global memory before this place: many addresses
// take many registers.
template <class T>
DEVICE void keep_address(T*& address) {
#ifndef PENSTOCK_HOST
    asm volatile("" : "+l"(address));
    __builtin_assume(__isGlobal(address));
#endif
}

// ---- 16-bit floats

typedef float f32;
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }
DEVICE float to_float(f16 x) {
#ifdef PENSTOCK_HOST
    return emu::f16_to_float(x.bits);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
    return f;
#endif
}

// Rounds to the nearest, ties to even.
template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
    return x;
}
template <>
DEVICE bf16 from_float<bf16>(float x) {
#ifdef PENSTOCK_HOST
    const uint32_t u = __float_as_uint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
    return {uint16_t((u + 0x7fffu + (u >> 16 & 1)) >> 16)};
#else
    uint16_t r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return {r};
#endif
}
template <>
DEVICE f16 from_float<f16>(float x) {
#ifdef PENSTOCK_HOST
    return {emu::float_to_f16(x)};
#else
    uint16_t r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return {r};
#endif
}

// A value of an operand: beyond the range of f16 it is +-65504, not infinite. Infinities stay infinite.
template <class T>
DEVICE T to_operand(float x) {
    return from_float<T>(x);
}
template <>
DEVICE f16 to_operand<f16>(float x) {
    const bool is_finite = fabsf(x) < infinity();
    return from_float<f16>(is_finite && fabsf(x) > 65504 ? copysignf(65504, x) : x);
}

// N values that one access of memory reads or writes.
template <class T, int N>
struct __align__(sizeof(T) * N) Values {
    T values[N];
};

// Writes of(from[i], i) to to[i], by all threads of a block. Four reads of a thread precede its writes: the compiler
// does not know that `to` is other memory, and would make each read wait for the write before it.
template <class From, class To, class Function>
DEVICE void transform(const From* from, To* to, int count, Function of) {
    for (int first = threadIdx.x; first < count; first += 4 * blockDim.x) {
        From values[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            if (first + n * int(blockDim.x) < count) values[n] = from[first + n * blockDim.x];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int i = first + n * blockDim.x;
            if (i < count) to[i] = of(values[n], i);
        }
    }
}

// Two values as the operands of mma hold them: the first in the low half.
template <class T>
DEVICE uint32_t pack(float first, float second);
template <>
DEVICE uint32_t pack<bf16>(float first, float second) {
#ifdef PENSTOCK_HOST
    return uint32_t(from_float<bf16>(first).bits) | uint32_t(from_float<bf16>(second).bits) << 16;
#else
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#endif
}
template <>
DEVICE uint32_t pack<f16>(float first, float second) {
#ifdef PENSTOCK_HOST
    return uint32_t(from_float<f16>(first).bits) | uint32_t(from_float<f16>(second).bits) << 16;
#else
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
#endif
}

// The same 16 bits twice.
constexpr uint32_t twice(uint32_t bits) { return bits << 16 | bits; }

// a * b + c for pairs of bf16 or f16.
template <class T>
DEVICE uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c);
#ifdef PENSTOCK_HOST
template <class T>
DEVICE uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
    auto number = [](uint32_t pair, int half) { return to_float(T{uint16_t(pair >> 16 * half)}); };
    return pack<T>(__fmaf_rn(number(a, 0), number(b, 0), number(c, 0)),
                   __fmaf_rn(number(a, 1), number(b, 1), number(c, 1)));
}
#else
template <>
DEVICE uint32_t fma_pairs<bf16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
template <>
DEVICE uint32_t fma_pairs<f16>(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#endif

template <class T>
constexpr uint32_t ONE = 0x3f80;
template <>
constexpr uint32_t ONE<f16> = 0x3c00;

// The types of floats, as the host numbers them.
enum FloatType : int { F32, BF16, F16 };

// The number that has integers in the low bits of its mantissa: 128 in bf16, 1024 in f16.
template <class T>
constexpr uint32_t INTEGER = 0x4300;
template <>
constexpr uint32_t INTEGER<f16> = 0x6400;

// (x & mask) ^ flips: one instruction, also if both are constants.
DEVICE uint32_t and_xor(uint32_t x, uint32_t mask, uint32_t flips) {
#ifdef PENSTOCK_HOST
    return (x & mask) ^ flips;
#else
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(x), "r"(mask), "r"(flips));
    return result;
#endif
}

// Codes of BITS bits, less 2^(BITS - 1), of a pair that has them in the low bits of INTEGER. It is exact.
template <class T, int BITS>
DEVICE uint32_t less_centre(uint32_t integers) {
    constexpr uint32_t minus = (0x8000 | INTEGER<T>) + (1 << (BITS - 1));
    return fma_pairs<T>(integers, twice(ONE<T>), twice(minus));
}

// A pair of codes of BITS bits, in the low bits of 16, less 2^(BITS - 1). It is exact.
template <class T, int BITS>
DEVICE uint32_t centred_pair(uint32_t codes) {
    // The mantissa of bf16 has 7 of 8 bits. The high one makes -128 of the -256 that are added.
    if constexpr (BITS == 8 && INTEGER<T> == INTEGER<bf16>)
        return fma_pairs<T>((codes & twice(0x7f)) | twice(INTEGER<T>), twice(ONE<T>),
                            (codes & twice(0x80)) ^ twice(0xc380));
    return less_centre<T, BITS>(codes | twice(INTEGER<T>));
}

// ---- Warps

// The sum over the 32 lanes, in butterfly order: every lane has the same bits.
template <class T>
DEVICE T warp_sum(T x) {
#ifdef PENSTOCK_HOST
    T one[1] = {x};
    emu::warp_sum(one);
    return one[0];
#else
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
#endif
}

// The largest value, which is not NaN in any lane.
DEVICE float warp_max(float x) {
#ifdef PENSTOCK_HOST
    float one[1] = {x};
    emu::warp_max(one);
    return one[0];
#else
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
#endif
}

// The sum over the threads of a block of whole warps; every thread has the same bits. `partial` has an element per
// warp.
template <class T>
DEVICE T block_sum(T x, T* partial) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    T sum = 0;
    for (int warp = 0; warp < int(blockDim.x) / 32; warp++) sum += partial[warp];
    return sum;
}

// ---- Tensor cores: d[16][8] += a[16][16] * b[16][8], float32 sums
//
// With group = lane / 4 and quad = lane % 4 (PTX ISA, "Matrix fragments for mma.m16n8k16"), a lane holds
//   a   rows group (a[0], a[2]) and group + 8 (a[1], a[3]); columns 2 quad, 2 quad + 1 (a[0], a[1]), + 8 (a[2], a[3])
//   b   column group; rows 2 quad, 2 quad + 1 (b[0]), and + 8 (b[1])
//   d   rows group (d[0], d[1]) and group + 8 (d[2], d[3]); columns 2 quad, 2 quad + 1
// The 16 products of an element may be added in any order that is the same for every element; so kernels may permute
// the inner dimension, provided that a and b agree. On an H100, the order does not change a bit, and wgmma has
// the same bits as mma: of two tiles, measured for bf16 and f16 with exponents that are far apart; with the first
// operand in registers, measured for bf16 with the matrices of the tests. Sums of integers are exact.

template <class T>
DEVICE void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
template <>
DEVICE void mma<bf16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef PENSTOCK_HOST
    emu::mma_bf16(d, a, b);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
template <>
DEVICE void mma<f16>(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef PENSTOCK_HOST
    emu::mma_f16(d, a, b);
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// The same for 8-bit integers with signs, four to a register, and sums of 32 bits (PTX ISA, "Matrix fragments for
// mma.m16n8k32", "mma.m16n8k16"): d[16][8] += a[16][16 A / 2] * b[16 A / 2][8] for A = 4 or 2 registers of a. A lane
// has
//   a   rows group (a[0], a[2]) and group + 8 (a[1], a[3]); columns 4 quad onwards (a[0], a[1]), + 16 (a[2], a[3])
//   b   column group; rows 4 quad onwards (b[0]), and + 16 (b[1])
//   d   as above
template <int A>
DEVICE void mma_int8(int (&d)[4], const uint32_t (&a)[A], const uint32_t (&b)[A / 2]) {
#ifdef PENSTOCK_HOST
    emu::mma_int8(d, a, b);
#else
    if constexpr (A == 4)
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
                     "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[A - 1]), "r"(b[0]), "r"(b[A / 2 - 1]));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
                     "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
                     : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(b[0]));
#endif
}

// The same for e4m3, four to a register, and sums of float32, for devices of compute capability 8.9 and newer: d[16][8]
// += a[16][32] * b[32][8].
DEVICE void mma_fp8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef PENSTOCK_HOST
    emu::mma_fp8(d, a, b);
#elif __CUDA_ARCH__ < 890
    asm volatile("trap;");
#else
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Four 8x8 matrices of 16-bit units from shared memory: lane 8 i + r passes the address of row r of matrix i (16
// bytes, aligned); r[i] holds columns 2 quad and 2 quad + 1 of row `group` of matrix i.
DEVICE void load_matrices(uint32_t (&r)[4], const void* row) {
#ifdef PENSTOCK_HOST
    emu::load_matrices(r, row);
#else
    const uint32_t from = uint32_t(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
#endif
}
// The same, transposed: r[i] holds rows 2 quad and 2 quad + 1 of column `group` of matrix i.
DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void* row) {
#ifdef PENSTOCK_HOST
    emu::load_matrices_transposed(r, row);
#else
    const uint32_t from = uint32_t(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(from)
                 : "memory");
#endif
}

// ---- Asynchronous copies

// Begins to copy 4, 8 or 16 bytes from global to shared memory; or to clear them, without reading, if `filled` is 0.
// The thread sees them after copy_wait, the others of its block after a barrier, too. 16 bytes bypass the first-level
// cache.
template <int BYTES>
DEVICE void copy_async(void* shared, const void* global, uint32_t filled = BYTES) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "bytes of cp.async");
#ifdef PENSTOCK_HOST
    emu::copy_async(shared, global, BYTES, filled);
#else
    const uint32_t to = uint32_t(__cvta_generic_to_shared(shared));
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(filled) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(to), "l"(global), "r"(filled), "n"(BYTES)
                     : "memory");
#endif
}
// Makes a group of the copies begun since the last one.
DEVICE void copy_commit() {
#ifdef PENSTOCK_HOST
    emu::copy_commit();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until all groups but the last PENDING are complete.
template <int PENDING>
DEVICE void copy_wait() {
#ifdef PENSTOCK_HOST
    emu::copy_wait(PENDING);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Begins to bring the cache line of an address of global memory, of 128 bytes, to the second-level cache. Stores of
// other kernels keep that up to date, so a prefetch may precede dependency_wait().
DEVICE void prefetch([[maybe_unused]] const void* from) {
#ifndef PENSTOCK_HOST
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
}
// The same for `count` values, by `threads` threads, of which this is number `thread`.
template <class T>
DEVICE void prefetch(const T* from, int count, int thread, int threads) {
    constexpr int STEP = 128 / sizeof(T);
    for (int i = thread * STEP; i < count; i += threads * STEP) prefetch(from + i);
}

// ---- Programmatic dependent launch (sm_90 and later; elsewhere a launch waits for all of the one before)

// Waits until the kernels before this one are complete, and their writes are visible. Before it, only the last of them
// may still run, because that one has passed its own wait. So what earlier kernels and copies wrote can be read before
// the wait. What the last one writes must not be read, and nothing may be written.
DEVICE void dependency_wait() {
#ifdef PENSTOCK_HOST
    emu::dependency_wait();
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Allows the next kernel's blocks to become resident, up to their dependency_wait().
DEVICE void dependency_launch() {
#ifdef PENSTOCK_HOST
    emu::dependency_launch();
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
