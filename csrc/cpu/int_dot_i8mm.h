// The tiles of int_dot.h by ARM's matrix instructions, which multiply two rows by two outputs (simd_neon.h). Included
// by int_product.h only.
#pragma once

#include "int_dot.h"

namespace octavo::OCTAVO_ISA {
namespace {

#ifdef OCTAVO_I8MM

static_assert(!kCodesAreCentred, "usmmla takes unsigned codes, and the table is not centred here");

// Writes the integer sums of group g to `sum`, for pairs of rows: sum[p][v] are two vectors, each [2 outputs][2 rows]
// of the four outputs of vector v by the rows 2p and 2p + 1. Lane o of a vector of codes has output o:
//   first            k0 k1 k2 k3 of outputs 0 1 2 3 (low halves of nibbles)
//   second           k4 k5 k6 k7 of outputs 0 1 2 3 (high halves, or the next step)
//   operands.of[0]   k0 .. k7 of output 0, k0 .. k7 of output 1; of[1]: of outputs 2 and 3
//   eight            x0 .. x7 of row 2p, x0 .. x7 of row 2p + 1
//   sum[p][v][0]     output 0: row 2p, row 2p + 1; output 1: row 2p, row 2p + 1; [1]: of outputs 2 and 3
template <class F, int kPairs, int V>
__attribute__((always_inline)) inline void dot_group_i8mm(const QBlock* const* x, int64_t b, const char* codes, int g,
                                                          Ints table, Ints (&sum)[kPairs][V][2]) {
    // An operand has eight elements of k: a step of codes of 4 bits, or two steps of codes of more bits.
    constexpr int kOperandBytes = 2 / F::kCodesPerByte * kStepBytes;
    constexpr int kOperandsPerGroup = F::kGroupElements / 8;
    for (int p = 0; p < kPairs; ++p) {
        const Ints terms =
            terms_of_two_rows(zero_point_term<F>(x[2 * p][b], g), zero_point_term<F>(x[2 * p + 1][b], g));
        for (int v = 0; v < V; ++v) sum[p][v][0] = sum[p][v][1] = terms;
    }
#pragma GCC unroll 4
    for (int i = g * kOperandsPerGroup; i < (g + 1) * kOperandsPerGroup; ++i) {
        const char* step = codes + i * kOperandBytes;
        TwoInts operands[V];
        for (int v = 0; v < V; ++v) {
            Ints first = load_ints(step + v * kVecBytes), second;
            if constexpr (F::kCodesPerByte == 2) {
                second = codes_of<F>(high_nibbles(first), table);
                first = codes_of<F>(low_nibbles(first), table);
            } else {
                second = load_ints(step + kStepBytes + v * kVecBytes);
            }
            operands[v] = interleaved(first, second);
        }
        for (int p = 0; p < kPairs; ++p) {
            const Ints eight = load_two_rows(x[2 * p][b].q + i * 8, x[2 * p + 1][b].q + i * 8);
            for (int v = 0; v < V; ++v) {
                for (int half = 0; half < 2; ++half) {
                    sum[p][v][half] = multiply_matrices(sum[p][v][half], operands[v].of[half], eight);
                }
            }
        }
    }
}

// As int_tile, by I8MM. If R is odd, the last row is paired with itself.
template <class F, int R>
void int_tile_i8mm(BlocksView w, int64_t blocks, const QBlock* rows, int64_t x_stride, bool is_first, Vec factor,
                   float* y, TilePrefetch prefetch) {
    constexpr int V = kI8mmVecs;
    constexpr int kPairs = (R + 1) / 2;
    const QBlock* x[2 * kPairs];
    for (int r = 0; r < 2 * kPairs; ++r) x[r] = rows + min_of(r, R - 1) * x_stride;
    const Ints table = table_of<F>(w);
    Vec acc[R][kVecsPerPanel];
    load_sums<R>(y, is_first, acc);
    for (int64_t b = 0; b < blocks; ++b, w.next_block()) {
        prefetch.prefetch_block();
        for (int v0 = 0; v0 < kVecsPerPanel; v0 += V) {
#pragma GCC unroll 4
            for (int g = 0; g < F::kGroupsPerBlock; ++g) {
                Ints sum[kPairs][V][2];
                dot_group_i8mm<F, kPairs, V>(x, b, w.codes + v0 * kVecBytes, g, table, sum);
                // sums_by_row: from [output][row] to a row's four outputs.
                const auto sum_of = [&](int r, int v) __attribute__((always_inline)) {
                    return to_float(sums_by_row(sum[r / 2][v][0], sum[r / 2][v][1]).of[r % 2]);
                };
                add_scaled<F, R, V>(w, x, b, g, v0, sum_of, acc);
            }
            if constexpr (F::kHasMinimaBy32) add_minima<F, R, V>(w, x, b, v0, acc);
        }
    }
    store_sums<R>(acc, factor, y);
}

#endif

}  // namespace
}  // namespace octavo::OCTAVO_ISA
