// Fibers, the stacks of CUDA threads: switched by assembly on x86-64 and aarch64, and by ucontext elsewhere.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) || defined(__aarch64__)
#define EMU_FIBER_ASSEMBLY
#endif

namespace emu {

constexpr size_t STACK = 64 << 10;
constexpr size_t STACK_GUARD = 4096;  // the lowest page of a stack is inaccessible

// Stacks that are a power of two apart have their hot lines in the same few sets of the L1 cache: ten times the misses.
inline char* stack_top(char* stack) {
    const size_t number = reinterpret_cast<uintptr_t>(stack) / STACK;
    return stack + STACK - 64 - (number % 64 * 448 % 16384 & ~size_t(63));
}

// A fiber that begins with a call of `entry`, which does not return.
void* new_fiber(char* stack, void (*entry)());

extern const bool uses_ucontext;  // EMU_UCONTEXT=1, or the only way on this machine
void switch_ucontext(void** save, void* to);
extern "C" void emu_switch_fiber(void** save, void* to);

// Saves the running fiber and continues another one.
inline void switch_fiber(void** save, void* to) {
#ifdef EMU_FIBER_ASSEMBLY
    if (!uses_ucontext) return emu_switch_fiber(save, to);
#endif
    switch_ucontext(save, to);
}

}  // namespace emu
