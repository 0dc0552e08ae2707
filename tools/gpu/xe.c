// A GPU of Intel that does nothing, so that Mesa's driver compiles for it: an Arc B580. `mesa.sh` preloads it.
//
// The driver finds GPUs by libdrm, and asks Linux's driver `xe` what they are, by ioctl. This answers in the place of both. Memory is a file without a name,
// and work is done at once, because nothing is. Numbers of requests and layouts of answers are those of Linux's `xe_drm.h`.

#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { VENDOR = 0x8086, DEVICE = 0xe20b, CORES = 20, ENGINES_OF_CORE = 8, MAJOR = 20, MINOR = 1, CLOCK = 19200000 };
static const uint64_t MEMORY = 12ull << 30;

// libdrm

struct bus { uint16_t domain; uint8_t bus, device, function; };
struct numbers { uint16_t vendor, device, subvendor, subdevice; uint8_t revision; };
struct device { char **nodes; int nodes_there, kind_of_bus; struct bus *bus; struct numbers *numbers; };
struct version { int numbers[3], name_length; char *name; int date_length; char *date; int description_length; char *description; };

static struct device *gpu(void) {
    static char path[32], *nodes[3] = {path, path, path};
    static struct bus bus;
    static struct numbers numbers = {VENDOR, DEVICE};
    static struct device device = {nodes, 1 << 0 | 1 << 2, 0, &bus, &numbers};
    if (!path[0]) {
        int file = memfd_create("gpu", 0);
        if (file < 0 || ftruncate(file, 1ll << 42)) {
            perror("memory of the GPU");
            exit(1);
        }
        snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    }
    return &device;
}

int drmGetDevices2(uint32_t flags, struct device **devices, int most) {
    if (devices && most > 0) devices[0] = gpu();
    return 1;
}

int drmGetDevice2(int fd, uint32_t flags, struct device **device) {
    *device = gpu();
    return 0;
}

void drmFreeDevice(struct device **device) {}
void drmFreeDevices(struct device **devices, int count) {}

struct version *drmGetVersion(int fd) {
    static struct version version = {{1}, 2, "xe", 0, "", 0, ""};
    return &version;
}

void drmFreeVersion(struct version *version) {}

int drmGetCap(int fd, uint64_t capability, uint64_t *value) {
    *value = 1;
    return 0;
}

int drmSyncobjCreate(int fd, uint32_t flags, uint32_t *handle) {
    *handle = 1;
    return 0;
}

int drmSyncobjDestroy(int fd, uint32_t handle) { return 0; }
int drmSyncobjWait(int fd, uint32_t *handles, unsigned count, int64_t until, unsigned flags, uint32_t *first) { return 0; }
int drmSyncobjReset(int fd, const uint32_t *handles, uint32_t count) { return 0; }
int drmSyncobjSignal(int fd, const uint32_t *handles, uint32_t count) { return 0; }
int drmSyncobjTimelineSignal(int fd, const uint32_t *handles, uint64_t *points, uint32_t count) { return 0; }
int drmSyncobjTimelineWait(int fd, uint32_t *handles, uint64_t *points, unsigned count, int64_t until, unsigned flags, uint32_t *first) { return 0; }
int drmSyncobjTransfer(int fd, uint32_t to, uint64_t to_point, uint32_t from, uint64_t from_point, uint32_t flags) { return 0; }

// ioctl

// struct drm_xe_device_query
struct query { uint64_t extensions; uint32_t query, size; uint64_t data; };
enum { OF_ENGINES, OF_MEMORY, OF_CONFIGURATION, OF_PARTS, OF_HARDWARE, OF_TOPOLOGY, OF_CYCLES, OF_FIRMWARE };

struct engine { uint16_t class, instance, part, unused; uint64_t reserved[3]; };
struct region { uint16_t class, instance; uint32_t page; uint64_t size, used, visible_size, visible_used, reserved[6]; };
struct part { uint16_t type, tile, number, unused[3]; uint32_t clock; uint64_t near, far; uint16_t major, minor, revision, unused_too; uint64_t reserved[7]; };
struct mask { uint16_t part, type; uint32_t bytes, bits; };

// Answers a query, or says how long its answer is.
static int answer(struct query *query) {
    static struct { uint32_t count, unused; struct engine engines[3]; } engines = {3, 0, {{0}, {1}, {4}}};
    struct { uint32_t count, unused; struct region regions[2]; } regions = {2, 0, {{0, 0, 4096, MEMORY}, {1, 1, 65536, MEMORY, 0, MEMORY}}};
    static struct { uint32_t count, unused; uint64_t numbers[5]; } configuration = {5, 0, {DEVICE, 1, 65536, 48, 2}};
    static struct { uint32_t count, unused; struct part part; } parts = {1, 0, {.clock = CLOCK, .near = 2, .far = 1, .major = MAJOR, .minor = MINOR}};
    // Cores for geometry, cores for computing, engines of a core
    static struct mask topology[] = {{0, 1, 4, (1u << CORES) - 1}, {0, 2, 4, (1u << CORES) - 1}, {0, 5, 4, (1u << ENGINES_OF_CORE) - 1}};
    static uint64_t zeros[8];
    const struct { const void *data; uint32_t size; } answers[] = {
        [OF_ENGINES] = {&engines, sizeof engines},
        [OF_MEMORY] = {&regions, sizeof regions},
        [OF_CONFIGURATION] = {&configuration, sizeof configuration},
        [OF_PARTS] = {&parts, sizeof parts},
        [OF_TOPOLOGY] = {topology, sizeof topology},
        [OF_CYCLES] = {zeros, 40},
        [OF_FIRMWARE] = {zeros, 24},
    };
    if (query->query >= sizeof answers / sizeof *answers || !answers[query->query].data) {
        errno = EINVAL;
        return -1;
    }
    if (!query->size) query->size = answers[query->query].size;
    else memcpy((void *)(uintptr_t)query->data, answers[query->query].data, answers[query->query].size);
    return 0;
}

int ioctl(int fd, unsigned long request, ...) {
    enum { DRM = 'd', CAPABILITY = 0x0c, QUERY = 0x40, CREATE_MEMORY, PLACE_OF_MEMORY, CREATE_SPACE, CREATE_QUEUE = 0x46, PROPERTY_OF_QUEUE = 0x48 };
    static uint64_t places[1 << 16], next = 1 << 16;
    static uint32_t handles;
    va_list rest;
    va_start(rest, request);
    void *argument = va_arg(rest, void *);
    va_end(rest);
    if ((request >> 8 & 0xff) != DRM) return syscall(SYS_ioctl, fd, request, argument);
    uint32_t *words = argument;
    uint64_t *doubles = argument;
    switch (request & 0xff) {
    case CAPABILITY:
        doubles[1] = 1;
        return 0;
    case QUERY:
        return answer(argument);
    case CREATE_MEMORY:
        words[7] = ++handles;
        places[handles & 0xffff] = next;
        next += (doubles[1] + 0x1fffff) & ~0x1fffffull;
        return 0;
    case PLACE_OF_MEMORY:
        doubles[2] = places[words[2] & 0xffff];
        return 0;
    case CREATE_SPACE:
        words[3] = 1;
        return 0;
    case CREATE_QUEUE:
        words[5] = 1;
        return 0;
    case PROPERTY_OF_QUEUE:
        doubles[2] = 0;
        return 0;
    default:
        return 0;
    }
}
