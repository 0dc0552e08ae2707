// The functions that float16 and bfloat16 share. Each operation is done in float and rounds once.
#pragma once
#include <math.h>
#include <type_traits>

namespace softcuda {
template <class T> concept Half = T::is_half;
template <class T> concept Pair = T::is_pair;
template <Half T> struct PairOf {
    static constexpr bool is_pair = true;
    T x, y;
};
}  // namespace softcuda

#define SOFTCUDA_OPERATOR(result, op) \
    template <softcuda::Half T> result operator op(T a, T b) { return result(float(a) op float(b)); }
SOFTCUDA_OPERATOR(T, +) SOFTCUDA_OPERATOR(T, -) SOFTCUDA_OPERATOR(T, *) SOFTCUDA_OPERATOR(T, /)
SOFTCUDA_OPERATOR(bool, <) SOFTCUDA_OPERATOR(bool, >) SOFTCUDA_OPERATOR(bool, <=) SOFTCUDA_OPERATOR(bool, >=)
SOFTCUDA_OPERATOR(bool, ==) SOFTCUDA_OPERATOR(bool, !=)
template <softcuda::Half T> T operator-(T a) { return T(-float(a)); }
template <softcuda::Half T> T& operator+=(T& a, T b) { return a = a + b; }

#define SOFTCUDA_UNARY(one, two, value) \
    template <softcuda::Half T> T one(T half) { float x = float(half); return T(value); } \
    template <softcuda::Pair P> P two(P a) { return {one(a.x), one(a.y)}; }
SOFTCUDA_UNARY(hlog, h2log, logf(x)) SOFTCUDA_UNARY(hexp, h2exp, expf(x))
SOFTCUDA_UNARY(hsin, h2sin, sinf(x)) SOFTCUDA_UNARY(hcos, h2cos, cosf(x)) SOFTCUDA_UNARY(htanh, h2tanh, tanhf(x))
SOFTCUDA_UNARY(hsqrt, h2sqrt, sqrtf(x)) SOFTCUDA_UNARY(hrsqrt, h2rsqrt, 1 / sqrtf(x))
SOFTCUDA_UNARY(hceil, h2ceil, ceilf(x)) SOFTCUDA_UNARY(hfloor, h2floor, floorf(x))
SOFTCUDA_UNARY(htrunc, h2trunc, truncf(x)) SOFTCUDA_UNARY(hrint, h2rint, rintf(x))
SOFTCUDA_UNARY(__habs, __habs2, fabsf(x)) SOFTCUDA_UNARY(__hneg, __hneg2, -x)
template <softcuda::Half T> bool __hisnan(T a) { return float(a) != float(a); }
template <softcuda::Half T> bool __hisinf(T a) { return fabsf(float(a)) == HUGE_VALF; }

#define SOFTCUDA_BINARY(one, two, value) \
    template <softcuda::Half T> T one(T a, T b) { float x = float(a), y = float(b); return T(value); } \
    template <softcuda::Pair P> P two(P a, P b) { return {one(a.x, b.x), one(a.y, b.y)}; }
SOFTCUDA_BINARY(__hadd, __hadd2, x + y) SOFTCUDA_BINARY(__hsub, __hsub2, x - y)
SOFTCUDA_BINARY(__hmul, __hmul2, x * y) SOFTCUDA_BINARY(__hdiv, __h2div, x / y)
SOFTCUDA_BINARY(__hmin, __hmin2, fminf(x, y)) SOFTCUDA_BINARY(__hmax, __hmax2, fmaxf(x, y))
SOFTCUDA_BINARY(__hmin_nan, __hmin2_nan, x != x || y != y ? NAN : fminf(x, y))
SOFTCUDA_BINARY(__hmax_nan, __hmax2_nan, x != x || y != y ? NAN : fmaxf(x, y))
// The product is exact as a double, and nearly always the sum.
template <softcuda::Half T> T __hfma(T a, T b, T c) { return T(double(float(a)) * double(float(b)) + double(float(c))); }
template <softcuda::Pair P> P __hfma2(P a, P b, P c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }

template <softcuda::Pair P> P operator+(P a, P b) { return __hadd2(a, b); }
template <softcuda::Pair P> P operator-(P a, P b) { return __hsub2(a, b); }
template <softcuda::Pair P> P operator*(P a, P b) { return __hmul2(a, b); }
template <softcuda::Pair P> P operator/(P a, P b) { return __h2div(a, b); }
template <softcuda::Pair P> P operator-(P a) { return __hneg2(a); }
