// The numbers that decide how calls are cut into tasks: rates of a thread, sizes of tasks, bytes of elements. For
// launch.cpp and launch_experts.cpp.
#pragma once

#include <cstdint>

#include "launch.h"
#include "pack_int.h"

namespace octavo {

// Rough single-thread rates, for cost estimates only.
constexpr double kBytesPerNs = 20;
constexpr double kBf16FlopsPerNs = 150;
constexpr double kF32FlopsPerNs = 80;
constexpr double kIntOpsPerNs = 300;
// Tasks for each thread, so that one slow thread does not hold up the rest.
constexpr int64_t kTasksPerThread = 8;
// Bytes of weights that one task of a product with few rows streams: some microseconds.
constexpr int64_t kTaskBytes = 128 * 1024;
// Rows of a chunk: their inputs stay in a second-level cache while a thread's panels go by.
constexpr int64_t kMaxChunkRows = 256;
constexpr int64_t kMinChunkRows = 48;
// With this many rows for each thread, rows are divided before panels.
constexpr int64_t kOwnRows = 32;
// Integer products: bytes of weights of a task, bytes of quantized rows of a chunk (by vectors, and by tiles), and the
// least rows of a chunk by tiles, for which codes are unpacked.
constexpr int64_t kIntTaskBytes = 32 * 1024;
constexpr int64_t kChunkBytes = 256 * 1024;
constexpr int64_t kTileChunkBytes = 512 * 1024;
constexpr int64_t kMinTileChunkRows = 64;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the bytes that an element of a packed matrix takes.
inline double weight_bytes(const Matrix& m) {
    if (m.format == kWeightF32) return 4;
    if (m.format == kWeightBF16) return 2;
    return static_cast<double>(packed_block_bytes(m)) / (kPanel * kQBlock);
}

inline int64_t size_of(int32_t dtype) { return dtype == kF32 ? 4 : dtype == kBF16 ? 2 : 1; }

}  // namespace octavo
