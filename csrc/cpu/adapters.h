// The first half of what adapters add to a product: rows grouped by adapter meet the factors of theirs by the kernels
// of linear.h. The second half is part of the product's epilogue. Included by kernels.cpp and products.cpp only.
#pragma once

#include "linear.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Row `row` of x as k floats of type T. Quantized rows are what they stand for, outliers included, rounded.
template <class T>
inline void copy_input(const ShrinkArgs& a, int64_t row, T* to) {
    if (a.x_dtype == kQ8) {
        const QBlock* blocks = static_cast<const QBlock*>(a.x) + row * a.x_stride;
        constexpr int kHalf = kQBlock / 2;
        for (int64_t begin = 0; begin < a.k; begin += kHalf) {
            const QBlock& block = blocks[begin / kQBlock];
            const int8_t* q = block.q + begin % kQBlock;
            const int half = static_cast<int>(begin % kQBlock / kHalf);
            const Vec scale = set1(block.scale[half]);
            for_vectors(min_of<int64_t>(kHalf, a.k - begin), [&](int64_t i, int lanes) {
                store_some(to + begin + i, mul(to_float(load_signed_bytes(q + i)), scale), lanes);
            });
            if (block.outlier[half] == 0.0f) continue;
            T* at = to + begin / kQBlock * kQBlock + block.outlier_at[half];
            if constexpr (sizeof(T) == sizeof(float)) {
                *at = block.outlier[half];
            } else {
                *at = narrow_scalar(block.outlier[half]);
            }
        }
        return;
    }
    with_element(a.x_dtype, [&](auto element) {
        using X = typename decltype(element)::T;
        const X* x = static_cast<const X*>(a.x) + row * a.x_stride;
        for_vectors(a.k, [&](int64_t i, int lanes) { store_some(to + i, load_some(x + i, lanes), lanes); });
    });
}

// How far ahead of its use a factor is fetched.
constexpr int kShrinkPrefetchBytes = 8192;
constexpr int kShrinkRows = kTileRows4;

// The beginning of an adapter's A, from where on the products fetch what follows.
inline void fetch_beginning(const AdapterFactors& f) {
    if (f.panels == nullptr || f.rank == 0) return;
    for (int at = 0; at < kShrinkPrefetchBytes; at += 64) __builtin_prefetch(static_cast<const char*>(f.a) + at);
}

// R rows by V vectors of outputs, each in two accumulators that run over k in order and meet at the end: a row's bits
// depend on neither R nor V. Two, because few rows would wait for each sum. The vectors are neighbours in one panel or
// each in the panel after the last one's.
template <class E, int R, int V>
inline void shrink_tile(const typename E::T* const* x, const typename E::T* a, int64_t vec_stride, int64_t k,
                        Vec (*sums)[V]) {
    constexpr int64_t kStepElements = kFactorPanel * E::kStep;
    Vec acc[2][R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) acc[0][r][v] = acc[1][r][v] = zero();
    }
    const auto step = [&](Vec(&to)[R][V], auto broadcast) __attribute__((always_inline)) {
        typename E::Lanes wv[V];
        for (int v = 0; v < V; ++v) {
            wv[v] = E::load_lanes(a + v * vec_stride);
            __builtin_prefetch(reinterpret_cast<const char*>(a + v * vec_stride) + kShrinkPrefetchBytes / V);
        }
        for (int r = 0; r < R; ++r) {
            const typename E::Lanes xv = broadcast(x[r]);
            for (int v = 0; v < V; ++v) to[r][v] = E::madd(to[r][v], xv, wv[v]);
        }
        a += kStepElements;
    };
    int64_t i = 0;
    const auto whole = [&](const typename E::T* row) { return E::broadcast(row + i); };
    for (; i + 2 * E::kStep <= k; i += E::kStep) {
        step(acc[0], whole);
        i += E::kStep;
        step(acc[1], whole);
    }
    if (i + E::kStep <= k) {
        step(acc[0], whole);
        i += E::kStep;
    }
    if (i < k) step(acc[1], [&](const typename E::T* row) { return E::broadcast_last(row + i); });
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) sums[r][v] = add(acc[0][r][v], acc[1][r][v]);
    }
}

template <class E>
void shrink_part(const ShrinkArgs& a, const AdapterRows& part, int64_t split) {
    using T = typename E::T;
    const AdapterSchedule& s = *a.schedule;
    const int32_t* rows = s.rows + part.begin;
    const AdapterFactors& f = a.factors[part.slot];
    const int64_t panels = (f.rank + kFactorPanel - 1) / kFactorPanel;
    const int64_t panel_begin = panels * split / s.splits;
    const int64_t panel_end = panels * (split + 1) / s.splits;
    if (panel_begin == panel_end) return;
    fetch_beginning(f);
    const T* x[kAdapterRows];
    if (a.x_dtype == a.dtype) {
        for (int64_t r = 0; r < part.rows; ++r) x[r] = static_cast<const T*>(a.x) + rows[r] * a.x_stride;
    } else {
        T* copy = static_cast<T*>(a.scratch) + (part.begin * s.splits + split * part.rows) * a.k;
        for (int64_t r = 0; r < part.rows; ++r, copy += a.k) {
            copy_input(a, rows[r], copy);
            x[r] = copy;
        }
    }
    if (&part + 1 < s.parts + s.num_parts) fetch_beginning(a.factors[(&part + 1)->slot]);
    constexpr int64_t kVecs = kFactorPanel / kLanes;  // of a panel
    const int64_t steps = (a.k + E::kStep - 1) / E::kStep;
    const int64_t panel_elements = steps * kFactorPanel * E::kStep;
    const int64_t tiles = (part.rows + kShrinkRows - 1) / kShrinkRows;
    const int64_t vec_end = panel_end * kVecs;
    const auto columns = [&](int64_t vec, auto vecs, int64_t row, auto count) __attribute__((always_inline)) {
        constexpr int kR = decltype(count)::kValue, kV = decltype(vecs)::kValue;
        const T* at = static_cast<const T*>(f.a) + vec / kVecs * panel_elements + vec % kVecs * kLanes * E::kStep;
        Vec acc[kR][kV];
        shrink_tile<E, kR, kV>(x + row, at, kVecs == 1 ? panel_elements : kLanes * E::kStep, a.k, acc);
        for (int r = 0; r < kR; ++r) {
            T* out = static_cast<T*>(a.out) + rows[row + r] * a.out_stride;
            for (int v = 0; v < kV; ++v) {
                const int64_t col = (vec + v) * kLanes;
                const int64_t lanes = min_of<int64_t>(kLanes, f.rank - col);
                if (lanes > 0) store_some(out + col, acc[r][v], static_cast<int>(lanes));
            }
        }
    };
    for (int64_t vec = panel_begin * kVecs; vec < vec_end;) {
        const int64_t vecs = vec_end - vec >= 2 ? 2 : 1;
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t row = part.rows * t / tiles;
            with_constant<kShrinkRows>(part.rows * (t + 1) / tiles - row, [&](auto count) {
                if (vecs == 2) {
                    columns(vec, Constant<2>{}, row, count);
                } else {
                    columns(vec, Constant<1>{}, row, count);
                }
            });
        }
        vec += vecs;
    }
}

void shrink(const void* args, int64_t task) {
    const ShrinkArgs& a = *static_cast<const ShrinkArgs*>(args);
    const AdapterSchedule& s = *a.schedule;
    const AdapterRows& part = s.parts[task / s.splits];
    if (a.factors[part.slot].panels == nullptr) return;
    with_element(a.dtype, [&](auto element) { shrink_part<decltype(element)>(a, part, task % s.splits); });
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
