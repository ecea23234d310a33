// AMX: eight tile registers of up to 16 rows by 64 bytes, which each thread has for itself, and the instructions on
// them that products and attention use. They are inline assembly, because GCC's intrinsics take no template arguments
// and do not say that they read memory. With OCTAVO_EMULATE_TILES the same functions are plain code with the semantics
// of Intel's manual, faults included, so that products can be tested on a machine without AMX. Included by
// linear_amx.h, int_dot_amx.h, lora_b.h and attention_amx.h only.
#pragma once

#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kTileMaxRows = 16;
constexpr int kTileMaxBytes = 64;

// The operand of ldtilecfg: the rows of every tile in use, and the bytes of a row.
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int num_rows, int bytes) {
        rows[tile] = static_cast<uint8_t>(num_rows);
        row_bytes[tile] = static_cast<uint16_t>(bytes);
    }
};
static_assert(sizeof(TileShapes) == 64, "as ldtilecfg reads it");

#ifndef OCTAVO_EMULATE_TILES

inline void tile_configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
inline void tile_release() { asm volatile("tilerelease" : : : "memory"); }
template <int kTile>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
// Loads the tile's rows, which lie `stride` bytes apart from p on; tile_store writes them so.
template <int kTile>
inline void tile_load(const void* p, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}
template <int kTile>
inline void tile_store(void* p, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(kTile) : "memory");
}
// C += A B for pairs of bf16: c[m][n] is a float32, a row of A has pairs of k, row k of B has the pairs of all n.
template <int kC, int kA, int kB>
inline void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

// C += A B for four int8 a lane, summed as int32.
template <int kC, int kA, int kB>
inline void tile_dot_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

#else

struct EmulatedTiles {
    TileShapes shapes;
    bool configured;
    alignas(64) uint8_t data[8][kTileMaxRows][kTileMaxBytes];
};
thread_local EmulatedTiles emulated{};

// Raises SIGILL unless the operation is allowed, as the processor does.
inline void fault_unless(bool allowed) {
    if (!allowed) __builtin_trap();
}

inline void tile_configure(const TileShapes& shapes) {
    fault_unless(shapes.palette == 1 && shapes.start_row == 0);
    for (int t = 0; t < 16; ++t) {
        const bool in_use = shapes.rows[t] > 0;
        fault_unless(in_use == (shapes.row_bytes[t] > 0) && (t < 8 || !in_use));
        fault_unless(shapes.rows[t] <= kTileMaxRows && shapes.row_bytes[t] <= kTileMaxBytes);
    }
    emulated = EmulatedTiles{};
    emulated.shapes = shapes;
    emulated.configured = true;
}
inline void tile_release() { emulated = EmulatedTiles{}; }

inline void fault_unless_usable(int t) { fault_unless(emulated.configured && emulated.shapes.rows[t] > 0); }
template <int kTile>
inline void tile_zero() {
    fault_unless_usable(kTile);
    memset(emulated.data[kTile], 0, sizeof(emulated.data[kTile]));
}
template <int kTile>
inline void tile_load(const void* p, int64_t stride) {
    tile_zero<kTile>();
    for (int m = 0; m < emulated.shapes.rows[kTile]; ++m) {
        memcpy(emulated.data[kTile][m], static_cast<const char*>(p) + m * stride, emulated.shapes.row_bytes[kTile]);
    }
}
template <int kTile>
inline void tile_store(void* p, int64_t stride) {
    fault_unless_usable(kTile);
    for (int m = 0; m < emulated.shapes.rows[kTile]; ++m) {
        memcpy(static_cast<char*>(p) + m * stride, emulated.data[kTile][m], emulated.shapes.row_bytes[kTile]);
    }
}

template <int kC, int kA, int kB>
inline void fault_unless_shapes_fit() {
    static_assert(kC != kA && kC != kB && kA != kB, "the processor refuses one tile for two operands");
    const TileShapes& s = emulated.shapes;
    fault_unless_usable(kC);
    fault_unless_usable(kA);
    fault_unless_usable(kB);
    fault_unless(s.rows[kC] == s.rows[kA] && s.row_bytes[kC] == s.row_bytes[kB] && s.row_bytes[kA] == 4 * s.rows[kB]);
    fault_unless(s.row_bytes[kB] % 4 == 0);
}

// Even elements of k have one sum and odd ones another, from zero and in order. The two are added, and the result is
// added to C. Every operation rounds to nearest even; denormals are zeros, both as operands and as results.
template <int kC, int kA, int kB>
inline void tile_dot_bf16() {
    fault_unless_shapes_fit<kC, kA, kB>();
    const TileShapes& s = emulated.shapes;
    const Pairs high = set1_pair(0xffff0000u);
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(0x9fc0);  // No exceptions, nearest even, and no denormals (FTZ, DAZ).
    asm volatile("" : : : "memory");
    for (int m = 0; m < s.rows[kC]; ++m) {
        float c[kTileMaxBytes / 4];
        memcpy(c, emulated.data[kC][m], sizeof(c));
        for (int n = 0; n < s.row_bytes[kC] / 4; n += kLanes) {
            Vec even = zero(), odd = zero();
            for (int k = 0; k < s.rows[kB]; ++k) {
                uint32_t pair;
                memcpy(&pair, emulated.data[kA][m] + 4 * k, sizeof(pair));
                const Pairs b = load_pairs(reinterpret_cast<const uint16_t*>(emulated.data[kB][k] + 4 * n));
                // The even element of a pair is in a lane's low half: shifted up, it is a float. The odd one is in the
                // high half.
                const Vec low_b = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
                even = fma(_mm512_castsi512_ps(set1_pair(pair << 16)), low_b, even);
                odd = fma(_mm512_castsi512_ps(set1_pair(pair & 0xffff0000u)), _mm512_castsi512_ps(and_pairs(b, high)),
                          odd);
            }
            store(c + n, add(load(c + n), add(even, odd)));
        }
        memcpy(emulated.data[kC][m], c, sizeof(c));
    }
    asm volatile("" : : : "memory");
    _mm_setcsr(mode);
}

template <int kC, int kA, int kB>
inline void tile_dot_int8() {
    fault_unless_shapes_fit<kC, kA, kB>();
    const TileShapes& s = emulated.shapes;
    for (int m = 0; m < s.rows[kC]; ++m) {
        int32_t c[kTileMaxBytes / 4];
        memcpy(c, emulated.data[kC][m], sizeof(c));
        for (int n = 0; n < s.row_bytes[kC] / 4; ++n) {
            for (int k = 0; k < s.row_bytes[kA]; ++k) {
                const int8_t a = static_cast<int8_t>(emulated.data[kA][m][k]);
                const int8_t b = static_cast<int8_t>(emulated.data[kB][k / 4][4 * n + k % 4]);
                c[n] += a * b;
            }
        }
        memcpy(emulated.data[kC][m], c, sizeof(c));
    }
}

#endif

// Configures tiles for the length of a task and no longer: a thread with live tiles has 8 KB more to save at each
// switch, and its core may not rest as deeply. Shapes are loaded once or twice in a task, and tasks take microseconds.
struct TileScope {
    explicit TileScope(const TileShapes& shapes) { tile_configure(shapes); }
    ~TileScope() { tile_release(); }
    TileScope(const TileScope&) = delete;
    TileScope& operator=(const TileScope&) = delete;
};

constexpr int kTileK = kTileMaxBytes / 2;  // elements of bf16 that a row of a tile holds

}  // namespace
}  // namespace octavo::OCTAVO_ISA
