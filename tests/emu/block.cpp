// Runs one block. Its CUDA threads are fibers on one OS thread; a thread runs until it waits for others or ends.
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include "runner.h"

namespace emu {

thread_local Block* block;
thread_local Thread* self;
thread_local Runner* runner;

// The order in which threads run: 0 ascending, 1 descending, else the seed of a random order. The results of a kernel
// with a race differ between orders.
static const unsigned ORDER = getenv("EMU_ORDER") ? atoi(getenv("EMU_ORDER")) : 0;

Runner::Runner() : seed(ORDER) {
    constexpr size_t SIZE = STACK * MAX_THREADS;
    void* memory = mmap(nullptr, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) perror("emu: stacks of the CUDA threads"), abort();
    all_stacks = static_cast<char*>(memory);
    signal_stack = malloc(STACK);
}

void Runner::enter_thread() {
    // The handler of an exhausted stack needs a stack of its own.
    stack_t own{};
    own.ss_size = STACK;
    own.ss_sp = signal_stack;
    sigaltstack(&own, nullptr);
}

char* Runner::take_stack() {
    if (free_stacks.empty()) {
        char* stack = all_stacks + STACK * num_stacks++;
        mprotect(stack, STACK_GUARD, PROT_NONE);
        return stack;
    }
    char* stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
}

[[noreturn]] static void leave(const char* format, va_list values) {
    char* error = runner->launch->error;
    constexpr size_t SIZE = sizeof runner->launch->error;
    const uint3 b = block->index, t = self->index;
    const int n = snprintf(error, SIZE, "kernel %s, block (%u,%u,%u), thread (%u,%u,%u): ", runner->kernel->name, b.x,
                           b.y, b.z, t.x, t.y, t.z);
    if (size_t(n) < SIZE) vsnprintf(error + n, SIZE - n, format, values);
    runner->is_running = false;
    __builtin_longjmp(runner->exit, 1);
}

void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    leave(format, values);
}

void fail_at(void* pc, const char* format, ...) {
    runner->launch->failed_pc = pc;
    va_list values;
    va_start(values, format);
    leave(format, values);
}

void abandon(uintptr_t address, const char* description, void* pc) {
    if (!runner || !runner->is_running) return;
    if (runner->launch->recovered) runner->launch->recovered();
    const bool is_stack = address - uintptr_t(runner->all_stacks) < STACK * MAX_THREADS;
    if (is_stack) fail_at(pc, "the stack of %zu KiB is exhausted", STACK >> 10);
    fail_at(pc, "illegal address: %s", description);
}

// ---------------------------------------------------------------------------------------------------- scheduling

// Takes a thread that can run from the sets of ready threads; null if there is none.
static Thread* take_ready(Runner& r) {
    const unsigned warps = r.block.ready_warps;
    if (!warps) return nullptr;
    unsigned number = __builtin_ctz(warps);
    if (ORDER == 1) {
        number = 31 - __builtin_clz(warps);
    } else if (ORDER > 1) {
        r.seed = r.seed * 1664525 + 1013904223;
        const unsigned first = r.seed >> 27;
        if (warps >> first) number = first + __builtin_ctz(warps >> first);
    }
    Warp& warp = r.warps[number];
    const unsigned lane = ORDER == 1 ? 31 - __builtin_clz(warp.ready) : __builtin_ctz(warp.ready);
    warp.ready &= ~(1u << lane);
    if (!warp.ready) r.block.ready_warps &= ~(1u << number);
    return &warp.threads[lane];
}

static void wake(Warp& warp, unsigned lanes) {
    warp.ready |= lanes;
    if (lanes) block->ready_warps |= 1u << warp.number;
}

static bool is_live(const Thread& thread) { return thread.warp->live >> thread.lane & 1; }

[[noreturn]] static void report_deadlock(Runner& r) {
    char text[320] = "";
    size_t n = 0;
    const Thread* previous = nullptr;
    for (unsigned i = 0; i < r.block.warps * WARP && n < 220; i++) {
        const Thread& t = r.threads[i];
        if (!is_live(t)) continue;
        const bool is_same = previous && t.file == previous->file && t.line == previous->line;
        previous = &t;
        if (is_same) continue;
        const char* what = t.waits_for == COLLECTIVE ? "warp" : "barrier";
        n += snprintf(text + n, sizeof text - n, " from thread %u: %s at %s:%d;", i, what, t.file, t.line);
    }
    fail("deadlock: the threads wait at different places:%s", text);
}

static void fiber();

// Suspends the running thread until it is woken.
static void wait(const char* file, int line, int what) {
    Runner& r = *runner;
    Thread* me = self;
    me->file = file, me->line = line, me->waits_for = what;
    Thread* next = take_ready(r);
    if (!next) report_deadlock(r);
    self = next;
    if (!next->stack_pointer) {
        next->stack = r.take_stack();
        next->stack_pointer = new_fiber(next->stack, fiber);
    }
    switch_fiber(&me->stack_pointer, next->stack_pointer);
}

// --------------------------------------------------------------------------------------- operations of a warp

static void complete(Warp& warp) {
    const unsigned lanes = warp.arrived;
    warp.operation(warp.slots, lanes);
    warp.arrived = 0;
    wake(warp, lanes & ~(1u << self->lane));
}

void collective(unsigned mask, void* slot, Operation operation, const char* file, int line) {
    Warp& warp = *self->warp;
    const unsigned lane = 1u << self->lane;
    mask &= warp.live;
    if (!(mask & lane)) fail("%s:%d: a lane that is not in the mask takes part", file, line);
    if (!warp.arrived) {
        warp.mask = mask, warp.operation = operation;
    } else if (warp.operation != operation || (warp.mask & warp.live) != mask) {
        const Thread& other = warp.threads[__builtin_ctz(warp.arrived)];
        fail("%s:%d: the lanes of a warp arrive at different operations or with different masks; other lanes are at "
             "%s:%d", file, line, other.file, other.line);
    }
    warp.slots[self->lane] = slot;
    warp.arrived |= lane;
    if (warp.arrived == mask) complete(warp);
    else wait(file, line, COLLECTIVE);
}

void sync_warp(unsigned mask, const char* file, int line) {
    collective(mask, self->warp, [](void** slots, unsigned lanes) {
        static_cast<Warp*>(slots[__builtin_ctz(lanes)])->syncs++;
    }, file, line);
}

// --------------------------------------------------------------------------------------- barriers of the block

static void release(unsigned number) {
    Runner& r = *runner;
    r.block.barriers[number].arrived = 0;
    r.block.interval++;
    for (unsigned i = 0; i < r.block.warps; i++) {
        Warp& warp = r.warps[i];
        unsigned lanes = 0;
        for (unsigned m = warp.live; m; m &= m - 1) {
            Thread& t = warp.threads[__builtin_ctz(m)];
            if (&t == self || t.waits_for != int(number)) continue;
            t.waits_for = NOTHING;
            lanes |= m & -m;
        }
        wake(warp, lanes);
    }
}

// Threads that have ended count as arrived at the barrier of the whole block.
static unsigned expected(const Block::Barrier& b) { return b.expected ? b.expected : block->live; }

void barrier(unsigned number, unsigned threads, const char* file, int line) {
    if (number >= MAX_BARRIERS) fail("%s:%d: barrier %u; a block has %u", file, line, number, MAX_BARRIERS);
    Block::Barrier& b = block->barriers[number];
    if (!b.arrived) {
        b.expected = threads, b.file = file, b.line = line;
    } else if (!number && (b.line != line || b.file != file)) {
        fail("%s:%d: the threads of a block arrive at different barriers; other threads are at %s:%d", file, line,
             b.file, b.line);
    } else if (b.expected != threads) {
        fail("%s:%d: barrier %u with %u threads; other threads expect %u", file, line, number, threads, b.expected);
    }
    if (++b.arrived == expected(b)) release(number);
    else wait(file, line, int(number));
}

// -------------------------------------------------------------------------------------------- the life of a thread

static void end_thread(Runner& r) {
    Thread* me = self;
    if (r.any_copies && r.copies[me->linear].num_copies) fail("an asynchronous copy is pending at the end");
    if (!r.products[me->warp->number].pending.empty()) fail("a product of tiles is pending at the end");
    // The end of a block counts as its dependency_launch.
    const Block& b = r.block;
    if (b.live == 1 && b.is_dependent && !b.has_waited)
        fail("a block of a dependent launch ends without dependency_wait");
    Warp& warp = *me->warp;
    warp.live &= ~(1u << me->lane);
    r.block.live--;
    me->stack_pointer = nullptr, me->waits_for = NOTHING, me->has_waited = false;
    if (warp.arrived && warp.arrived == (warp.mask & warp.live)) complete(warp);
    const Block::Barrier& all = r.block.barriers[0];
    if (all.arrived && all.arrived == expected(all)) release(0);
}

// The first function of every fiber. A thread that ends leaves its stack to a thread that has not begun, so threads
// that never wait cost no switch.
static void fiber() {
    Runner& r = *runner;
    for (;;) {
        r.kernel->call(r.launch->arguments);
        Thread* me = self;
        end_thread(r);
        Thread* next = take_ready(r);
        if (next && !next->stack_pointer) {
            next->stack = me->stack;
            self = next;
            continue;
        }
        if (!next && r.block.live) report_deadlock(r);
        r.free_stacks.push_back(me->stack);
        self = next;
        void* abandoned;
        switch_fiber(&abandoned, next ? next->stack_pointer : r.home);
    }
}

bool Runner::run_block() {
    is_running = true;
    if (__builtin_setjmp(exit)) {  // the kernel has failed: all stacks are free again
        free_stacks.clear();
        for (unsigned i = 0; i < num_stacks; i++) free_stacks.push_back(all_stacks + STACK * i);
        prepared[0] = 0;
        for (Products& warp : products) warp = {};
        return false;
    }
    self = take_ready(*this);
    self->stack = take_stack();
    switch_fiber(&home, new_fiber(self->stack, fiber));
    is_running = false;
    return true;
}

}  // namespace emu
