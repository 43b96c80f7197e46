// Fibers, the stacks of CUDA threads: switched by assembly (fiber.cpp) on x86-64 and aarch64, by ucontext elsewhere.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(EMU_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))
#define EMU_FIBER_UCONTEXT
#include <ucontext.h>
#endif

namespace emu {

constexpr size_t STACK = 64 << 10;
constexpr size_t STACK_GUARD = 4096;  // the lowest page of a stack is inaccessible

// Stacks that are a power of two apart have their hot lines in the same few sets of the L1 cache: ten times the misses.
inline char* stack_top(char* stack) {
    const size_t number = reinterpret_cast<uintptr_t>(stack) / STACK;
    return stack + STACK - 64 - (number % 64 * 448 % 16384 & ~size_t(63));
}

#ifdef EMU_FIBER_UCONTEXT

inline void* new_fiber(char* stack, void (*entry)()) {
    auto* context = reinterpret_cast<ucontext_t*>(stack + STACK_GUARD);
    char* bottom = reinterpret_cast<char*>(context + 1);
    getcontext(context);
    context->uc_stack.ss_sp = bottom;
    context->uc_stack.ss_size = stack_top(stack) - bottom;
    makecontext(context, entry, 0);
    return context;
}

inline void switch_fiber(void** save, void* to) {
    ucontext_t here;  // on the stack of the fiber that waits
    *save = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to));
}

#else

extern "C" void emu_switch_fiber(void** save, void* to);

inline void switch_fiber(void** save, void* to) { emu_switch_fiber(save, to); }

#ifdef __x86_64__

inline void* new_fiber(char* stack, void (*entry)()) {
    void** sp = reinterpret_cast<void**>(stack_top(stack));
    *--sp = nullptr;  // the alignment of the stack after a call
    *--sp = reinterpret_cast<void*>(entry);
    return sp - 6;
}

#else

inline void* new_fiber(char* stack, void (*entry)()) {
    void** sp = reinterpret_cast<void**>(stack_top(stack) - 160);
    sp[11] = reinterpret_cast<void*>(entry);  // the link register
    return sp;
}

#endif
#endif

}  // namespace emu
