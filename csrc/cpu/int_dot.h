// The vector code of integer products. A tile is R quantized rows by one panel of 32 outputs. int_layouts.h draws the
// blocks and defines the words. Included by int_dot_amx.h and int_dot_i8mm.h only.
//
//             the panel's codes of block b                     the tile's sums, R = 2, vectors of 16 lanes
//                 outputs 0..15   16..31                             outputs 0..15   16..31
//      group 0   +---------------+---------------+                  +---------------+---------------+
//        step 0  | k0 k1 k2 k3   | k0 k1 k2 k3   |   x row 0   ->   |   sum[0][0]   |   sum[0][1]   |
//        step 1  | k4 k5 k6 k7   | k4 k5 k6 k7   |   x row 1   ->   |   sum[1][0]   |   sum[1][1]   |
//        ...     +---------------+---------------+                  +---------------+---------------+
//      group 1   ...                                                 int32 of one group; acc: float, of all blocks
//
// int_tile, for each block b, for each V vectors of outputs, for each group g of the block:
//   a. dot_group    sum = term + codes * elements      each lane has four k of one output. One instruction for each
//                                                      row, vector and step as drawn: codes of a byte. Nibbles: two,
//                                                      as a step then has k0 .. k7
//   b. add_scaled   acc += scale of the weights * scale of the row * sum
// and then for the same vectors, if the matrix has minima of 32 elements:
//   c. add_minima   acc += minimum * sum of the row's elements
// `dot_group` adds integers, so their order does not matter. `add_scaled` and `add_minima` add floats, in the order of
// blocks and groups. So a row's bits do not depend on R, nor on how the work is cut.
//
// The parameters of a tile's parts:
//
//   x    [R]                the tile's rows, [blocks] each
//   w                       view of the panel from block b on: each round moves it by a block, and increments b
//   acc  [R][kVecsPerPanel] float sums: row r by vector v of the panel
//   sum  [R][V]             integer sums of group g: row r by vector v of the V vectors from v0 on
//   b                       number of the block in x
//   g, s                    group, step of the block
//   v0, V                   first vector of outputs, number of vectors: as many as there are registers for
//   codes, step             the block's codes, and those of step s, from vector v0 on
//   x_stride                QBlocks from one row to the next
//   y    [R]                the results; rows lie kMaxEpilogueWidth floats apart
#pragma once

#include "epilogue.h"
#include "superblock_layouts.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Returns -z * sum(x) for group g; 0 if z was already subtracted from the codes (8 bits only). z is 8, 32 or 128 for
// codes of 4, 6 or 8 bits. Table formats count as 8 bits.
template <class F>
inline int32_t zero_point_term(const QBlock& x, int g) {
    constexpr int kBits = F::kMultipliedBits;
    static_assert(kBits == 4 || kBits == 6 || kBits == 8, "QBlock has no terms of other zero points");
    static_assert(kBits != 6 || F::kGroupElements == 16, "6-bit formats need groups of 16");
    if constexpr (kBits == 8) {
        if (kCodesAreCentred) return 0;
        return F::kGroupElements == 32 ? x.zero_point_terms_z128[g] : x.zero_point_terms_z128_by_16[g];
    } else if constexpr (F::kGroupElements == 16) {
        // From -128 * sum to -z * sum: a multiple of 128 has only zeros in the bits that are shifted out.
        return x.zero_point_terms_z128_by_16[g] >> (8 - kBits);
    } else {
        return x.zero_point_terms_z8[g];
    }
}

// What a tile prefetches for each block: `lines` cache lines of weights from `from` on, and `num_adapter_lines` of the
// adapters' lines. A tile calls prefetch_block once for each block; more or fewer calls would only cost time.
struct TilePrefetch {
    const char* from;
    int lines;
    CacheLines& adapter_lines;
    int64_t num_adapter_lines;

    inline void prefetch_block() {
        for (int i = 0; i < lines; ++i, from += 64) __builtin_prefetch(from, 0, 2);
        adapter_lines.fetch(num_adapter_lines);
    }
};

// Begins the sums at zero if `is_first`, otherwise at the values in y.
template <int R>
__attribute__((always_inline)) inline void load_sums(const float* y, bool is_first, Vec (&acc)[R][kVecsPerPanel]) {
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVecsPerPanel; ++v) {
            acc[r][v] = is_first ? zero() : load(y + r * kMaxEpilogueWidth + v * kLanes);
        }
    }
}

// Stores the sums, times `factor`, in y.
template <int R>
__attribute__((always_inline)) inline void store_sums(const Vec (&acc)[R][kVecsPerPanel], Vec factor, float* y) {
    for (int r = 0; r < R; ++r) {
        for (int v = 0; v < kVecsPerPanel; ++v) {
            store(y + r * kMaxEpilogueWidth + v * kLanes, mul(acc[r][v], factor));
        }
    }
}

// Returns the nibbles, or their entries in the table if F has one: codes of eight bits.
template <class F>
__attribute__((always_inline)) inline Ints codes_of(Ints nibbles, Ints table) {
    return F::kHasTable ? look_up(table, nibbles) : nibbles;
}

// Loads the table of a matrix, if it has one.
template <class F>
__attribute__((always_inline)) inline Ints table_of(const BlocksView& w) {
    return F::kHasTable ? load_table(w.table) : set1_int(0);
}

// Adds a step of eight elements of k: codes of 4 bits or indices of a table, two a byte. int_tile has already passed
// `table` through `centred`; add_step8 does that with its codes. Lane o of a vector has output o:
//   both   bytes k4:k0  k5:k1  k6:k2  k7:k3, high half : low half
//   low    bytes k0 k1 k2 k3,     times the row's x0 x1 x2 x3 in every lane
//   high   bytes k4 k5 k6 k7,     times the row's x4 x5 x6 x7 in every lane
template <class F, int R, int V>
__attribute__((always_inline)) inline void add_step_of_nibbles(const QBlock* const* x, int64_t b, const char* step,
                                                               int s, Ints table, Ints (&sum)[R][V]) {
    const auto add_products = [](Ints sums, Ints codes, Ints x_four) __attribute__((always_inline)) {
        return F::kHasTable ? dot_codes8(sums, codes, x_four) : add_to_sums4(sums, codes, x_four);
    };
    Ints low[V], high[V];
    for (int v = 0; v < V; ++v) {
        const Ints both = load_ints(step + v * kVecBytes);
        low[v] = codes_of<F>(low_nibbles(both), table);    // k0 k1 k2 k3 of each output
        high[v] = codes_of<F>(high_nibbles(both), table);  // k4 k5 k6 k7
    }
    for (int r = 0; r < R; ++r) {
        const Ints x_four = set1_bytes(x[r][b].q + s * 8);  // x0 x1 x2 x3 in every lane
        for (int v = 0; v < V; ++v) sum[r][v] = add_products(sum[r][v], low[v], x_four);
    }
    for (int r = 0; r < R; ++r) {
        const Ints x_four = set1_bytes(x[r][b].q + s * 8 + 4);  // x4 x5 x6 x7 in every lane
        for (int v = 0; v < V; ++v) sum[r][v] = add_products(sum[r][v], high[v], x_four);
    }
}

// Adds steps s and s + 1, of four elements of k each, with codes of 6 bits, a byte each. Without VNNI products are
// added in 16 bits, which hold both steps (docs/kernels.md).
template <int R, int V>
__attribute__((always_inline)) inline void add_two_steps6(const QBlock* const* x, int64_t b, const char* step, int s,
                                                          Ints (&sum)[R][V]) {
    Ints first[V], second[V];
    for (int v = 0; v < V; ++v) {
        first[v] = load_ints(step + v * kVecBytes);                // k0 k1 k2 k3 of each output
        second[v] = load_ints(step + kStepBytes + v * kVecBytes);  // k4 k5 k6 k7
    }
    for (int r = 0; r < R; ++r) {
        const Ints x_first = set1_bytes(x[r][b].q + s * 4);       // x0 x1 x2 x3 in every lane
        const Ints x_second = set1_bytes(x[r][b].q + s * 4 + 4);  // x4 x5 x6 x7
        for (int v = 0; v < V; ++v) sum[r][v] = dot_two_codes6(sum[r][v], first[v], x_first, second[v], x_second);
    }
}

// Adds a step of four elements of k, with codes of 8 bits, a byte each.
template <int R, int V>
__attribute__((always_inline)) inline void add_step8(const QBlock* const* x, int64_t b, const char* step, int s,
                                                     Ints (&sum)[R][V]) {
    Ints codes[V];
    // k0 k1 k2 k3 of each output. `centred` makes codes signed on sets that multiply signed bytes.
    for (int v = 0; v < V; ++v) codes[v] = centred(load_ints(step + v * kVecBytes));
    for (int r = 0; r < R; ++r) {
        const Ints x_four = set1_bytes(x[r][b].q + s * 4);  // x0 x1 x2 x3 in every lane
        for (int v = 0; v < V; ++v) sum[r][v] = dot_codes8(sum[r][v], codes[v], x_four);
    }
}

// Writes the integer sums of group g to `sum`. `table` is that of add_step_of_nibbles.
template <class F, int R, int V>
__attribute__((always_inline)) inline void dot_group(const QBlock* const* x, int64_t b, const char* codes, int g,
                                                     Ints table, Ints (&sum)[R][V]) {
    constexpr int kStepsPerGroup = F::kGroupElements / F::kCodesPerByte / 4;
    for (int r = 0; r < R; ++r) {
        const int32_t term = zero_point_term<F>(x[r][b], g);
        for (int v = 0; v < V; ++v) sum[r][v] = F::kMultipliedBits == 4 ? begin_sums4(term) : set1_int(term);
    }
    constexpr int kStepsAtOnce = F::kMultipliedBits == 6 ? 2 : 1;
#pragma GCC unroll 8
    for (int s = g * kStepsPerGroup; s < (g + 1) * kStepsPerGroup; s += kStepsAtOnce) {
        const char* step = codes + s * kStepBytes;
        if constexpr (F::kCodesPerByte == 2) {
            add_step_of_nibbles<F, R, V>(x, b, step, s, table, sum);
        } else if constexpr (F::kMultipliedBits == 6) {
            add_two_steps6<R, V>(x, b, step, s, sum);
        } else {
            add_step8<R, V>(x, b, step, s, sum);
        }
    }
    // begin_sums4 or end_sums4 adds the zero-point term, never both: end_sums4 where sums were kept in 16 bits
    // (simd_pairs.h).
    if constexpr (F::kMultipliedBits == 4) {
        for (int r = 0; r < R; ++r) {
            const int32_t term = zero_point_term<F>(x[r][b], g);
            for (int v = 0; v < V; ++v) sum[r][v] = end_sums4(sum[r][v], term);
        }
    }
}

// Adds group g's integer sums, scaled, to `acc`. sum_of(r, v) returns a vector of integer sums as floats.
template <class F, int R, int V, class SumOf>
__attribute__((always_inline)) inline void add_scaled(const BlocksView& w, const QBlock* const* x, int64_t b, int g,
                                                      int v0, SumOf sum_of, Vec (&acc)[R][kVecsPerPanel]) {
    for (int v = 0; v < V; ++v) {
        const int output = (v0 + v) * kLanes;  // the first of the vector, in the panel
        const Vec weight_scale = load_scale(w.scales_of_group<F>(g) + output);
        for (int r = 0; r < R; ++r) {
            // A row has one scale for each 32 elements, a group may have 16.
            const Vec row_scale = set1(x[r][b].scale[g * F::kGroupElements / 32]);
            if constexpr (F::kHasMinimaBy16) {
                // acc += row scale * (scale * integer sum + minimum * zero-point term). FormatQ2K::Header says how
                // these minima are stored.
                const Vec added = mul(load(w.minima_by_16<F>(g) + output),
                                      set1(static_cast<float>(x[r][b].zero_point_terms_z128_by_16[g])));
                acc[r][v0 + v] = fma(fma(weight_scale, sum_of(r, v), added), row_scale, acc[r][v0 + v]);
            } else {
                // acc += scale * row scale * integer sum
                acc[r][v0 + v] = fma(mul(weight_scale, row_scale), sum_of(r, v), acc[r][v0 + v]);
            }
        }
    }
}

// Adds the products of a block's minima, one for each 32 elements of k, to `acc`. A lane has an output's two minima,
// and `element_sums` has the row's two: acc += minimum 0 * element sum 0 + minimum 1 * element sum 1.
template <class F, int R, int V>
__attribute__((always_inline)) inline void add_minima(const BlocksView& w, const QBlock* const* x, int64_t b, int v0,
                                                      Vec (&acc)[R][kVecsPerPanel]) {
    for (int v = 0; v < V; ++v) {
        const Pairs minima = load_pairs(w.minima_by_32<F>() + (v0 + v) * kLanes * 2);
        for (int r = 0; r < R; ++r) {
            acc[r][v0 + v] = dot_pairs(acc[r][v0 + v], minima, BF16::broadcast(x[r][b].element_sums));
        }
    }
}

// Computes y[r, 0 .. kPanel) for R rows over `blocks` blocks, and multiplies it by `factor`. The sums begin at zero if
// `is_first`, otherwise at the values in y. Always inlined: as a function, called for each superblock of a single row,
// it would load the sums right after it has stored them, which takes a third of the row's time.
template <class F, int R>
__attribute__((always_inline)) inline void int_tile(BlocksView w, int64_t blocks, const QBlock* rows, int64_t x_stride,
                                                    bool is_first, Vec factor, float* y, TilePrefetch prefetch) {
    constexpr int V = kIntVecs;
    const QBlock* x[R];
    for (int r = 0; r < R; ++r) x[r] = rows + r * x_stride;
    const Ints table = centred(table_of<F>(w));
    Vec acc[R][kVecsPerPanel];
    load_sums<R>(y, is_first, acc);
    for (int64_t b = 0; b < blocks; ++b, w.next_block()) {
        prefetch.prefetch_block();
#pragma GCC unroll 8
        for (int v0 = 0; v0 < kVecsPerPanel; v0 += V) {
#pragma GCC unroll 4
            for (int g = 0; g < F::kGroupsPerBlock; ++g) {
                // Where registers are few (AVX2) the float sums stay in memory while integers are summed.
                leave_in_memory(acc);
                Ints sum[R][V];
                dot_group<F, R, V>(x, b, w.codes + v0 * kVecBytes, g, table, sum);  // a
                const auto sum_of = [&](int r, int v) __attribute__((always_inline)) { return to_float(sum[r][v]); };
                add_scaled<F, R, V>(w, x, b, g, v0, sum_of, acc);  // b
            }
            if constexpr (F::kHasMinimaBy32) add_minima<F, R, V>(w, x, b, v0, acc);  // c
        }
    }
    store_sums<R>(acc, factor, y);
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
