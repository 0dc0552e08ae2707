// Runs kernels block by block on the threads of a pool.
#pragma once
#include "include/softcuda.h"
#undef int64_t
#undef uint64_t
#undef int8_t
#undef int16_t
#undef int32_t
#undef uint8_t
#undef uint16_t
#undef uint32_t

namespace softcuda {
/// A kernel that was compiled and loaded.
struct Kernel {
    const char* name;
    void (*thread)(void**);  // One thread.
    void (*each)(void**);    // All threads of a block, for kernels in which none waits for others; else null.
    const size_t* sizes;     // Bytes of its arguments, and 0 at the end.
    unsigned most_threads;   // `__launch_bounds__`
    size_t shared = 48 << 10;  // Bytes of shared memory that a launch may ask for.
};
struct Launch {
    const Kernel* kernel;
    Dim grid, dim;
    size_t shared;
    void** args;
};
/// Runs all blocks, and returns when they are done.
void run(const Launch& launch);

/// The most threads of a block, and bytes of its shared memory.
constexpr size_t MOST_THREADS = 1024, MOST_SHARED = 64 << 10;

/// Whether threads run in a random order, and memory that nobody has written is NaN (SOFTCUDA_SHUFFLE).
bool shuffles();

/// Memory that ends where a page begins that must not be touched, and begins after such a page. Null if there is none.
char* map(size_t bytes, size_t alignment);
void unmap(char* memory, size_t bytes, size_t alignment);

/// From now on, a fault says which kernel and thread it was before the process dies. `where` describes an address.
void report_faults(void (*where)(const void* address, char* text, size_t length));
}  // namespace softcuda
