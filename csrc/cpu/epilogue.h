// Epilogues of products: what becomes of their outputs. Products leave outputs in a small buffer, which stays in the
// first-level cache. Here adapters add to them (lora_b.h), they get their bias, and they are stored, added to an array,
// activated, gated or quantized. Included by int_dot.h and linear_amx.h only.
#pragma once

#include "lora_b.h"
#include "quantize.h"
#include "summation_tree.h"

namespace octavo::OCTAVO_ISA {
namespace {

// How far ahead of its use a weight is fetched, in bytes over all panels that are read at once: about the memory's
// latency times the bandwidth of one core.
constexpr int kPrefetchBytes = 4096;

// Returns how many vectors of outputs an epilogue finishes together. Gated outputs need whole pairs of gate and up
// panels, quantized outputs a whole block of the row. Other epilogues take `otherwise`.
inline int64_t epilogue_vecs(const LinearArgs& a, int64_t otherwise) {
    const bool by_blocks = is_quantized(a.out_dtype);
    if (a.epilogue == kActivated && by_blocks) return 2 * kVecsPerPanel;
    if (a.epilogue != kGated) return otherwise;
    return (by_blocks ? 4 : 2) * kVecsPerPanel;
}
constexpr int kMaxEpilogueWidth = 4 * kPanel;

// Returns the number of panels of a matrix. Gate and up have whole panels each.
inline int64_t panels_of(const Matrix& m) {
    return m.gated ? (m.n / 2 + kPanel - 1) / kPanel * 2 : (m.n + kPanel - 1) / kPanel;
}

// Segment `number` of a matrix: elements [begin, begin + size) of k.
struct Segment {
    int64_t number, begin, size;
};

inline Segment segment_of(const Matrix& m, int64_t number) {
    const int64_t size = m.k / m.segments;
    return {number, number * size, size};
}

// Computes y as the sum of a matrix's segments, in the order of summation_tree.h. make(segment, to) writes one
// segment's products, `rows` by `width` floats, whose rows lie kMaxEpilogueWidth apart. Sums that wait for others are
// in `partial_sums`: kTreeDepth - 1 of them, `step` floats apart.
template <class Make>
inline void sum_segments(const Matrix& m, float* y, float* partial_sums, int64_t step, int64_t rows, int64_t width,
                         Make make) {
    const auto at = [&](int depth) { return depth == 0 ? y : partial_sums + (depth - 1) * step; };
    in_tree(
        m.segments, [&](int index, int depth) { make(segment_of(m, index), at(depth)); },
        [&](int depth) {
            float* to = at(depth - 1);
            const float* more = at(depth);
            for (int64_t r = 0; r < rows; ++r, to += kMaxEpilogueWidth, more += kMaxEpilogueWidth) {
                for (int64_t i = 0; i < width; i += kLanes) store(to + i, add(load(to + i), load(more + i)));
            }
        });
}

// Outputs with their bias. It copies the pointers, which stay in registers while outputs are stored.
struct Biased {
    const float* y;
    const float* bias;
    int64_t stride;

    Biased(const LinearArgs& a, const Products& p)
        : y(p.y), bias(a.matrix.bias ? a.matrix.bias + p.col : nullptr), stride(p.stride) {}

    Vec at(int64_t r, int64_t i) const {
        const Vec sum = load(y + r * stride + i);
        return bias ? add(sum, load(bias + i)) : sum;
    }
};

// Calls f with the function that makes an output of gate and up, exact enough for outputs of type E.
template <class E, class F>
inline void with_gate(const LinearArgs& a, F f) {
    if (a.activation != kClamped) {
        return with_activation<E>(a.activation, [&](auto activation) {
            f([=](Vec gate, Vec up) __attribute__((always_inline)) { return mul(activation(gate), up); });
        });
    }
    f([&](Vec gate, Vec up) __attribute__((always_inline)) {
        const Vec limit = set1(a.clamp.limit);
        const Vec low = min(limit, gate);  // a NaN gate stays NaN: min and max return their second operand then
        const Vec shifted = add(max(negated(limit), min(limit, up)), set1(1.0f));
        return mul(gated_by(low, mul(set1(a.clamp.slope), low)), shifted);
    });
}

// Returns element i of row r's gated outputs. Gate and up panels alternate.
template <class Gate>
__attribute__((always_inline)) inline Vec gated(Biased sums, int64_t r, int64_t i, Gate gate) {
    const int64_t gate_at = i / kPanel * 2 * kPanel + i % kPanel;
    return gate(sums.at(r, gate_at), sums.at(r, gate_at + kPanel));
}

// Stores f(where, row, index, lanes) in `width` columns of the output, from column `begin` on, vector by vector.
// `where` points to the place in the output.
template <class T, class F>
inline void write_outputs(const LinearArgs& a, const Products& p, int64_t begin, int64_t width, F f) {
    const int64_t rows = p.rows, stride = a.out_stride;
    T* out = static_cast<T*>(a.out) + p.row * stride + begin;
    for (int64_t r = 0; r < rows; ++r, out += stride) {
        int64_t pairs = 0;
        for (; pairs + 2 * kLanes <= width; pairs += 2 * kLanes) {
            const Vec first = f(out + pairs, r, pairs, kLanes);
            store_two(out + pairs, first, f(out + pairs + kLanes, r, pairs + kLanes, kLanes));
        }
        for_vectors(width - pairs, [&](int64_t j, int lanes) {
            const int64_t i = pairs + j;
            store_some(out + i, f(out + i, r, i, lanes), lanes);
        });
    }
}

// Quantizes the outputs output(row, index), `width` of each row from column `begin` on. Outputs that pad the last
// panels are exactly zero, and so are their gated products. All outputs are made before any is quantized, in place of
// sums that are read no more: a row's steps wait for each other, so those of many rows take turns.
template <class Output>
inline void quantize_outputs(const LinearArgs& a, const Products& p, int64_t begin, int64_t width, Output output) {
    QBlock* out = static_cast<QBlock*>(a.out) + p.row * a.out_stride + begin / kQBlock;
    for (int64_t r = 0; r < p.rows; ++r) {
        for (int64_t i = 0; i < width; i += kLanes) store(p.y + r * p.stride + i, output(r, i));
        // Blocks of rows lie far apart: a store to each would wait for memory.
        const char* block = reinterpret_cast<const char*>(out + r * a.out_stride);
        for (size_t line = 0; line < sizeof(QBlock); line += 64) __builtin_prefetch(block + line, 1);
    }
    for (int64_t r = 0; r < p.rows; ++r, out += a.out_stride) {
        const float* y = p.y + r * p.stride;
        quantize_row(width, out, a.out_dtype == kQ16 ? out + a.out_stride / 2 : nullptr,
                     [&](int64_t i, int) { return load(y + i); });
    }
}

template <class Gate>
inline void quantize_gated(const LinearArgs& a, const Products& p, Gate gate) {
    const Biased sums(a, p);
    quantize_outputs(a, p, p.col / 2, p.width / 2, [&](int64_t r, int64_t i) { return gated(sums, r, i, gate); });
}

template <class Activation>
inline void quantize_activated(const LinearArgs& a, const Products& p, Activation activation) {
    const Biased sums(a, p);
    quantize_outputs(a, p, p.col, p.width, [&](int64_t r, int64_t i) { return activation(sums.at(r, i)); });
}

inline void scatter(const LinearArgs& a, const Products& p) {
    const int64_t width = min_of(p.width, a.matrix.n - p.col);
    const Biased sums(a, p);
    for (int64_t r = 0; r < p.rows; ++r) {
        float* out = static_cast<float*>(a.out) + a.out_rows[p.row + r] * a.out_stride + p.col;
        const Vec scale = set1(a.row_scales ? a.row_scales[p.row + r] : 1.0f);
        for_vectors(width, [&](int64_t i, int lanes) {
            store_some(out + i, fma(scale, sums.at(r, i), load_some(out + i, lanes)), lanes);
        });
    }
}

// Does the epilogue of some products: adapters, bias and activation first, then storing.
void run_epilogue(const LinearArgs& a, const Products& p) {
    if (a.has_lora) expand(a, p);
    if (a.epilogue == kScatter) return scatter(a, p);
    if (a.epilogue == kGated && is_quantized(a.out_dtype)) {
        return with_gate<F32>(a, [&](auto f) { quantize_gated(a, p, f); });
    }
    if (a.epilogue == kActivated && is_quantized(a.out_dtype)) {
        return with_activation<F32>(a.activation, [&](auto f) { quantize_activated(a, p, f); });
    }
    with_element(a.out_dtype, [&](auto element) {
        using E = decltype(element);
        using T = typename E::T;
        const int64_t width = min_of(p.width, a.matrix.n - p.col);
        const Biased sums(a, p);
        if (a.epilogue == kActivated) {
            with_activation<E>(a.activation, [&](auto f) {
                write_outputs<T>(a, p, p.col, width,
                                 [=](const T*, int64_t r, int64_t i, int) { return f(sums.at(r, i)); });
            });
        } else if (a.epilogue == kStore) {
            write_outputs<T>(a, p, p.col, width, [=](const T*, int64_t r, int64_t i, int) { return sums.at(r, i); });
        } else if (a.epilogue == kAdd) {
            const Vec scale = set1(a.scale);
            write_outputs<T>(a, p, p.col, width, [=](const T* out, int64_t r, int64_t i, int lanes) {
                return fma(scale, sums.at(r, i), load_some(out, lanes));
            });
        } else {
            with_gate<E>(a, [&](auto f) {
                write_outputs<T>(a, p, p.col / 2, width / 2,
                                 [=](const T*, int64_t r, int64_t i, int) { return gated(sums, r, i, f); });
            });
        }
    });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
