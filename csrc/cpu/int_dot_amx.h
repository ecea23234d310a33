// The products of int_dot.h by the tile instructions of AMX: sixteen rows by a vector of outputs, group by group.
// Sums of a group are the same integers, and what is left of it are the same float operations in the same order, so a
// row has the bits that vectors give it, and these take what fills no tile. A tile instruction takes as long for a
// group as for 64 elements, and the vectors' operations cannot begin before it and a store are done: they work on one
// group while the tiles make the next. Included by int_dot.h only.
#pragma once

#include <optional>
#include <vector>

#include "k_quants.h"
#include "launch_number.h"
#ifdef OCTAVO_TILES
#include "amx.h"
#endif

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kRowsOfTile = 16;
constexpr int kTileGroup = 32;  // elements of a group

// What a task has for products by tile instructions, where there are none.
template <class F, bool kThereAreTiles>
struct IntTiles {
    IntTiles(const QBlock*, int64_t, int64_t, int64_t, bool) {}
    static constexpr int64_t whole_tiles(int64_t) { return 0; }
    void open(IntView, int64_t) {}
    template <class Meanwhile>
    void multiply(IntView, int64_t, int64_t, int64_t, bool, Vec, float*, Meanwhile) {}
    void configure() {}
};

#ifdef OCTAVO_TILES

static_assert(kRowsOfTile == kTileMaxRows);
template <class F>
using IntTilesOf = IntTiles<F, F::kGroup == kTileGroup>;

// A block of sixteen quantized rows, as tiles and vectors read it one after the other; rows that are none are zeros.
struct alignas(64) BlockOfRows {
    int8_t q[kRowsOfTile][kQBlock];
    float scale[2][kRowsOfTile];
    uint16_t sums[kRowsOfTile][2];
};

// Quantized rows in tiles, for all the panels that they meet. A thread lays the same rows out once in a launch, for all
// its tasks: what `of` returns is good until its next call.
class RowTiles {
  public:
    static const RowTiles& of(const QBlock* x, int64_t x_stride, int64_t blocks, int64_t rows) {
        static thread_local RowTiles found;
        const Rows wanted{launch_number(), x, blocks, rows};
        if (!(found.rows_ == wanted)) {
            found.rows_ = wanted;
            found.lay_out(x_stride);
        }
        return found;
    }

    // From block `block` on of the sixteen rows that begin with `row`.
    const BlockOfRows* at(int64_t row, int64_t block) const {
        return blocks_.data() + row / kRowsOfTile * rows_.blocks + block;
    }

  private:
    struct Rows {
        uint64_t launch;
        const QBlock* x;
        int64_t blocks, rows;

        bool operator==(const Rows& other) const {
            return launch == other.launch && x == other.x && blocks == other.blocks && rows == other.rows;
        }
    };

    void lay_out(int64_t x_stride) {
        const int64_t tiles = (rows_.rows + kRowsOfTile - 1) / kRowsOfTile;
        if (blocks_.size() < static_cast<size_t>(tiles * rows_.blocks)) blocks_.resize(tiles * rows_.blocks);
        BlockOfRows* to = blocks_.data();
        for (int64_t first = 0; first < rows_.rows; first += kRowsOfTile) {
            const int64_t some = min_of<int64_t>(kRowsOfTile, rows_.rows - first);
            for (int64_t b = 0; b < rows_.blocks; ++b, ++to) {
                if (some < kRowsOfTile) *to = {};
                const QBlock* x = rows_.x + first * x_stride + b;
                for (int64_t r = 0; r < some; ++r, x += x_stride) {
                    memcpy(to->q[r], x->q, kQBlock);
                    for (int i = 0; i < 2; ++i) {
                        to->scale[i][r] = x->scale[i];
                        to->sums[r][i] = x->sums[i];
                    }
                }
            }
        }
    }

    Rows rows_{};
    std::vector<BlockOfRows> blocks_;  // and room for more
};

// Codes of one block as a tile reads them, less their zero: sixteen steps of four elements, of all outputs of a panel.
constexpr int kStepBytes = kPanel * 4;
constexpr int kSignedBytes = kPanel * kQBlock;

template <class F>
void open_codes(IntView w, int64_t blocks, char* to) {
    const Ints zero_code = set1_int((1 << (F::kBits - 1)) * 0x01010101u);
    for (int64_t b = 0; b < blocks; ++b, w.codes += w.code_stride, to += kSignedBytes) {
        for (int at = 0; at < kSignedBytes / F::kCodesOfByte; at += kLanes * 4) {
            const Ints codes = load_ints(w.codes + at);
            if constexpr (F::kCodesOfByte == 2) {
                char* step = to + at / kStepBytes * 2 * kStepBytes + at % kStepBytes;
                store_ints(step, _mm512_sub_epi8(low_nibbles(codes), zero_code));
                store_ints(step + kStepBytes, _mm512_sub_epi8(high_nibbles(codes), zero_code));
            } else {
                store_ints(to + at, _mm512_sub_epi8(codes, zero_code));
            }
        }
    }
}

// The sums of a block's group kGroup, for a vector of outputs at `codes`. Groups take turns in the tiles.
template <int kGroup>
inline void group_by_tiles(const BlockOfRows& x, const char* codes, int32_t* sums) {
    tile_zero<kGroup>();
    tile_load<4 + kGroup>(x.q[0] + kGroup * kTileGroup, kQBlock);
    tile_load<6 + kGroup>(codes + kGroup * kTileGroup / 4 * kStepBytes, kStepBytes);
    tile_dot_int8<kGroup, 4 + kGroup, 6 + kGroup>();
    tile_store<kGroup>(sums, kLanes * 4);
}

inline TileShapes int_tile_shapes() {
    TileShapes shapes;
    for (int group = 0; group < 2; ++group) {
        shapes.set(group, kRowsOfTile, kTileMaxBytes);
        shapes.set(4 + group, kRowsOfTile, kTileGroup);
        shapes.set(6 + group, kTileGroup / 4, kTileMaxBytes);
    }
    return shapes;
}

// As int_tile, for sixteen rows of y; `codes` are those of `w`, opened. meanwhile() is called for each block.
template <class F, class Meanwhile>
void int_tile_by_tiles(IntView w, const char* codes, int64_t blocks, const BlockOfRows* x, bool is_first, Vec factor,
                       float* y, Meanwhile meanwhile) {
    using Scale = typename F::Scale;
    static_assert(F::kGroup == kTileGroup && F::kGroups == 2);
    alignas(64) int32_t sums[2][kRowsOfTile * kLanes];
    for (int v = 0; v < kVecsPerPanel; ++v, y += kLanes, codes += kLanes * 4) {
        Vec acc[kRowsOfTile];
        for (int r = 0; r < kRowsOfTile; ++r) acc[r] = is_first ? zero() : load(y + r * kMaxUnit);
        const char* scales_at = w.scales;
        group_by_tiles<0>(x[0], codes, sums[0]);
        for (int64_t b = 0; b < blocks; ++b, scales_at += w.scale_stride) {
            if (v == 0) meanwhile();
            const char* block_codes = codes + b * kSignedBytes;
            const Scale* scales = reinterpret_cast<const Scale*>(scales_at) + v * kLanes;
#pragma GCC unroll 2
            for (int g = 0; g < 2; ++g) {
                if (g == 0) {
                    group_by_tiles<1>(x[b], block_codes, sums[1]);
                } else if (b + 1 < blocks) {
                    group_by_tiles<0>(x[b + 1], block_codes + kSignedBytes, sums[0]);
                }
                const Vec d = load_scale(scales + g * kPanel);
#pragma GCC unroll 16
                for (int r = 0; r < kRowsOfTile; ++r) {
                    const Vec sum = to_float(load_ints(sums[g] + r * kLanes));
                    acc[r] = fma(mul(d, set1(x[b].scale[g][r])), sum, acc[r]);
                }
            }
            if constexpr (F::kMinima) {
                const uint16_t* minima = reinterpret_cast<const uint16_t*>(scales_at + F::kScaleBytes);
                const Pairs m = load_pairs(minima + v * kLanes * 2);
#pragma GCC unroll 16
                for (int r = 0; r < kRowsOfTile; ++r) acc[r] = dot_pairs(acc[r], m, BF16::broadcast(x[b].sums[r]));
            }
        }
        for (int r = 0; r < kRowsOfTile; ++r) store(y + r * kMaxUnit, mul(acc[r], factor));
    }
}

// What a task has for them.
template <class F>
class IntTiles<F, true> {
  public:
    IntTiles(const QBlock* x, int64_t x_stride, int64_t blocks, int64_t rows, bool are_used) {
        if (!are_used) return;
        scope_.emplace(int_tile_shapes());
        rows_ = &RowTiles::of(x, x_stride, blocks, rows);
    }

    // How many tiles a batch of rows has, of which the last may lack some. A tile takes as long for one row as for
    // sixteen, so that vectors are faster for fewer than thirteen, and for a single tile where codes of eight bits have
    // to be copied for it. (They are faster for groups of 16 elements as well, for which a tile takes as long as for
    // 32.)
    static constexpr int64_t whole_tiles(int64_t rows) {
        constexpr int64_t kFewest = 13;
        if (F::kBits == 8 && rows < 2 * kRowsOfTile) return 0;
        return (rows + kRowsOfTile - kFewest) / kRowsOfTile;
    }

    // What `multiply` sees until the next call.
    void open(IntView w, int64_t blocks) { open_codes<F>(w, blocks, codes_); }

    // Of the task's rows from `row` on, and of blocks from `block` on.
    template <class Meanwhile>
    void multiply(IntView w, int64_t blocks, int64_t row, int64_t block, bool is_first, Vec factor, float* y,
                  Meanwhile meanwhile) {
        int_tile_by_tiles<F>(w, codes_, blocks, rows_->at(row, block), is_first, factor, y, meanwhile);
    }

    // Once others have given tiles another shape.
    void configure() {
        if (scope_) tile_configure(int_tile_shapes());
    }

  private:
    alignas(64) char codes_[kSignedBytes * kOpenedBlocks];
    std::optional<TileScope> scope_;
    const RowTiles* rows_ = nullptr;
};

#else

template <class F>
using IntTilesOf = IntTiles<F, false>;

#endif

}  // namespace
}  // namespace octavo::OCTAVO_ISA
