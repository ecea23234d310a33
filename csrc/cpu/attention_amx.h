// Attention of rows that all see the same keys (encoders' rows), by the tile instructions of AMX. Scores take one
// instruction for sixteen rows, sixteen keys and 32 elements of a head; weights by values take one for sixteen rows, 16
// keys and 16 columns. The caches' layouts are those that the instructions need. A row's sums do not depend on how many
// rows a tile has. Included by attention.h only.
#pragma once

#include "amx.h"
#include "attention_8bit.h"

namespace octavo::OCTAVO_ISA {
namespace {

static_assert(kLanes == kTileMaxRows && kTileK == 2 * kLanes, "a tile is a vector wide");

// Where the rows of a tile lie; `stride` is in bytes.
struct TileSource {
    const uint16_t* data;
    int64_t stride;
};

using PlainBf16 = PlainCache<BF16>;

// Returns elements [32 * chunk, 32 * chunk + 32) of 16 keys as a tile. The halves of two blocks of 8 keys are put side
// by side in `copy`.
inline TileSource keys_of_tile(const KvHead<PlainBf16>& h, const TileRefs<PlainBf16>& refs, int vec, int64_t chunk,
                               uint16_t* copy) {
    const int64_t stride = static_cast<int64_t>(h.block_size) * BF16::kStep;
    const int64_t offset = chunk * kTileMaxRows * stride;
    const uint16_t* k = refs.keys[2 * vec] + offset;
    if (h.block_size >= kLanes) return {k, stride * 2};
    const uint16_t* upper = refs.keys[2 * vec + 1] + offset;
    constexpr int kHalf = kTileK / 2;
    for (int i = 0; i < kTileMaxRows; ++i) {
        memcpy(copy + i * kTileK, k + i * stride, kHalf * sizeof(*k));
        memcpy(copy + i * kTileK + kHalf, upper + i * stride, kHalf * sizeof(*k));
    }
    return {copy, kTileMaxBytes};
}

// Returns 32 columns of the values of 16 keys, two tiles side by side. Only the first `count` keys are seen: values of
// the others, NaN perhaps, are 0 in `copy`.
inline TileSource values_of_tile(const KvHead<PlainBf16>& h, const TileRefs<PlainBf16>& refs, int vec, int64_t column,
                                 int count, uint16_t* copy) {
    const int64_t offset = column * BF16::kStep;
    if (h.block_size >= kLanes && count >= kLanes) return {refs.values[2 * vec] + offset, h.value_stride * 2};
    constexpr int kRowElements = 2 * kTileK;
    for (int pair = 0; pair < kLanes / 2; ++pair) {
        uint16_t* to = copy + pair * kRowElements;
        const int seen = min_of(count - 2 * pair, 2);
        if (seen <= 0) {
            memset(to, 0, kRowElements * sizeof(*to));
            continue;
        }
        constexpr int kGroupPairs = kGroupKeys / 2;
        const uint16_t* from = refs.values[2 * vec + pair / kGroupPairs] + pair % kGroupPairs * h.value_stride + offset;
        memcpy(to, from, kRowElements * sizeof(*to));
        // The second key of a pair is not seen.
        for (int i = 1; seen == 1 && i < kRowElements; i += 2) to[i] = 0;
    }
    return {copy, kRowElements * 2};
}

// Attends rows row .. row + count - 1, at most sixteen, to the keys [first, last] of one partition.
inline void attend_by_amx(const KvHead<PlainBf16>& h, Rows<PlainBf16>& rows, int row, int count, int first, int last) {
    alignas(64) float scores[kTileMaxRows * kKeyTile];
    alignas(64) uint16_t weights[kTileMaxRows * kKeyTile];
    alignas(64) uint16_t copy[kTileMaxRows * kTileK];
    alignas(64) uint16_t queries[kTileMaxRows * kMaxHeadSize];
    constexpr int64_t kScoreStride = kKeyTile * sizeof(float), kWeightStride = kKeyTile * sizeof(uint16_t);
    const int64_t size = static_cast<int64_t>(h.steps) * BF16::kStep, chunks = size / kTileK;
    const int64_t out_stride = rows.padded * static_cast<int64_t>(sizeof(float));
    float* out = rows.out + row * rows.padded;
    for (int r = 0; r < count; ++r) {
        memcpy(queries + r * size, rows.query[row + r], static_cast<size_t>(size) * sizeof(uint16_t));
    }
    TileShapes shapes;  // 0 to 3: sums; 4: queries; 5: weights; 6: keys; 7: values
    for (int t = 0; t < 5; ++t) shapes.set(t, count, kTileMaxBytes);
    shapes.set(5, count, kTileMaxBytes / 2);
    shapes.set(6, kTileMaxRows, kTileMaxBytes);
    shapes.set(7, kLanes / 2, kTileMaxBytes);
    const TileScope scope(shapes);
    TileRefs<PlainBf16> refs;
    for (int tile = first; tile <= last; tile += kKeyTile) {
        find_tile(h, tile, first, last, refs);
        const int seen = min_of(last + 1 - tile, kKeyTile);
        const int vecs = (seen + kLanes - 1) / kLanes;

        for_constants<4>([](auto vec) { tile_zero<vec.kValue>(); });
        for (int64_t c = 0; c < chunks; ++c) {
            // Scores: tiles 0 to 3 are rows by 16 keys each, over chunks of 32 elements.
            tile_load<4>(queries + c * kTileK, size * 2);
            for_constants<4>([&](auto vec) {
                if (vec.kValue >= vecs) return;
                const TileSource keys = keys_of_tile(h, refs, vec.kValue, c, copy);
                tile_load<6>(keys.data, keys.stride);
                tile_dot_bf16<vec.kValue, 4, 6>();
            });
        }
        for_constants<4>([&](auto vec) { tile_store<vec.kValue>(scores + vec.kValue * kLanes, kScoreStride); });

        // Softmax by vectors. Earlier sums are rescaled to the new maxima.
        int begin[kTileMaxRows] = {}, end[kTileMaxRows];
        for (int& e : end) e = seen;
        for (int r = 0; rows.adjusts && r < count; ++r) {
            adjust(rows, row + r, scores + r * kKeyTile, tile, 0, seen);
        }
        for (int r = 0; r < count; r += kScoreRows) {
            const int some = min_of(count - r, kScoreRows);
            alignas(64) float rescale[kLanes];
            with_constant<kScoreRows>(some, [&](auto n) {
                update_softmax<PlainBf16, decltype(n)::kValue>(rows, row + r, scores + r * kKeyTile,
                                                               weights + r * kKeyTile, begin, end, rescale);
            });
            for (int i = 0; i < some; ++i) {
                float* o = out + (r + i) * rows.padded;
                const Vec factor = set1(rescale[i]);
                for (int64_t j = 0; j < rows.padded; j += kLanes) store(o + j, mul(load(o + j), factor));
            }
        }

        // Weights by values: tiles 0 and 1 are rows by 16 columns each, over the tile's keys, 16 at a time.
        for (int64_t column = 0; column < size; column += 2 * kLanes) {
            tile_load<0>(out + column, out_stride);
            tile_load<1>(out + column + kLanes, out_stride);
            for (int v = 0; v < vecs; ++v) {
                const TileSource values = values_of_tile(h, refs, v, column, seen - v * kLanes, copy);
                tile_load<5>(weights + v * kLanes, kWeightStride);
                tile_load<7>(values.data, values.stride);
                tile_dot_bf16<0, 5, 7>();
                tile_load<7>(values.data + kTileK, values.stride);
                tile_dot_bf16<1, 5, 7>();
            }
            tile_store<0>(out + column, out_stride);
            tile_store<1>(out + column + kLanes, out_stride);
        }
    }
}

}  // namespace
}  // namespace octavo::OCTAVO_ISA
