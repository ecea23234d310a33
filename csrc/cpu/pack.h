// What the packers of float and of integer matrices (pack.cpp, pack_int.cpp) share.
#pragma once

#include "kernels.h"

namespace octavo {

// Transposes the first `steps` words of 32 bits of 32 rows, which lie `stride_bytes` apart, into [step][32].
void transpose_panel(const char* rows, int64_t stride_bytes, int64_t steps, char* out);

}  // namespace octavo
