// Packs a matrix of floats into panels, once, at load. It only moves bits, so one version serves every instruction set.
// On current machines memory and page faults bound it, not instructions. Integers are packed in pack_int.cpp.
#include "pack.h"

#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace octavo {

namespace {

// Transposes words of 32 bits (floats or pairs of bf16) of `valid_rows` rows into [step][32].
void transpose_words(const char* rows, int64_t stride_bytes, int64_t steps, int valid_rows, char* out) {
    for (int64_t i = 0; i < steps; ++i) {
        uint32_t words[kPanel] = {};
        for (int r = 0; r < valid_rows; ++r) std::memcpy(&words[r], rows + r * stride_bytes + i * 4, 4);
        std::memcpy(out + i * kPanel * 4, words, sizeof(words));
    }
}

// The same for all 32 rows, in squares of four by four words. Returns how many steps it did.
int64_t transpose_squares(const char* rows, int64_t stride_bytes, int64_t steps, char* out) {
    int64_t i = 0;
#ifdef __SSE2__
    for (; i + 4 <= steps; i += 4) {
        for (int r = 0; r < kPanel; r += 4) {
            const char* from = rows + r * stride_bytes + i * 4;
            __m128i row[4];
            for (int j = 0; j < 4; ++j) {
                row[j] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j * stride_bytes));
            }
            // Rows 0 and 1 word by word, words 0 and 1 in low01, 2 and 3 in high01; rows 2 and 3 likewise.
            const __m128i low01 = _mm_unpacklo_epi32(row[0], row[1]), high01 = _mm_unpackhi_epi32(row[0], row[1]);
            const __m128i low23 = _mm_unpacklo_epi32(row[2], row[3]), high23 = _mm_unpackhi_epi32(row[2], row[3]);
            // Column j is word j of rows 0 to 3.
            const __m128i column[4] = {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23),
                                       _mm_unpacklo_epi64(high01, high23), _mm_unpackhi_epi64(high01, high23)};
            for (int j = 0; j < 4; ++j) {
                _mm_storeu_si128(reinterpret_cast<__m128i*>(out + ((i + j) * kPanel + r) * 4), column[j]);
            }
        }
    }
#elif defined(__aarch64__)
    for (; i + 4 <= steps; i += 4) {
        for (int r = 0; r < kPanel; r += 4) {
            const char* from = rows + r * stride_bytes + i * 4;
            uint32x4_t row[4];
            for (int j = 0; j < 4; ++j) {
                row[j] = vreinterpretq_u32_u8(vld1q_u8(reinterpret_cast<const uint8_t*>(from + j * stride_bytes)));
            }
            // Rows 0 and 2 word by word, rows 1 and 3 likewise; then both: column j is word j of rows 0 to 3.
            const uint32x4_t low02 = vzip1q_u32(row[0], row[2]), high02 = vzip2q_u32(row[0], row[2]);
            const uint32x4_t low13 = vzip1q_u32(row[1], row[3]), high13 = vzip2q_u32(row[1], row[3]);
            const uint32x4_t column[4] = {vzip1q_u32(low02, low13), vzip2q_u32(low02, low13),
                                          vzip1q_u32(high02, high13), vzip2q_u32(high02, high13)};
            for (int j = 0; j < 4; ++j) {
                vst1q_u8(reinterpret_cast<uint8_t*>(out + ((i + j) * kPanel + r) * 4), vreinterpretq_u8_u32(column[j]));
            }
        }
    }
#else
    (void)rows, (void)stride_bytes, (void)steps, (void)out;
#endif
    return i;
}

}  // namespace

void transpose_panel(const char* rows, int64_t stride_bytes, int64_t steps, char* out) {
    const int64_t done = transpose_squares(rows, stride_bytes, steps, out);
    transpose_words(rows + done * 4, stride_bytes, steps - done, kPanel, out + done * kPanel * 4);
}

void pack_panel(const void* args, int64_t task) {
    const PackArgs& a = *static_cast<const PackArgs*>(args);
    const int64_t element = a.dtype == kF32 ? 4 : 2;
    const int64_t per_word = 4 / element;
    const int64_t steps = (a.k + per_word - 1) / per_word;
    const int64_t first_row = task * kPanel;
    const int valid = static_cast<int>(a.n - first_row < kPanel ? a.n - first_row : kPanel);
    const char* rows = static_cast<const char*>(a.weight) + first_row * a.stride * element;
    char* out = static_cast<char*>(a.out) + task * a.panel_step * steps * kPanel * 4;
    if (valid == kPanel) {
        transpose_panel(rows, a.stride * element, a.k / per_word, out);
    } else {
        transpose_words(rows, a.stride * element, a.k / per_word, valid, out);
    }
    if (a.k % per_word != 0) {
        // The last element of an odd bf16 row, paired with zero.
        uint16_t tail[kPanel][2] = {};
        for (int r = 0; r < valid; ++r) std::memcpy(&tail[r][0], rows + (r * a.stride + a.k - 1) * 2, 2);
        std::memcpy(out + (steps - 1) * kPanel * 4, tail, sizeof(tail));
    }
}

}  // namespace octavo
