// libcuda.so.1: the device, memory and kernels.
#include <algorithm>
#include <dlfcn.h>
#include <map>
#include <string.h>
#include <string>
#include <unistd.h>

#include "compile.h"
#include "driver.h"

using namespace softcuda;

namespace {
constexpr size_t ALIGNMENT = 512;

struct Allocation {
    size_t bytes;
    bool on_device;
};
std::map<char*, Allocation> allocations;
size_t used;
bool initialized;
thread_local void* context;
char only_context;

const char* setting(const char* name, const char* otherwise) {
    const char* set = getenv(name);
    return set && *set ? set : otherwise;
}
int capability() {
    double version = atof(setting("SOFTCUDA_CAPABILITY", "6.1"));
    return int(version * 10 + 0.5);
}
size_t memory_of_device() {
    if (const char* set = setting("SOFTCUDA_MEMORY", nullptr)) return strtoull(set, nullptr, 10);
    return size_t(sysconf(_SC_PHYS_PAGES)) * size_t(sysconf(_SC_PAGESIZE)) / 2;
}
/// Those of SOFTCUDA_DEVICES that CUDA_VISIBLE_DEVICES names. The first that does not exist ends the list.
std::vector<int> devices() {
    int count = atoi(setting("SOFTCUDA_DEVICES", "1"));
    std::vector<int> visible;
    const char* list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) {
        for (int i = 0; i < count; i++) visible.push_back(i);
        return visible;
    }
    for (char* end; *list; list = *end == ',' ? end + 1 : end) {
        long index = strtol(list, &end, 10);
        if (end == list || index < 0 || index >= count) break;
        visible.push_back(int(index));
    }
    return visible;
}

/// The allocation that an address is in, or whose end it is closest to.
std::map<char*, Allocation>::iterator around(const char* memory) {
    auto after = allocations.upper_bound(const_cast<char*>(memory));
    return after == allocations.begin() ? allocations.end() : std::prev(after);
}

void describe(const void* address, char* text, size_t length) {
    auto at = static_cast<const char*>(address);
    auto near = around(at);
    if (near != allocations.end() && at < near->first + near->second.bytes + (1 << 20))
        snprintf(text, length, "%td bytes after the beginning of an allocation of %zu bytes", at - near->first, near->second.bytes);
    else snprintf(text, length, "at %p, which is in no allocation", address);
}

Result allocate(char** memory, size_t bytes, bool on_device) {
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    if (Result error = while_capturing()) return error;
    if (bytes == 0 || !memory) return INVALID_VALUE;
    if (on_device && (bytes > memory_of_device() || used > memory_of_device() - bytes)) return OUT_OF_MEMORY;
    char* mapped = softcuda::map(bytes, ALIGNMENT);
    if (!mapped) return OUT_OF_MEMORY;
    if (shuffles()) memset(mapped, 0xff, bytes);
    allocations[mapped] = {bytes, on_device};
    if (on_device) used += bytes;
    return *memory = mapped, SUCCESS;
}

Result release(char* memory, bool on_device) {
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    if (Result error = while_capturing()) return error;
    auto found = allocations.find(memory);
    if (found == allocations.end() || found->second.on_device != on_device) return INVALID_VALUE;
    size_t bytes = found->second.bytes;
    allocations.erase(found);
    softcuda::unmap(memory, bytes, ALIGNMENT);
    if (on_device) used -= bytes;
    return SUCCESS;
}

struct Function : Kernel {
    void* library;
};
}  // namespace

namespace softcuda {
std::recursive_mutex everything;
Stream* capturing;
thread_local bool relaxed;

Result in_context() { return !initialized ? NOT_INITIALIZED : context ? SUCCESS : INVALID_CONTEXT; }
Result while_capturing() {
    if (!capturing || relaxed) return SUCCESS;
    return capturing->invalidated = true, CAPTURE_UNSUPPORTED;
}
bool is_on_device(const char* memory, size_t bytes) {
    auto found = around(memory);
    return found != allocations.end() && found->second.on_device && memory + bytes <= found->first + found->second.bytes;
}
}  // namespace softcuda

// The device.
API cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (devices().empty()) return NO_DEVICE;
    std::lock_guard lock(everything);
    if (initialized) return SUCCESS;
    report_faults(describe);
    // For kernels, which are not linked with it.
    Dl_info info;
    if (dladdr(&only_context, &info)) dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
    return initialized = true, SUCCESS;
}
API cuDriverGetVersion(int* version) { return *version = 12080, SUCCESS; }
API cuDeviceGetCount(int* count) { return initialized ? (*count = int(devices().size()), SUCCESS) : NOT_INITIALIZED; }
API cuDeviceGet(int* device, int ordinal) {
    if (!initialized) return NOT_INITIALIZED;
    return ordinal >= 0 && size_t(ordinal) < devices().size() ? (*device = devices()[size_t(ordinal)], SUCCESS) : INVALID_DEVICE;
}
API cuDeviceGetName(char* name, int length, int device) {
    // At 7.5, "GTX" says that there are no tensor cores.
    bool has_them = strcmp(setting("SOFTCUDA_TENSOR_CORES", "0"), "0") != 0;
    snprintf(name, size_t(length), "softcuda software device %d%s", device, capability() >= 75 && !has_them ? " (GTX)" : "");
    return SUCCESS;
}
API cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 1: case 2: case 3: *value = MOST_THREADS; break;  // Threads of a block, at most; and in x and y.
        case 4: *value = 64; break;
        case 5: *value = INT_MAX; break;  // Blocks of a grid in x.
        case 6: case 7: *value = 65535; break;
        case 8: *value = 48 << 10; break;  // Shared memory of a block.
        case 10: *value = 32; break;  // Lanes of a warp.
        case 16: *value = int(std::max(1l, sysconf(_SC_NPROCESSORS_ONLN))); break;  // Multiprocessors.
        case 75: *value = capability() / 10; break;
        case 76: *value = capability() % 10; break;
        case 97: *value = capability() < 70 ? 48 << 10 : MOST_SHARED; break;  // Shared memory that a kernel may ask for.
        default: *value = 0;
    }
    return SUCCESS;
}
API cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = memory_of_device(), SUCCESS; }
API cuDeviceGetPCIBusId(char*, int, int) { return INVALID_DEVICE; }  // It is on no bus.
API cuDeviceGetUuid_v2(char* uuid, int device) {
    memset(uuid, 0, 16);
    snprintf(uuid, 16, "softcuda %d", device);
    return SUCCESS;
}
API cuDeviceGetUuid(char* uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
API cuDevicePrimaryCtxRetain(void** result, int) { return initialized ? (*result = &only_context, SUCCESS) : NOT_INITIALIZED; }
API cuCtxSetCurrent(void* current) { return context = current, SUCCESS; }

// Memory.
API cuMemAlloc_v2(char** memory, size_t bytes) { return allocate(memory, bytes, true); }
API cuMemFree_v2(char* memory) { return release(memory, true); }
API cuMemAllocHost_v2(char** memory, size_t bytes) { return allocate(memory, bytes, false); }
API cuMemFreeHost(char* memory) { return release(memory, false); }
API cuMemGetInfo_v2(size_t* free, size_t* total) {
    std::lock_guard lock(everything);
    return *total = memory_of_device(), *free = *total - used, SUCCESS;
}

namespace {
Result copy(Stream* stream, char* to, const char* from, size_t bytes, bool to_device, bool from_device) {
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    if ((to_device && !is_on_device(to, bytes)) || (from_device && !is_on_device(from, bytes))) return INVALID_VALUE;
    return enqueue(stream, Node::COPY, [=] { memmove(to, from, bytes); });
}
struct Copy2D {
    size_t from_x, from_y;
    unsigned from_kind;
    const char *from_host, *from_device;
    void* from_array;
    size_t from_pitch, to_x, to_y;
    unsigned to_kind;
    char *to_host, *to_device;
    void* to_array;
    size_t to_pitch, width, height;
};
}  // namespace
API cuMemcpyHtoDAsync_v2(char* to, const char* from, size_t bytes, Stream* stream) { return copy(stream, to, from, bytes, true, false); }
API cuMemcpyDtoHAsync_v2(char* to, const char* from, size_t bytes, Stream* stream) { return copy(stream, to, from, bytes, false, true); }
API cuMemcpyDtoDAsync_v2(char* to, const char* from, size_t bytes, Stream* stream) { return copy(stream, to, from, bytes, true, true); }
API cuMemcpy2DAsync_v2(const Copy2D* c, Stream* stream) {
    constexpr unsigned HOST = 1, DEVICE = 2;
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    if (c->from_kind > DEVICE || c->to_kind > DEVICE || c->from_pitch < c->width || c->to_pitch < c->width) return INVALID_VALUE;
    const char* from = (c->from_kind == HOST ? c->from_host : c->from_device) + c->from_y * c->from_pitch + c->from_x;
    char* to = (c->to_kind == HOST ? c->to_host : c->to_device) + c->to_y * c->to_pitch + c->to_x;
    if (c->width == 0 || c->height == 0) return SUCCESS;
    auto span = [&](size_t pitch) { return (c->height - 1) * pitch + c->width; };
    if (c->from_kind == DEVICE && !is_on_device(from, span(c->from_pitch))) return INVALID_VALUE;
    if (c->to_kind == DEVICE && !is_on_device(to, span(c->to_pitch))) return INVALID_VALUE;
    return enqueue(stream, Node::COPY, [c = *c, from, to] {
        for (size_t row = 0; row < c.height; row++) memmove(to + row * c.to_pitch, from + row * c.from_pitch, c.width);
    });
}

// Kernels.
API cuModuleLoadData(Function** module, const char* image) {
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    if (Result error = while_capturing()) return error;
    std::string log, path = compiled(image, log);
    void* library = path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "softcuda: %s\n", path.empty() ? log.c_str() : dlerror()), INVALID_IMAGE;
    auto find = [&](const char* name) { return dlsym(library, name); };
    *module = new Function{};
    (*module)->name = static_cast<const char*>(find("softcuda_name"));
    (*module)->thread = reinterpret_cast<void (*)(void**)>(find("softcuda_thread"));
    (*module)->each = reinterpret_cast<void (*)(void**)>(find("softcuda_each"));
    (*module)->sizes = reinterpret_cast<const size_t* (*)()>(find("softcuda_sizes"))();
    (*module)->most_threads = *static_cast<const unsigned*>(find("softcuda_most_threads"));
    (*module)->library = library;
    return SUCCESS;
}
API cuModuleGetFunction(Function** function, Function* module, const char* name) {
    return strcmp(module->name, name) == 0 ? (*function = module, SUCCESS) : NOT_FOUND;
}
API cuModuleUnload(Function* module) { return dlclose(module->library), delete module, SUCCESS; }
API cuFuncSetAttribute(Function* function, int attribute, int value) {
    int most = 0;
    cuDeviceGetAttribute(&most, 97, 0);
    if (attribute != 8 || value < 0 || value > most) return INVALID_VALUE;
    return function->shared = std::max<size_t>(48 << 10, size_t(value)), SUCCESS;
}
API cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   Stream* stream, void** args, void** extra) {
    std::lock_guard lock(everything);
    if (Result error = in_context()) return error;
    Dim grid{gx, gy, gz}, dim{bx, by, bz};
    if (!grid.count() || !dim.count() || gx > INT_MAX || gy > 65535 || gz > 65535 || bz > 64) return INVALID_VALUE;
    if (dim.count() > function->most_threads || dim.count() > MOST_THREADS || shared > function->shared || extra) return INVALID_VALUE;
    // Arguments are read now: the caller may change them when this returns.
    auto values = std::make_shared<std::vector<std::vector<char>>>();
    for (size_t i = 0; function->sizes[i]; i++) {
        auto from = static_cast<const char*>(args[i]);
        values->emplace_back(from, from + function->sizes[i]);
    }
    return enqueue(stream, Node::KERNEL, [=] {
        std::vector<void*> pointers;
        for (auto& value : *values) pointers.push_back(value.data());
        run({function, grid, dim, shared, pointers.data()});
    });
}

// Errors.
#define ERRORS(each) \
    each(SUCCESS, "SUCCESS", "no error") each(INVALID_VALUE, "ERROR_INVALID_VALUE", "invalid argument") \
    each(OUT_OF_MEMORY, "ERROR_OUT_OF_MEMORY", "out of memory") each(NOT_INITIALIZED, "ERROR_NOT_INITIALIZED", "initialization error") \
    each(NO_DEVICE, "ERROR_NO_DEVICE", "no CUDA-capable device is detected") each(INVALID_DEVICE, "ERROR_INVALID_DEVICE", "invalid device ordinal") \
    each(INVALID_IMAGE, "ERROR_INVALID_IMAGE", "device kernel image is invalid") each(INVALID_CONTEXT, "ERROR_INVALID_CONTEXT", "invalid device context") \
    each(INVALID_HANDLE, "ERROR_INVALID_HANDLE", "invalid resource handle") each(NOT_FOUND, "ERROR_NOT_FOUND", "named symbol not found") \
    each(CAPTURE_UNSUPPORTED, "ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing") \
    each(CAPTURE_INVALIDATED, "ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture") \
    each(CAPTURE_UNMATCHED, "ERROR_STREAM_CAPTURE_UNMATCHED", "the capture was not begun in this stream") \
    each(CAPTURE_ISOLATION, "ERROR_STREAM_CAPTURE_ISOLATION", "dependency created on uncaptured work in another stream") \
    each(CAPTURED_EVENT, "ERROR_CAPTURED_EVENT", "operation not permitted on an event last recorded in a capturing stream") \
    each(CAPTURE_WRONG_THREAD, "ERROR_STREAM_CAPTURE_WRONG_THREAD", "attempt to terminate a thread-local capture from another thread")
#define NAME(number, name, text) case number: return *result = "CUDA_" name, SUCCESS;
#define TEXT(number, name, text) case number: return *result = text, SUCCESS;
API cuGetErrorName(Result error, const char** result) {
    switch (error) { ERRORS(NAME) }
    return INVALID_VALUE;
}
API cuGetErrorString(Result error, const char** result) {
    switch (error) { ERRORS(TEXT) }
    return INVALID_VALUE;
}
