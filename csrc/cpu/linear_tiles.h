// Products by the tile instructions of AMX, over the same packed matrices: a vector of outputs is a column of a tile,
// and sixteen rows are one instruction. Tiles with fewer rows are configured as such; a row's sums do not depend on how
// many there are. Integer products give the bits that the vectors give. Products of bf16 have an order of their own,
// the tiles' (32 elements of k at a time), so that they are made by tiles for any number of rows, a single one too.
// Included by linear.h only.
#pragma once

#include "linear_int.h"
#include "tiles.h"

namespace octavo::OCTAVO_ISA {
namespace {

static_assert(kLanes == kTileMaxRows && kVecsPerPanel == 2, "a tile is a vector wide and a panel two");

// Held for the length of a task and no longer: a thread that has live tiles has 8 KB more to save at each switch, and
// its core may not rest as deeply. Shapes are loaded once or twice a task, of microseconds each.
struct TileScope {
    explicit TileScope(const TileShapes& shapes) { tile_configure(shapes); }
    ~TileScope() { tile_release(); }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

constexpr int kTileK = kTileMaxBytes / 2;  // elements of bf16 that a row of a tile holds

// Sixteen rows, or as many as tiles 0, 1 and 4 have, by a panel: tiles 0 and 1. With kTall tiles 2, 3 and 5 are sixteen
// rows further. The weights of a vector are rows of a tile, every other 64 bytes of a panel.
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

// Rows row .. row + rows - 1 by one panel, into rows of y. What k lacks to a whole tile is zeros.
template <bool kTall>
void bf16_tiles(const LinearArgs& a, int64_t row, int rows, int64_t panel, float* y) {
    constexpr int64_t kStepElements = kTileK * kPanel;
    const int64_t pairs = (a.matrix.k + 1) / 2;
    const int64_t steps = a.matrix.k / kTileK;
    const int64_t x_stride = a.x_stride * 2;
    const uint16_t* w = static_cast<const uint16_t*>(a.matrix.data) + panel * pairs * kPanel * 2;
    const uint16_t* x = static_cast<const uint16_t*>(a.x) + row * a.x_stride;
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
    }
    if (const int64_t rest = a.matrix.k - steps * kTileK; rest > 0) {
        alignas(64) uint16_t last_x[2 * kTileMaxRows * kTileK] = {};
        alignas(64) uint16_t last_w[kStepElements] = {};
        for (int r = 0; r < rows; ++r) {
            memcpy(last_x + r * kTileK, x + r * a.x_stride, static_cast<size_t>(rest) * sizeof(*x));
        }
        memcpy(last_w, w, static_cast<size_t>((rest + 1) / 2 * kPanel * 2) * sizeof(*w));
        bf16_tile_step<kTall>(last_x, last_x + kTileMaxRows * kTileK, kTileMaxBytes, last_w);
    }
    constexpr int64_t kStride = kMaxUnit * sizeof(float);
    tile_store<0>(y, kStride);
    tile_store<1>(y + kLanes, kStride);
    if constexpr (kTall) {
        tile_store<2>(y + kTileMaxRows * kMaxUnit, kStride);
        tile_store<3>(y + kTileMaxRows * kMaxUnit + kLanes, kStride);
    }
}

// `count` rows at a time, as often as they fit. Each unit of panels meets all rows before the next.
template <bool kTall>
void bf16_tile_columns(const LinearArgs& a, int64_t row_begin, int64_t row_end, int count, int64_t panel_begin,
                       int64_t panel_end) {
    alignas(64) float y[(kTall ? 2 : 1) * kTileMaxRows * kMaxUnit];
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
    const int64_t unit = unit_vecs(a, kVecsPerPanel) / kVecsPerPanel;
    for (int64_t panel = panel_begin; panel < panel_end; panel += unit) {
        const int64_t panels = min_of(unit, panel_end - panel);
        for (int64_t row = row_begin; row < row_end; row += count) {
            for (int64_t p = 0; p < panels; ++p) bf16_tiles<kTall>(a, row, count, panel + p, y + p * kPanel);
            finish(a, {y, kMaxUnit, row, count, panel * kPanel, panels * kPanel});
        }
    }
}

void bf16_tile_block(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    constexpr int kTallRows = 2 * kTileMaxRows;
    const int rest = static_cast<int>((row_end - row_begin) % kTallRows);
    const int64_t row_rest = row_end - rest;
    if (row_rest > row_begin) bf16_tile_columns<true>(a, row_begin, row_rest, kTallRows, panel_begin, panel_end);
    if (rest > kTileMaxRows) {
        bf16_tile_columns<true>(a, row_rest, row_end, rest, panel_begin, panel_end);
    } else if (rest > 0) {
        bf16_tile_columns<false>(a, row_rest, row_end, rest, panel_begin, panel_end);
    }
}

// Integer products. Fewer rows than this are left to the vectors: what comes after a tile's products costs the same for
// one row and sixteen (docs/kernels.md counts the cycles).
constexpr int kLeastTileRows = 8;
// Rows that share unpacked codes, and the blocks of codes that are unpacked at a time: 16 KB, as much as half a
// first-level cache.
constexpr int kUnpackRows = 64;
constexpr int kUnpackBlocks = 8;
constexpr int kUnpackedBytes = kPanel * kQBlock;

// Codes that are unpacked lose their z on the way, and an integer sum needs no start: a quarter of the work that each
// sum makes. Codes that lie as tiles want them are taken as they lie, unsigned.
template <class F>
constexpr bool kSignedCodes = F::kBits == 4 || sizeof(typename F::Scale) == 4;

// Sums of a block, as integers: group g of rows at sums[g].
using TileSums = int32_t[kTileMaxRows * kLanes];

// The products of one block with the rows' blocks at x: tiles 0 to 3 are groups, 4 to 7 their operands in turn. Codes
// are those of one byte each.
template <class F, int g = 0>
inline void int_tile_products(const char* codes, const QBlock* x, int64_t x_stride, TileSums* sums) {
    if constexpr (g < F::kGroups) {
        tile_zero<g>();
        tile_load<4 + g % 2>(x->q + g * F::kGroup, x_stride * static_cast<int64_t>(sizeof(QBlock)));
        tile_load<6 + g % 2>(codes + g * F::kGroup * kPanel, kPanel * 4);
        tile_dot_bytes<g, 4 + g % 2, 6 + g % 2, kSignedCodes<F>>();
        tile_store<g>(sums[g], kLanes * 4);
        int_tile_products<F, g + 1>(codes, x, x_stride, sums);
    }
}

// Up to sixteen rows by vector v of a panel, over `blocks` blocks whose codes have one byte each and begin with those
// of the vector. Adds to y, in the vectors' order (int_tile). The products of the next block are under way meanwhile.
// Where there are fewer rows the last stands for those that lack; nobody looks at what it yields.
template <class F>
void int_tile_rows(IntView w, int v, int64_t blocks, const QBlock* x, int64_t x_stride, int rows,
                   TileSums (*sums)[F::kGroups], float* y) {
    Vec acc[kTileMaxRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileMaxRows; ++r) acc[r] = load(y + r * kMaxUnit);
    int_tile_products<F>(w.codes, x, x_stride, sums[0]);
    for (int64_t b = 0; b < blocks; ++b, ++x, w.scales += w.scale_stride) {
        w.codes += w.code_stride;
        if (b + 1 < blocks) int_tile_products<F>(w.codes, x + 1, x_stride, sums[(b + 1) % 2]);
        const TileSums* sum = sums[b % 2];
        Vec d[F::kGroups];
        const auto* scales = reinterpret_cast<const typename F::Scale*>(w.scales) + v * kLanes;
        for (int g = 0; g < F::kGroups; ++g) d[g] = load_scale(scales + g * kPanel);
        const uint16_t* minima = reinterpret_cast<const uint16_t*>(w.scales + F::kScaleBytes);
        const Pairs m = F::kMinima ? load_pairs(minima + v * kLanes * 2) : Pairs{};
        const QBlock* row = x;
#pragma GCC unroll 16
        for (int r = 0; r < kTileMaxRows; ++r) {
            for (int g = 0; g < F::kGroups; ++g) {
                Ints total = load_ints(sum[g] + r * kLanes);
                if constexpr (!kSignedCodes<F>) total = add_ints(total, set1_int(start_of_sum<F>(*row, g)));
                acc[r] = fma(mul(d[g], set1(row->scale[g * F::kGroup / 32])), to_float(total), acc[r]);
            }
            if constexpr (F::kMinima) acc[r] = dot_pairs(acc[r], m, BF16::broadcast(row->sums));
            if (r + 1 < rows) row += x_stride;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileMaxRows; ++r) store(y + r * kMaxUnit, acc[r]);
}

// One block's codes of four bits, less 8, as [16][32][4] bytes, which is how codes of eight lie.
inline void unpack_codes(const char* codes, uint8_t* out) {
    const Ints z = set1_int(0x08080808);
    for (int j = 0; j < kQBlock / 8; ++j, codes += kPanel * 4, out += 2 * kPanel * 4) {
        for (int v = 0; v < kVecsPerPanel; ++v) {
            const Ints both = load_ints(codes + v * kLanes * 4);
            store_ints(out + v * kLanes * 4, sub_bytes(low_nibbles(both), z));
            store_ints(out + (kPanel + v * kLanes) * 4, sub_bytes(high_nibbles(both), z));
        }
    }
}

// Up to kUnpackRows rows, in tiles of `count`, by the panel at w.
template <class F>
void int_tile_panel(const char* w, int64_t blocks, const QBlock* x, int64_t x_stride, int64_t rows, int count,
                    float factor, TileSums (*sums)[F::Flat::kGroups], float* y) {
    using Flat = typename F::Flat;
    alignas(64) uint8_t unpacked[F::kBits == 4 ? kUnpackBlocks * kUnpackedBytes : 64];
    alignas(64) char opened[F::kOpenedBytes ? F::kOpenedBytes * kUnpackBlocks : 1];
    const int64_t padded = (rows + kTileMaxRows - 1) / kTileMaxRows * kTileMaxRows;
    for (int64_t r = 0; r < padded; ++r) {
        for (int v = 0; v < kVecsPerPanel; ++v) store(y + r * kMaxUnit + v * kLanes, zero());
    }
    const int64_t step = F::kBits == 4 || F::kOpenedBytes ? kUnpackBlocks : blocks;
    for (int64_t begin = 0; begin < blocks; begin += step) {
        const int64_t some = min_of(step, blocks - begin);
        IntView view = F::template open<true>(w, begin, some, 1 / factor, opened);
        if constexpr (F::kBits == 4) {
            for (int64_t b = 0; b < some; ++b)
                unpack_codes(view.codes + b * view.code_stride, unpacked + b * kUnpackedBytes);
            view.codes = reinterpret_cast<const char*>(unpacked);
            view.code_stride = kUnpackedBytes;
        }
        for (int v = 0; v < kVecsPerPanel; ++v) {
            for (int64_t r = 0; r < rows; r += count) {
                IntView of_vector = view;
                of_vector.codes += v * kLanes * 4;
                int_tile_rows<Flat>(of_vector, v, some, x + r * x_stride + begin, x_stride, count, sums,
                                    y + r * kMaxUnit + v * kLanes);
            }
        }
    }
    for (int64_t r = 0; r < rows; ++r) {
        for (int v = 0; v < kVecsPerPanel; ++v) {
            float* p = y + r * kMaxUnit + v * kLanes;
            store(p, mul(load(p), set1(factor)));
        }
    }
}

// Rows in tiles of `count`, as often as they fit. Each unit of panels meets all rows before the next.
template <class F>
void int_tile_columns(const LinearArgs& a, int64_t row_begin, int64_t row_end, int count, int64_t panel_begin,
                      int64_t panel_end) {
    alignas(64) float y[kUnpackRows * kMaxUnit];
    alignas(64) TileSums sums[2][F::Flat::kGroups] = {};
    OutlierList outliers;
    const int64_t blocks = (a.matrix.k + kQBlock - 1) / kQBlock;
    const int64_t all_rows = row_end - row_begin;
    const QBlock* first = static_cast<const QBlock*>(a.x) + row_begin * a.x_stride;
    if (!outliers.collect(first, a.x_stride, blocks, all_rows, kUnpackRows)) {
        if (all_rows <= count) return int_block<F>(a, row_begin, row_end, panel_begin, panel_end);
        const int64_t middle = row_begin + all_rows / count / 2 * count;
        int_tile_columns<F>(a, row_begin, middle, count, panel_begin, panel_end);
        return int_tile_columns<F>(a, middle, row_end, count, panel_begin, panel_end);
    }
    TileShapes shapes;
    for (int g = 0; g < F::Flat::kGroups; ++g) shapes.set(g, count, kTileMaxBytes);
    for (int i = 0; i < 2; ++i) {
        shapes.set(4 + i, count, F::Flat::kGroup);
        shapes.set(6 + i, F::Flat::kGroup / 4, kTileMaxBytes);
    }
    const TileScope scope(shapes);
    const int64_t panel_bytes = blocks * F::kBlockBytes;
    const int64_t unit = unit_vecs(a, kVecsPerPanel) / kVecsPerPanel;
    for (int64_t panel = panel_begin; panel < panel_end; panel += unit) {
        const int64_t panels = min_of(unit, panel_end - panel);
        const char* w = static_cast<const char*>(a.matrix.data) + panel * panel_bytes;
        for (int64_t row = row_begin; row < row_end; row += kUnpackRows) {
            const int64_t rows = min_of<int64_t>(kUnpackRows, row_end - row);
            const QBlock* x = static_cast<const QBlock*>(a.x) + row * a.x_stride;
            for (int64_t p = 0; p < panels; ++p) {
                const char* panel_w = w + p * panel_bytes;
                const int64_t tile = (row - row_begin) / kUnpackRows;
                int_tile_panel<F>(panel_w, blocks, x, a.x_stride, rows, count, a.matrix.factor, sums, y + p * kPanel);
                add_outliers<F>(panel_w, outliers.begin(tile), outliers.end(tile), a.matrix.factor, y + p * kPanel);
            }
            finish(a, {y, kMaxUnit, row, rows, panel * kPanel, panels * kPanel});
        }
    }
}

template <class F>
void int_tile_block(const LinearArgs& a, int64_t row_begin, int64_t row_end, int64_t panel_begin, int64_t panel_end) {
    const int rest = static_cast<int>((row_end - row_begin) % kTileMaxRows);
    const int64_t row_rest = row_end - rest;
    if (row_rest > row_begin) int_tile_columns<F>(a, row_begin, row_rest, kTileMaxRows, panel_begin, panel_end);
    if (rest >= kLeastTileRows) {
        int_tile_columns<F>(a, row_rest, row_end, rest, panel_begin, panel_end);
    } else if (rest > 0) {
        int_block<F>(a, row_rest, row_end, panel_begin, panel_end);
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
