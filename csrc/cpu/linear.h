// Products with packed matrices of floats, and the choice among all products by a matrix's format. One micro-kernel
// computes R rows by V vectors of outputs. Each output has one accumulator that runs over a segment of k in order. So a
// row's bits depend neither on R and V nor on how the work is cut. Products with integer matrices are in int_product.h,
// products by AMX's tile instructions in linear_amx.h. Included by kernels.cpp and products.cpp only.
#pragma once

#include "int_product.h"
#ifdef OCTAVO_AMX
#include "linear_amx.h"
#endif

namespace octavo::OCTAVO_ISA {
namespace {

// Computes rows row .. row + R - 1 by outputs vec * kLanes .. (vec + V) * kLanes - 1 over one segment of k, into rows
// of y.
template <class E, int R, int V>
void linear_tile(const LinearArgs& a, Segment segment, int64_t row, int64_t vec, float* y) {
    using T = typename E::T;
    constexpr int kPanels = V > kVecsPerPanel ? V / kVecsPerPanel : 1;
    constexpr int kVecsEach = V / kPanels;
    constexpr int kVecElements = kLanes * E::kStep;
    constexpr int kVecBytes = kVecElements * static_cast<int>(sizeof(T));
    constexpr int kAhead = kPrefetchBytes / kPanels;

    const int64_t steps = (segment.size + E::kStep - 1) / E::kStep;
    const int64_t full_steps = segment.size / E::kStep;
    const int64_t panel_elements = (a.matrix.k + E::kStep - 1) / E::kStep * kPanel * E::kStep;
    const T* w = static_cast<const T*>(a.matrix.data) + vec / kVecsPerPanel * panel_elements + segment.begin * kPanel +
                 vec % kVecsPerPanel * kVecElements;
    const T* x[R];
    for (int r = 0; r < R; ++r) x[r] = static_cast<const T*>(a.x) + (row + r) * a.x_stride + segment.begin;

    Vec acc[R][V];
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) acc[r][v] = zero();
    }
    // Adds one step of k, or one part of the step. Sets without a dot product of pairs take two products a step: part 0
    // multiplies the first elements of all pairs, part 1 the second, in the order of madd. Both at once would not fit
    // the registers.
    const auto add_part = [&](int64_t i, auto part) __attribute__((always_inline)) {
        constexpr int kPart = decltype(part)::kValue;
        decltype(E::template part<kPart>(E::load_lanes(w))) wv[V];
        for (int v = 0; v < V; ++v) {
            const T* p = w + v / kVecsEach * panel_elements + v % kVecsEach * kVecElements;
            wv[v] = E::template part<kPart>(E::load_lanes(p));
            if (kPart == 0 && v * kVecBytes % 64 == 0) {
                __builtin_prefetch(reinterpret_cast<const char*>(p) + kAhead);
            }
        }
        for (int r = 0; r < R; ++r) {
            const auto xv = E::template part<kPart>(E::broadcast(x[r] + i * E::kStep));
            for (int v = 0; v < V; ++v) acc[r][v] = E::madd_part(acc[r][v], xv, wv[v]);
        }
    };
    for (int64_t i = 0; i < full_steps; ++i) {
        add_part(i, Constant<0>{});
        if constexpr (E::kParts == 2) {
            asm("" : "+r"(w), "+r"(i));  // so that the compiler reads w and x again and keeps no registers
            add_part(i, Constant<1>{});
        }
        w += kPanel * E::kStep;
    }
    if (full_steps < steps) {
        for (int r = 0; r < R; ++r) {
            // The last pair lacks its second element: broadcast_last puts a zero there.
            const typename E::Lanes xv = E::broadcast_last(x[r] + full_steps * E::kStep);
            for (int v = 0; v < V; ++v) {
                const T* p = w + v / kVecsEach * panel_elements + v % kVecsEach * kVecElements;
                acc[r][v] = E::madd(acc[r][v], xv, E::load_lanes(p));
            }
        }
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) store(y + r * kMaxEpilogueWidth + v * kLanes, acc[r][v]);
    }
}

#ifdef OCTAVO_I8MM
// As linear_tile, for bf16 by ARM's matrix instructions: two rows by two outputs at a time. If R is odd, the last row
// is its own neighbour. The instructions add the pairs of k in the order of linear_tile and round as its dot products
// do, so a row has the same bits either way.
template <int R, int V>
void bf16_tile_by_matrices(const LinearArgs& a, Segment segment, int64_t row, int64_t vec, float* y) {
    constexpr int kPairs = (R + 1) / 2;
    constexpr int kVecElements = kLanes * 2;
    constexpr int kStepElements = kPanel * 2;
    static_assert(V <= kVecsPerPanel, "vectors of one panel");
    const int64_t steps = (a.matrix.k + 1) / 2;
    const int64_t fours = segment.size / 4;
    const uint16_t* w = static_cast<const uint16_t*>(a.matrix.data) + vec / kVecsPerPanel * steps * kStepElements +
                        segment.begin * kPanel + vec % kVecsPerPanel * kVecElements;
    const uint16_t* x[2 * kPairs];
    for (int r = 0; r < 2 * kPairs; ++r) {
        x[r] = static_cast<const uint16_t*>(a.x) + (row + min_of(r, R - 1)) * a.x_stride + segment.begin;
    }
    Vec acc[kPairs][V][2];
    for (int p = 0; p < kPairs; ++p) {
        for (int v = 0; v < V; ++v) acc[p][v][0] = acc[p][v][1] = zero();
    }
    const auto add_four = [&](auto second_step, auto x_of_pair) __attribute__((always_inline)) {
        TwoPairs wv[V];
        for (int v = 0; v < V; ++v) {
            // An output's pair of this step and its pair of the next lie side by side: four k of two outputs are an
            // operand.
            wv[v] = interleaved(load_pairs(w + v * kVecElements), second_step(w + kStepElements + v * kVecElements));
        }
        for (int p = 0; p < kPairs; ++p) {
            const Pairs xv = x_of_pair(p);
            for (int v = 0; v < V; ++v) {
                for (int i = 0; i < 2; ++i) acc[p][v][i] = multiply_matrices(acc[p][v][i], wv[v].of[i], xv);
            }
        }
    };
    for (int64_t i = 0; i < fours; ++i, w += 2 * kStepElements) {
        for (int line = 0; line < V * kLanes * 4; line += 64) {
            __builtin_prefetch(reinterpret_cast<const char*>(w) + kPrefetchBytes + line);
            __builtin_prefetch(reinterpret_cast<const char*>(w + kStepElements) + kPrefetchBytes + line);
        }
        add_four([](const uint16_t* p) { return load_pairs(p); },
                 [&](int p) { return load_two_rows(x[2 * p] + 4 * i, x[2 * p + 1] + 4 * i); });
    }
    if (const int64_t rest = segment.size - 4 * fours; rest > 0) {
        // Missing elements are zeros, which add nothing.
        uint16_t last[2 * kPairs][4] = {};
        for (int r = 0; r < 2 * kPairs; ++r) memcpy(last[r], x[r] + 4 * fours, static_cast<size_t>(rest) * 2);
        const bool has_second = rest > 2;
        add_four([=](const uint16_t* p) { return has_second ? load_pairs(p) : set1_pair(0); },
                 [&](int p) { return load_two_rows(last[2 * p], last[2 * p + 1]); });
    }
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < V; ++v) {
            // Sums lie as [2 outputs][2 rows] by instruction; sums_by_row gathers a row's.
            const TwoVecs two = sums_by_row(acc[r / 2][v][0], acc[r / 2][v][1]);
            store(y + r * kMaxEpilogueWidth + v * kLanes, two.of[r % 2]);
        }
    }
}
#endif

// Computes a tile of R rows. A single row would leave half of a matrix instruction idle, so vectors take it.
template <class E, int R, int V>
inline void linear_tile_of_rows(const LinearArgs& a, Segment segment, int64_t row, int64_t vec, float* y) {
#ifdef OCTAVO_I8MM
    if constexpr (E::kStep == 2 && R > 1) {
        bf16_tile_by_matrices<R, V>(a, segment, row, vec, y);
    } else {
        linear_tile<E, R, V>(a, segment, row, vec, y);
    }
#else
    linear_tile<E, R, V>(a, segment, row, vec, y);
#endif
}

// Computes `vecs` vectors of outputs: V at a time, the rest with half as many.
template <class E, int V, int kMaxRows>
inline void linear_vecs(const LinearArgs& a, Segment segment, int64_t rows, int64_t row, int64_t vec, int64_t vecs,
                        float* y) {
    int64_t v = 0;
    for (; v + V <= vecs; v += V) {
        with_constant<kMaxRows>(rows, [&](auto r) {
            linear_tile_of_rows<E, decltype(r)::kValue, V>(a, segment, row, vec + v, y + v * kLanes);
        });
    }
    if constexpr (V > 2) {
        if (v < vecs) linear_vecs<E, V / 2, kMaxRows>(a, segment, rows, row, vec + v, vecs - v, y + v * kLanes);
    }
}

// Computes the vectors of an epilogue for every tile of rows, then those of the next epilogue: their weights stay in
// the cache meanwhile.
template <class E, int V, int kMaxRows>
void linear_columns(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t vec_begin, int64_t vec_end) {
    constexpr int kFloats = kMaxRows * kMaxEpilogueWidth;
    alignas(64) float y[kFloats];
    alignas(64) float partial_sums[(kTreeDepth - 1) * kFloats];
    const int64_t epilogue_width = epilogue_vecs(a, V);
    const int64_t rows = row_end - row_begin;
    const int64_t tiles = (rows + kMaxRows - 1) / kMaxRows;
    for (int64_t vec = vec_begin; vec < vec_end; vec += epilogue_width) {
        const int64_t vecs = min_of(epilogue_width, vec_end - vec);
        if (a.has_lora && vec + vecs < vec_end) {
            const int64_t next = vec + vecs, width = min_of(epilogue_width, vec_end - next);
            fetch_factors(a, row_begin, row_end, next / kVecsPerPanel, (width + kVecsPerPanel - 1) / kVecsPerPanel);
        }
        for (int64_t t = 0; t < tiles; ++t) {
            const int64_t begin = row_begin + rows * t / tiles;
            const int64_t end = row_begin + rows * (t + 1) / tiles;
            sum_segments(a.matrix, y, partial_sums, kFloats, end - begin, vecs * kLanes,
                         [&](Segment segment, float* to) {
                             linear_vecs<E, V, kMaxRows>(a, segment, end - begin, begin, vec, vecs, to);
                         });
            run_epilogue(a, {y, kMaxEpilogueWidth, begin, end - begin, vec * kLanes, vecs * kLanes});
        }
    }
}

// Chooses the shape of tiles: fewer rows take more vectors of outputs, to hide latency.
template <class E>
void linear_block(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t vec_begin, int64_t vec_end) {
    const int64_t rows = row_end - row_begin;
    if (rows <= kTileRows8) {
        linear_columns<E, 8, kTileRows8>(a, row_begin, row_end, vec_begin, vec_end);
    } else if (rows <= kTileRows4) {
        linear_columns<E, 4, kTileRows4>(a, row_begin, row_end, vec_begin, vec_end);
    } else {
        linear_columns<E, kTileVecs, kTileRows>(a, row_begin, row_end, vec_begin, vec_end);
    }
}

// Computes rows row_begin .. row_end - 1 by panels panel_begin .. panel_end - 1, whole epilogues, with the
// product of the matrix's format.
void product_block(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    const Matrix& m = a.matrix;
    if (m.format == kWeightF32) {
        linear_block<F32>(a, row_begin, row_end, panel_begin * kVecsPerPanel, panel_end * kVecsPerPanel);
    } else if (m.format == kWeightBF16) {
#ifdef OCTAVO_AMX
        bf16_tile_block(a, row_begin, row_end, panel_begin, panel_end);
#else
        linear_block<BF16>(a, row_begin, row_end, panel_begin * kVecsPerPanel, panel_end * kVecsPerPanel);
#endif
    } else {
        with_format(
            m, [&](auto format) { int_product_task<decltype(format)>(a, row_begin, row_end, panel_begin, panel_end); });
    }
}

// The kernel: one task is one chunk of rows by one chunk of panels.
void linear(const void* args, int64_t task) {
    const LinearArgs& a = *static_cast<const LinearArgs*>(args);
    const Matrix& m = a.matrix;
    const int64_t panels = panels_of(m);
    const int64_t epilogue_panels = epilogue_vecs(a, kVecsPerPanel) / kVecsPerPanel;
    const int64_t epilogues = (panels + epilogue_panels - 1) / epilogue_panels;
    const int64_t row_chunk = task / a.panel_chunks;
    const int64_t panel_chunk = task % a.panel_chunks;
    const int64_t row_begin = a.rows * row_chunk / a.row_chunks;
    const int64_t row_end = a.rows * (row_chunk + 1) / a.row_chunks;
    const int64_t panel_begin = epilogues * panel_chunk / a.panel_chunks * epilogue_panels;
    const int64_t panel_end = min_of(epilogues * (panel_chunk + 1) / a.panel_chunks * epilogue_panels, panels);
    // An integer product has fetched the factors that the next task of its rows begins with. If all tasks have the same
    // rows, the next one may be another thread's, so each task fetches its own.
    if (a.has_lora && (!is_integer(m.format) || panel_begin == 0 || a.row_chunks == 1)) {
        fetch_factors(a, row_begin, row_end, panel_begin, min_of(epilogue_panels, panel_end - panel_begin));
    }
    product_block(a, row_begin, row_end, panel_begin, panel_end);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
