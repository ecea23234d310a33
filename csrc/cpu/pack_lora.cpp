// Packs an adapter's factors while it is read: rows of floats are rounded and dealt out to the lanes of panels. Memory
// bounds it, so one version serves every instruction set.
#include "pack_lora.h"

#include <algorithm>
#include <cstring>

#include "float_bits.h"
#include "kernels.h"

namespace octavo {

namespace {

// Columns that are packed at a time: lines of the panels stay in the cache until all rows are in.
constexpr int64_t kBlock = 64;

// Writes `count` floats as words of 32 bits: the floats themselves, or pairs of bf16, of which the last may be half
// empty. Returns the number of words.
int64_t words_of(const float* from, int64_t count, int32_t dtype, uint32_t* words) {
    if (dtype == kF32) {
        std::memcpy(words, from, static_cast<size_t>(count) * sizeof(float));
        return count;
    }
    const int64_t pairs = count / 2;
    for (int64_t i = 0; i < pairs; ++i) {
        words[i] = float_to_bf16(from[2 * i]) | static_cast<uint32_t>(float_to_bf16(from[2 * i + 1])) << 16;
    }
    if (count % 2 != 0) words[pairs] = float_to_bf16(from[count - 1]);
    return pairs + count % 2;
}

}  // namespace

void pack_factor_rows(const FactorRows& a) {
    const int64_t per_word = a.dtype == kF32 ? 1 : 2;
    for (int64_t column = 0; column < a.columns; column += kBlock) {
        const int64_t count = std::min(kBlock, a.columns - column);
        for (int64_t row = 0; row < a.rows; ++row) {
            if (a.places[row] < 0) continue;
            uint32_t words[kBlock];
            const int64_t num_words = words_of(a.source + row * a.stride + column, count, a.dtype, words);
            uint32_t* out = a.out + a.places[row] + column / per_word * a.lanes;
            for (int64_t i = 0; i < num_words; ++i) out[i * a.lanes] = words[i];
        }
    }
}

}  // namespace octavo
