// Packing a weight matrix into panels, once, at load. It only moves bits, so one version serves every instruction set;
// on current machines it is bound by memory and page faults, not by instructions.
#include <cstring>

#include "kernels.h"

namespace octavo {

namespace {

// Transposes 32 rows of `steps` items (bf16 pairs or floats, as 32-bit words) into [step][32].
void transpose_words(const char* rows, int64_t stride_bytes, int64_t steps, int valid_rows, char* out) {
    for (int64_t i = 0; i < steps; ++i) {
        uint32_t words[kPanel] = {};
        for (int r = 0; r < valid_rows; ++r) std::memcpy(&words[r], rows + r * stride_bytes + i * 4, 4);
        std::memcpy(out + i * kPanel * 4, words, sizeof(words));
    }
}

}  // namespace

void pack_panel(const void* args, int64_t task) {
    const PackArgs& a = *static_cast<const PackArgs*>(args);
    const int64_t element = a.dtype == kF32 ? 4 : 2;
    const int64_t per_word = 4 / element;
    const int64_t steps = (a.k + per_word - 1) / per_word;
    const int64_t first_row = task * kPanel;
    const int valid = static_cast<int>(a.n - first_row < kPanel ? a.n - first_row : kPanel);
    const char* rows = static_cast<const char*>(a.weight) + first_row * a.stride * element;
    char* out = static_cast<char*>(a.out) + task * steps * kPanel * 4;
    transpose_words(rows, a.stride * element, a.k / per_word, valid, out);
    if (a.k % per_word != 0) {
        // The last element of an odd bf16 row, paired with zero.
        uint16_t tail[kPanel][2] = {};
        for (int r = 0; r < valid; ++r) std::memcpy(&tail[r][0], rows + (r * a.stride + a.k - 1) * 2, 2);
        std::memcpy(out + (steps - 1) * kPanel * 4, tail, sizeof(tail));
    }
}

}  // namespace octavo
