// Element-wise functions that activations and the epilogues of gated products share. Included by
// activation.h and epilogue.h only.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

inline Vec negated(Vec x) { return sub(zero(), x); }

// x times the logistic function of y.
inline Vec gated_by(Vec x, Vec y) { return div(x, add(set1(1.0f), exp(negated(y)))); }

// The complementary error function of z >= 0, to a few units in the last place everywhere: Chebyshev coefficients of
// Press et al., Numerical Recipes in C (1992), section 6.2.
inline Vec erfc(Vec z) {
    const Vec t = div(set1(1.0f), fma(set1(0.5f), z, set1(1.0f)));
    Vec p = set1(0.17087277f);
    constexpr float kCoefficients[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                                       -0.18628806f, 0.09678418f, 0.37409196f,  1.00002368f};
    for (const float c : kCoefficients) p = fma(p, t, set1(c));
    const Vec exponent = fma(negated(z), z, fma(p, t, set1(-1.26551223f)));
    return mul(t, exp(exponent));
}

// x times the normal distribution function, from the tail that is small so that nothing cancels.
inline Vec gelu(Vec x) {
    const Vec z = mul(max(x, negated(x)), set1(0.70710678f));
    const Vec tail = mul(set1(0.5f), erfc(z));
    return mul(x, select_greater(x, zero(), sub(set1(1.0f), tail), tail));
}

// The same by its approximation x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks & Gimpel 2016).
inline Vec gelu_tanh(Vec x) {
    const Vec cubic = fma(mul(set1(0.044715f), mul(x, x)), x, x);
    return gated_by(x, mul(set1(1.59576912f), cubic));
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
