// CUDA C++ for a host compiler: qualifiers, types, built-in variables and intrinsics, over runtime.h and warp.h.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include "runtime.h"
#include "warp.h"

// ------------------------------------------------------------------------------------------ qualifiers, kernels

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define __shared__ static thread_local  // the threads of a block share an OS thread
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(emu::block->shared)

// Registers a kernel with the number and the sizes of its parameters, all from the type of the function.
#define EXPORT(kernel)                                                                           \
    static const emu::Entry emu_entry_##kernel(                                                  \
        emu::entries, {#kernel, decltype(emu::signature(kernel))::num_parameters,                \
                       decltype(emu::signature(kernel))::sizes, decltype(emu::signature(kernel))::call<kernel>});

namespace emu {

extern const Entry* entries __attribute__((visibility("hidden")));  // of this library

template <class... P>
struct Signature {
    static constexpr unsigned num_parameters = sizeof...(P);
    static constexpr unsigned sizes[sizeof...(P) + 1] = {sizeof(P)..., 0};

    template <void (*F)(P...), size_t... I>
    __attribute__((no_sanitize_thread, always_inline)) static inline void unpack(void** values,
                                                                                 std::index_sequence<I...>) {
        F(*static_cast<std::remove_reference_t<P>*>(values[I])...);
    }
    template <void (*F)(P...)>
    __attribute__((no_sanitize_thread)) static void call(void** values) {
        unpack<F>(values, std::index_sequence_for<P...>{});
    }
};
template <class... P>
Signature<P...> signature(void (*)(P...));

}  // namespace emu

// --------------------------------------------------------------------------------------------- vectors, variables

#define EMU_VECTOR(T, name)                     \
    struct alignas(2 * sizeof(T)) name##2 {     \
        T x, y;                                 \
    };                                          \
    struct alignas(4 * sizeof(T)) name##4 {     \
        T x, y, z, w;                           \
    };                                          \
    inline name##2 make_##name##2(T x, T y) {   \
        return {x, y};                          \
    }                                           \
    inline name##4 make_##name##4(T x, T y, T z, T w) { \
        return {x, y, z, w};                    \
    }
EMU_VECTOR(signed char, char)
EMU_VECTOR(unsigned char, uchar)
EMU_VECTOR(unsigned short, ushort)
EMU_VECTOR(short, short)
EMU_VECTOR(int, int)
EMU_VECTOR(unsigned, uint)
EMU_VECTOR(float, float)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

#define threadIdx (emu::self->index)
#define blockIdx (emu::block->index)
#define blockDim (emu::block->size)
#define gridDim (emu::block->grid)
constexpr int warpSize = 32;

// ---------------------------------------------------------------------------------------- barriers, shuffles, votes

inline void __syncthreads(EMU_HERE) { emu::barrier(0, 0, file, line); }
inline void __syncwarp(unsigned mask = emu::ALL_LANES, EMU_HERE) { emu::sync_warp(mask, file, line); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

namespace emu {
// The lane that a shuffle reads in a segment of `width` lanes; a lane outside of the segment means the own one.
inline unsigned source_lane(int wanted, int width) {
    const int lane = int(self->lane), first = lane & ~(width - 1);
    return wanted >= first && wanted < first + width ? wanted : lane;
}
}  // namespace emu

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, EMU_HERE) {
    const unsigned first = emu::self->lane & ~(width - 1);
    return emu::shuffle(mask, value, first + (from & (width - 1)), file, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMU_HERE) {
    return emu::shuffle(mask, value, emu::source_lane(int(emu::self->lane) ^ bits, width), file, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int distance, int width = 32, EMU_HERE) {
    return emu::shuffle(mask, value, emu::source_lane(int(emu::self->lane) + distance, width), file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int distance, int width = 32, EMU_HERE) {
    return emu::shuffle(mask, value, emu::source_lane(int(emu::self->lane) - distance, width), file, line);
}
inline unsigned __ballot_sync(unsigned mask, bool vote, EMU_HERE) { return emu::ballot(mask, vote, file, line); }
inline int __any_sync(unsigned mask, bool vote, EMU_HERE) { return emu::ballot(mask, vote, file, line) != 0; }
inline int __all_sync(unsigned mask, bool vote, EMU_HERE) { return emu::ballot(mask, !vote, file, line) == 0; }
inline unsigned __activemask() { return emu::self->warp->live; }

// ------------------------------------------------------------------------------------------------------ arithmetic

namespace emu {
template <class To, class From>
To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// Where products and sums are contracted (build.py), this value is not a part of a fused operation.
inline float rounded(float x) {
#if defined(EMU_CONTRACTED) && defined(__x86_64__)
    asm("" : "+x"(x));
#elif defined(EMU_CONTRACTED)
    asm("" : "+w"(x));
#endif
    return x;
}
}  // namespace emu

inline float __uint_as_float(unsigned x) { return emu::bit_cast<float>(x); }
inline float __int_as_float(int x) { return emu::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return emu::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return emu::bit_cast<int>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline int __mulhi(int a, int b) { return int(int64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += int(int8_t(a >> i)) * int(int8_t(b >> i));
    return sum;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) result |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return result;
}

inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fadd_rn(float a, float b) { return emu::rounded(a + b); }
inline float __fmul_rn(float a, float b) { return emu::rounded(a * b); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline int __float2int_rn(float x) { return int(nearbyintf(x)); }
inline int __float2int_rz(float x) { return int(x); }

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

// --------------------------------------------------------------------------------------------------------- atomics

namespace emu {
// Replaces *p by f(*p) and returns the old value; compares integers of the same size, so it serves float, too.
template <class T, class F>
T update(T* p, F f) {
    using Bits = std::conditional_t<sizeof(T) == 4, unsigned, unsigned long>;
    static_assert(sizeof(T) == sizeof(Bits));
    Bits* bits = reinterpret_cast<Bits*>(p);
    Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bits, &old, bit_cast<Bits>(T(f(bit_cast<T>(old)))), false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED)) {}
    return bit_cast<T>(old);
}
}  // namespace emu

template <class T> T atomicAdd(T* p, T v) { return emu::update(p, [v](T x) { return x + v; }); }
template <class T> T atomicSub(T* p, T v) { return emu::update(p, [v](T x) { return x - v; }); }
template <class T> T atomicMin(T* p, T v) { return emu::update(p, [v](T x) { return v < x ? v : x; }); }
template <class T> T atomicMax(T* p, T v) { return emu::update(p, [v](T x) { return x < v ? v : x; }); }
template <class T> T atomicOr(T* p, T v) { return emu::update(p, [v](T x) { return x | v; }); }
template <class T> T atomicAnd(T* p, T v) { return emu::update(p, [v](T x) { return x & v; }); }
template <class T> T atomicExch(T* p, T v) { return emu::update(p, [v](T) { return v; }); }
template <class T> T atomicCAS(T* p, T expected, T v) {
    return emu::update(p, [=](T x) { return x == expected ? v : x; });
}
