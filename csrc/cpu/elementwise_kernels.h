// Kernels of element-wise functions of rows, of rows in another order, of products and sums of two arrays. Outputs may
// be quantized. Included by kernels.cpp only.
#pragma once

#include "norms_and_rotary.h"

namespace octavo::OCTAVO_ISA {
namespace {

template <class Function>
void activate(const ActivationArgs& a, int64_t task, Function f) {
    with_element(a.dtype, [&](auto element) {
        using T = typename decltype(element)::T;
        for_rows(a, task, a.rows, [&](int64_t row) {
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            write_row(a.out, a.out_dtype, row, a.width,
                      [&](int64_t i, int lanes) { return f(load_some(x + i, lanes)); });
        });
    });
}

// Writes rows whose elements take another order, for matrices whose columns have it.
void reorder(const ActivationArgs& a, int64_t task) {
    with_element(a.dtype, [&](auto element) {
        using T = typename decltype(element)::T;
        for_rows(a, task, a.rows, [&](int64_t row) {
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            write_row(a.out, a.out_dtype, row, a.width, [&](int64_t i, int lanes) {
                T gathered[kLanes] = {};
                for (int lane = 0; lane < lanes; ++lane) gathered[lane] = x[a.order[i + lane]];
                return load(gathered);
            });
        });
    });
}

void activation(const void* args, int64_t task) {
    const ActivationArgs& a = *static_cast<const ActivationArgs*>(args);
    if (a.order) return reorder(a, task);
    switch (a.kind) {
        case kIdentity:
            return activate(a, task, [](Vec x) { return x; });
        case kXielu:
            return activate(a, task,
                            [&](Vec x) { return xielu(x, a.parameter0, a.parameter1, a.parameter2, a.parameter3); });
        case kSoftcap:
            return activate(a, task, [&](Vec x) { return softcap(x, set1(a.parameter0), set1(1.0f / a.parameter0)); });
        case kClip:
            return activate(a, task, [&](Vec x) { return min(set1(a.parameter0), max(set1(-a.parameter0), x)); });
        default:
            return a.out_dtype == kBF16 ? with_activation<BF16>(a.kind, [&](auto f) { activate(a, task, f); })
                                        : with_activation<F32>(a.kind, [&](auto f) { activate(a, task, f); });
    }
}

void multiply(const void* args, int64_t task) {
    const MultiplyArgs& a = *static_cast<const MultiplyArgs*>(args);
    with_element(a.dtype, [&](auto element) {
        using T = typename decltype(element)::T;
        for_rows(a, task, a.rows, [&](int64_t row) {
            const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
            const T* y = static_cast<const T*>(a.y) + row * a.y_stride;
            write_row(a.out, a.out_dtype, row, a.width, [&](int64_t i, int lanes) {
                T repeated[kLanes] = {};
                for (int lane = 0; a.shared > 1 && lane < lanes; ++lane) repeated[lane] = y[(i + lane) / a.shared];
                const Vec v = a.shared > 1 ? load(repeated) : load_some(y + i, lanes);
                const Vec scaled = a.kind == kIdentity   ? v
                                   : a.kind == kSoftplus ? softplus(v)
                                                         : gated_by(a.kind == kSilu ? v : set1(1.0f), v);
                return mul(load_some(x + i, lanes), scaled);
            });
        });
    });
}

void add_rows(const void* args, int64_t task) {
    const AddArgs& a = *static_cast<const AddArgs*>(args);
    with_element(a.dtype, [&](auto element) {
        with_element(a.out_dtype, [&](auto out_element) {
            for_rows(a, task, a.rows, [&](int64_t row) {
                float of_row = a.ids ? 0.0f : a.scale;
                for (int64_t j = row * a.top_k; j < (row + 1) * a.top_k; ++j) {
                    if (a.ids[j] >= a.first_id) of_row += a.weights[j];
                }
                const Vec scale = set1(of_row);
                const auto* x = static_cast<const typename decltype(element)::T*>(a.x) + row * a.x_stride;
                auto* out = static_cast<typename decltype(out_element)::T*>(a.out) + row * a.out_stride;
                // The same operation as in a product's epilogue (kAdd), so that both have the same bits.
                for_vectors(a.width, [&](int64_t i, int lanes) {
                    store_some(out + i, fma(scale, load_some(x + i, lanes), load_some(out + i, lanes)), lanes);
                });
            });
        });
    });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
