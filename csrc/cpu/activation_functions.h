// Element-wise functions of vectors: activations, softplus, powers of two. Included by int_layouts.h,
// kv_cache_formats.h, quantize.h and recurrent.h only.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

inline Vec negated(Vec x) { return sub(zero(), x); }

// Returns x times the logistic function of y.
inline Vec gated_by(Vec x, Vec y) { return div(x, add(set1(1.0f), exp(negated(y)))); }

// Returns log(1 + e^x), to a few units in the last place, as max(x, 0) + log(1 + y), where y = e^-|x|. The logarithm is
// the series of 2 artanh(y / (2 + y)), whose argument is at most a third.
inline Vec softplus(Vec x) {
    const Vec y = exp(negated(abs(x)));
    const Vec s = div(y, add(set1(2.0f), y));
    const Vec square = mul(s, s);
    Vec p = set1(2.0f / 15);
    constexpr float kCoefficients[] = {2.0f / 13, 2.0f / 11, 2.0f / 9, 2.0f / 7, 2.0f / 5, 2.0f / 3, 2.0f};
    for (const float c : kCoefficients) p = fma(p, square, set1(c));
    return fma(p, s, max(zero(), x));
}

// Returns 2^x for x <= 0: exactly 1 at 0, exactly 0 below -126.5, NaN for NaN. The polynomials are minimax fits of 2^r
// on [-1/2, 1/2] through 1 at 0. Relative errors are 9e-8 for float32, and 3e-6 where the result is rounded to bf16
// anyway.
template <class E>
inline Vec pow2(Vec x) {
    const Vec magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer.
    const Vec clamped = max(set1(-127.0f), x);
    const Vec t = add(clamped, magic);
    const Vec r = sub(clamped, sub(t, magic));
    Vec p;
    if constexpr (E::kStep == 1) {
        p = fma(set1(1.326472749e-3f), r, set1(9.671512642e-3f));
        p = fma(p, r, set1(5.550733742e-2f));
        p = fma(p, r, set1(2.402224209e-1f));
        p = fma(p, r, set1(6.931469776e-1f));
    } else {
        p = fma(set1(9.582853121e-3f), r, set1(5.590642482e-2f));
        p = fma(p, r, set1(2.402409861e-1f));
        p = fma(p, r, set1(6.931241934e-1f));
    }
    return mul(fma(p, r, set1(1.0f)), pow2_of_magic(t));
}

// Returns x times the normal distribution function, to a few units in the last place everywhere. It is computed from
// the small tail, so nothing cancels. The tail is half the complementary error function of z = |x| / sqrt(2), with
// Chebyshev coefficients of Press et al., Numerical Recipes in C (1992), section 6.2, here for powers of two. For bf16
// it is a minimax fit of the same form, with relative errors of 1.1e-5.
template <class E>
inline Vec gelu(Vec x) {
    const Vec t = reciprocal(fma(set1(0.35355339f), abs(x), set1(1.0f)));  // 1 / (1 + z / 2)
    Vec p;
    if constexpr (E::kStep == 1) {
        p = set1(0.246517298f);
        constexpr float kCoefficients[] = {-1.18611495f, 2.14747446f,  -1.63775315f, 0.402321582f, -0.26875686f,
                                           0.139630057f, 0.539700616f, 1.4427292f,   -2.82574822f};
        for (const float c : kCoefficients) p = fma(p, t, set1(c));
    } else {
        p = set1(0.33007735f);
        constexpr float kCoefficients[] = {-1.02315533f, 0.68456119f, 0.36707595f, 1.46868563f, -2.82723379f};
        for (const float c : kCoefficients) p = fma(p, t, set1(c));
    }
    const Vec tail = mul(t, pow2<E>(fma(mul(set1(-0.72134752f), x), x, p)));
    return sub(max(zero(), x), mul(abs(x), tail));
}

// Returns gelu by its approximation x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3) (Hendrycks & Gimpel 2016).
inline Vec gelu_tanh(Vec x) {
    const Vec cubic = fma(mul(set1(0.044715f), mul(x, x)), x, x);
    return gated_by(x, mul(set1(1.59576912f), cubic));
}

inline Vec relu(Vec x) { return max(zero(), x); }  // NaN for NaN

// Returns the hyperbolic tangent, to a few units in the last place. Near zero it is the polynomial of Cephes (Moshier
// 1992).
inline Vec tanh(Vec x) {
    const Vec square = mul(x, x);
    Vec p = set1(-5.70498872745e-3f);
    constexpr float kCoefficients[] = {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f};
    for (const float c : kCoefficients) p = fma(p, square, set1(c));
    const Vec near_zero = fma(mul(p, square), x, x);
    const Vec two = set1(2.0f);
    const Vec far = sub(set1(1.0f), div(two, add(exp(mul(two, x)), set1(1.0f))));
    return select_greater(square, set1(0.390625f), far, near_zero);
}

inline Vec softcap(Vec x, Vec cap, Vec inverse) { return mul(cap, tanh(mul(x, inverse))); }

// Returns x (a x + b) where x is positive, else c (exp(min(x, e)) - 1 - x) + b x (Huang & Schlag 2024).
inline Vec xielu(Vec x, float a, float c, float b, float e) {
    const Vec z = min(set1(e), x);
    // exp(z) - 1 - z cancels near zero: the Taylor series is used there.
    Vec p = set1(1.0f / 5040);
    constexpr float kCoefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f};
    for (const float k : kCoefficients) p = fma(p, z, set1(k));
    const Vec near_zero = fma(mul(z, z), p, sub(z, x));
    const Vec far = sub(sub(exp(z), set1(1.0f)), x);
    const Vec below = fma(set1(c), select_greater(z, set1(-0.25f), near_zero, far), mul(set1(b), x));
    return select_greater(x, zero(), mul(x, fma(set1(a), x, set1(b))), below);
}

// Calls f with an activation function that is exact enough for elements of type E.
template <class E, class F>
inline void with_activation(int32_t kind, F f) {
    switch (kind) {
        case kGelu:
            return f([](Vec x) __attribute__((always_inline)) { return gelu<E>(x); });
        case kGeluTanh:
            return f([](Vec x) __attribute__((always_inline)) { return gelu_tanh(x); });
        case kRelu:
            return f([](Vec x) __attribute__((always_inline)) { return relu(x); });
        case kRelu2:
            return f([](Vec x) __attribute__((always_inline)) { return mul(relu(x), relu(x)); });
        default:
            return f([](Vec x) __attribute__((always_inline)) { return gated_by(x, x); });
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
