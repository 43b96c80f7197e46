// The interface between the emulated driver and a library of kernels that is compiled for the host.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

// A kernel that is registered by EXPORT.
struct Kernel {
    const char* name;
    unsigned num_parameters;
    const unsigned* sizes;           // of the parameters, in bytes
    void (*call)(void** arguments);  // runs one CUDA thread
};

// A memory access of a kernel, as reported by the instrumentation of the compiler.
struct Access {
    uintptr_t address;
    unsigned size;
    bool is_write, is_atomic;
    bool is_pending;      // the begin of an asynchronous copy: the destination has no defined value yet
    bool is_of_product;   // by the tensor cores (wgmma)
    bool is_early;        // this thread has not yet waited for the previous launch (dependency_wait)
    unsigned block, thread;
    unsigned interval;    // barriers that the block has passed
    uint64_t warp_syncs;  // calls of __syncwarp that the warp has passed
    void* pc;
};

// Receives the accesses of an instrumented kernel. The runtime fills in the addresses of the shared memory.
struct Observer {
    void (*access)(const Access&);
    void (*begin_block)(const Observer&);  // the content of shared memory is undefined again
    void (*products_see_writes)(unsigned thread, unsigned interval);  // wgmma may read what it has written so far
    bool (*is_pinned)(const void*, size_t);  // memory of the host that kernels may use
    uintptr_t device, device_end;
    uintptr_t dynamic_shared, dynamic_shared_end;
    uintptr_t static_shared, static_shared_end;
};

struct Launch {
    unsigned grid[3], block[3];
    uint64_t first;     // the blocks before it are left out
    unsigned shared;    // bytes of dynamic shared memory
    bool is_dependent;  // may begin before the previous launch has ended (programmatic dependent launch)
    void** arguments;
    Observer* observer;    // null: nothing is checked
    void (*recovered)();   // called on the OS thread that has left a signal handler by a jump; may be null
    void* failed_pc;       // the place of an illegal access; null if unknown
    char error[512];
};

struct Library {
    const Kernel* (*find)(const char* name);
    bool (*run)(const Kernel*, Launch*);  // false: Launch::error has the reason
    // For the handler of SIGSEGV and SIGBUS: ends the kernel that runs on this OS thread. Returns if none runs.
    void (*abandon)(uintptr_t address, const char* description, void* pc);
    bool is_instrumented;
};

}  // namespace emu

// Every library of kernels exports both.
extern "C" {
__attribute__((visibility("default"))) const emu::Library* emu_library();
// Runs the blocks of a kernel from number `first` on, without the driver. Returns null, or the reason of a failure,
// valid until the thread's next call.
__attribute__((visibility("default"))) const char* emu_launch(const char* name, const unsigned grid[3],
                                                              const unsigned block[3], uint64_t first, unsigned shared,
                                                              void** arguments);
}
