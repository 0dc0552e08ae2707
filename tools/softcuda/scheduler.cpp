// Threads of a block as fibers of one thread of the host, and the pool of those.
#include "scheduler.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

namespace softcuda {
constinit thread_local Block block{};
constinit thread_local Fiber* self = nullptr;

namespace {
constexpr size_t STACK = (64 << 10) + 448;  // Not a power of two: the tops would share a set of the cache.
constexpr size_t SHARED_ALIGNMENT = 128;

thread_local void* scheduler;  // Where it goes on when a fiber waits.
thread_local const Launch* current;
thread_local unsigned random_state = 1;

// swapcontext asks the kernel for the signal mask; this does not.
extern "C" void softcuda_switch(void** from, void* to);
asm(".text\nsoftcuda_switch:\n"
    "push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    "mov %rsp, (%rdi)\n mov %rsi, %rsp\n pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

void begin() {
    current->kernel->thread(current->args);
    wait(Fiber::Done, -1);
}

void resume(Fiber& fiber) { self = &fiber, softcuda_switch(&scheduler, fiber.stack); }

unsigned random_number() {
    random_state ^= random_state << 13, random_state ^= random_state >> 17, random_state ^= random_state << 5;
    return random_state;
}

/// The lanes that are furthest behind in the text, so that others wait for them after branches and loops: values change hands.
bool settle(Fiber* warp, unsigned lanes) {
    unsigned group = 0, ballot = 0;
    int site = INT_MAX;
    for (unsigned i = 0; i < lanes; i++)
        if (warp[i].state == Fiber::InWarp) site = std::min(site, warp[i].site);
    if (site == INT_MAX) return false;
    for (unsigned i = 0; i < lanes; i++) {
        bool here = warp[i].state == Fiber::InWarp && warp[i].site == site;
        group |= unsigned(here) << i, ballot |= unsigned(here && warp[i].vote) << i;
    }
    for (unsigned i = 0; i < lanes; i++) {
        Fiber& lane = warp[i];
        if (!(group >> i & 1)) continue;
        // A lane that is not there has no value to give: CUDA leaves open what comes then.
        memcpy(lane.out, warp[group >> lane.from & 1 ? lane.from : i].in, sizeof lane.out);
        lane.group = group, lane.ballot = ballot, lane.state = Fiber::Ready;
    }
    return true;
}

/// What one thread of the host keeps from launch to launch.
struct Worker {
    std::vector<Fiber> fibers{MOST_THREADS};
    std::vector<unsigned> warps;  // The order in which they run.
    unsigned lane_step = 1, lane_first = 0;
    char* stacks = nullptr;
    char* shared = nullptr;

    unsigned lane(unsigned i) const { return (i * lane_step + lane_first) % 32; }

    void choose_order(size_t threads) {
        warps.resize((threads + 31) / 32);
        std::iota(warps.begin(), warps.end(), 0u);
        if (!shuffles()) return;
        for (size_t i = warps.size(); i > 1; i--) std::swap(warps[i - 1], warps[random_number() % i]);
        lane_step = random_number() | 1, lane_first = random_number();
    }

    static Dim index_of(size_t i) {
        const Dim& dim = block.dim;
        return {unsigned(i % dim.x), unsigned(i / dim.x % dim.y), unsigned(i / dim.x / dim.y)};
    }

    void run_block(size_t threads) {
        const Kernel& kernel = *current->kernel;
        if (shuffles()) memset(block.shared, 0xff, current->shared);
        if (kernel.each && !shuffles()) return self = &fibers[0], kernel.each(current->args);
        choose_order(threads);
        if (kernel.each) return run_alone(threads);
        for (size_t i = 0; i < threads; i++) {
            void** top = reinterpret_cast<void**>(stacks + (i + 1) * STACK) - 2;
            *top = reinterpret_cast<void*>(&begin);
            fibers[i].stack = top - 6;
            fibers[i].state = Fiber::Ready;
            fibers[i].lane = i % 32;
            fibers[i].index = index_of(i);
        }
        do
            for (unsigned warp : warps) run_warp(&fibers[warp * 32], unsigned(std::min<size_t>(32, threads - warp * 32)));
        while (pass_barrier(threads));
    }

    /// Threads that do not wait for each other.
    void run_alone(size_t threads) {
        self = &fibers[0];
        for (unsigned warp : warps)
            for (unsigned i = 0; i < 32; i++)
                if (size_t thread = warp * 32 + lane(i); thread < threads) self->index = index_of(thread), current->kernel->thread(current->args);
    }

    /// Until all its lanes are done, or wait at a barrier.
    void run_warp(Fiber* warp, unsigned lanes) {
        do
            for (unsigned i = 0; i < 32; i++)
                if (unsigned at = lane(i); at < lanes && warp[at].state == Fiber::Ready) resume(warp[at]);
        while (settle(warp, lanes));
    }

    /// Whether there are threads that were waiting.
    bool pass_barrier(size_t threads) {
        int site = -1;
        for (size_t i = 0; i < threads; i++) {
            Fiber& fiber = fibers[i];
            if (fiber.state == Fiber::Done) continue;
            if (site >= 0 && fiber.site != site) {
                fprintf(stderr, "softcuda: %s: threads of a block wait at different barriers\n", current->kernel->name);
                abort();
            }
            site = fiber.site, fiber.state = Fiber::Ready;
        }
        return site >= 0;
    }

    void work(const Launch& launch, std::atomic<size_t>& next, size_t blocks, size_t at_once) {
        current = &launch;
        if (!stacks) {
            stacks = map(MOST_THREADS * STACK, 16), shared = map(MOST_SHARED, SHARED_ALIGNMENT);
            if (!stacks || !shared) perror("softcuda: no memory for the threads of a block"), abort();
        }
        // Its end is that of a page, so that what reads beyond it dies.
        char* first = shared + MOST_SHARED - (launch.shared + SHARED_ALIGNMENT - 1) / SHARED_ALIGNMENT * SHARED_ALIGNMENT;
        const Dim& grid = launch.grid;
        for (size_t from; (from = next.fetch_add(at_once)) < blocks;)
            for (size_t i = from; i < std::min(blocks, from + at_once); i++) {
                block = {{unsigned(i % grid.x), unsigned(i / grid.x % grid.y), unsigned(i / grid.x / grid.y)}, launch.dim, grid, first};
                run_block(launch.dim.count());
            }
        self = nullptr, current = nullptr;
    }
};

/// Threads that wait for work. It is never destroyed: the process may end while they wait.
struct Pool {
    std::mutex mutex;
    std::condition_variable wake, done;
    const Launch* launch = nullptr;
    std::atomic<size_t> next{0};
    size_t blocks = 0, at_once = 1, busy = 0, round = 0, others = 0;
    bool open = false;  // Whether a thread that comes now is of use.

    Pool() {
        const char* set = getenv("SOFTCUDA_THREADS");
        size_t threads = set ? strtoul(set, nullptr, 10) : std::thread::hardware_concurrency();
        for (others = 0; others + 1 < threads; others++) std::thread([this] { serve(); }).detach();
    }
    void serve() {
        Worker worker;
        for (size_t seen = 0;;) {
            std::unique_lock lock(mutex);
            wake.wait(lock, [&] { return open && round != seen; });
            seen = round, busy++;
            lock.unlock();
            worker.work(*launch, next, blocks, at_once);
            lock.lock();
            if (--busy == 0) done.notify_one();
        }
    }
    void run(const Launch& launch) {
        static std::mutex one_at_a_time;
        static Worker& worker = *new Worker;
        std::lock_guard turn(one_at_a_time);
        size_t count = launch.grid.count(), threads = count * launch.dim.count();
        bool alone = count == 1 || others == 0 || threads < (launch.kernel->each ? 4096 : 256);
        std::unique_lock lock(mutex);
        this->launch = &launch, next = 0, blocks = count, at_once = std::max<size_t>(1, count / ((others + 1) * 8));
        if (!alone) open = true, round++, wake.notify_all();
        lock.unlock();
        worker.work(launch, next, blocks, at_once);
        lock.lock();
        open = false;
        done.wait(lock, [&] { return busy == 0; });
    }
};
}  // namespace

void wait(Fiber::State state, int site) { self->state = state, self->site = site, softcuda_switch(&self->stack, scheduler); }

void run(const Launch& launch) {
    static Pool& pool = *new Pool;
    pool.run(launch);
}

bool shuffles() {
    static const bool set = getenv("SOFTCUDA_SHUFFLE") && strcmp(getenv("SOFTCUDA_SHUFFLE"), "0") != 0;
    return set;
}

const Launch* launch_of_this_thread() { return current; }
}  // namespace softcuda
