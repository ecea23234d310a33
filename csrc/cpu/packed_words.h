// Words of 32 bits that have several codes of one or of eight outputs, as lanes of a panel in order of k.
// Included by pack_int.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "float_bits.h"
#include "pack_int.h"

namespace octavo {
namespace {

// Panels whose words are read together: a line of memory has the words of so many where they are nibbles of outputs.
constexpr int kTogether = 4;
constexpr int kLanes = kTogether * kPanel;

// What the outputs of some panels have for 32 elements.
struct LaneGroup {
    int64_t index = -1;  // of the group that this is
    uint16_t scales[kLanes] = {}, minima[kLanes] = {};
    uint32_t shifts[kLanes] = {};  // in all nibbles

    void read(const PackWordsArgs& a, int64_t group, int64_t row, int count) {
        if (group == index) return;
        index = group;
        const float inverse = 1 / a.to.factor, zero = a.to.format == kWeightInt4 ? 8 : 128;
        const int64_t first = group * a.rows + row;
        for (int lane = 0; lane < count; ++lane) {
            scales[lane] = float_to_half(a.scales[first + lane] * inverse);
            if (a.minima) {
                minima[lane] = float_to_bf16((a.minima[first + lane] + zero * a.scales[first + lane]) * inverse);
            }
            if (a.shifts) shifts[lane] = a.shifts[first + lane] * 0x11111111u;
        }
    }
};

// Eight elements of k, `valid` of which exist, in words at `from` that have a nibble of each of eight outputs, as words
// that have the eight elements of an output each: those of `count` outputs from the `first` nibble on.
void turn_nibbles(const uint8_t* from, int64_t output_stride, int64_t word_stride, int first, int count, int valid,
                  uint32_t* out) {
    constexpr int kWords = kLanes / 8 + 4;  // one more, and no rest of a vector
    uint32_t words[8][kWords] = {}, turned[8 * kWords];
    const int num_words = (first + count + 7) / 8;
    for (int e = 0; e < valid; ++e) {
        const uint8_t* row = from + e * word_stride;
        // What follows lies in another page each, which no processor fetches by itself.
        __builtin_prefetch(row + kQBlock * word_stride);
        __builtin_prefetch(row + kQBlock * word_stride + (num_words - 1) * output_stride);
        for (int w = 0; w < num_words; ++w) words[e][w] = load<uint32_t>(row + w * output_stride);
    }
    // A square of nibbles in eight words is transposed by eighths, quarters and halves.
    constexpr uint32_t kLow[] = {0x0f0f0f0f, 0x00ff00ff, 0x0000ffff};
    for (int level = 0; level < 3; ++level) {
        const int step = 1 << level, shift = 4 * step;
        for (int e = 0; e < 8; ++e) {
            if (e & step) continue;
            for (int w = 0; w < kWords; ++w) {
                const uint32_t moved = (words[e][w] >> shift ^ words[e + step][w]) & kLow[level];
                words[e + step][w] ^= moved;
                words[e][w] ^= moved << shift;
            }
        }
    }
    for (int w = 0; w < kWords; ++w) {
        for (int output = 0; output < 8; ++output) turned[8 * w + output] = words[output % 2 * 4 + output / 2][w];
    }
    std::memcpy(out, turned + first, static_cast<size_t>(count) * 4);
}

// The bits of a word, `kBits` of each code, so far apart that each code has a nibble.
template <int kBits>
uint32_t spread(uint32_t codes) {
    if (kBits == 3) {
        codes = (codes & 0xfff) | (codes & 0xfff000) << 4;
        codes = (codes & 0x003f003f) | (codes & 0x0fc00fc0) << 2;
        return (codes & 0x07070707) | (codes & 0x38383838) << 1;
    }
    if (kBits == 2) {
        codes = (codes & 0xff) | (codes & 0xff00) << 8;
        codes = (codes & 0x000f000f) | (codes & 0x00f000f0) << 4;
        return (codes & 0x03030303) | (codes & 0x0c0c0c0c) << 2;
    }
    return codes;
}

// Words in which a code takes a nibble or a byte.
template <int kBits>
constexpr int kPerWord = kBits == 8 ? 4 : 8;
template <int kBits>
constexpr int kWordsOfBlock = kQBlock / kPerWord<kBits>;

// Those of a block, in order of k: [word][pitch], for `count` outputs.
template <int kBits>
void read_words(const PackWordsArgs& a, int64_t block, int64_t row, int count, int64_t pitch, uint32_t* out) {
    const int64_t valid = std::min<int64_t>(a.to.k - block * kQBlock, kQBlock);
    for (int64_t i = 0; i * kPerWord<kBits> < valid; ++i, out += pitch) {
        const int64_t k = block * kQBlock + i * kPerWord<kBits>;
        if (a.by_outputs) {
            const uint8_t* from = a.words + row / 8 * a.output_stride + k * a.word_stride;
            const int elements = static_cast<int>(std::min<int64_t>(a.to.k - k, 8));
            turn_nibbles(from, a.output_stride, a.word_stride, static_cast<int>(row % 8), count, elements, out);
            continue;
        }
        const int64_t bit = k * kBits, shift = bit % 32;
        const uint8_t* from = a.words + row * a.output_stride + bit / 32 * a.word_stride;
        for (int64_t at = 0; a.output_stride < a.word_stride && at < count * a.output_stride; at += 64) {
            __builtin_prefetch(from + kQBlock * kBits / 32 * a.word_stride + at);
        }
        for (int lane = 0; lane < count; ++lane, from += a.output_stride) {
            uint32_t word = load<uint32_t>(from) >> shift;
            if (shift + kBits * kPerWord<kBits> > 32) word |= load<uint32_t>(from + a.word_stride) << (32 - shift);
            out[lane] = spread<kBits>(word);
        }
    }
}

// A block's words of which the elements are those of `order` in all words of some outputs.
template <int kBits>
void take_words(const uint32_t* all, const int32_t* order, int64_t valid, int64_t pitch, uint32_t* out) {
    constexpr int kWide = 32 / kPerWord<kBits>;
    for (int64_t e = 0; e < valid; ++e) {
        const uint32_t* from = all + order[e] / kPerWord<kBits> * pitch;
        uint32_t* to = out + e / kPerWord<kBits> * pitch;
        const int down = order[e] % kPerWord<kBits> * kWide, up = static_cast<int>(e % kPerWord<kBits>) * kWide;
        for (int64_t lane = 0; lane < pitch; ++lane) {
            to[lane] = (up ? to[lane] : 0) | (from[lane] >> down & ((1u << kWide) - 1)) << up;
        }
    }
}

// Eight nibbles in order of k -> four bytes, elements 0 to 3 in their low halves and 4 to 7 in their high ones.
uint32_t by_halves(uint32_t word) {
    uint32_t low = word & 0xffff, high = word >> 16;
    low = (low | low << 8) & 0x00ff00ff;
    low = (low | low << 4) & 0x0f0f0f0f;
    high = (high | high << 8) & 0x00ff00ff;
    high = (high | high << 4) & 0x0f0f0f0f;
    return low | high << 4;
}

}  // namespace
}  // namespace octavo
