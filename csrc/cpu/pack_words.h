// Reads words of 32 bits that hold several codes of one output (GPTQ) or of eight outputs (AWQ), as lanes of a panel in
// order of k. Included by pack_int.cpp only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "float_bits.h"
#include "pack_int.h"

namespace octavo {
namespace {

// Panels whose words are read together: with nibbles of eight outputs a cache line has the words of so many panels.
constexpr int kTogether = 4;
constexpr int kLanes = kTogether * kPanel;

// Scales, minima and shifts of the outputs of some panels, for one group.
struct LaneGroup {
    int64_t index = -1;  // of the group; -1: none
    uint16_t scales[kLanes] = {}, minima[kLanes] = {};
    uint32_t shifts[kLanes] = {};  // each in all nibbles of a word

    void read(const PackWordsArgs& a, int64_t group, int64_t row, int count) {
        if (group == index) return;
        index = group;
        const float inverse = 1 / a.to.factor, zero = a.to.format == kWeightInt8 ? 128 : 8;
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

// Turns words that have a nibble of each of eight outputs into words that have eight elements of k of one output. There
// are eight elements of k, of which `valid` exist, from `from` on. Writes the words of `count` outputs from the `first`
// nibble on.
void turn_nibbles(const uint8_t* from, int64_t output_stride, int64_t word_stride, int first, int count, int valid,
                  uint32_t* out) {
    constexpr int kWords = kLanes / 8 + 4;  // room for one more word, in whole vectors
    uint32_t words[8][kWords] = {}, turned[8 * kWords];
    const int num_words = (first + count + 7) / 8;
    for (int e = 0; e < valid; ++e) {
        const uint8_t* row = from + e * word_stride;
        // Fetches the next block. Each row of words lies in another page, which no processor fetches by itself.
        __builtin_prefetch(row + kQBlock * word_stride);
        __builtin_prefetch(row + kQBlock * word_stride + (num_words - 1) * output_stride);
        for (int w = 0; w < num_words; ++w) words[e][w] = load<uint32_t>(row + w * output_stride);
    }
    // Transposes the eight by eight nibbles of eight words: nibbles of neighbouring words change places, then pairs of
    // nibbles (bytes), then halves.
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
        // AWQ's order: nibbles 0 to 3 are outputs 0, 2, 4 and 6, nibbles 4 to 7 are outputs 1, 3, 5 and 7.
        for (int output = 0; output < 8; ++output) turned[8 * w + output] = words[output % 2 * 4 + output / 2][w];
    }
    std::memcpy(out, turned + first, static_cast<size_t>(count) * 4);
}

// Spreads eight codes of kBits bits, from the low bits of a word, to a nibble each.
template <int kBits>
uint32_t spread(uint32_t codes) {
    if (kBits == 3) {
        // Four codes to each half of the word, then two to each byte, then one to each nibble.
        codes = (codes & 0xfff) | (codes & 0xfff000) << 4;
        codes = (codes & 0x003f003f) | (codes & 0x0fc00fc0) << 2;
        return (codes & 0x07070707) | (codes & 0x38383838) << 1;
    }
    if (kBits == 2) {
        // Four codes to each half of the word, then two to each byte, then one to each nibble.
        codes = (codes & 0xff) | (codes & 0xff00) << 8;
        codes = (codes & 0x000f000f) | (codes & 0x00f000f0) << 4;
        return (codes & 0x03030303) | (codes & 0x0c0c0c0c) << 2;
    }
    return codes;
}

// Codes in a word, once each takes a nibble or a byte.
template <int kBits>
constexpr int kPerWord = kBits == 8 ? 4 : 8;
template <int kBits>
constexpr int kWordsOfBlock = kQBlock / kPerWord<kBits>;

// Reads the words of a block in order of k, [word][pitch], for `count` outputs.
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
            // Codes of three bits may begin in one word and end in the next.
            uint32_t word = load<uint32_t>(from) >> shift;
            if (shift + kBits * kPerWord<kBits> > 32) word |= load<uint32_t>(from + a.word_stride) << (32 - shift);
            out[lane] = spread<kBits>(word);
        }
    }
}

// Takes a block's words in an order: element e of the block is element order[e] of `all`, the words of all blocks.
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

// Returns eight nibbles in order of k as four bytes: elements 0 to 3 in low halves, elements 4 to 7 in high halves.
uint32_t by_halves(uint32_t word) {
    uint32_t low = word & 0xffff, high = word >> 16;
    // Four nibbles move to the low halves of four bytes, in two steps.
    low = (low | low << 8) & 0x00ff00ff;
    low = (low | low << 4) & 0x0f0f0f0f;
    high = (high | high << 8) & 0x00ff00ff;
    high = (high | high << 4) & 0x0f0f0f0f;
    return low | high << 4;
}

}  // namespace
}  // namespace octavo
