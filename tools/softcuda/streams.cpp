// Streams, events, and graphs: lists of what a stream was asked to do while it recorded.
#include <algorithm>

#include "driver.h"

using namespace softcuda;

namespace {
Stream default_stream;
Stream* of(Stream* stream) { return stream ? stream : &default_stream; }
}  // namespace

namespace softcuda {
Result enqueue(Stream* stream, Node::Kind kind, std::function<void()> run) {
    stream = of(stream);
    if (!stream->capturing) return run(), SUCCESS;
    if (stream->invalidated) return CAPTURE_INVALIDATED;
    return stream->recorded.push_back(std::make_shared<Node>(Node{kind, std::move(run)})), SUCCESS;
}
}  // namespace softcuda

API cuStreamCreate(Stream** stream, unsigned) {
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    return *stream = new Stream, SUCCESS;
}
API cuStreamCreateWithPriority(Stream** stream, unsigned flags, int) { return cuStreamCreate(stream, flags); }
API cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, SUCCESS; }
API cuStreamDestroy_v2(Stream* stream) {
    std::lock_guard lock(everything);
    if (capturing == stream) capturing = nullptr;
    return delete stream, SUCCESS;
}
API cuStreamSynchronize(Stream* stream) {
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    // No mode allows this.
    return of(stream)->capturing ? (capturing->invalidated = true, CAPTURE_UNSUPPORTED) : SUCCESS;
}
API cuStreamWaitEvent(Stream* stream, Event* event, unsigned) {
    std::lock_guard lock(everything);
    stream = of(stream);
    if (event->captured_by == (stream->capturing ? stream : nullptr)) return SUCCESS;
    // Work of two streams in one graph is not there; nor can a graph wait for what is not in it.
    if (capturing) capturing->invalidated = true;
    return stream->capturing ? CAPTURE_ISOLATION : CAPTURED_EVENT;
}

API cuEventCreate(Event** event, unsigned) { return *event = new Event, SUCCESS; }
API cuEventDestroy_v2(Event* event) { return delete event, SUCCESS; }
API cuEventRecord(Event* event, Stream* stream) {
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    event->recorded = true, event->captured_by = of(stream)->capturing ? of(stream) : nullptr;
    return SUCCESS;
}
API cuEventSynchronize(Event* event) {
    std::lock_guard lock(everything);
    return event->captured_by && event->captured_by == capturing ? (capturing->invalidated = true, CAPTURED_EVENT) : SUCCESS;
}
API cuEventElapsedTime_v2(float* milliseconds, Event* start, Event* end) {
    if (!start->recorded || !end->recorded) return INVALID_HANDLE;
    // Always as long, so that whoever compares candidates stays with the first: times of a CPU say nothing about a GPU.
    return *milliseconds = 1, SUCCESS;
}
API cuEventElapsedTime(float* milliseconds, Event* start, Event* end) { return cuEventElapsedTime_v2(milliseconds, start, end); }

API cuStreamBeginCapture_v2(Stream* stream, int) {
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    if (!stream) return CAPTURE_UNSUPPORTED;
    if (capturing) return INVALID_VALUE;
    capturing = stream;
    stream->capturing = true, stream->invalidated = false, stream->thread = std::this_thread::get_id();
    stream->recorded.clear();
    return SUCCESS;
}
API cuThreadExchangeStreamCaptureMode(int* mode) {
    // This thread's own captures, and those of others, are of the first mode: the second is as strict here.
    constexpr int GLOBAL = 0, RELAXED = 2;
    if (*mode < GLOBAL || *mode > RELAXED) return INVALID_VALUE;
    const int before = relaxed ? RELAXED : GLOBAL;
    relaxed = *mode == RELAXED;
    return *mode = before, SUCCESS;
}
API cuStreamIsCapturing(Stream* stream, int* status) {
    stream = of(stream);
    return *status = stream->capturing ? 1 + stream->invalidated : 0, SUCCESS;
}
API cuStreamEndCapture(Stream* stream, Graph** graph) {
    std::lock_guard lock(everything);
    *graph = nullptr;
    if (!stream || !stream->capturing) return CAPTURE_UNMATCHED;
    if (stream->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
    stream->capturing = false, capturing = nullptr;
    static const char* fails = getenv("SOFTCUDA_FAIL_CAPTURE");
    if (stream->invalidated || (fails && *fails != '0')) return stream->recorded.clear(), CAPTURE_INVALIDATED;
    *graph = new Graph(std::move(stream->recorded));
    return stream->recorded.clear(), SUCCESS;
}
API cuGraphGetNodes(Graph* graph, Node** nodes, size_t* count) {
    if (nodes)
        for (size_t i = 0; i < *count; i++) nodes[i] = i < graph->size() ? (*graph)[i].get() : nullptr;
    if (!nodes) *count = graph->size();
    else *count = std::min(*count, graph->size());
    return SUCCESS;
}
API cuGraphNodeGetType(Node* node, int* kind) { return *kind = node->kind, SUCCESS; }
API cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long) { return *executable = new Graph(*graph), SUCCESS; }
API cuGraphDestroy(Graph* graph) { return delete graph, SUCCESS; }
API cuGraphExecDestroy(Graph* executable) { return delete executable, SUCCESS; }
API cuGraphUpload(Graph*, Stream*) { return SUCCESS; }
API cuGraphLaunch(Graph* executable, Stream* stream) {
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    for (auto& node : *executable)
        if (Result error = enqueue(stream, node->kind, node->run)) return error;
    return SUCCESS;
}
