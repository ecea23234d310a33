// Products with packed matrices. One micro-kernel computes R rows by V vectors of outputs, each output in one
// accumulator that runs over k in order, so a row's bits depend neither on R and V nor on how the work was cut.
// Included by kernels.cpp only.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

// How far ahead of its use a weight is fetched, over all panels read at once: about the memory's latency times the
// bandwidth of one core.
constexpr int kPrefetchBytes = 4096;

inline void store_outputs(const LinearArgs& a, int64_t row, int64_t col, Vec v) {
    if (a.bias) v = add(v, load(a.bias + col));
    const int64_t valid = a.n - col;
    if (valid <= 0) return;
    if (a.out_dtype == kF32) {
        float* out = static_cast<float*>(a.out) + row * a.out_stride + col;
        if (valid >= kLanes) {
            store(out, v);
        } else {
            store_n(out, v, static_cast<int>(valid));
        }
    } else {
        uint16_t* out = static_cast<uint16_t*>(a.out) + row * a.out_stride + col;
        if (valid >= kLanes) {
            store(out, v);
        } else {
            store_n(out, v, static_cast<int>(valid));
        }
    }
}

// Rows row .. row + R - 1, outputs vec * kLanes .. (vec + V) * kLanes - 1.
template <class E, int R, int V>
void linear_tile(const LinearArgs& a, int64_t row, int64_t vec) {
    using T = typename E::T;
    constexpr int kPanels = V > kVecsPerPanel ? V / kVecsPerPanel : 1;
    constexpr int kVecsEach = V / kPanels;
    constexpr int kVecElements = kLanes * E::kStep;
    constexpr int kVecBytes = kVecElements * static_cast<int>(sizeof(T));
    constexpr int kAhead = kPrefetchBytes / kPanels;

    const int64_t steps = (a.k + E::kStep - 1) / E::kStep;
    const int64_t full_steps = a.k / E::kStep;
    const int64_t panel_elements = steps * kPanel * E::kStep;
    const T* w =
        static_cast<const T*>(a.weight) + vec / kVecsPerPanel * panel_elements + vec % kVecsPerPanel * kVecElements;
    const T* x[R];
    for (int r = 0; r < R; ++r) x[r] = static_cast<const T*>(a.x) + (row + r) * a.x_stride;

    Vec acc[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) acc[r][v] = zero();
    }
    for (int64_t i = 0; i < full_steps; ++i) {
        typename E::Lanes wv[V];
        for (int v = 0; v < V; ++v) {
            const T* p = w + v / kVecsEach * panel_elements + v % kVecsEach * kVecElements;
            wv[v] = E::load_lanes(p);
            if (v * kVecBytes % 64 == 0) __builtin_prefetch(reinterpret_cast<const char*>(p) + kAhead);
        }
        for (int r = 0; r < R; ++r) {
            const typename E::Lanes xv = E::broadcast(x[r] + i * E::kStep);
            for (int v = 0; v < V; ++v) acc[r][v] = E::madd(acc[r][v], xv, wv[v]);
        }
        w += kPanel * E::kStep;
    }
    if (full_steps < steps) {
        for (int r = 0; r < R; ++r) {
            const typename E::Lanes xv = E::broadcast_last(x[r] + full_steps * E::kStep);
            for (int v = 0; v < V; ++v) {
                const T* p = w + v / kVecsEach * panel_elements + v % kVecsEach * kVecElements;
                acc[r][v] = E::madd(acc[r][v], xv, E::load_lanes(p));
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) store_outputs(a, row + r, (vec + v) * kLanes, acc[r][v]);
    }
}

template <class E, int V, int R>
inline void linear_rows(const LinearArgs& a, int64_t rows, int64_t row, int64_t vec) {
    if (rows == R) {
        linear_tile<E, R, V>(a, row, vec);
    } else if constexpr (R > 1) {
        linear_rows<E, V, R - 1>(a, rows, row, vec);
    }
}

// Each group of V vectors meets every row tile before the next group: its weights stay in the cache meanwhile.
template <class E, int V, int kMaxRows>
void linear_columns(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t vec_begin, int64_t vec_end) {
    const int64_t rows = row_end - row_begin;
    const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
    int64_t vec = vec_begin;
    for (; vec + V <= vec_end; vec += V) {
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t begin = row_begin + rows * t / tiles;
            const int64_t end = row_begin + rows * (t + 1) / tiles;
            linear_rows<E, V, kMaxRows>(a, end - begin, begin, vec);
        }
    }
    if constexpr (V > 2) {
        if (vec < vec_end) linear_columns<E, V / 2, kMaxRows>(a, row_begin, row_end, vec, vec_end);
    }
}

template <class E>
void linear_block(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t vec_begin, int64_t vec_end) {
    const int64_t rows = row_end - row_begin;
    if (rows <= kTileRows8) {
        linear_columns<E, 8, kTileRows8>(a, row_begin, row_end, vec_begin, vec_end);
    } else if (rows <= kTileRows4) {
        linear_columns<E, 4, kTileRows4>(a, row_begin, row_end, vec_begin, vec_end);
    } else {
        linear_columns<E, 2, kTileRows>(a, row_begin, row_end, vec_begin, vec_end);
    }
}

void linear(const void* args, int64_t task) {
    const LinearArgs& a = *static_cast<const LinearArgs*>(args);
    const int64_t panels = (a.n + kPanel - 1) / kPanel;
    const int64_t row_chunk = task / a.panel_chunks;
    const int64_t panel_chunk = task % a.panel_chunks;
    const int64_t row_begin = a.rows * row_chunk / a.row_chunks;
    const int64_t row_end = a.rows * (row_chunk + 1) / a.row_chunks;
    const int64_t vec_begin = panels * panel_chunk / a.panel_chunks * kVecsPerPanel;
    const int64_t vec_end = panels * (panel_chunk + 1) / a.panel_chunks * kVecsPerPanel;
    if (a.dtype == kF32) {
        linear_block<F32>(a, row_begin, row_end, vec_begin, vec_end);
    } else {
        linear_block<BF16>(a, row_begin, row_end, vec_begin, vec_end);
    }
}

// Row token_ids[t] is one lane of one panel: gathered, because a tied embedding is stored only once, packed.
template <class E>
void embedding_rows(const EmbeddingArgs& a, int64_t begin, int64_t end) {
    using T = typename E::T;
    const int64_t steps = (a.k + E::kStep - 1) / E::kStep;
    for (int64_t t = begin; t < end; ++t) {
        const int64_t row = a.token_ids[t];
        T* out = static_cast<T*>(a.out) + t * a.k;
        if (row < 0 || row >= a.n) {
            memset(out, 0, static_cast<size_t>(a.k) * sizeof(T));
            continue;
        }
        const T* w = static_cast<const T*>(a.weight) + (row / kPanel * steps * kPanel + row % kPanel) * E::kStep;
        for (int64_t k = 0; k < a.k; ++k) out[k] = w[k / E::kStep * kPanel * E::kStep + k % E::kStep];
    }
}

void embedding(const void* args, int64_t task) {
    const EmbeddingArgs& a = *static_cast<const EmbeddingArgs*>(args);
    const int64_t begin = task * a.tokens_per_task;
    const int64_t end = min_of(begin + a.tokens_per_task, a.tokens);
    if (a.dtype == kF32) {
        embedding_rows<F32>(a, begin, end);
    } else {
        embedding_rows<BF16>(a, begin, end);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
