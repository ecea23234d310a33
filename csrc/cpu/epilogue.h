// Where the outputs of a product go. The products leave them in a small buffer, which stays in the first-level cache;
// here they get their bias and are stored, added to what is there, or gated. Included by linear.h only.
#pragma once

#include "quantize.h"

namespace octavo::OCTAVO_ISA {
namespace {

// How far ahead of its use a weight is fetched, over all panels read at once: about the memory's latency times the
// bandwidth of one core.
constexpr int kPrefetchBytes = 4096;

// Vectors of outputs that are finished together: whole pairs of gate and up panels, and enough of them for a block of
// a quantized row.
inline int64_t unit_vecs(const LinearArgs& a, int64_t otherwise) {
    if (a.epilogue != kGated) return otherwise;
    return (a.out_dtype == kQ8 ? 4 : 2) * kVecsPerPanel;
}
constexpr int kMaxUnit = 4 * kPanel;

// Rows of products, from output `col` of the packed matrix on.
struct Products {
    const float* y;
    int64_t stride, row, rows, col, width;
};

inline Vec with_bias(const LinearArgs& a, const Products& p, int64_t r, int64_t i) {
    const Vec y = load(p.y + r * p.stride + i);
    return a.matrix.bias ? add(y, load(a.matrix.bias + p.col + i)) : y;
}

// Calls f with what becomes of gate and up.
template <class F>
inline void with_gate(const LinearArgs& a, F f) {
    if (a.activation != kClamped) {
        return with_activation(a.activation, [&](auto activation) {
            f([=](Vec gate, Vec up) __attribute__((always_inline)) { return mul(activation(gate), up); });
        });
    }
    f([&](Vec gate, Vec up) __attribute__((always_inline)) {
        const Vec limit = set1(a.clamp.limit);
        const Vec low = min(limit, gate);  // NaN for NaN, as here
        const Vec shifted = add(max(negated(limit), min(limit, up)), set1(1.0f));
        return mul(gated_by(low, mul(set1(a.clamp.slope), low)), shifted);
    });
}

// Element i of the gated outputs of these products.
template <class Gate>
__attribute__((always_inline)) inline Vec gated(const LinearArgs& a, const Products& p, int64_t r, int64_t i,
                                                Gate gate) {
    const int64_t gate_at = i / kPanel * 2 * kPanel + i % kPanel;
    return gate(with_bias(a, p, r, gate_at), with_bias(a, p, r, gate_at + kPanel));
}

// Stores f(where, row, index, lanes) in `width` columns of the output from `begin` on.
template <class T, class F>
inline void write_outputs(const LinearArgs& a, const Products& p, int64_t begin, int64_t width, F f) {
    for (int64_t r = 0; r < p.rows; ++r) {
        T* out = static_cast<T*>(a.out) + (p.row + r) * a.out_stride + begin;
        for_vectors(width, [&](int64_t i, int lanes) { store_some(out + i, f(out + i, r, i, lanes), lanes); });
    }
}

// What pads the last panels is exactly zero, and so is its gated product.
template <class Gate>
inline void quantize_gated(const LinearArgs& a, const Products& p, Gate gate) {
    for (int64_t r = 0; r < p.rows; ++r) {
        QBlock* out = static_cast<QBlock*>(a.out) + (p.row + r) * a.out_stride + p.col / (2 * kQBlock);
        quantize_row(p.width / 2, out, [&](int64_t i, int) { return gated(a, p, r, i, gate); });
    }
}

inline void scatter(const LinearArgs& a, const Products& p) {
    const int64_t width = min_of(p.width, a.matrix.n - p.col);
    for (int64_t r = 0; r < p.rows; ++r) {
        float* out = static_cast<float*>(a.out) + a.out_rows[p.row + r] * a.out_stride + p.col;
        const Vec scale = set1(a.row_scales ? a.row_scales[p.row + r] : 1.0f);
        for_vectors(width, [&](int64_t i, int lanes) {
            store_some(out + i, fma(scale, with_bias(a, p, r, i), load_some(out + i, lanes)), lanes);
        });
    }
}

void finish(const LinearArgs& a, const Products& p) {
    if (a.epilogue == kScatter) return scatter(a, p);
    if (a.epilogue == kGated && a.out_dtype == kQ8) {
        return with_gate(a, [&](auto f) { quantize_gated(a, p, f); });
    }
    with_element(a.out_dtype, [&](auto element) {
        using T = typename decltype(element)::T;
        const int64_t width = min_of(p.width, a.matrix.n - p.col);
        if (a.epilogue == kStore) {
            write_outputs<T>(a, p, p.col, width,
                             [&](const T*, int64_t r, int64_t i, int) { return with_bias(a, p, r, i); });
        } else if (a.epilogue == kAdd) {
            const Vec scale = set1(a.scale);
            write_outputs<T>(a, p, p.col, width, [&](const T* out, int64_t r, int64_t i, int lanes) {
                return fma(scale, with_bias(a, p, r, i), load_some(out, lanes));
            });
        } else {
            with_gate(a, [&](auto f) {
                write_outputs<T>(a, p, p.col / 2, width / 2,
                                 [&](const T*, int64_t r, int64_t i, int) { return gated(a, p, r, i, f); });
            });
        }
    });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
