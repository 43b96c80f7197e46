// Graphs: the operations that streams would execute are captured and replayed.
#include <cstring>
#include "driver.h"

struct CUgraphExec_st {
    std::vector<CUgraph_st::Node> nodes;
    unsigned num_branches;
};

namespace emu {

static std::set<CUgraph_st*> graphs;
static std::set<CUgraphExec_st*> executables;

std::vector<Leak> graph_objects() {
    return {{"graphs", graphs.size()}, {"executable graphs", executables.size()}};
}

void free_graph_objects() {
    for (CUgraph_st* graph : graphs) delete graph;
    for (CUgraphExec_st* executable : executables) delete executable;
    graphs.clear(), executables.clear();
}

// True if all nodes precede the end of the origin: every other stream has been joined.
static bool is_joined(const CUgraph_st& graph, std::vector<int> ends) {
    std::vector<bool> is_reached(graph.nodes.size());
    size_t num_reached = 0;
    while (!ends.empty()) {
        const int node = ends.back();
        ends.pop_back();
        if (is_reached[node]) continue;
        is_reached[node] = true, num_reached++;
        const std::vector<int>& after = graph.nodes[node].after;
        ends.insert(ends.end(), after.begin(), after.end());
    }
    return num_reached == graph.nodes.size();
}

// The actor of each branch of a graph on a stream.
static bool reserve_branches(CUstream_st& s, unsigned num_branches) {
    while (s.branches.size() + 1 < num_branches) {
        const unsigned actor = take_actor();
        if (!actor) return false;
        s.branches.push_back(actor);
    }
    return true;
}

// The stream that this thread captures, or has captured.
static thread_local CUstream_st* captured = nullptr;
static thread_local CUstreamCaptureMode_enum thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
// Streams whose captures affect all threads of the same mode; some of these captures have ended.
static std::set<CUstream_st*> captured_globally;

// Whether a stream is in a capture, which a call ends now.
static bool ends_capture(CUstream_st* s) {
    if (!is_stream(s) || !s->capture) return false;
    return s->capture->is_invalid = true;
}

CUresult not_in_a_capture() {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    Guard guard(state_mutex);
    bool is_captured = captured && ends_capture(captured);
    if (thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
        for (CUstream_st* s : captured_globally) is_captured |= ends_capture(s);
    return is_captured ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_SUCCESS;
}

}  // namespace emu

using namespace emu;

extern "C" {

CUresult cuStreamBeginCapture_v2(CUstream_st* s, CUstreamCaptureMode_enum mode) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    if (!is_stream(s)) return CUDA_ERROR_INVALID_HANDLE;
    if (s->capture) return CUDA_ERROR_ILLEGAL_STATE;
    s->capture = new CUgraph_st;
    s->capture->streams = {s};
    s->capture->is_invalid = is_planted(__func__);
    s->last_nodes.clear();
    captured = mode == CU_STREAM_CAPTURE_MODE_RELAXED ? nullptr : s;
    if (mode == CU_STREAM_CAPTURE_MODE_GLOBAL) captured_globally.insert(s);
    return CUDA_SUCCESS;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode_enum* mode) {
    ENTER(INITIALISATION);
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream_st* s, CUstreamCaptureStatus_enum* status) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    if (!is_stream(s)) return CUDA_ERROR_INVALID_HANDLE;
    *status = !s->capture             ? CU_STREAM_CAPTURE_STATUS_NONE :
              s->capture->is_invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED :
                                       CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream_st* s, CUgraph_st** result) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    *result = nullptr;
    if (!is_stream(s)) return CUDA_ERROR_INVALID_HANDLE;
    if (!s->capture) return CUDA_ERROR_ILLEGAL_STATE;
    if (s->capture->streams.front() != s) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    captured = nullptr;
    captured_globally.erase(s);
    std::unique_ptr<CUgraph_st> graph(s->capture);
    const std::vector<int> ends = s->last_nodes;
    end_capture(*graph);
    if (graph->is_invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!is_joined(*graph, ends)) return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    graphs.insert(*result = graph.release());
    return CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec_st** result, CUgraph_st* graph, unsigned long long) {
    ENTER(CONTEXT);
    not_in_a_step(__func__);
    Guard guard(state_mutex);
    if (!graphs.count(graph)) return CUDA_ERROR_INVALID_HANDLE;
    executables.insert(*result = new CUgraphExec_st{graph->nodes, unsigned(graph->streams.size())});
    return CUDA_SUCCESS;
}

CUresult cuGraphUpload(CUgraphExec_st* executable, CUstream_st* s) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    return executables.count(executable) && is_stream(s) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuGraphExecDestroy(CUgraphExec_st* executable) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    if (!executables.erase(executable)) return CUDA_ERROR_INVALID_HANDLE;
    delete executable;
    return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph_st* graph) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    if (!graphs.erase(graph)) return CUDA_ERROR_INVALID_HANDLE;
    delete graph;
    return CUDA_SUCCESS;
}

// The stream executes the nodes one after the other, in the order of the capture. Their clocks know only the captured
// dependencies, so a missing one is found.
CUresult cuGraphLaunch(CUgraphExec_st* executable, CUstream_st* s) {
    ENTER(CONTEXT);
    Guard guard(state_mutex);
    if (!executables.count(executable) || !is_stream(s)) {
        findings.add("launch of a destroyed graph, or on a destroyed stream", __func__);
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (s->capture) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (!reserve_branches(*s, executable->num_branches)) return CUDA_ERROR_OUT_OF_MEMORY;
    s->clock.join(host_clock);
    std::vector<Clock> ends;  // of each node
    Clock end = s->clock;
    for (const CUgraph_st::Node& node : executable->nodes) {
        const unsigned actor = node.branch ? s->branches[node.branch - 1] : s->actor;
        Clock clock = s->clock;
        for (const int before : node.after) clock.join(ends[before]);
        clock.at[actor] = enqueue(*s, actor, clock, node.work);
        ends.push_back(clock);
        end.join(clock);
    }
    s->clock = end;
    return CUDA_SUCCESS;
}

}  // extern "C"
