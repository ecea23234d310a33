// Element-wise functions of rows, quantized or not, and sums of two matrices. Included by kernels.cpp only.
#pragma once

#include "elementwise.h"

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

inline Vec relu(Vec x) { return max(zero(), x); }  // NaN for NaN

template <class Function>
void activate(const ActivationArgs& a, int64_t task, Function f) {
    with_element(a.dtype, [&](auto element) {
        using T = typename decltype(element)::T;
        for_rows(a, task, a.rows, [&](int64_t row) {
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            write_row<T>(a.out, a.out_dtype, row, a.width,
                         [&](int64_t i, int lanes) { return f(load_some(x + i, lanes)); });
        });
    });
}

void activation(const void* args, int64_t task) {
    const ActivationArgs& a = *static_cast<const ActivationArgs*>(args);
    switch (a.kind) {
        case kSilu:
            return activate(a, task, [](Vec x) { return gated_by(x, x); });
        case kGelu:
            return activate(a, task, [](Vec x) { return gelu(x); });
        case kGeluTanh:
            return activate(a, task, [](Vec x) { return gelu_tanh(x); });
        case kRelu:
            return activate(a, task, [](Vec x) { return relu(x); });
        case kRelu2:
            return activate(a, task, [](Vec x) { return mul(relu(x), relu(x)); });
        default:
            return activate(a, task, [](Vec x) { return x; });
    }
}

void add_rows(const void* args, int64_t task) {
    const AddArgs& a = *static_cast<const AddArgs*>(args);
    const Vec scale = set1(a.scale);
    with_element(a.dtype, [&](auto element) {
        with_element(a.out_dtype, [&](auto out_element) {
            for_rows(a, task, a.rows, [&](int64_t row) {
                const auto* x = static_cast<const typename decltype(element)::T*>(a.x) + row * a.x_stride;
                auto* out = static_cast<typename decltype(out_element)::T*>(a.out) + row * a.out_stride;
                // As a product's epilogue does it, so that both have the same bits.
                for_vectors(a.width, [&](int64_t i, int lanes) {
                    store_some(out + i, fma(scale, load_some(x + i, lanes), load_some(out + i, lanes)), lanes);
                });
            });
        });
    });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
