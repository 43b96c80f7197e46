// The state of every byte of device and shared memory, and the checks of each access against it.
#pragma once
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>
#include "runtime.h"

namespace emu {

// An actor executes operations in their order: a stream, a branch of a graph on a stream, or the host (actor 0).
constexpr unsigned ACTORS = 64;

// For each actor, the number of its operations that are known to be complete.
struct Clock {
    uint32_t at[ACTORS] = {};
    void join(const Clock& other) {
        for (unsigned i = 0; i < ACTORS; i++)
            if (other.at[i] > at[i]) at[i] = other.at[i];
    }
};

// The operation that an access belongs to.
struct Doing {
    Clock clock;  // the operations that are complete before it begins
    unsigned actor = 0;
    uint32_t index = 0;
    bool is_dependent = false;  // may begin before the previous operation of its stream has ended
    bool is_host_function = false;
    const char* name = "";
};

class Shadow {
  public:
    enum State : uint8_t { AS_PAGE, UNALLOCATED, UNWRITTEN, WRITTEN, FREED };

    bool is_on = false;
    std::mutex mutex;  // operations are executed one at a time while they are checked
    const Doing* doing = nullptr;

    void open(uintptr_t begin, size_t size);
    void mark(uintptr_t begin, size_t size, State);

    // A copy or memset of device memory by an operation.
    void access_range(uintptr_t begin, size_t size, bool is_write, const Doing&);
    // A kernel of `doing`.
    void begin_launch() { launch++; }
    void begin_block(const Observer&);
    void products_see_writes(unsigned thread, unsigned interval) {
        Fences& of = fences[thread];
        of.intervals[of.count++ % Fences::KEPT] = interval;
    }
    void access(const Access&);

  private:
    // Operations that have accessed 16 bytes: the last writer, and the last readers of two actors.
    struct Operations {
        uint32_t write, read[2];
        uint16_t writer, readers[2];
    };
    // The last access of a kind to 4 bytes by a CUDA thread.
    struct Last {
        uint32_t run, block, warp_syncs;
        uint16_t thread, interval;
        uint8_t bytes;
        bool is_atomic;
    };
    struct Threads {
        Last write, read;
    };

    uintptr_t base = 0;
    size_t size = 0;
    State* states = nullptr;           // per byte: a state, or AS_PAGE
    State* page_states = nullptr;      // large ranges have a state per page, so the bytes take no memory of the host
    Operations* operations = nullptr;  // per 16 bytes
    Threads* threads = nullptr;        // per 4 bytes
    uint32_t launch = 0;               // a number of the kernel

    Observer block{};
    uint32_t block_run = 0;  // a number of the block, of all launches
    std::vector<Threads> shared_threads;    // per 4 bytes of shared memory, dynamic and then static
    // Calls of products_see_writes by a thread, and the intervals of the last ones.
    struct Fences {
        static constexpr uint32_t KEPT = 8;
        uint32_t count, intervals[KEPT];
        // Whether the call after the first `before` ones was in an earlier interval.
        bool has_call(uint32_t before, uint32_t interval) const {
            return count > before && (count - before > KEPT || intervals[before % KEPT] < interval);
        }
    };
    struct Written {
        uint32_t run, fences;  // the block, and the fences of the thread before
    };
    std::vector<Written> shared_written;  // of the last writes
    Fences fences[MAX_THREADS] = {};

    State state_of(size_t offset) const;
    void check_operation(uintptr_t begin, size_t size, bool is_write, const Doing&, const Access*);
    void access_shared(const Access&);
    void report(const char* defect, const Access& access, const std::string& details = "");
};

}  // namespace emu
