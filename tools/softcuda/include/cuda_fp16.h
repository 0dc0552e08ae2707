// float16 for kernels on a CPU.
#pragma once
#include "softcuda_halves.h"

struct __half {
    static constexpr bool is_half = true;
    _Float16 value;
    __half() = default;
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> __half(T from) : value(static_cast<_Float16>(from)) {}
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> explicit operator T() const {
        return static_cast<T>(static_cast<float>(value));
    }
};
struct alignas(4) __half2 : softcuda::PairOf<__half> {};
