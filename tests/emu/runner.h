// The state of an OS thread that runs blocks; shared by block.cpp (one block) and grid.cpp (all blocks of a launch).
#pragma once
#include <vector>
#include "fiber.h"
#include "runtime.h"

namespace emu {

struct Runner {
    Block block{};
    Warp warps[MAX_THREADS / WARP]{};
    Thread threads[MAX_THREADS]{};
    Copies copies[MAX_THREADS]{};
    bool any_copies = false;   // of the current block
    unsigned prepared[3] = {};  // the block size for which `threads` is filled in
    const Kernel* kernel = nullptr;
    Launch* launch = nullptr;

    char* all_stacks;
    unsigned num_stacks = 0;
    std::vector<char*> free_stacks;
    void* home = nullptr;  // the OS thread's own stack
    void* exit[5] = {};    // where a failed kernel leaves to, for __builtin_setjmp
    bool is_running = false;
    unsigned seed = 0;     // of the random order of threads
    char* shared = nullptr;
    size_t shared_size = 0;

    void* signal_stack;

    Runner();
    void enter_thread();  // before the first block of an OS thread
    char* take_stack();
    // Both return false after a failure, whose reason is in launch->error.
    bool run_block();
    void prepare(const Kernel*, Launch*, uint64_t number);
};

extern thread_local Runner* runner EMU_TLS;

}  // namespace emu
