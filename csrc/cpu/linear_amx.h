// Products of bf16 by the tile instructions of AMX, over the same packed matrices: a vector of outputs is a column of a
// tile, and one instruction takes sixteen rows. Tiles with fewer rows are configured so; a row's sums do not depend on
// the number of rows. Tiles add in an order of their own (32 elements of k at a time), so they compute every number of
// rows, even a single row. Included by linear.h only.
#pragma once

#include "amx.h"
#include "epilogue.h"

namespace octavo::OCTAVO_ISA {
namespace {

static_assert(kLanes == kTileMaxRows && kVecsPerPanel == 2, "a tile is a vector wide and a panel two");

// Adds one step of 32 elements of k to sixteen rows, or as many as tiles 0, 1 and 4 have, by a panel: tiles 0 and 1 are
// its two vectors of outputs. With kTall tiles 2, 3 and 5 are the next sixteen rows. A tile's rows of weights are every
// other 64 bytes of a panel: the pairs of one vector of outputs.
template <bool kTall>
inline void bf16_tile_step(const uint16_t* x, const uint16_t* x_below, int64_t x_stride, const uint16_t* w) {
    constexpr int64_t kWeightStride = kPanel * 4;
    tile_load<4>(x, x_stride);
    tile_load<6>(w, kWeightStride);
    tile_load<7>(w + 2 * kLanes, kWeightStride);
    tile_dot_bf16<0, 4, 6>();
    tile_dot_bf16<1, 4, 7>();
    if constexpr (kTall) {
        tile_load<5>(x_below, x_stride);
        tile_dot_bf16<2, 5, 6>();
        tile_dot_bf16<3, 5, 7>();
    }
}

// Products that wait for their epilogue. Vectors do it, some rows with each step, while tiles compute the next
// products.
class Unfinished {
  public:
    explicit Unfinished(const LinearArgs& a) : a_(a) {}

    // Finishes what is left of the products before, and takes these.
    void put(const Products& products) {
        finish_all();
        left_ = products;
    }

    void finish_some(int64_t rows) {
        Products some = left_;
        some.rows = min_of(rows, left_.rows);
        if (some.rows == 0) return;
        run_epilogue(a_, some);
        left_.y += some.rows * left_.stride;
        left_.row += some.rows;
        left_.rows -= some.rows;
    }

    void finish_all() { finish_some(left_.rows); }

  private:
    const LinearArgs& a_;
    Products left_{};
};

// Computes rows row .. row + rows - 1 by one panel over one segment of k, into rows of y. Elements that a segment lacks
// to a whole tile are zeros. Calls meanwhile() after each step.
template <bool kTall, class Meanwhile>
void bf16_tiles(const LinearArgs& a, Segment segment, int64_t row, int rows, int64_t panel, float* y,
                Meanwhile meanwhile) {
    constexpr int64_t kStepElements = kTileK * kPanel;
    const int64_t pairs = (a.matrix.k + 1) / 2;
    const int64_t steps = segment.size / kTileK;
    const int64_t x_stride = a.x_stride * 2;
    const uint16_t* w =
        static_cast<const uint16_t*>(a.matrix.data) + panel * pairs * kPanel * 2 + segment.begin * kPanel;
    const uint16_t* x = static_cast<const uint16_t*>(a.x) + row * a.x_stride + segment.begin;
    const int64_t below = kTall ? kTileMaxRows * a.x_stride : 0;
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (kTall) {
        tile_zero<2>();
        tile_zero<3>();
    }
    for (int64_t i = 0; i < steps; ++i, x += kTileK, w += kStepElements) {
        for (int line = 0; line < kStepElements * 2; line += 64) {
            __builtin_prefetch(reinterpret_cast<const char*>(w) + kPrefetchBytes + line);
        }
        bf16_tile_step<kTall>(x, x + below, x_stride, w);
        meanwhile();
    }
    if (const int64_t rest = segment.size - steps * kTileK; rest > 0) {
        alignas(64) uint16_t last_x[2 * kTileMaxRows * kTileK] = {};
        alignas(64) uint16_t last_w[kStepElements] = {};
        for (int r = 0; r < rows; ++r) {
            memcpy(last_x + r * kTileK, x + r * a.x_stride, static_cast<size_t>(rest) * sizeof(*x));
        }
        memcpy(last_w, w, static_cast<size_t>((rest + 1) / 2 * kPanel * 2) * sizeof(*w));
        bf16_tile_step<kTall>(last_x, last_x + kTileMaxRows * kTileK, kTileMaxBytes, last_w);
    }
    constexpr int64_t kStride = kMaxEpilogueWidth * sizeof(float);
    tile_store<0>(y, kStride);
    tile_store<1>(y + kLanes, kStride);
    if constexpr (kTall) {
        tile_store<2>(y + kTileMaxRows * kMaxEpilogueWidth, kStride);
        tile_store<3>(y + kTileMaxRows * kMaxEpilogueWidth + kLanes, kStride);
    }
}

// Computes `count` rows at a time; row_end - row_begin is a multiple. The panels of an epilogue meet all rows before
// the next panels do. With kWaits an epilogue that takes vectors as long as products take tiles is done while tiles
// compute the next product.
template <bool kTall, bool kWaits>
void bf16_tile_columns(const LinearArgs& a, int64_t row_begin, int64_t row_end, int count, int64_t panel_begin,
                       int64_t panel_end) {
    constexpr int kFloats = (kTall ? 2 : 1) * kTileMaxRows * kMaxEpilogueWidth;
    alignas(64) float buffers[kWaits ? 2 : 1][kFloats];
    alignas(64) float partial_sums[kFloats];  // sums of segments, each a panel wide
    static_assert((kTreeDepth - 1) * kPanel <= kMaxEpilogueWidth);
    const int upper = min_of(count, kTileMaxRows);
    TileShapes shapes;
    for (int v = 0; v < kVecsPerPanel; ++v) {
        shapes.set(v, upper, kTileMaxBytes);
        if (kTall) shapes.set(2 + v, count - upper, kTileMaxBytes);
        shapes.set(6 + v, kTileMaxRows, kTileMaxBytes);
    }
    shapes.set(4, upper, kTileMaxBytes);
    if (kTall) shapes.set(5, count - upper, kTileMaxBytes);
    const TileScope scope(shapes);
    const int64_t epilogue_panels = epilogue_vecs(a, kVecsPerPanel) / kVecsPerPanel;
    const int64_t steps = epilogue_panels * (a.matrix.k / kTileK);
    const int64_t rows_a_step = steps > 0 ? (count + steps - 1) / steps : count;
    Unfinished before(a);
    int turn = 0;
    for (int64_t panel = panel_begin; panel < panel_end; panel += epilogue_panels) {
        const int64_t panels = min_of(epilogue_panels, panel_end - panel), next = panel + panels;
        if (a.has_lora) fetch_factors(a, row_begin, row_end, next, min_of(epilogue_panels, panel_end - next));
        for (int64_t row = row_begin; row < row_end; row += count) {
            float* y = buffers[turn];
            for (int64_t p = 0; p < panels; ++p) {
                sum_segments(a.matrix, y + p * kPanel, partial_sums, kPanel, count, kPanel,
                             [&](Segment segment, float* to) {
                                 bf16_tiles<kTall>(a, segment, row, count, panel + p, to, [&] {
                                     if constexpr (kWaits) before.finish_some(rows_a_step);
                                 });
                             });
            }
            const Products products{y, kMaxEpilogueWidth, row, count, panel * kPanel, panels * kPanel};
            if constexpr (kWaits) {
                before.put(products);
                turn = 1 - turn;
            } else {
                run_epilogue(a, products);
                if (a.has_lora) tile_configure(shapes);  // adapters configured tiles of their own
            }
        }
    }
    before.finish_all();
}

// Activations and gates are the epilogues that are worth waiting for. With adapters none waits: they use tiles
// too.
template <bool kTall>
void bf16_tile_rows(const LinearArgs& a, int64_t row_begin, int64_t row_end, int count, int64_t panel_begin,
                    int64_t panel_end) {
    if ((a.epilogue == kActivated || a.epilogue == kGated) && !a.has_lora) {
        bf16_tile_columns<kTall, true>(a, row_begin, row_end, count, panel_begin, panel_end);
    } else {
        bf16_tile_columns<kTall, false>(a, row_begin, row_end, count, panel_begin, panel_end);
    }
}

// Computes 32 rows at a time, then the rest with tiles of as many rows as are left.
void bf16_tile_block(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    constexpr int kTallRows = 2 * kTileMaxRows;
    const int rest = static_cast<int>((row_end - row_begin) % kTallRows);
    const int64_t row_rest = row_end - rest;
    if (row_rest > row_begin) bf16_tile_rows<true>(a, row_begin, row_rest, kTallRows, panel_begin, panel_end);
    if (rest > kTileMaxRows) {
        bf16_tile_rows<true>(a, row_rest, row_end, rest, panel_begin, panel_end);
    } else if (rest > 0) {
        bf16_tile_rows<false>(a, row_rest, row_end, rest, panel_begin, panel_end);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
