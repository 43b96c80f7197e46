// Checks of memory accesses: bounds, initialisation, order between operations, races between CUDA threads.
#include "shadow.h"
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>
#include "findings.h"

namespace emu {

constexpr size_t GRANULE = 16, CELL = 4;  // bytes of an entry of `operations` and of `threads`
constexpr size_t PAGE = 4096;             // bytes of an entry of `page_states`
constexpr size_t LARGE = 64 * PAGE;

template <class T>
static T* table(size_t length) {
    constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;  // zero, and only touched pages take memory
    void* memory = mmap(nullptr, length * sizeof(T), PROT_READ | PROT_WRITE, FLAGS, -1, 0);
    if (memory == MAP_FAILED) perror("emu: tables of the checks"), abort();
    return static_cast<T*>(memory);
}

void Shadow::open(uintptr_t begin, size_t length) {
    base = begin, size = length;
    states = table<State>(size);
    page_states = table<State>(size / PAGE);
    operations = table<Operations>(size / GRANULE);
    threads = table<Threads>(size / CELL);
    is_on = true;
}

void Shadow::mark(uintptr_t begin, size_t length, State state) {
    if (!is_on) return;
    const size_t first = begin - base, end = first + length;
    if (length < LARGE) return (void)memset(states + first, state, length);
    const size_t pages = (first + PAGE - 1) / PAGE * PAGE, pages_end = end / PAGE * PAGE;
    memset(states + first, state, pages - first);
    madvise(states + pages, pages_end - pages, MADV_DONTNEED);  // AS_PAGE
    memset(page_states + pages / PAGE, state, (pages_end - pages) / PAGE);
    memset(states + pages_end, state, end - pages_end);
}

Shadow::State Shadow::state_of(size_t offset) const {
    if (states[offset] != AS_PAGE) return states[offset];
    const State state = page_states[offset / PAGE];
    return state == AS_PAGE ? UNALLOCATED : state;
}

void Shadow::report(const char* defect, const Access& a, const std::string& details) {
    char key[200], text[200];
    snprintf(key, sizeof key, "%s %s %p", defect, doing ? doing->name : "", a.pc);
    if (!findings.is_new(key)) return;
    const char* memory = "device memory";
    uintptr_t offset = a.address - base;
    if (a.address - block.dynamic_shared < block.dynamic_shared_end - block.dynamic_shared)
        memory = "dynamic shared memory", offset = a.address - block.dynamic_shared;
    else if (a.address - block.static_shared < block.static_shared_end - block.static_shared)
        memory = "static shared memory", offset = a.address - block.static_shared;
    snprintf(text, sizeof text, "%s of %u bytes of %s at 0x%zx", a.is_write ? "write" : "read", a.size, memory, offset);
    findings.add(defect, std::string(doing ? doing->name : "host") + ", " + text + details + place(a.pc));
}

// ------------------------------------------------------------------------------------- device memory, operations

void Shadow::check_operation(uintptr_t begin, size_t length, bool is_write, const Doing& d, const Access* access) {
    Access a{};
    if (access) a = *access;
    a.address = begin, a.size = unsigned(length), a.is_write = is_write;
    if (begin < base || length > size || begin - base > size - length) return report("out of bounds", a);

    for (size_t i = 0; i < length; i++) {
        const State state = state_of(begin - base + i);
        if (state == WRITTEN) continue;
        if (state == UNWRITTEN && is_write) {
            states[begin - base + i] = WRITTEN;
            continue;
        }
        a.address = begin + i, a.size = unsigned(length - i);
        report(state == UNALLOCATED ? "out of bounds" :
               state == FREED       ? "use after free" :
                                      "read of memory that was never written", a);
        // Bytes that do not belong to an allocation stay so, for the reports of other accesses.
        if (!is_write) break;
    }
    a.address = begin, a.size = unsigned(length);

    const bool is_early = access && access->is_early;
    auto is_before = [&](unsigned actor, uint32_t index) {
        if (!index || (actor == d.actor && index == d.index)) return true;
        // An access before dependency_wait may overlap the previous operation of the stream.
        const uint32_t known = d.clock.at[actor];
        return known >= index + (is_early && actor == d.actor ? 1 : 0);
    };
    for (size_t i = (begin - base) / GRANULE; i <= (begin - base + length - 1) / GRANULE; i++) {
        Operations& o = operations[i];
        if (!is_before(o.writer, o.write)) {
            report(is_early ? "access before dependency_wait" : "not ordered after a write of another stream", a);
            o.write = 0;
        }
        if (!is_write) {
            if (o.read[0] && o.readers[0] != d.actor) o.readers[1] = o.readers[0], o.read[1] = o.read[0];
            o.readers[0] = uint16_t(d.actor), o.read[0] = d.index;
            continue;
        }
        for (int r = 0; r < 2; r++) {
            if (is_before(o.readers[r], o.read[r])) continue;
            report(is_early ? "access before dependency_wait" : "not ordered after a read of another stream", a);
        }
        o = {d.index, {0, 0}, uint16_t(d.actor), {0, 0}};
    }
}

void Shadow::access_range(uintptr_t begin, size_t length, bool is_write, const Doing& d) {
    if (is_on && length) check_operation(begin, length, is_write, d, nullptr);
}

// --------------------------------------------------------------------------------------------- threads of a launch

// True if the last access and this one are by threads that no barrier has ordered.
template <class Last>
static bool is_parallel(const Last& last, const Access& a) {
    if (last.block != a.block) return true;
    if (last.thread == a.thread || last.interval != uint16_t(a.interval)) return false;
    return last.thread / 32 != a.thread / 32 || last.warp_syncs == uint32_t(a.warp_syncs);
}

// Calls `check` with the cell and the mask of its bytes, for each cell of an access.
template <class F>
static void for_each_cell(size_t offset, size_t length, F check) {
    while (length) {
        const size_t first = offset % CELL, n = std::min(CELL - first, length);
        check(offset / CELL, uint8_t(((1u << n) - 1) << first));
        offset += n, length -= n;
    }
}

// Records an access in a cell; true if it races with the recorded one of another thread, whose number is in `other`.
template <class Cell>
static bool is_race(Cell& cell, uint8_t bytes, uint32_t run, const Access& a, unsigned& other) {
    auto conflicts = [&](const auto& last) {
        if (last.run != run || !(last.bytes & bytes) || (a.is_atomic && last.is_atomic)) return false;
        if (!is_parallel(last, a)) return false;
        other = last.thread;
        return true;
    };
    bool found = conflicts(cell.write);
    if (a.is_write) found = conflicts(cell.read) || found;
    (a.is_write ? cell.write : cell.read) = {run,    a.block, uint32_t(a.warp_syncs), uint16_t(a.thread),
                                             uint16_t(a.interval), bytes, a.is_atomic};
    return found;
}

void Shadow::begin_block(const Observer& o) {
    block = o;
    block_run++;
    const size_t bytes = o.dynamic_shared_end - o.dynamic_shared + o.static_shared_end - o.static_shared;
    if (shared_threads.size() < bytes / CELL + 2) {
        shared_threads.resize(bytes / CELL + 2);
        shared_written.resize(bytes / CELL + 2);
    }
}

void Shadow::access_shared(const Access& a) {
    const size_t dynamic_size = (block.dynamic_shared_end - block.dynamic_shared + CELL - 1) / CELL * CELL;
    const bool is_dynamic = a.address >= block.dynamic_shared && a.address < block.dynamic_shared_end;
    const size_t offset = is_dynamic ? a.address - block.dynamic_shared
                                     : dynamic_size + (a.address - block.static_shared);
    if (is_dynamic && a.size > block.dynamic_shared_end - a.address) report("out of bounds", a);
    for_each_cell(offset, a.size, [&](size_t cell, uint8_t bytes) {
        Written& written = shared_written[cell];
        if (!a.is_write && written.run != block_run) report("read of shared memory that was never written", a);
        if (a.is_write) written = {a.is_pending ? 0 : block_run, fences[a.thread].count};
        const Last& write = shared_threads[cell].write;
        if (a.is_of_product && write.run == block_run && !fences[write.thread].has_call(written.fences, a.interval))
            report("read by wgmma before products_see_writes and a barrier", a,
                   " by thread " + std::to_string(write.thread));
        unsigned other;
        if (is_race(shared_threads[cell], bytes, block_run, a, other))
            report("race in shared memory", a,
                   " by threads " + std::to_string(a.thread) + " and " + std::to_string(other));
    });
}

void Shadow::access(const Access& a) {
    if (a.address < base || a.address >= base + size) return access_shared(a);
    check_operation(a.address, a.size, a.is_write, *doing, &a);
    for_each_cell(a.address - base, a.size, [&](size_t cell, uint8_t bytes) {
        unsigned other;
        if (is_race(threads[cell], bytes, launch, a, other))
            report("race in device memory", a,
                   " by threads " + std::to_string(a.thread) + " and " + std::to_string(other));
    });
}

}  // namespace emu
