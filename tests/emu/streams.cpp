// Streams, which are OS threads with a queue each, and events.
#include <algorithm>
#include <cstring>
#include "driver.h"

namespace emu {

static std::set<CUstream_st*> streams;
static std::set<CUevent_st*> events;

bool is_stream(CUstream_st* s) { return streams.count(s); }

// ---------------------------------------------------------------------------------------------------------- tickets

void Ticket::finish() {
    Guard guard(mutex);
    is_done = true, time = std::chrono::steady_clock::now();
    changed.notify_all();
}

void Ticket::wait() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return is_done; });
}

bool Ticket::is_finished() {
    Guard guard(mutex);
    return is_done;
}

// ----------------------------------------------------------------------------------------------------------- actors

static uint32_t operations_of[ACTORS];
static bool is_taken[ACTORS] = {true};  // the host

unsigned take_actor() {
    for (unsigned i = 1; i < ACTORS; i++) {
        if (is_taken[i]) continue;
        is_taken[i] = true;
        return i;
    }
    return 0;
}

void return_actor(unsigned actor) { is_taken[actor] = false; }

uint32_t next_operation(unsigned actor) { return ++operations_of[actor]; }

// ------------------------------------------------------------------------------------------------ queue and thread

static void perform(const Item& item) {
    if (item.waits_for) item.waits_for->wait();
    if (item.work) execute(item.doing, item.work->task);
    if (item.finishes) item.finishes->finish();
}

static void run_stream(CUstream_st* s) {
    unsigned seed = s->actor;
    std::unique_lock<std::mutex> lock(s->mutex);
    for (;;) {
        s->changed.wait(lock, [&] { return s->is_ending || !s->queue.empty(); });
        if (s->queue.empty()) return;
        s->is_busy = true;
        const Item item = std::move(s->queue.front());
        s->queue.pop_front();
        lock.unlock();
        if (settings.delay_us) {
            seed = seed * 1664525 + 1013904223;
            std::this_thread::sleep_for(std::chrono::microseconds((seed >> 8) % settings.delay_us));
        }
        perform(item);
        lock.lock();
        s->is_busy = false;
        if (s->queue.empty()) s->changed.notify_all();
    }
}

static void push(CUstream_st& s, Item item) {
    Guard guard(s.mutex);
    s.queue.push_back(std::move(item));
    s.changed.notify_all();
}

void wait_for(CUstream_st& s) {
    std::unique_lock<std::mutex> lock(s.mutex);
    s.changed.wait(lock, [&] { return s.queue.empty() && !s.is_busy; });
}

uint32_t enqueue(CUstream_st& s, unsigned actor, const Clock& before, const WorkPointer& work) {
    const uint32_t index = next_operation(actor);
    watch_source(work->source, work->source_size, actor, index);
    add_users(work->addresses, actor, index);
    if (work->target) memset(work->target, 0xa5, work->target_size);  // undefined until the copy is complete
    Item item;
    item.doing = {before, actor, index, work->is_dependent, work->is_host_function, work->name.c_str()};
    item.work = work;
    push(s, std::move(item));
    return index;
}

static CUresult check_stream(CUstream_st* s, const std::string& call) {
    if (is_stream(s)) return CUDA_SUCCESS;
    findings.add(s ? "use of a destroyed stream" : "use of the default stream", call);
    return CUDA_ERROR_INVALID_HANDLE;
}

CUresult submit(CUstream_st* s, Work work) {
    Guard guard(state_mutex);
    if (const CUresult error = check_stream(s, work.name)) return error;
    const auto shared = std::make_shared<const Work>(std::move(work));
    if (CUgraph_st* graph = s->capture) {
        if (graph->is_invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        const auto& captured = graph->streams;
        const unsigned branch = unsigned(std::find(captured.begin(), captured.end(), s) - captured.begin());
        graph->nodes.push_back({shared, s->last_nodes, branch});
        s->last_nodes = {int(graph->nodes.size()) - 1};
        return CUDA_SUCCESS;
    }
    s->clock.join(host_clock);
    s->clock.at[s->actor] = enqueue(*s, s->actor, s->clock, shared);
    return CUDA_SUCCESS;
}

void end_capture(CUgraph_st& graph) {
    for (CUstream_st* s : graph.streams) s->capture = nullptr, s->last_nodes.clear();
    for (CUevent_st* e : events)
        if (e->capture == &graph) e->capture = nullptr, e->nodes.clear();
}

// A call that waits is not allowed while its stream is captured; it ends the capture with an error.
static CUresult check_not_captured(CUstream_st* s, const char* call) {
    Guard guard(state_mutex);
    if (const CUresult error = check_stream(s, call)) return error;
    if (!s->capture) return CUDA_SUCCESS;
    s->capture->is_invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

// The host has seen the end of all operations up to this point.
static CUresult learned(const Clock& clock) {
    Guard guard(state_mutex);
    learn(clock);
    return sticky();
}

static void end_stream(CUstream_st* s) {
    {
        Guard guard(s->mutex);
        s->is_ending = true;
        s->changed.notify_all();
    }
    s->thread.join();
    Guard guard(state_mutex);
    for (const unsigned actor : s->branches) return_actor(actor);
    return_actor(s->actor);
    delete s;
}

std::vector<Leak> stream_objects() { return {{"streams", streams.size()}, {"events", events.size()}}; }

void free_stream_objects() {
    std::set<CUstream_st*> left;
    {
        Guard guard(state_mutex);
        left.swap(streams);
        for (CUevent_st* e : events) delete e;
        events.clear();
    }
    for (CUstream_st* s : left) end_stream(s);
}

}  // namespace emu

using namespace emu;

extern "C" {

// ---------------------------------------------------------------------------------------------------------- streams

CUresult cuStreamCreateWithPriority(CUstream_st** stream, unsigned, int) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    const unsigned actor = take_actor();
    if (!actor) return CUDA_ERROR_OUT_OF_MEMORY;
    *stream = new CUstream_st;
    (*stream)->actor = actor;
    (*stream)->thread = std::thread(run_stream, *stream);
    streams.insert(*stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream_st** stream, unsigned flags) {
    ENTER(CONTEXT);
    return cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult cuStreamDestroy_v2(CUstream_st* s) {
    ENTER(CONTEXT);
    {
        Guard guard(state_mutex);
        if (const CUresult error = check_stream(s, __func__)) return error;
        if (s->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        streams.erase(s);
    }
    end_stream(s);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream_st* s) {
    ENTER(CONTEXT);
    not_in_a_step(__func__);
    if (const CUresult error = check_not_captured(s, __func__)) return error;
    Clock clock;
    {
        Guard guard(state_mutex);
        clock = s->clock;
    }
    wait_for(*s);
    return learned(clock);
}

CUresult cuStreamQuery(CUstream_st* s) {
    ENTER(CONTEXT);
    if (const CUresult error = check_not_captured(s, __func__)) return error;
    Clock clock;
    {
        Guard guard(state_mutex);
        clock = s->clock;
        Guard own(s->mutex);
        if (!s->queue.empty() || s->is_busy) return CUDA_ERROR_NOT_READY;
    }
    return learned(clock);
}

CUresult cuCtxSynchronize() {
    ENTER(CONTEXT);
    not_in_a_step(__func__);
    std::vector<CUstream_st*> all;
    Clock clock;
    {
        Guard guard(state_mutex);
        all.assign(streams.begin(), streams.end());
        bool is_captured = false;
        for (const CUstream_st* s : all) {
            if (s->capture) is_captured = s->capture->is_invalid = true;
            clock.join(s->clock);
        }
        if (is_captured) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    for (CUstream_st* s : all) wait_for(*s);
    return learned(clock);
}

CUresult cuLaunchHostFunc(CUstream_st* s, CUhostFn function, void* data) {
    ENTER(CONTEXT);
    Work work;
    work.name = "host function";
    work.is_host_function = true;
    work.task = [=](const Doing&) { return function(data), CUDA_SUCCESS; };
    return submit(s, std::move(work));
}

// ----------------------------------------------------------------------------------------------------------- events

static CUresult check_event(CUevent_st* e, const char* call) {
    if (events.count(e)) return CUDA_SUCCESS;
    findings.add("use of a destroyed event", call);
    return CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventCreate(CUevent_st** event, unsigned) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    events.insert(*event = new CUevent_st);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent_st* e) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    if (const CUresult error = check_event(e, __func__)) return error;
    events.erase(e);
    delete e;
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent_st* e, CUstream_st* s) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    if (const CUresult error = check_event(e, __func__)) return error;
    if (const CUresult error = check_stream(s, __func__)) return error;
    if (is_planted(__func__)) return CUDA_SUCCESS;
    e->capture = s->capture, e->nodes = s->last_nodes, e->ticket = nullptr;
    if (e->capture) return CUDA_SUCCESS;
    e->ticket = std::make_shared<Ticket>();
    s->clock.join(host_clock);
    e->ticket->clock = s->clock;
    Item item;
    item.finishes = e->ticket;
    push(*s, std::move(item));
    return CUDA_SUCCESS;
}

// In a capture: the stream joins the graph of the event, and its next node depends on the nodes of the event.
static CUresult wait_in_capture(CUstream_st* s, const CUevent_st* e) {
    if (!e->capture) {
        s->capture->is_invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (s->capture && s->capture != e->capture) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    if (!s->capture) {
        s->capture = e->capture, s->last_nodes.clear();
        auto& captured = e->capture->streams;
        if (std::find(captured.begin(), captured.end(), s) == captured.end()) captured.push_back(s);
    }
    s->last_nodes.insert(s->last_nodes.end(), e->nodes.begin(), e->nodes.end());
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream_st* s, CUevent_st* e, unsigned) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    if (const CUresult error = check_event(e, __func__)) return error;
    if (const CUresult error = check_stream(s, __func__)) return error;
    if (s->capture || e->capture) return wait_in_capture(s, e);
    if (!e->ticket) {
        findings.add("wait for an event that was never recorded", __func__);
        return CUDA_SUCCESS;
    }
    s->clock.join(e->ticket->clock);
    Item item;
    item.waits_for = e->ticket;
    push(*s, std::move(item));
    return CUDA_SUCCESS;
}

// The ticket of an event; null if it was never recorded, which counts as complete.
static CUresult find_ticket(CUevent_st* e, const char* call, TicketPointer& ticket) {
    Guard guard(state_mutex);
    if (const CUresult error = check_event(e, call)) return error;
    if (e->capture) return CUDA_ERROR_CAPTURED_EVENT;
    ticket = e->ticket;
    return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent_st* e) {
    ENTER(CONTEXT);
    NOT_IN_A_CAPTURE();
    TicketPointer ticket;
    if (const CUresult error = find_ticket(e, __func__, ticket)) return error;
    if (!ticket) return CUDA_SUCCESS;
    return ticket->is_finished() ? learned(ticket->clock) : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent_st* e) {
    ENTER(CONTEXT);
    NOT_IN_A_CAPTURE();
    TicketPointer ticket;
    if (const CUresult error = find_ticket(e, __func__, ticket)) return error;
    if (!ticket) return CUDA_SUCCESS;
    ticket->wait();
    return learned(ticket->clock);
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent_st* begin, CUevent_st* end) {
    ENTER(CONTEXT);
    TicketPointer first, last;
    if (const CUresult error = find_ticket(begin, __func__, first)) return error;
    if (const CUresult error = find_ticket(end, __func__, last)) return error;
    if (!first || !last) return CUDA_ERROR_INVALID_HANDLE;
    if (!first->is_finished() || !last->is_finished()) return CUDA_ERROR_NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(last->time - first->time).count();
    return CUDA_SUCCESS;
}

}  // extern "C"
