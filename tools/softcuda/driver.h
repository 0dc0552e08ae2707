// What the parts of the driver share. Numbers are those of CUDA's own header.
#pragma once
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "scheduler.h"

namespace softcuda {
enum Result {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
    CAPTURE_UNMATCHED = 903, CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908,
};

/// Something that a stream does: now, or each time that the graph is launched that recorded it.
struct Node {
    enum Kind { KERNEL = 0, COPY = 1, EMPTY = 5 } kind;
    std::function<void()> run;
};
using Graph = std::vector<std::shared_ptr<Node>>;

struct Stream {
    bool capturing = false, invalidated = false;
    std::thread::id thread;  // That began to capture.
    Graph recorded;
};
struct Event {
    bool recorded = false;
    Stream* captured_by = nullptr;
};

/// All calls are done one after the other, on the thread that makes them: one of the orders that streams allow.
extern std::recursive_mutex everything;
/// The stream that records, if there is one.
extern Stream* capturing;
/// Whether this thread asked for calls that are otherwise not allowed while a stream records.
extern thread_local bool relaxed;

/// Whether this thread has a context, as all calls need but those about devices.
Result in_context();
/// Error of a call that is not allowed while a stream records. The recording cannot be used then.
Result while_capturing();
/// Does it, or records it.
Result enqueue(Stream* stream, Node::Kind kind, std::function<void()> run);
/// Whether these bytes are of one allocation on the device.
bool is_on_device(const char* memory, size_t bytes);
}  // namespace softcuda

#define API extern "C" __attribute__((visibility("default"))) softcuda::Result
