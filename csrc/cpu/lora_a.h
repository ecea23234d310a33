// Adapters' first product, x A^T: rows grouped by adapter meet the A of their adapter (ShrinkArgs). The second product,
// by B, is part of the base product's epilogue (lora_b.h). Included by experts.h, kernels.cpp and products.cpp only.
#pragma once

#include "linear.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Copies row `row` of x as k floats of type T. Quantized rows become what they stand for, outliers included, rounded to
// T.
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
                const Vec values = mul(to_float(load_signed_bytes(q + i)), scale);
                if constexpr (sizeof(T) != sizeof(float)) {
                    if (lanes == kLanes) return store_own(to + begin + i, values);
                }
                store_some(to + begin + i, values, lanes);
            });
            for (int i = 0; i < kMaxOutliers; ++i) {
                const float outlier = block.outlier[half][i];
                if (outlier == 0.0f) continue;
                T* at = to + begin / kQBlock * kQBlock + block.outlier_at[half][i];
                if constexpr (sizeof(T) == sizeof(float)) {
                    *at = outlier;
                } else {
                    *at = narrow_scalar(outlier);
                }
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

// Fetches the beginning of an adapter's A; products fetch what follows.
inline void fetch_beginning(const AdapterFactors& f) {
    if (f.panels == nullptr || f.rank == 0 || f.replaces) return;
    for (int at = 0; at < kShrinkPrefetchBytes; at += 64) __builtin_prefetch(static_cast<const char*>(f.a) + at);
}

// Computes R rows by V vectors of outputs. Each output has two accumulators that take turns over k in order and are
// added at the end: a row's bits depend on neither R nor V. With one accumulator few rows would wait for each sum. The
// vectors are neighbours in one panel or, `vec_stride` apart, in neighbouring panels.
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

#ifdef OCTAVO_AMX
// Adds one step of 32 elements of k: rows of x by kCount panels of A, which lie `panel_elements` apart, into tiles 0 to
// kCount - 1.
template <int kCount>
inline void shrink_step(const uint16_t* x, int64_t x_stride, const uint16_t* a, int64_t panel_elements) {
    constexpr int64_t kStride = kFactorPanel * 4;
    tile_load<4>(x, x_stride);
    for_constants<kCount>([&](auto panel) {
        constexpr int kPanelTile = 5 + panel.kValue % 3;
        tile_load<kPanelTile>(a + panel.kValue * panel_elements, kStride);
        tile_dot_bf16<panel.kValue, 4, kPanelTile>();
    });
}

constexpr int kMostPanels = 4;

// Computes x [rows, k], whose rows lie x_stride elements apart, by kCount panels, into y [kCount][16][16]. Elements
// that k lacks to a whole tile are zeros.
template <int kCount>
void shrink_tiles(const uint16_t* x, int64_t x_stride, int64_t rows, const uint16_t* a, int64_t panel_elements,
                  int64_t k, float* y) {
    constexpr int64_t kStepElements = kTileK * kFactorPanel;
    for_constants<kCount>([](auto panel) { tile_zero<panel.kValue>(); });
    const int64_t steps = k / kTileK;
    for (int64_t i = 0; i < steps; ++i) {
        for (int p = 0; p < kCount; ++p) {
            const char* next = reinterpret_cast<const char*>(a + i * kStepElements + p * panel_elements);
            for (int line = 0; line < kStepElements * 2; line += 64) {
                __builtin_prefetch(next + kShrinkPrefetchBytes / kCount + line);
            }
        }
        shrink_step<kCount>(x + i * kTileK, x_stride * 2, a + i * kStepElements, panel_elements);
    }
    if (const int64_t rest = k - steps * kTileK; rest > 0) {
        alignas(64) uint16_t last_x[kTileMaxRows * kTileK] = {};
        alignas(64) uint16_t last_a[kCount * kStepElements] = {};
        for (int64_t r = 0; r < rows; ++r) {
            memcpy(last_x + r * kTileK, x + r * x_stride + steps * kTileK, static_cast<size_t>(rest) * sizeof(*x));
        }
        for (int p = 0; p < kCount; ++p) {
            memcpy(last_a + p * kStepElements, a + p * panel_elements + steps * kStepElements,
                   static_cast<size_t>((rest + 1) / 2 * 2 * kFactorPanel) * sizeof(*a));
        }
        shrink_step<kCount>(last_x, kTileMaxBytes, last_a, kStepElements);
    }
    constexpr int64_t kStride = kFactorPanel * sizeof(float);
    constexpr int kElements = kTileMaxRows * kFactorPanel;
    for_constants<kCount>([&](auto panel) { tile_store<panel.kValue>(y + panel.kValue * kElements, kStride); });
}

// Does the products of shrink_part by tiles. `x` is the part's rows, x_stride elements apart.
void shrink_part_by_tiles(const ShrinkArgs& a, const AdapterRows& part, const uint16_t* x, int64_t x_stride,
                          int64_t panel_begin, int64_t panel_end) {
    const AdapterFactors& f = a.factors[part.slot];
    const int32_t* rows = a.schedule->rows + part.begin;
    const int64_t panel_elements = (a.k + 1) / 2 * 2 * kFactorPanel;
    alignas(64) float y[kMostPanels * kTileMaxRows * kFactorPanel];
    TileShapes shapes;
    for (int t = 0; t <= 4; ++t) shapes.set(t, part.rows, kTileMaxBytes);
    for (int t = 5; t < 8; ++t) shapes.set(t, kTileMaxRows, kTileMaxBytes);
    const TileScope scope(shapes);
    for (int64_t panel = panel_begin; panel < panel_end; panel += kMostPanels) {
        const int64_t count = min_of<int64_t>(kMostPanels, panel_end - panel);
        const uint16_t* from = static_cast<const uint16_t*>(f.a) + panel * panel_elements;
        with_constant<kMostPanels>(count, [&](auto panels) {
            shrink_tiles<decltype(panels)::kValue>(x, x_stride, part.rows, from, panel_elements, a.k, y);
        });
        for (int64_t p = 0; p < count; ++p) {
            const int64_t col = (panel + p) * kFactorPanel;
            const int lanes = static_cast<int>(min_of<int64_t>(kFactorPanel, f.rank - col));
            for (int r = 0; r < part.rows; ++r) {
                uint16_t* out = static_cast<uint16_t*>(a.out) + rows[r] * a.out_stride + col;
                store_some(out, load(y + (p * kTileMaxRows + r) * kFactorPanel), lanes);
            }
        }
    }
}
static_assert(kAdapterRows <= kTileMaxRows && kFactorPanel == kLanes, "a part is a tile high and a panel one wide");
#endif

// If the adapter replaces the base's matrix, the shrunk row is the row itself, padded with a zero if k is odd.
template <class T>
void copy_part(const ShrinkArgs& a, const AdapterRows& part, int64_t split) {
    const int64_t splits = a.schedule->splits, end = part.rows * (split + 1) / splits;
    for (int64_t r = part.rows * split / splits; r < end; ++r) {
        const int32_t row = a.schedule->rows[part.begin + r];
        T* out = static_cast<T*>(a.out) + row * a.out_stride;
        copy_input(a, row, out);
        if (a.k < a.factors[part.slot].rank) out[a.k] = T{};
    }
}

// Computes one part's rows by share `split` of its adapter's panels. Rows in another layout than products need are
// copied first.
template <class E>
void shrink_part(const ShrinkArgs& a, const AdapterRows& part, int64_t split) {
    using T = typename E::T;
    const AdapterSchedule& s = *a.schedule;
    const int32_t* rows = s.rows + part.begin;
    const AdapterFactors& f = a.factors[part.slot];
    if (f.replaces) return copy_part<T>(a, part, split);
    const int64_t panels = (f.rank + kFactorPanel - 1) / kFactorPanel;
    const int64_t panel_begin = panels * split / s.splits;
    const int64_t panel_end = panels * (split + 1) / s.splits;
    if (panel_begin == panel_end) return;
    fetch_beginning(f);
    const T* x[kAdapterRows];
#ifdef OCTAVO_AMX
    constexpr bool kByTiles = E::kStep == 2;
#else
    constexpr bool kByTiles = false;
#endif
    // Tiles need rows at equal distances.
    const bool as_they_are = a.x_dtype == a.dtype && (!kByTiles || rows[part.rows - 1] - rows[0] == part.rows - 1);
    if (as_they_are) {
        for (int64_t r = 0; r < part.rows; ++r) x[r] = static_cast<const T*>(a.x) + rows[r] * a.x_stride;
    } else {
        T* copy = static_cast<T*>(a.scratch) + (part.begin * s.splits + split * part.rows) * a.k;
        for (int64_t r = 0; r < part.rows; ++r, copy += a.k) {
            copy_input(a, rows[r], copy);
            x[r] = copy;
        }
    }
    if (&part + 1 < s.parts + s.num_parts) fetch_beginning(a.factors[(&part + 1)->slot]);
#ifdef OCTAVO_AMX
    if constexpr (kByTiles) {
        return shrink_part_by_tiles(a, part, x[0], as_they_are ? a.x_stride : a.k, panel_begin, panel_end);
    }
#endif
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
