// bfloat16 for kernels on a CPU.
#pragma once
#include <string.h>

#include "softcuda_halves.h"

struct __nv_bfloat16 {
    static constexpr bool is_half = true;
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float from) {
        unsigned wide;
        memcpy(&wide, &from, sizeof wide);
        // To the nearest, and to the even one of two.
        bits = from != from ? 0x7fff : static_cast<unsigned short>((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
    // A double is made a float whose last bit says whether anything was lost, so that the sum of both roundings is one.
    __nv_bfloat16(double from) {
        float near = static_cast<float>(from);
        unsigned wide;
        memcpy(&wide, &near, sizeof wide);
        if (near != from && from == from && !(wide & 1)) {
            near = fabs(near) > fabs(from) ? nextafterf(near, 0) : near;
            memcpy(&wide, &near, sizeof wide), wide |= 1, memcpy(&near, &wide, sizeof wide);
        }
        *this = __nv_bfloat16(near);
    }
    template <class T, class = std::enable_if_t<std::is_integral_v<T>>> __nv_bfloat16(T from) : __nv_bfloat16(double(from)) {}
    template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>> explicit operator T() const {
        unsigned wide = unsigned(bits) << 16;
        float value;
        memcpy(&value, &wide, sizeof value);
        return static_cast<T>(value);
    }
};
struct alignas(4) __nv_bfloat162 : softcuda::PairOf<__nv_bfloat16> {};
