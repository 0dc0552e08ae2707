// Memory between pages that must not be touched, and what a process says when one is.
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "scheduler.h"

namespace softcuda {
const Launch* launch_of_this_thread();

namespace {
const size_t PAGE = size_t(sysconf(_SC_PAGESIZE));
size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
struct sigaction before[NSIG];
void (*describe)(const void*, char*, size_t);

void fault(int signal, siginfo_t* info, void* context) {
    if (const Launch* launch = launch_of_this_thread(); launch && self) {
        bool writes = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2;
        const char* what = signal == SIGILL ? "runs what this CPU cannot" : signal == SIGFPE ? "divides by 0" : writes ? "writes where it must not" : "reads where it must not";
        const Dim &b = block.index, &t = self->index;
        char text[640], where[320] = "";
        if (signal == SIGSEGV || signal == SIGBUS) describe(info->si_addr, where, sizeof where);
        int length = snprintf(text, sizeof text, "softcuda: %s, block (%u, %u, %u), thread (%u, %u, %u) %s: %s\n",
            launch->kernel->name, b.x, b.y, b.z, t.x, t.y, t.z, what, where);
        if (write(2, text, size_t(length)) < 0) _exit(1);
        abort();
    }
    // Not of a kernel: as if this had never been here.
    sigaction(signal, &before[signal], nullptr);
}
}  // namespace

char* map(size_t bytes, size_t alignment) {
    size_t inner = rounded(rounded(bytes, alignment), PAGE);
    void* whole = mmap(nullptr, inner + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) return nullptr;
    char* first = static_cast<char*>(whole) + PAGE;
    if (inner && mprotect(first, inner, PROT_READ | PROT_WRITE) != 0) return munmap(whole, inner + 2 * PAGE), nullptr;
    return first + inner - rounded(bytes, alignment);
}

void unmap(char* memory, size_t bytes, size_t alignment) {
    size_t inner = rounded(rounded(bytes, alignment), PAGE);
    munmap(memory + rounded(bytes, alignment) - inner - PAGE, inner + 2 * PAGE);
}

void report_faults(void (*where)(const void*, char*, size_t)) {
    describe = where;
    struct sigaction action = {};
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, &before[signal]);
}
}  // namespace softcuda
