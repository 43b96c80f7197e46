// The state of the CUDA threads of a block, and the operations by which they wait for one another (block.cpp).
#pragma once
#include <cstddef>
#include <cstdint>
#include "abi.h"

struct uint3 {
    unsigned x, y, z;
};

// The source location of the caller, as default arguments.
#define EMU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace emu {

constexpr unsigned WARP = 32, MAX_THREADS = 1024, MAX_BARRIERS = 16;
constexpr unsigned ALL_LANES = ~0u;

struct Warp;

// The purpose for which a thread is suspended. Values from 0 are numbers of barriers.
enum : int { COLLECTIVE = -1, NOTHING = -2 };

struct Thread {
    uint3 index;
    unsigned lane, linear;
    Warp* warp;
    void* stack_pointer;  // null: the thread has not begun
    char* stack;
    const char* file;     // the place where it waits
    int line, waits_for;
    bool has_waited;      // for the previous launch
};

// An operation of all lanes in a mask. The lane that arrives last executes it for all: `slots` has a pointer to the
// operands of each lane.
using Operation = void (*)(void** slots, unsigned mask);

struct Warp {
    unsigned live, ready;  // lanes that have not ended; lanes that can run
    unsigned number;
    unsigned arrived, mask;  // the collective operation in progress
    Operation operation;
    uint64_t syncs;  // completed calls of __syncwarp
    void* slots[WARP];
    Thread* threads;
};

// Asynchronous copies of a thread (cp.async) that are not yet executed.
struct Copies {
    struct Copy {
        void* to;
        const void* from;
        uint16_t size, filled;  // the bytes behind `filled` become zero
    };
    static constexpr unsigned MAX_COPIES = 128, MAX_GROUPS = 16;
    Copy copies[MAX_COPIES];
    uint16_t num_copies, num_groups;
    uint16_t groups[MAX_GROUPS];  // the end of each committed group
};

struct Block {
    uint3 index, size, grid;
    char* shared;  // dynamic shared memory
    unsigned warps, live, ready_warps;
    unsigned linear;
    unsigned interval;  // barriers passed
    struct Barrier {
        unsigned arrived, expected;
        const char* file;
        int line;
    } barriers[MAX_BARRIERS];
    bool is_dependent, has_waited;
    Observer* observer;
    uintptr_t stacks, stacks_size;  // of its threads
};

// Initial-exec, so that a read is one instruction. The kernels' libraries cannot have variables of this model: their
// __shared__ variables are thread-local and do not fit into the small space that dlopen has for it.
#define EMU_TLS __attribute__((tls_model("initial-exec"), visibility("default")))
extern thread_local Block* block EMU_TLS;
extern thread_local Thread* self EMU_TLS;

void collective(unsigned mask, void* slot, Operation, const char* file, int line);
void sync_warp(unsigned mask, const char* file, int line);
void barrier(unsigned number, unsigned threads, const char* file, int line);  // threads 0: all of the block
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail_at(void* pc, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Memory of the runtime and of the kernel's library: thread indices, constants.
bool is_private(uintptr_t address);

// The functions of abi.h, without the search for kernels.
bool run(const Kernel*, Launch*);
void abandon(uintptr_t address, const char* description, void* pc);
const char* launch(const Kernel*, const unsigned grid[3], const unsigned block[3], uint64_t first, unsigned shared,
                   void** arguments);

// A kernel's entry in the list of its library.
struct Entry : Kernel {
    const Entry* next;
    Entry(const Entry*& list, const Kernel& kernel) : Kernel(kernel), next(list) { list = this; }
};

}  // namespace emu
