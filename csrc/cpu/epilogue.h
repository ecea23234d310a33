// Where the outputs of a product go. The products leave them in a small buffer, which stays in the first-level cache;
// here they get their bias and are stored, added to what is there, or gated. Included by linear.h only.
#pragma once

#include "quantize.h"

namespace octavo::OCTAVO_ISA {
namespace {

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

template <class T>
void store_products(const LinearArgs& a, const Products& p) {
    const int64_t width = min_of(p.width, a.matrix.n - p.col);
    for (int64_t r = 0; r < p.rows; ++r) {
        T* out = static_cast<T*>(a.out) + (p.row + r) * a.out_stride + p.col;
        for_vectors(width, [&](int64_t i, int lanes) { store_some(out + i, with_bias(a, p, r, i), lanes); });
    }
}

template <class T>
void add_products(const LinearArgs& a, const Products& p) {
    const Vec scale = set1(a.scale);
    const int64_t width = min_of(p.width, a.matrix.n - p.col);
    for (int64_t r = 0; r < p.rows; ++r) {
        T* out = static_cast<T*>(a.out) + (p.row + r) * a.out_stride + p.col;
        for_vectors(width, [&](int64_t i, int lanes) {
            store_some(out + i, fma(scale, with_bias(a, p, r, i), load_some(out + i, lanes)), lanes);
        });
    }
}

// Element i of the gated outputs of these products.
inline Vec gated(const LinearArgs& a, const Products& p, int64_t r, int64_t i) {
    const int64_t gate_at = i / kPanel * 2 * kPanel + i % kPanel;
    const Vec gate = with_bias(a, p, r, gate_at);
    const Vec silu = div(gate, add(set1(1.0f), exp(sub(zero(), gate))));
    return mul(silu, with_bias(a, p, r, gate_at + kPanel));
}

template <class T>
void store_gated(const LinearArgs& a, const Products& p) {
    const int64_t begin = p.col / 2;
    const int64_t width = min_of(p.width / 2, a.matrix.n / 2 - begin);
    for (int64_t r = 0; r < p.rows; ++r) {
        T* out = static_cast<T*>(a.out) + (p.row + r) * a.out_stride + begin;
        for_vectors(width, [&](int64_t i, int lanes) { store_some(out + i, gated(a, p, r, i), lanes); });
    }
}

// What pads the last panels is exactly zero, and so is its gated product.
inline void quantize_gated(const LinearArgs& a, const Products& p) {
    for (int64_t r = 0; r < p.rows; ++r) {
        QBlock* out = static_cast<QBlock*>(a.out) + (p.row + r) * a.out_stride + p.col / (2 * kQBlock);
        quantize_row(p.width / 2, out, [&](int64_t i, int) { return gated(a, p, r, i); });
    }
}

void finish(const LinearArgs& a, const Products& p) {
    const bool f32 = a.out_dtype == kF32;
    if (a.epilogue == kStore) {
        f32 ? store_products<float>(a, p) : store_products<uint16_t>(a, p);
    } else if (a.epilogue == kAdd) {
        f32 ? add_products<float>(a, p) : add_products<uint16_t>(a, p);
    } else if (a.out_dtype == kQ8) {
        quantize_gated(a, p);
    } else {
        f32 ? store_gated<float>(a, p) : store_gated<uint16_t>(a, p);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
