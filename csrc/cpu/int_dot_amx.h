// The tiles of int_dot.h on AMX: sixteen rows by a panel, one vector of outputs after the other. The integer sums of a
// group are those of the vectors, and the same float operations follow in the same order, so a row has the same bits
// either way. Vectors work on one group while AMX computes the next, because they would otherwise wait for AMX's
// product and store. Included by int_product.h only.
//
// AMX's tile registers, for each group g = 0, 1 of a block:
//
//   4 + g  rows   int8  [16 rows][32 k]                      6 + g  codes  int8  [8 steps][16 outputs][4 k]
//   g      sums   int32 [16 rows][16 outputs] += rows * codes
#pragma once

#include <optional>
#include <vector>

#include "int_dot.h"
#include "launch_number.h"
#ifdef OCTAVO_AMX
#include "amx.h"
#endif

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kAmxRows = 16;
constexpr int kAmxGroupElements = 32;  // the only size of groups that AMX tiles take

// Stands in for AMX tiles where there are none (no AMX, or groups of 16 elements): num_tiles is 0, and nothing else
// does anything.
template <class F, bool kTakesAmx>
struct AmxTilesIf {
    AmxTilesIf(const QBlock*, int64_t, int64_t, int64_t, bool) {}
    static constexpr int64_t num_tiles(int64_t) { return 0; }
    const char* unpack_codes(BlocksView, int64_t) { return nullptr; }
    template <class PrefetchBlock>
    void multiply(BlocksView, const char*, int64_t, int64_t, int64_t, bool, Vec, float*, PrefetchBlock) {}
    void configure() {}
};

#ifdef OCTAVO_AMX

static_assert(kAmxRows == kTileMaxRows);
template <class F>
using AmxTiles = AmxTilesIf<F, F::kGroupElements == kAmxGroupElements>;

// A block of sixteen quantized rows: the QBlocks of the rows, field by field. Missing rows are zeros.
struct alignas(64) BlockOfRows {
    int8_t q[kAmxRows][kQBlock];         // loaded as tiles, [16][32] for each group
    float scale[2][kAmxRows];            // of each group
    uint16_t element_sums[kAmxRows][2];  // bf16, of each 32 elements
};

// The rows of a task, laid out as BlockOfRows for all panels. Each thread lays the same rows out once in a launch. The
// result of `of` is valid until this thread's next call.
class RowsForAmx {
  public:
    static const RowsForAmx& of(const QBlock* x, int64_t x_stride, int64_t blocks, int64_t rows) {
        static thread_local RowsForAmx cached;
        const Rows wanted{launch_number(), x, x_stride, blocks, rows};
        if (!(cached.rows_ == wanted)) {
            cached.rows_ = wanted;
            cached.lay_out();
        }
        return cached;
    }

    // Returns the blocks of the sixteen rows from `row`, a multiple of sixteen, beginning with block `block`.
    const BlockOfRows* at(int64_t row, int64_t block) const {
        return blocks_.data() + row / kAmxRows * rows_.blocks + block;
    }

  private:
    struct Rows {
        uint64_t launch;
        const QBlock* x;
        int64_t x_stride, blocks, rows;

        bool operator==(const Rows& other) const {
            return launch == other.launch && x == other.x && x_stride == other.x_stride && blocks == other.blocks &&
                   rows == other.rows;
        }
    };

    void lay_out() {
        const int64_t x_stride = rows_.x_stride;
        const int64_t tiles = (rows_.rows + kAmxRows - 1) / kAmxRows;
        if (blocks_.size() < static_cast<size_t>(tiles * rows_.blocks)) blocks_.resize(tiles * rows_.blocks);
        BlockOfRows* to = blocks_.data();
        for (int64_t first = 0; first < rows_.rows; first += kAmxRows) {
            const int64_t some = min_of<int64_t>(kAmxRows, rows_.rows - first);
            for (int64_t b = 0; b < rows_.blocks; ++b, ++to) {
                if (some < kAmxRows) *to = {};
                const QBlock* x = rows_.x + first * x_stride + b;
                for (int64_t r = 0; r < some; ++r, x += x_stride) {
                    memcpy(to->q[r], x->q, kQBlock);
                    for (int i = 0; i < 2; ++i) {
                        to->scale[i][r] = x->scale[i];
                        to->element_sums[r][i] = x->element_sums[i];
                    }
                }
            }
        }
    }

    Rows rows_{};
    std::vector<BlockOfRows> blocks_;  // grown, never shrunk
};

// Bytes of a block of signed codes, code - z: [16 steps][kPanel][4 k].
constexpr int kSignedBytes = kPanel * kQBlock;

// Writes the codes of `blocks` blocks to `to`, as signed codes.
template <class F>
void unpack_signed_codes(BlocksView w, int64_t blocks, char* to) {
    const Ints zero_code = set1_int((1 << (F::kMultipliedBits - 1)) * 0x01010101u);  // z in every byte
    const auto unpacked = [&](Ints nibbles) {
        if constexpr (F::kHasTable) nibbles = look_up(load_table(w.table), nibbles);
        return _mm512_sub_epi8(nibbles, zero_code);
    };
    for (int64_t b = 0; b < blocks; ++b, w.codes += w.code_stride, to += kSignedBytes) {
        for (int at = 0; at < kSignedBytes / F::kCodesPerByte; at += kVecBytes) {
            const Ints codes = load_ints(w.codes + at);
            if constexpr (F::kCodesPerByte == 2) {
                // A step of nibbles, of eight elements of k, becomes two steps of bytes.
                char* step = to + at / kStepBytes * 2 * kStepBytes + at % kStepBytes;
                store_ints(step, unpacked(low_nibbles(codes)));                // k0 k1 k2 k3 of each output
                store_ints(step + kStepBytes, unpacked(high_nibbles(codes)));  // k4 k5 k6 k7
            } else {
                store_ints(to + at, _mm512_sub_epi8(codes, zero_code));
            }
        }
    }
}

// Writes the integer sums of group `group` of a block to `sums` [16 rows][kLanes], for the vector of outputs at the
// signed `codes`. Each group has tile registers of its own, so that one is computed while the other is read.
template <int group>
inline void amx_group_sums(const BlockOfRows& x, const char* codes, int32_t* sums) {
    tile_zero<group>();
    tile_load<4 + group>(x.q[0] + group * kAmxGroupElements, kQBlock);                     // rows, kQBlock bytes apart
    tile_load<6 + group>(codes + group * kAmxGroupElements / 4 * kStepBytes, kStepBytes);  // steps of the group
    tile_dot_int8<group, 4 + group, 6 + group>();
    tile_store<group>(sums, kVecBytes);
}

inline TileShapes amx_tile_shapes() {
    TileShapes shapes;
    for (int group = 0; group < 2; ++group) {
        shapes.set(group, kAmxRows, kTileMaxBytes);
        shapes.set(4 + group, kAmxRows, kAmxGroupElements);
        shapes.set(6 + group, kAmxGroupElements / 4, kTileMaxBytes);
    }
    return shapes;
}

// As int_tile, for sixteen rows of y, one vector of outputs after the other. `codes` are the signed codes of `w`. Calls
// prefetch_block() once for each block.
template <class F, class PrefetchBlock>
void int_tile_amx(BlocksView w, const char* codes, int64_t blocks, const BlockOfRows* x, bool is_first, Vec factor,
                  float* y, PrefetchBlock prefetch_block) {
    static_assert(F::kGroupElements == kAmxGroupElements && F::kGroupsPerBlock == 2);
    alignas(64) int32_t sums[2][kAmxRows * kLanes];
    for (int v = 0; v < kVecsPerPanel; ++v, y += kLanes, codes += kVecBytes) {
        Vec acc[kAmxRows];
        for (int r = 0; r < kAmxRows; ++r) acc[r] = is_first ? zero() : load(y + r * kMaxEpilogueWidth);
        BlocksView block = w;
        amx_group_sums<0>(x[0], codes, sums[0]);
        for (int64_t b = 0; b < blocks; ++b, block.next_block()) {
            if (v == 0) prefetch_block();
            const char* block_codes = codes + b * kSignedBytes;
#pragma GCC unroll 2
            for (int g = 0; g < 2; ++g) {
                // AMX begins the next group before vectors read the sums of this one.
                if (g == 0) {
                    amx_group_sums<1>(x[b], block_codes, sums[1]);
                } else if (b + 1 < blocks) {
                    amx_group_sums<0>(x[b + 1], block_codes + kSignedBytes, sums[0]);
                }
                const Vec weight_scale = load_scale(block.scales_of_group<F>(g) + v * kLanes);
#pragma GCC unroll 16
                for (int r = 0; r < kAmxRows; ++r) {
                    const Vec sum = to_float(load_ints(sums[g] + r * kLanes));
                    acc[r] = fma(mul(weight_scale, set1(x[b].scale[g][r])), sum, acc[r]);
                }
            }
            if constexpr (F::kHasMinimaBy32) {
                const Pairs minima = load_pairs(block.minima_by_32<F>() + v * kLanes * 2);
#pragma GCC unroll 16
                for (int r = 0; r < kAmxRows; ++r)
                    acc[r] = dot_pairs(acc[r], minima, BF16::broadcast(x[b].element_sums[r]));
            }
        }
        for (int r = 0; r < kAmxRows; ++r) store(y + r * kMaxEpilogueWidth, mul(acc[r], factor));
    }
}

// A task's AMX tiles. Unless `are_used`, no tile registers are configured.
template <class F>
class AmxTilesIf<F, true> {
  public:
    AmxTilesIf(const QBlock* x, int64_t x_stride, int64_t blocks, int64_t rows, bool are_used) {
        if (!are_used) return;
        scope_.emplace(amx_tile_shapes());
        rows_ = &RowsForAmx::of(x, x_stride, blocks, rows);
    }

    // Returns how many AMX tiles a batch of rows has; the last may lack some rows. A tile takes as long for one row as
    // for sixteen, so vectors are faster for fewer than thirteen rows. With codes of eight bits AMX takes 32
    // rows or more: fewer do not pay for copying the codes. (Vectors are faster for groups of 16 elements too: a
    // tile takes as long for 16 elements as for 32.)
    static constexpr int64_t num_tiles(int64_t rows) {
        constexpr int64_t kFewest = 13;
        if (F::kMultipliedBits == 8 && rows < 2 * kAmxRows) return 0;
        return (rows + kAmxRows - kFewest) / kAmxRows;
    }

    // Returns the signed codes of a view, valid until the next call.
    const char* unpack_codes(BlocksView w, int64_t blocks) {
        unpack_signed_codes<F>(w, blocks, codes_);
        return codes_;
    }

    // Computes sixteen of the task's rows from `row`, a multiple of sixteen: `blocks` blocks from `block` on, with the
    // signed `codes` of `w`. Writes sixteen rows of y, also if the batch has fewer: y must have room for them.
    template <class PrefetchBlock>
    void multiply(BlocksView w, const char* codes, int64_t blocks, int64_t row, int64_t block, bool is_first,
                  Vec factor, float* y, PrefetchBlock prefetch_block) {
        int_tile_amx<F>(w, codes, blocks, rows_->at(row, block), is_first, factor, y, prefetch_block);
    }

    // Configures the tiles again after other code has given them other shapes.
    void configure() {
        if (scope_) tile_configure(amx_tile_shapes());
    }

  private:
    alignas(64) char codes_[kSignedBytes * kUnpackedBlocks];
    std::optional<TileScope> scope_;
    const RowsForAmx* rows_ = nullptr;
};

#else

template <class F>
using AmxTiles = AmxTilesIf<F, false>;

#endif

}  // namespace
}  // namespace octavo::OCTAVO_ISA
