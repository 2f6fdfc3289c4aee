// Sixteen numbers at a time, and the functions that the method needs of them.

#pragma once

#include <cstdint>

namespace {

constexpr int LANES = 16;

typedef float Vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(sizeof(int32_t)), may_alias));

// A row as vectors. What is written with them is done in the order in which it stands, so that the compiler need not
// ask whether rows overlap each time it meets two.
inline Vector* vec(float* row) { return reinterpret_cast<Vector*>(row); }
inline const Vector* vec(const float* row) { return reinterpret_cast<const Vector*>(row); }

// e^x, to the rounding of x: x = n ln 2 + f, and 2^n is made of bits. What is no number stays so, which is seen in its
// bits alone: -ffast-math takes comparisons for true.
inline Vector exponential(Vector exponent) {
    const Integers number = (reinterpret_cast<const Integers&>(exponent) & 0x7fffffff) <= 0x7f800000;
    Vector x = exponent < -87.0f ? Vector{} - 87.0f : exponent;
    x = x > 88.0f ? Vector{} + 88.0f : x;
    const Vector y = x * 1.44269504f + 0.5f;
    Integers n = __builtin_convertvector(y, Integers);  // towards 0
    n += __builtin_convertvector(n, Vector) > y;         // downwards: true is -1
    const Vector f = x - __builtin_convertvector(n, Vector) * 0.693147181f;
    const Vector e = 1.0f + f * (1.0f + f * (1.0f / 2 + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f / 720)))));
    const Integers bits = (n + 127) << 23;
    return number ? e * reinterpret_cast<const Vector&>(bits) : exponent;
}

// The normal distribution: density and share below x, both from one exponential. Abramowitz and Stegun 7.1.26, to 1e-7.
struct Normal {
    Vector density, below;
};

inline Normal normal(Vector x) {
    const Vector size = x < 0.0f ? -x : x, t = 1.0f / (1.0f + 0.23164189f * size);
    const Vector sum = t * (0.31938154f + t * (-0.35656378f + t * (1.7814779f + t * (-1.8212559f + t * 1.3302744f))));
    const Vector density = 0.39894228f * exponential(-0.5f * x * x), above = density * sum;  // above |x|
    return {density, x < 0.0f ? above : 1.0f - above};
}

inline Vector sigmoid(Vector x) { return 1.0f / (1.0f + exponential(-x)); }

inline float sum_of(Vector x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += x[lane];
    return sum;
}

}  // namespace
