// The switch between fibers. The assembly saves the callee-saved registers on the stack of the running fiber, and
// restores those of the other one.
#include "fiber.h"
#include <cstdlib>
#include <ucontext.h>

namespace emu {

#ifdef EMU_FIBER_ASSEMBLY
const bool uses_ucontext = getenv("EMU_UCONTEXT") != nullptr;
#else
const bool uses_ucontext = true;
#endif

static void* new_ucontext(char* stack, void (*entry)()) {
    auto* context = reinterpret_cast<ucontext_t*>(stack + STACK_GUARD);
    char* bottom = reinterpret_cast<char*>(context + 1);
    getcontext(context);
    context->uc_stack.ss_sp = bottom;
    context->uc_stack.ss_size = stack_top(stack) - bottom;
    makecontext(context, entry, 0);
    return context;
}

void switch_ucontext(void** save, void* to) {
    ucontext_t here;  // on the stack of the fiber that waits
    *save = &here;
    swapcontext(&here, static_cast<ucontext_t*>(to));
}

void* new_fiber(char* stack, void (*entry)()) {
    if (uses_ucontext) return new_ucontext(stack, entry);
    void** sp = reinterpret_cast<void**>(stack_top(stack));
#if defined(__x86_64__)
    *--sp = nullptr;  // the alignment of the stack after a call
    *--sp = reinterpret_cast<void*>(entry);
    return sp - 6;
#elif defined(__aarch64__)
    sp -= 20;
    sp[11] = reinterpret_cast<void*>(entry);  // the link register
    return sp;
#else
    return sp;
#endif
}

}  // namespace emu

#if defined(__x86_64__)
asm(R"(
    .text
    .globl emu_switch_fiber
    .hidden emu_switch_fiber
    .type emu_switch_fiber,@function
emu_switch_fiber:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size emu_switch_fiber, .-emu_switch_fiber
)");
#elif defined(__aarch64__)
asm(R"(
    .text
    .globl emu_switch_fiber
    .hidden emu_switch_fiber
    .type emu_switch_fiber,@function
emu_switch_fiber:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size emu_switch_fiber, .-emu_switch_fiber
)");
#endif
