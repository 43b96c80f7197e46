// The state of an OS thread that runs blocks; shared by block.cpp (one block) and grid.cpp (all blocks of a launch).
#pragma once
#include <vector>
#include "fiber.h"
#include "runtime.h"

namespace emu {

// Products of tiles (wgmma) of a warp that are not yet executed.
struct Products {
    enum Type { BF16, F16, INT8 };
    struct Product {
        const void *a, *b;  // tiles; `a` is null if the operand is in registers
        unsigned rows, part;
        Type type;
        bool adds;
        void* pc;
        void* d[WARP] = {};                  // the sums of each lane
        const uint32_t* a_words[WARP] = {};  // its registers, and their values when the product began
        uint32_t a_values[WARP][4] = {};
    };
    std::vector<Product> pending;
    std::vector<size_t> groups;  // the end of each committed group
    bool has_begun = false;      // begin_products was called for the next group
};

struct Runner {
    Block block{};
    Warp warps[MAX_THREADS / WARP]{};
    Thread threads[MAX_THREADS]{};
    Copies copies[MAX_THREADS]{};
    bool any_copies = false;   // of the current block
    Products products[MAX_THREADS / WARP];
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
