// What the CUDA C++ that cubecl writes names, for g++ on a CPU. Each thread of a block is a fiber of a thread of the host.
// This is the first line of every kernel (`-include`). It is not precompiled: on some virtual machines, g++ took all memory to read it.
#pragma once
// Special functions of C++17 come with <math.h>, and take a quarter of the time that a kernel compiles in.
#include <cstddef>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#define _GLIBCXX_USE_STD_SPEC_FUNCS 0
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <limits>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __grid_constant__
// Other threads of the block may write to what is behind the pointer, where they meet at barriers.
#define __restrict__

namespace softcuda {
struct Dim {
    unsigned x = 1, y = 1, z = 1;
    size_t count() const { return size_t(x) * y * z; }
};
struct Block {
    Dim index, dim, grid;
    char* shared;
};
struct Fiber {
    enum State { Ready, AtBarrier, InWarp, Done } state;
    Dim index;
    unsigned lane, from;     // The lane whose value this one wants.
    int site;                // Where in the text it waits.
    unsigned group, ballot;  // Lanes that met there; those of them that voted.
    bool vote;
    unsigned char in[8], out[8];
    void* stack;
};
// In the driver's library. The model of thread-local storage saves a call with each use.
#define SOFTCUDA_SHARED __attribute__((visibility("default")))
extern constinit thread_local Block block SOFTCUDA_SHARED __attribute__((tls_model("initial-exec")));
extern constinit thread_local Fiber* self SOFTCUDA_SHARED __attribute__((tls_model("initial-exec")));
SOFTCUDA_SHARED void wait(Fiber::State state, int site);

// Lanes of a warp that have come to the same place in the text meet once none of the others can go on: as many as can be together.
template <class T> T meet(int site, T value, unsigned from, bool vote = false) {
    static_assert(sizeof(T) <= sizeof self->in);
    memcpy(self->in, &value, sizeof value);
    self->from = from, self->vote = vote;
    wait(Fiber::InWarp, site);
    memcpy(&value, self->out, sizeof value);
    return value;
}
template <class T> T shuffle(int site, T value, unsigned from) { return meet(site, value, from < 32 ? from : self->lane); }
inline unsigned ballot(int site, bool vote) { return meet(site, 0, self->lane, vote), self->ballot; }
inline unsigned active(int site) { return meet(site, 0, self->lane), self->group; }

/// Calls a kernel with arguments as cuLaunchKernel has them: an array of pointers to each.
template <class... A> void call(void (*kernel)(A...), void** args) {
    [&]<size_t... I>(std::index_sequence<I...>) {
        kernel(*static_cast<std::remove_const_t<A>*>(args[I])...);
    }(std::index_sequence_for<A...>());
}
/// Calls it for each thread of a block, one after the other: there must be no barrier in it, nor a function of warps.
template <class... A> void call_each(void (*kernel)(A...), void** args) {
    Dim& at = self->index;
    for (at.z = 0; at.z < block.dim.z; at.z++)
        for (at.y = 0; at.y < block.dim.y; at.y++)
            for (at.x = 0; at.x < block.dim.x; at.x++) call(kernel, args);
}
/// The sizes of its arguments in bytes, and 0 at the end.
template <class... A> const size_t* sizes(void (*)(A...)) {
    static const size_t all[] = {sizeof(A)..., 0};
    return all;
}

// What a GPU defines and a CPU does not: division of integers by 0, and numbers that an integer type cannot hold.
template <class A, class B> auto divide(A a, B b) {
    using T = decltype(a / b);
    if constexpr (std::is_integral_v<T>) {
        if (b == 0) return T(-1);
        if constexpr (std::is_signed_v<T>)
            if (b == -1) return T(-a);
    }
    return a / b;
}
template <class A, class B> auto remainder(A a, B b) {
    using T = decltype(a % b);
    if (b == 0) return T(a);
    if constexpr (std::is_signed_v<T>)
        if (b == -1) return T(0);
    return a % b;
}
template <class To, class From> To convert(From from) {
    if constexpr (std::is_integral_v<From>) return static_cast<To>(from);
    else if constexpr (std::is_floating_point_v<From>) {
        using Limits = std::numeric_limits<To>;
        if (from != from) return 0;
        // Both bounds are exact: 0, or a power of 2.
        if (from < From(Limits::min())) return Limits::min();
        if (from >= 2 * From(To(1) << (Limits::digits - 1))) return Limits::max();
        return static_cast<To>(from);
    } else return convert<To>(float(from));
}
}  // namespace softcuda

#define threadIdx (softcuda::self->index)
#define blockIdx (softcuda::block.index)
#define blockDim (softcuda::block.dim)
#define gridDim (softcuda::block.grid)
#define warpSize 32
// A number that no other place of the text has, also where the compiler copies it, as in an unrolled loop.
#define SITE __COUNTER__
#define __syncthreads() softcuda::wait(softcuda::Fiber::AtBarrier, SITE)
#define __syncwarp(...) ((void)softcuda::active(SITE))
#define __threadfence() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __activemask() softcuda::active(SITE)
// The mask is always `__activemask()`: those that meet here.
#define __shfl_sync(mask, value, from) softcuda::shuffle(SITE, value, (from) & 31)
#define __shfl_xor_sync(mask, value, bits) softcuda::shuffle(SITE, value, softcuda::self->lane ^ (bits))
#define __shfl_up_sync(mask, value, by) softcuda::shuffle(SITE, value, softcuda::self->lane - (by))
#define __shfl_down_sync(mask, value, by) softcuda::shuffle(SITE, value, softcuda::self->lane + (by))
#define __ballot_sync(mask, vote) softcuda::ballot(SITE, vote)
#define __any_sync(mask, vote) (softcuda::ballot(SITE, vote) != 0)
#define __all_sync(mask, vote) (softcuda::ballot(SITE, !(vote)) == 0)

// Functions of numbers.
template <class T, class = std::enable_if_t<std::is_integral_v<T>>> T min(T a, T b) { return b < a ? b : a; }
template <class T, class = std::enable_if_t<std::is_integral_v<T>>> T max(T a, T b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline float rsqrt(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float rhypotf(float x, float y) { return 1 / hypotf(x, y); }
inline double rhypot(double x, double y) { return 1 / hypot(x, y); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(unsigned x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline int __ffsll(unsigned long long x) { return __builtin_ffsll((long long)x); }
inline unsigned long long __brevll(unsigned long long x) {
    unsigned long long y = 0;
    for (int i = 0; i < 64; i++, x >>= 1) y = y << 1 | (x & 1);
    return y;
}
inline unsigned __brev(unsigned x) { return unsigned(__brevll(x) >> 32); }
inline int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
template <class T> T __dp4a(T a, T b, T c) {
    using Byte = std::conditional_t<std::is_signed_v<T>, signed char, unsigned char>;
    for (int i = 0; i < 32; i += 8) c += T(Byte(a >> i)) * T(Byte(b >> i));
    return c;
}

// Atomics: those with names, and those that are written as PTX (`atom.relaxed.add.f32`), which the text is rewritten for.
namespace softcuda {
template <class T, class F> T update(T* at, F f) {
    using Bits = std::conditional_t<sizeof(T) == 8, unsigned long long, std::conditional_t<sizeof(T) == 4, unsigned, unsigned short>>;
    Bits* bits = reinterpret_cast<Bits*>(at);
    Bits old = __atomic_load_n(bits, __ATOMIC_RELAXED), next;
    T value;
    do {
        memcpy(&value, &old, sizeof value);
        T result = f(value);
        memcpy(&next, &result, sizeof next);
    } while (!__atomic_compare_exchange_n(bits, &old, next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return value;
}
inline auto add = [](auto a, auto b) { return decltype(a)(a + b); };
inline auto min = [](auto a, auto b) { return ::min(a, b); };
inline auto max = [](auto a, auto b) { return ::max(a, b); };
template <class T, class F, class P, class V> V atom(F f, P* at, V value) {
    T operand;
    static_assert(sizeof operand == sizeof value);
    memcpy(&operand, &value, sizeof operand);
    T old = update(reinterpret_cast<T*>(const_cast<std::remove_const_t<P>*>(at)), [&](T is) { return f(is, operand); });
    memcpy(&value, &old, sizeof value);
    return value;
}
inline float max_or_nan(float a, float b) { return a != a ? a : b != b ? b : fmaxf(a, b); }
inline float min_or_nan(float a, float b) { return a != a ? a : b != b ? b : fminf(a, b); }
inline int saturate(long long x) { return x < INT_MIN ? INT_MIN : x > INT_MAX ? INT_MAX : int(x); }
}  // namespace softcuda
template <class T> T atomicExch(T* at, T value) { return __atomic_exchange_n(at, value, __ATOMIC_RELAXED); }
template <class T> T atomicCAS(T* at, T old, T value) {
    __atomic_compare_exchange_n(at, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return old;
}
template <class T> T atomicAnd(T* at, T value) { return __atomic_fetch_and(at, value, __ATOMIC_RELAXED); }
template <class T> T atomicOr(T* at, T value) { return __atomic_fetch_or(at, value, __ATOMIC_RELAXED); }
template <class T> T atomicXor(T* at, T value) { return __atomic_fetch_xor(at, value, __ATOMIC_RELAXED); }

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "softcuda_matrices.h"

// The text has its own types of integers. Those of 64 bits are others than the C library's. A cast is one of a GPU.
#define int64_t softcuda_int64_t
#define uint64_t softcuda_uint64_t
#define int8_t(x) softcuda::convert<signed char>(x)
#define int16_t(x) softcuda::convert<short>(x)
#define int32_t(x) softcuda::convert<int>(x)
#define softcuda_int64_t(x) softcuda::convert<long long>(x)
#define uint8_t(x) softcuda::convert<unsigned char>(x)
#define uint16_t(x) softcuda::convert<unsigned short>(x)
#define uint32_t(x) softcuda::convert<unsigned>(x)
#define softcuda_uint64_t(x) softcuda::convert<unsigned long long>(x)
