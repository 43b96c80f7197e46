// Linked into instrumented libraries. Kernels that are compiled with -fsanitize=thread call these functions at every
// load and store; they take the place of the thread sanitizer's own library, which knows neither fibers nor streams.
// -fsanitize=alignment adds a call at every access through a pointer that is not aligned as its type demands: the
// compiler divides the access of a vector into those of its parts, a GPU does not.
#include "observe.h"

#define PC __builtin_return_address(0)

#define PLAIN(n)                                                                      \
    void __tsan_read##n(void* p) { emu::observe(p, n, emu::READ, PC); }               \
    void __tsan_write##n(void* p) { emu::observe(p, n, emu::WRITE, PC); }             \
    void __tsan_unaligned_read##n(void* p) { emu::observe(p, n, emu::READ, PC); }     \
    void __tsan_unaligned_write##n(void* p) { emu::observe(p, n, emu::WRITE, PC); }   \
    void __tsan_volatile_read##n(void* p) { emu::observe(p, n, emu::READ, PC); }      \
    void __tsan_volatile_write##n(void* p) { emu::observe(p, n, emu::WRITE, PC); }

// The atomic operations that the compiler makes of those in shim.h.
#define ATOMIC(bits, T)                                                                                              \
    T __tsan_atomic##bits##_load(const volatile T* p, int) {                                                         \
        emu::observe(p, sizeof(T), emu::ATOMIC_READ, PC);                                                            \
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                                                 \
    }                                                                                                                \
    void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                                                      \
        emu::observe(p, sizeof(T), emu::ATOMIC_WRITE, PC);                                                           \
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                                                                    \
    }                                                                                                                \
    bool __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {                  \
        emu::observe(p, sizeof(T), emu::ATOMIC_READ, PC);                                                            \
        emu::observe(p, sizeof(T), emu::ATOMIC_WRITE, PC);                                                           \
        return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);               \
    }                                                                                                                \
    T __tsan_atomic##bits##_compare_exchange_val(volatile T* p, T expected, T v, int, int) {                         \
        emu::observe(p, sizeof(T), emu::ATOMIC_READ, PC);                                                            \
        emu::observe(p, sizeof(T), emu::ATOMIC_WRITE, PC);                                                           \
        __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                     \
        return expected;                                                                                             \
    }

// The data of the alignment sanitizer for a place in the source.
struct TypeMismatch {
    struct {
        const char* file;
        uint32_t line, column;
    } place;
    const void* type;
    unsigned char log2_alignment, kind;
};

extern "C" {
void __ubsan_handle_type_mismatch_v1(const TypeMismatch* data, uintptr_t p) {
    emu::fail_at(PC, "the address 0x%zx is not aligned to %u bytes", size_t(p), 1u << data->log2_alignment);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void __tsan_read_range(void* p, size_t n) { emu::observe(p, n, emu::READ, PC); }
void __tsan_write_range(void* p, size_t n) { emu::observe(p, n, emu::WRITE, PC); }
PLAIN(1) PLAIN(2) PLAIN(4) PLAIN(8) PLAIN(16)
ATOMIC(32, unsigned) ATOMIC(64, unsigned long)
}
