// Runs all blocks of a launch, on one OS thread or shared out to several (EMU_WORKERS).
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <link.h>
#include <mutex>
#include <thread>
#include <vector>
#include "runner.h"

extern "C" void* __tls_get_addr(size_t* index);

namespace emu {

// ------------------------------------------------------------------------------------- memory of a kernels' library

struct Range {
    uintptr_t begin = 0, end = 0;
    bool contains(uintptr_t p) const { return p >= begin && p < end; }
};

// The loaded image of the library that contains a kernel, and its thread-local variables on this OS thread: these are
// the __shared__ variables.
struct Image {
    uintptr_t symbol;
    Range all, shared;
};
static thread_local Image image{};

static int find_image(dl_phdr_info* info, size_t, void* out) {
    Image& found = *static_cast<Image*>(out);
    Range all{~uintptr_t(0), 0};
    size_t shared = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type == PT_TLS) shared = header.p_memsz;
        if (header.p_type != PT_LOAD) continue;
        all.begin = std::min<uintptr_t>(all.begin, info->dlpi_addr + header.p_vaddr);
        all.end = std::max<uintptr_t>(all.end, info->dlpi_addr + header.p_vaddr + header.p_memsz);
    }
    if (!all.contains(found.symbol)) return 0;
    found.all = all;
    if (shared) {
        // `dlpi_tls_data` is null until the thread uses the variables; this call allocates them.
        size_t index[2] = {info->dlpi_tls_modid, 0};
        found.shared.begin = uintptr_t(__tls_get_addr(index));
        found.shared.end = found.shared.begin + shared;
    }
    return 1;
}

static const Image& image_of(const Kernel* kernel) {
    if (!image.all.contains(uintptr_t(kernel))) {
        image = {uintptr_t(kernel), {}, {}};
        dl_iterate_phdr(find_image, &image);
    }
    return image;
}

bool is_private(uintptr_t p) {
    const Runner& r = *runner;
    return p - uintptr_t(&r) < sizeof r || image.all.contains(p);
}

// ------------------------------------------------------------------------------------------------- blocks of a grid

void Runner::prepare(const Kernel* k, Launch* l, uint64_t number) {
    kernel = k, launch = l;
    Block& b = block;
    const unsigned n = l->block[0] * l->block[1] * l->block[2];
    b.size = {l->block[0], l->block[1], l->block[2]};
    b.grid = {l->grid[0], l->grid[1], l->grid[2]};
    const uint64_t row = number / b.grid.x;
    b.index = {unsigned(number % b.grid.x), unsigned(row % b.grid.y), unsigned(row / b.grid.y)};
    b.warps = (n + WARP - 1) / WARP, b.live = n, b.interval = 0, b.linear = unsigned(number);
    b.observer = l->observer, b.is_dependent = l->is_dependent, b.has_waited = false;
    b.stacks = uintptr_t(all_stacks), b.stacks_size = STACK * MAX_THREADS;
    memset(b.barriers, 0, sizeof b.barriers);

    // Otherwise the previous block has left the threads as they were at its begin.
    if (memcmp(prepared, l->block, sizeof prepared) || any_copies) {
        for (unsigned i = 0; i < n; i++) {
            const uint3 index = {i % b.size.x, i / b.size.x % b.size.y, i / b.size.x / b.size.y};
            threads[i] = {index, i % WARP, i, &warps[i / WARP], nullptr, nullptr, "", 0, NOTHING, false};
            copies[i].num_copies = copies[i].num_groups = 0;
        }
        memcpy(prepared, l->block, sizeof prepared);
        any_copies = false;
    }
    b.ready_warps = 0;
    for (unsigned i = 0; i < b.warps; i++) {
        Warp& w = warps[i];
        const unsigned lanes = n - i * WARP;
        w.live = w.ready = lanes >= WARP ? ALL_LANES : (1u << lanes) - 1;
        w.number = i, w.arrived = 0, w.syncs = 0, w.threads = &threads[i * WARP];
        b.ready_warps |= 1u << i;
    }

    constexpr size_t ALIGNMENT = 128;
    if (shared_size < l->shared) {
        free(shared);
        shared_size = (l->shared + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        shared = static_cast<char*>(aligned_alloc(ALIGNMENT, shared_size));
    }
    b.shared = shared;
    memset(shared, 0xff, l->shared);  // undefined; NaN in every type of floating point numbers

    const Image& own = image_of(k);
    if (Observer* o = l->observer) {
        o->dynamic_shared = uintptr_t(shared), o->dynamic_shared_end = o->dynamic_shared + l->shared;
        o->static_shared = own.shared.begin, o->static_shared_end = own.shared.end;
        o->begin_block(*o);
    }
    emu::block = &b;
}

// OS threads that help with the blocks of a launch; made at the first use and never ended. Their wake-up takes longer
// than a small launch, so a launch asks for help when it has run for a while.
class Helpers {
    std::mutex mutex;
    std::condition_variable changed;
    const std::function<void()>* job = nullptr;
    uint64_t turn = 0;
    unsigned busy = 0;

    void help() {
        std::unique_lock<std::mutex> lock(mutex);
        for (uint64_t seen = 0;;) {
            changed.wait(lock, [&] { return job && turn != seen; });
            seen = turn, busy++;
            const std::function<void()>& work = *job;
            lock.unlock();
            work();
            lock.lock();
            if (!--busy) changed.notify_all();
        }
    }

  public:
    const unsigned count;
    std::mutex one;  // the helpers serve one launch at a time

    explicit Helpers(unsigned n) : count(n) {
        for (unsigned i = 0; i < n; i++) std::thread(&Helpers::help, this).detach();
    }
    void start(const std::function<void()>& work) {
        std::lock_guard<std::mutex> guard(mutex);
        job = &work, turn++;
        changed.notify_all();
    }
    // Waits for the helpers that have begun; the others do not begin any more.
    void finish() {
        std::unique_lock<std::mutex> lock(mutex);
        job = nullptr;
        changed.wait(lock, [&] { return !busy; });
    }
};

// EMU_WORKERS, or a thread for each core.
static unsigned num_helpers() {
    const char* setting = getenv("EMU_WORKERS");
    const unsigned workers = setting ? atoi(setting) : std::thread::hardware_concurrency();
    return workers > 1 ? workers - 1 : 0;
}

// The runner of an OS thread. Those of ended threads are used again: their stacks are many mappings, of which a process
// may have 65530.
struct RunnerOfThread {
    struct Idle {
        std::mutex mutex;
        std::vector<Runner*> runners;
    };
    static Idle& idle() {
        static Idle* all = new Idle;  // the last threads end after static destructors
        return *all;
    }
    Runner* own = nullptr;

    RunnerOfThread() {
        {
            std::lock_guard<std::mutex> guard(idle().mutex);
            if (!idle().runners.empty()) own = idle().runners.back(), idle().runners.pop_back();
        }
        if (!own) own = new Runner;
        own->enter_thread();
    }
    ~RunnerOfThread() {
        std::lock_guard<std::mutex> guard(idle().mutex);
        idle().runners.push_back(own);
    }
};

using Clock = std::chrono::steady_clock;

// The blocks of a launch, which OS threads take one by one.
class Blocks {
    const Kernel* kernel;
    Launch* launch;
    const uint64_t count;
    std::atomic<uint64_t> next;
    std::atomic<bool> is_failed{false};

  public:
    Blocks(const Kernel* k, Launch* l)
        : kernel(k), launch(l), count(uint64_t(l->grid[0]) * l->grid[1] * l->grid[2]), next(l->first) {}

    // Runs blocks as long as there are more and `end` has not come, but at least one.
    void run(Clock::time_point end) {
        static thread_local RunnerOfThread of_thread;
        Runner* own = runner = of_thread.own;
        Launch mine = *launch;  // each OS thread has its own text of an error
        do {
            const uint64_t i = next++;
            if (i >= count) break;
            own->prepare(kernel, &mine, i);
            if (own->run_block() || is_failed.exchange(true)) continue;
            memcpy(launch->error, mine.error, sizeof mine.error);
            launch->failed_pc = mine.failed_pc;
        } while (has_more() && Clock::now() < end);
        emu::block = nullptr;
    }
    bool has_more() const { return !is_failed && next < count; }
    bool has_failed() const { return is_failed; }
};

constexpr std::chrono::microseconds ALONE{50};  // before a launch asks for help

bool run(const Kernel* kernel, Launch* launch) {
    Blocks blocks(kernel, launch);
    static Helpers* helpers = new Helpers(num_helpers());
    // Accesses are observed one at a time, so instrumented launches have no use for helpers.
    const bool can_be_helped = helpers->count && !launch->observer;
    blocks.run(can_be_helped ? Clock::now() + ALONE : Clock::time_point::max());
    if (!blocks.has_more()) return !blocks.has_failed();
    const std::function<void()> work = [&] { blocks.run(Clock::time_point::max()); };
    std::unique_lock<std::mutex> lock(helpers->one, std::try_to_lock);
    if (lock) helpers->start(work);
    work();
    if (lock) helpers->finish();
    return !blocks.has_failed();
}

const char* launch(const Kernel* kernel, const unsigned grid[3], const unsigned block[3], uint64_t first,
                   unsigned shared, void** arguments) {
    static thread_local Launch l;
    l = {};
    memcpy(l.grid, grid, sizeof l.grid);
    memcpy(l.block, block, sizeof l.block);
    l.first = first, l.shared = shared, l.arguments = arguments;
    const uint64_t threads = uint64_t(block[0]) * block[1] * block[2];
    if (!threads || threads > MAX_THREADS) return "a block has 1 to 1024 threads";
    if (!grid[0] || !grid[1] || !grid[2]) return "a grid has at least one block";
    return run(kernel, &l) ? nullptr : l.error;
}

}  // namespace emu
