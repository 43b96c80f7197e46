// Injected faults, the signal handler of illegal accesses, and the functions for tests (emu*).
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <ucontext.h>
#include <unistd.h>
#include "driver.h"

namespace emu {

static size_t number(const char* name, size_t otherwise) {
    const char* value = getenv(name);
    return value ? strtoull(value, nullptr, 0) : otherwise;
}

const Settings settings = {
    number("EMU", 0) == 1,
    number("EMU_MEMORY", size_t(2) << 30),
    unsigned(number("EMU_DELAY_US", 0)),
    unsigned(number("EMU_ARCH", 90)),
    number("EMU_TRACE", 0) != 0,
};

std::mutex state_mutex;
std::atomic<int> sticky_error{0};
static thread_local bool is_armed = false;

CUresult sticky() { return CUresult(sticky_error.load()); }

// ------------------------------------------------------------------------------------------------- injected faults

struct Fault {
    std::string call;
    unsigned nth;  // 0: every call
    CUresult code;
};
static std::vector<Fault> faults;
static std::map<std::string, unsigned> calls;

// A call that has another effect than the program asks for, as if the program had a defect.
struct Plant {
    std::string call;
    unsigned nth;
};
static std::vector<Plant> plants;

bool is_planted(const char* call) {
    const unsigned n = calls[call];
    for (const Plant& p : plants)
        if (p.call == call && p.nth == n) return true;
    return false;
}

bool is_counted_and_planted(const char* event) {
    Guard guard(state_mutex);
    calls[event]++;
    return is_planted(event);
}

static std::string thread_name() {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    return name;
}

static thread_local bool is_executing = false;

CUresult enter(const char* call, Needs needs) {
    if (settings.is_traced) fprintf(stderr, "%s\n", call);
    if (needs != Needs::NOTHING && !is_initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    if (is_executing) {
        findings.add("call of the driver by a host function", call);
        return CUDA_ERROR_NOT_PERMITTED;
    }
    Guard guard(state_mutex);
    const unsigned n = ++calls[call];
    if (!faults.empty()) {
        const std::string of_thread = std::string(call) + "@" + thread_name();
        const unsigned n_of_thread = ++calls[of_thread];
        for (const Fault& f : faults) {
            if (f.call == call && (!f.nth || f.nth == n)) return f.code;
            if (f.call == of_thread && (!f.nth || f.nth == n_of_thread)) return f.code;
        }
    }
    if (needs != Needs::CONTEXT) return CUDA_SUCCESS;
    return current_context ? sticky() : CUDA_ERROR_INVALID_CONTEXT;
}

void not_in_a_step(const char* call) {
    if (is_armed) findings.add("call inside a step", call);
}

// ------------------------------------------------------------------------------------------------ illegal accesses

static thread_local void* landing[5];  // where an operation continues after an illegal access
static thread_local bool is_landing_set = false;
static struct sigaction previous_segv, previous_bus;

static uintptr_t program_counter(const ucontext_t* context) {
#if defined(__x86_64__)
    return uintptr_t(context->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    return uintptr_t(context->uc_mcontext.pc);
#else
    return 0;
#endif
}

// Faults of other code are for the handler that was installed before, such as Rust's or Python's.
static void chain(int signal_number, siginfo_t* info, void* context) {
    const struct sigaction& previous = signal_number == SIGSEGV ? previous_segv : previous_bus;
    if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(signal_number, info, context);
    if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) return previous.sa_handler(signal_number);
    signal(signal_number, SIG_DFL);  // the instruction is repeated and ends the process
}

static void on_fault(int signal_number, siginfo_t* info, void* context) {
    const uintptr_t address = uintptr_t(info->si_addr);
    // One instruction on, as in a return address, which `place` expects.
    void* pc = reinterpret_cast<void*>(program_counter(static_cast<ucontext_t*>(context)) + 1);
    char text[100];
    snprintf(text, sizeof text, "%s memory, 0x%zx", is_device_address(address) ? "device" : "host", size_t(address));
    library->abandon(address, text, pc);  // does not return if this OS thread runs a kernel
    if (is_executing && is_landing_set) __builtin_longjmp(landing, 1);
    if (is_device_address(address)) {
        static const char text[] = "emu: host code accesses device memory\n";
        if (write(STDERR_FILENO, text, sizeof text - 1) < 0) {}
    }
    chain(signal_number, info, context);
}

void install_fault_handler() {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &previous_segv);
    sigaction(SIGBUS, &action, &previous_bus);
}

static CUresult execute_guarded(const Doing& doing, const Task& task) {
    is_executing = is_landing_set = true;
    CUresult result;
    if (__builtin_setjmp(landing)) {
        restore_access();
        findings.add("illegal address", doing.name);
        result = CUDA_ERROR_ILLEGAL_ADDRESS;
    } else {
        result = task(doing);
    }
    is_executing = is_landing_set = false;
    return result;
}

CUresult execute(const Doing& doing, const Task& task) {
    if (const CUresult error = sticky()) return error;
    if (doing.is_host_function) {
        is_executing = true;
        const CUresult result = task(doing);
        is_executing = false;
        return result;
    }
    std::unique_lock<std::mutex> lock(shadow.mutex, std::defer_lock);
    if (shadow.is_on) {
        lock.lock();
        shadow.doing = &doing;
    }
    open_device_memory();
    const CUresult result = execute_guarded(doing, task);
    close_device_memory();
    if (result) sticky_error = result;
    return result;
}

}  // namespace emu

// ----------------------------------------------------------------------------------------- functions for tests

using namespace emu;

extern "C" {

// The n-th call from now on (0: every call) of a function returns a code, which the bindings may lack: a newer driver
// has more of them. "cuEventQuery@worker" are the calls of threads of that name, also for emuCount, which counts them
// while there are faults. False for a code that is none.
bool emuFault(const char* call, unsigned nth, int code) {
    if (code <= 0 || code > CUDA_ERROR_UNKNOWN) return false;
    Guard guard(state_mutex);
    calls[call] = 0;
    faults.push_back({call, nth, CUresult(code)});
    return true;
}

// The n-th call from now on of a function has the effect of a defect, or of another thread: a launch has one block less,
// or none; the kernel of a launch ("launch") reads a bad address, so the context is lost; an event is not recorded, so
// waits for it end early; a copy to the device has half of its bytes; a capture is ended at once; a region is free
// although it is in use.
void emuPlant(const char* call, unsigned nth) {
    Guard guard(state_mutex);
    calls[call] = 0;
    plants.push_back({call, nth});
}

unsigned emuCount(const char* call) {
    Guard guard(state_mutex);
    return calls[call];
}

void emuArm(int armed) {
    is_armed = armed;
    Guard guard(state_mutex);
    calls[__func__] += armed != 0;
}

// The findings so far, a line each; returns their number.
size_t emuFindings(char* text, size_t size) {
    if (size) snprintf(text, size, "%s", findings.text().c_str());
    return findings.count();
}

// Removes all findings, injected faults and planted defects.
void emuClear() {
    findings.clear();
    Guard guard(state_mutex);
    faults.clear(), plants.clear(), calls.clear();
}

void emuRegion(unsigned long long begin, unsigned long long size, int is_live, void* stream) {
    if (!shadow.is_on || !size) return;
    uintptr_t first, end;
    device_range(first, end);
    if (begin < first || begin >= end || size > end - begin)
        return findings.add("region outside of device memory", std::to_string(size) + " bytes");
    bool is_free = !is_live;
    {
        Guard guard(state_mutex);
        calls[__func__]++;
        is_free |= is_planted(__func__);
    }
    const Shadow::State state = is_free ? Shadow::FREED : Shadow::UNWRITTEN;
    if (!stream) {
        Guard guard(shadow.mutex);
        return shadow.mark(begin, size, state);
    }
    Work work;
    work.name = "region";
    work.task = [=](const Doing&) { return shadow.mark(begin, size, state), CUDA_SUCCESS; };
    submit(static_cast<CUstream_st*>(stream), std::move(work));
}

}  // extern "C"
