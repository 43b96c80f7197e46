// The state of the emulated driver. Each subject has a file: faults, device, memory, streams, modules, graphs.
#pragma once
#include <cuda_api.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include "findings.h"
#include "shadow.h"

namespace emu {

// --------------------------------------------------------------------------------------------------------- settings

// Read from the environment when the library is loaded.
struct Settings {
    bool is_enabled;        // EMU=1; otherwise there is no device
    size_t memory;          // EMU_MEMORY, bytes of device memory
    unsigned delay_us;      // EMU_DELAY_US, the limit of a random delay before each operation
    unsigned architecture;  // EMU_ARCH, 90 for compute capability 9.0
    bool is_traced;         // EMU_TRACE, prints the name of each call
};
extern const Settings settings;

// The most shared memory of a block, by compute capability (CUDA C++ programming guide, "Compute Capabilities").
inline unsigned most_shared_bytes() {
    switch (settings.architecture) {
        case 80: case 87: return 163 << 10;
        case 90: case 100: case 103: return 227 << 10;
        default: return 99 << 10;
    }
}

// Guards all that follows, except for the members of a stream that its own mutex guards. It is never held while an
// operation is executed.
extern std::mutex state_mutex;
using Guard = std::lock_guard<std::mutex>;

// ----------------------------------------------------------------------------------------------------------- faults

enum class Needs { NOTHING, INITIALISATION, CONTEXT };

// Called first by every function of the driver: counts the call and returns the error that it ends with, if any.
CUresult enter(const char* call, Needs);
#define ENTER(needs) \
    if (const CUresult error = emu::enter(__func__, emu::Needs::needs)) return error

// Whether this call has the effect of a defect (emuPlant). Requires state_mutex.
bool is_planted(const char* call);

// Counts an event for emuCount, and returns whether it has the effect of a defect.
bool is_counted_and_planted(const char* event);

// A call that must not occur while the engine executes a step (emuArm).
void not_in_a_step(const char* call);

// After an error of an operation, every call returns it, as on a device: it ends with the context.
extern std::atomic<int> sticky_error;
CUresult sticky();

void install_fault_handler();
// Executes an operation of this OS thread. An illegal access ends it with CUDA_ERROR_ILLEGAL_ADDRESS.
using Task = std::function<CUresult(const Doing&)>;
CUresult execute(const Doing&, const Task&);

// ----------------------------------------------------------------------------------------------------------- device

extern const Library* library;  // the kernels
extern Shadow shadow;
extern thread_local CUctx_st* current_context;
bool is_initialised();  // in this process, not in the parent of a fork

// ----------------------------------------------------------------------------------------------------------- memory

void reserve_memory();
bool is_device_address(uintptr_t);
void device_range(uintptr_t& begin, uintptr_t& end);  // of all addresses
bool is_pinned(const void*, size_t);                   // page-locked memory of the host
// Device memory is accessible to this OS thread from open to close.
void open_device_memory();
void close_device_memory();
void restore_access();  // after a jump out of a signal handler

// Under state_mutex.
extern Clock host_clock;   // the operations that the host has waited for
void learn(const Clock&);  // the host has waited
// An operation may access the allocations that contain these addresses.
void add_users(const std::vector<uintptr_t>& addresses, unsigned actor, uint32_t index);
// Pinned memory that a copy reads: its content must be the same when the host has waited for the copy.
void watch_source(const void* source, size_t size, unsigned actor, uint32_t index);

// ------------------------------------------------------------------------------------------------- streams, events

// A point of a stream that can be waited for.
class Ticket {
    std::mutex mutex;
    std::condition_variable changed;
    bool is_done = false;

  public:
    Clock clock;  // the operations that are complete at this point
    std::chrono::steady_clock::time_point time;

    void finish();
    void wait();
    bool is_finished();
};
using TicketPointer = std::shared_ptr<Ticket>;

// An operation that has not yet got a place in a stream.
struct Work {
    std::string name;
    Task task;
    std::vector<uintptr_t> addresses;  // of device memory that it may access
    bool is_dependent = false, is_host_function = false;
    const void* source = nullptr;  // pinned memory that it reads
    size_t source_size = 0;
    void* target = nullptr;  // host memory that it writes
    size_t target_size = 0;
};

using WorkPointer = std::shared_ptr<const Work>;

// An entry of a stream's queue: it waits for a point of another stream, executes an operation, finishes a point.
struct Item {
    TicketPointer waits_for;
    WorkPointer work;
    Doing doing;
    TicketPointer finishes;
};

// Actors are used again, because a clock has few; the operations of an actor are counted over all its uses.
unsigned take_actor();  // 0 if none is free
void return_actor(unsigned);
uint32_t next_operation(unsigned actor);

// Under state_mutex.
bool is_stream(CUstream_st*);
// Adds an operation of an actor to the queue of a stream; the number of the operation.
uint32_t enqueue(CUstream_st&, unsigned actor, const Clock& before, const WorkPointer&);
// Adds an operation to the queue of a stream, or to the graph that the stream is captured into. Takes state_mutex.
CUresult submit(CUstream_st*, Work);
void wait_for(CUstream_st&);  // without state_mutex

// --------------------------------------------------------------------------------------------------------- objects

struct Leak {
    const char* kind;
    size_t count;
};
std::vector<Leak> memory_objects();
std::vector<Leak> stream_objects();
std::vector<Leak> module_objects();
std::vector<Leak> graph_objects();
void free_memory_objects();
void free_stream_objects();  // joins the threads; without state_mutex
void free_module_objects();
void free_graph_objects();

// Calls that wait, query or allocate are not allowed in a thread that captures; they end the capture with an error.
CUresult not_in_a_capture();
#define NOT_IN_A_CAPTURE() \
    if (const CUresult error = emu::not_in_a_capture()) return error

void end_capture(CUgraph_st&);  // streams and events no longer refer to the graph; under state_mutex

}  // namespace emu

// ----------------------------------------------------------------------------------------------- calls by the engine

// The engine calls these functions if the loaded library has them, which NVIDIA's has not. They may be called at any
// time and do not fail.
extern "C" {

// From emuArm(1) to emuArm(0), this OS thread executes steps: its allocations and frees, and its waits for a stream or
// for the context, are findings. Events may be waited for.
void emuArm(int armed);

// The engine's allocator gives out a range of an allocation (`is_live` is 1), whose content is undefined from then on,
// or takes it back (0): accesses are findings until it is given out again. This happens in the order of the stream; if
// the stream is null, at once: the host has waited for the operations that use the range.
void emuRegion(unsigned long long pointer, unsigned long long bytes, int is_live, void* stream);

}  // extern "C"

struct CUctx_st {
    int references = 0;
};

struct CUstream_st {
    unsigned actor = 0;
    std::thread thread;
    // Under state_mutex.
    emu::Clock clock;  // the operations that are complete when the queue is empty
    CUgraph_st* capture = nullptr;
    std::vector<int> last_nodes;     // of the capture: the next node depends on them
    std::vector<unsigned> branches;  // actors of the branches of graphs that were launched here
    // Under the stream's own mutex.
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<emu::Item> queue;
    bool is_busy = false, is_ending = false;
};

struct CUevent_st {
    emu::TicketPointer ticket;
    CUgraph_st* capture = nullptr;  // recorded in a captured stream: `nodes` of this graph
    std::vector<int> nodes;
};

struct CUgraph_st {
    struct Node {
        emu::WorkPointer work;
        std::vector<int> after;
        unsigned branch;  // 0: the stream of the launch
    };
    std::vector<Node> nodes;
    std::vector<CUstream_st*> streams;  // in capture; the first one is the origin
    bool is_invalid = false;
};
