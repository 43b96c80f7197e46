// Device memory, pinned memory, copies and memsets.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include "driver.h"

namespace emu {

constexpr size_t PAGE = 4096;
constexpr size_t ALIGNMENT = 256;     // of an allocation, as with the driver
constexpr size_t SPACE_FACTOR = 32;   // address space per device memory: freed addresses are used again late
constexpr size_t MAX_WATCHED = 1 << 20;  // larger sources are weights, which are written once

static size_t pages_of(size_t size) { return (size + PAGE - 1) / PAGE * PAGE; }

// ---------------------------------------------------------------------------------------------------- allocations

struct Allocation {
    size_t size;
    uintptr_t pages;  // the first page; the end of the allocation is at the end of the last page
    std::vector<std::pair<unsigned, uint32_t>> users;  // the last operation of each actor that may access it
};

static uintptr_t space, space_next, space_end;
static size_t used_memory = 0;
static std::map<uintptr_t, Allocation> allocations;
static std::set<uintptr_t> freed_addresses;
static std::deque<std::pair<uintptr_t, size_t>> free_pages;

bool is_device_address(uintptr_t p) { return p >= space && p < space_end; }

void device_range(uintptr_t& begin, uintptr_t& end) { begin = space, end = space_end; }

static Allocation* find_allocation(uintptr_t p) {
    auto next = allocations.upper_bound(p);
    if (next == allocations.begin()) return nullptr;
    auto& [begin, allocation] = *std::prev(next);
    return p - begin < allocation.size ? &allocation : nullptr;
}

void add_users(const std::vector<uintptr_t>& addresses, unsigned actor, uint32_t index) {
    for (const uintptr_t address : addresses) {
        Allocation* a = find_allocation(address);
        if (!a) continue;
        auto same = [=](const auto& user) { return user.first == actor; };
        a->users.erase(std::remove_if(a->users.begin(), a->users.end(), same), a->users.end());
        a->users.push_back({actor, index});
    }
}

// ------------------------------------------------------------------------------------------ access by host code

// Code of the host must not access device memory. With protection keys, only a thread that executes an operation has
// access. Without, the pages become accessible with the first operation, and inaccessible when the host has waited and
// no operation is executed; but not often, because this takes milliseconds per gigabyte.
static int protection_key = -1;
static std::mutex gate_mutex;  // guards what follows, and the page protection; locked after state_mutex
static unsigned gate_users = 0;
static bool is_gate_open = false;
static unsigned closings_left = 64;

static void protect(uintptr_t pages, size_t size) {
    void* p = reinterpret_cast<void*>(pages);
    if (protection_key >= 0) pkey_mprotect(p, size, PROT_READ | PROT_WRITE, protection_key);
    else mprotect(p, size, is_gate_open ? PROT_READ | PROT_WRITE : PROT_NONE);
}

static void move_gate(bool is_open) {
    if (is_gate_open == is_open) return;
    is_gate_open = is_open;
    for (const auto& [begin, a] : allocations) protect(a.pages, pages_of(a.size));
}

void open_device_memory() {
    if (protection_key >= 0) return (void)pkey_set(protection_key, 0);
    Guard guard(gate_mutex);
    gate_users++;
    move_gate(true);
}

void close_device_memory() {
    if (protection_key >= 0) return (void)pkey_set(protection_key, PKEY_DISABLE_ACCESS);
    Guard guard(gate_mutex);
    gate_users--;
}

static void close_gate_if_idle() {
    Guard guard(gate_mutex);
    if (protection_key >= 0 || gate_users || !is_gate_open || !closings_left) return;
    closings_left--;
    move_gate(false);
}

void restore_access() {
    if (protection_key >= 0) pkey_set(protection_key, 0);  // a signal handler begins with the rights of a new thread
}

void reserve_memory() {
    const size_t size = settings.memory * SPACE_FACTOR;
    constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, size, PROT_NONE, FLAGS, -1, 0);
    if (memory == MAP_FAILED) perror("emu: address space of the device"), abort();
    space = space_next = reinterpret_cast<uintptr_t>(memory);
    space_end = space + size;
    const char* keys = getenv("EMU_PKEY");
    if (!keys || strcmp(keys, "0")) protection_key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    if (library->is_instrumented) shadow.open(space, size);
}

// Freed ranges of pages that stay unused, so that a late access is found. Each is a mapping of its own, of which a
// process may have 65530.
constexpr size_t MOST_FREE_PAGES = 4096;

// The first of `size` bytes of pages, with an inaccessible page behind them; 0 if there is no space.
static uintptr_t take_pages(size_t size) {
    const bool has_space = space_next + size + PAGE <= space_end;
    if (!has_space || free_pages.size() > MOST_FREE_PAGES) {
        auto fits = [=](const auto& range) { return range.second >= size; };
        auto found = std::find_if(free_pages.begin(), free_pages.end(), fits);
        if (found != free_pages.end()) {
            const uintptr_t pages = found->first;
            free_pages.erase(found);
            return pages;
        }
    }
    if (!has_space) return 0;
    const uintptr_t pages = space_next;
    space_next += size + PAGE;
    return pages;
}

static void release(uintptr_t begin, const Allocation& a) {
    void* p = reinterpret_cast<void*>(a.pages);
    const size_t room = pages_of(a.size);
    shadow.mark(begin, a.size, Shadow::FREED);
    mprotect(p, room, PROT_NONE);
    madvise(p, room, MADV_DONTNEED);
    used_memory -= room;
    free_pages.push_back({a.pages, room});
    freed_addresses.insert(begin);
}

// --------------------------------------------------------------------------------------------------- pinned memory

struct Pinned {
    size_t size;
    bool is_registered;  // the caller's memory
};
static std::map<uintptr_t, Pinned> pinned;

bool is_pinned(const void* p, size_t size) {
    Guard guard(state_mutex);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(p);
    auto next = pinned.upper_bound(begin);
    if (next == pinned.begin()) return false;
    const auto& [address, range] = *std::prev(next);
    return begin - address <= range.size && size <= range.size - (begin - address);
}

struct Source {
    const void* memory;
    size_t size;
    uint64_t hash;
    unsigned actor;
    uint32_t index;
};
static std::vector<Source> sources;
Clock host_clock;

static uint64_t hash_of(const void* memory, size_t size) {  // FNV-1a
    uint64_t hash = 14695981039346656037ull;
    for (size_t i = 0; i < size; i++) hash = (hash ^ static_cast<const uint8_t*>(memory)[i]) * 1099511628211ull;
    return hash;
}

void watch_source(const void* memory, size_t size, unsigned actor, uint32_t index) {
    if (size && size <= MAX_WATCHED) sources.push_back({memory, size, hash_of(memory, size), actor, index});
}

void learn(const Clock& clock) {
    host_clock.join(clock);
    auto is_complete = [](const Source& s) {
        if (host_clock.at[s.actor] < s.index) return false;
        if (hash_of(s.memory, s.size) != s.hash)
            findings.add("pinned memory changed before the host waited for the copy", std::to_string(s.size) + " bytes");
        return true;
    };
    sources.erase(std::remove_if(sources.begin(), sources.end(), is_complete), sources.end());
    close_gate_if_idle();
}

static void forget_sources(uintptr_t begin, size_t size) {
    auto is_inside = [=](const Source& s) { return reinterpret_cast<uintptr_t>(s.memory) - begin < size; };
    for (const Source& s : sources)
        if (is_inside(s)) findings.add("pinned memory freed before the host waited for the copy", std::to_string(s.size) + " bytes");
    sources.erase(std::remove_if(sources.begin(), sources.end(), is_inside), sources.end());
}

std::vector<Leak> memory_objects() {
    return {{"device allocations", allocations.size()}, {"pinned allocations", pinned.size()}};
}

void free_memory_objects() {
    Guard guard(gate_mutex);
    for (const auto& [begin, a] : allocations) release(begin, a);
    allocations.clear();
    for (const auto& [begin, range] : pinned)
        if (!range.is_registered) free(reinterpret_cast<void*>(begin));
    pinned.clear(), sources.clear();
}

}  // namespace emu

using namespace emu;

extern "C" {

CUresult cuMemGetInfo_v2(size_t* available, size_t* total) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    *total = settings.memory, *available = settings.memory - used_memory;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc_v2(unsigned long long* pointer, size_t size) {
    ENTER(CONTEXT);
    NOT_IN_A_CAPTURE();
    not_in_a_step(__func__);
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    const size_t room = pages_of(size);
    Guard guard(state_mutex);
    if (size > settings.memory || room > settings.memory - used_memory) return CUDA_ERROR_OUT_OF_MEMORY;
    Guard gate(gate_mutex);
    const uintptr_t pages = take_pages(room);
    if (!pages) return CUDA_ERROR_OUT_OF_MEMORY;
    protect(pages, room);
    const uintptr_t begin = pages + room - (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    allocations[begin] = {size, pages, {}};
    freed_addresses.erase(begin);
    shadow.mark(begin, size, Shadow::UNWRITTEN);
    used_memory += room;
    *pointer = begin;
    return CUDA_SUCCESS;
}

CUresult cuMemFree_v2(unsigned long long pointer) {
    ENTER(CONTEXT);
    not_in_a_step(__func__);
    Guard guard(state_mutex);
    const auto found = allocations.find(pointer);
    if (found == allocations.end()) {
        findings.add("free of an invalid pointer", freed_addresses.count(pointer) ? "freed before" : "not an allocation");
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (const auto& [actor, index] : found->second.users)
        if (host_clock.at[actor] < index)
            findings.add("device memory freed before the host waited for its users", std::to_string(found->second.size) + " bytes");
    Guard gate(gate_mutex);
    release(found->first, found->second);
    allocations.erase(found);
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** pointer, size_t size, unsigned) {
    ENTER(CONTEXT);
    NOT_IN_A_CAPTURE();
    not_in_a_step(__func__);
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    *pointer = aligned_alloc(PAGE, pages_of(size));
    if (!*pointer) return CUDA_ERROR_OUT_OF_MEMORY;
    memset(*pointer, 0xa5, size);
    Guard guard(state_mutex);
    pinned[reinterpret_cast<uintptr_t>(*pointer)] = {size, false};
    return CUDA_SUCCESS;
}

static CUresult end_pinned(void* pointer, bool is_registered) {
    Guard guard(state_mutex);
    const uintptr_t begin = reinterpret_cast<uintptr_t>(pointer);
    const auto found = pinned.find(begin);
    if (found == pinned.end() || found->second.is_registered != is_registered) return CUDA_ERROR_INVALID_VALUE;
    forget_sources(begin, found->second.size);
    pinned.erase(found);
    return CUDA_SUCCESS;
}

CUresult cuMemFreeHost(void* pointer) {
    ENTER(CONTEXT);
    not_in_a_step(__func__);
    if (const CUresult error = end_pinned(pointer, false)) return error;
    free(pointer);
    return CUDA_SUCCESS;
}

CUresult cuMemHostRegister_v2(void* pointer, size_t size, unsigned) {
    ENTER(CONTEXT);
    if (!size) return CUDA_ERROR_INVALID_VALUE;
    Guard guard(state_mutex);
    const bool is_new = pinned.insert({reinterpret_cast<uintptr_t>(pointer), {size, true}}).second;
    return is_new ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUresult cuMemHostUnregister(void* pointer) {
    ENTER(CONTEXT);
    return end_pinned(pointer, true) ? CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED : CUDA_SUCCESS;
}

}  // extern "C"

// ----------------------------------------------------------------------------------------------------------- copies

static Work copy_to_device(uintptr_t to, const void* from, size_t size) {
    Work work;
    work.name = "copy to the device";
    work.addresses = {to};
    work.task = [=](const Doing& doing) {
        shadow.access_range(to, size, true, doing);
        memcpy(reinterpret_cast<void*>(to), from, size);
        return CUDA_SUCCESS;
    };
    return work;
}

static Work copy_to_host(void* to, uintptr_t from, size_t size) {
    Work work;
    work.name = "copy to the host";
    work.addresses = {from};
    work.task = [=](const Doing& doing) {
        shadow.access_range(from, size, false, doing);
        memcpy(to, reinterpret_cast<void*>(from), size);
        return CUDA_SUCCESS;
    };
    return work;
}

// Copies that return when they are complete are operations of the host.
static CUresult copy_now(const Work& work) {
    Doing doing;
    {
        Guard guard(state_mutex);
        doing.clock = host_clock, doing.index = host_clock.at[0] = next_operation(0), doing.name = work.name.c_str();
    }
    return execute(doing, work.task);
}

template <class T>
static CUresult fill(unsigned long long to, T value, size_t count, CUstream_st* stream) {
    if (to % sizeof(T)) return CUDA_ERROR_INVALID_VALUE;
    Work work;
    work.name = "memset";
    work.addresses = {to};
    work.task = [=](const Doing& doing) {
        shadow.access_range(to, count * sizeof(T), true, doing);
        std::fill_n(reinterpret_cast<T*>(to), count, value);
        return CUDA_SUCCESS;
    };
    return submit(stream, std::move(work));
}

extern "C" {

CUresult cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t size, CUstream_st* stream) {
    ENTER(CONTEXT);
    if (Guard guard(state_mutex); is_planted(__func__)) size /= 2;
    Work work = copy_to_device(to, from, size);
    if (is_pinned(from, size)) {
        work.source = from, work.source_size = size;
    } else {
        // The driver has read pageable memory when the call returns, and the call is slow.
        findings.add("asynchronous copy from memory that is not pinned", std::to_string(size) + " bytes");
        const char* bytes = static_cast<const char*>(from);
        auto content = std::make_shared<std::vector<char>>(bytes, bytes + size);
        Task copy = copy_to_device(to, content->data(), size).task;
        work.task = [=](const Doing& doing) { return (void)content, copy(doing); };
    }
    return submit(stream, std::move(work));
}

CUresult cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t size, CUstream_st* stream) {
    ENTER(CONTEXT);
    if (!is_pinned(to, size))
        findings.add("asynchronous copy to memory that is not pinned", std::to_string(size) + " bytes");
    Work work = copy_to_host(to, from, size);
    work.target = to, work.target_size = size;
    return submit(stream, std::move(work));
}

CUresult cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t size, CUstream_st* stream) {
    ENTER(CONTEXT);
    Work work;
    work.name = "copy on the device";
    work.addresses = {to, from};
    work.task = [=](const Doing& doing) {
        shadow.access_range(from, size, false, doing);
        shadow.access_range(to, size, true, doing);
        memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
        return CUDA_SUCCESS;
    };
    return submit(stream, std::move(work));
}

CUresult cuMemcpyHtoD_v2(unsigned long long to, const void* from, size_t size) {
    ENTER(CONTEXT);
    not_in_a_step(__func__);
    return copy_now(copy_to_device(to, from, size));
}

CUresult cuMemcpyDtoH_v2(void* to, unsigned long long from, size_t size) {
    ENTER(CONTEXT);
    not_in_a_step(__func__);
    return copy_now(copy_to_host(to, from, size));
}

CUresult cuMemsetD8Async(unsigned long long to, unsigned char value, size_t count, CUstream_st* stream) {
    ENTER(CONTEXT);
    return fill(to, value, count, stream);
}

CUresult cuMemsetD32Async(unsigned long long to, unsigned value, size_t count, CUstream_st* stream) {
    ENTER(CONTEXT);
    return fill(to, value, count, stream);
}

}  // extern "C"
